"""Where numbers of a training run go: CSV files and TensorBoard."""
from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any, Mapping, Protocol, Sequence

from ..errors import StateError

__all__ = ["CsvSink", "Sink", "TensorBoardSink"]


class Sink(Protocol):
    """Takes rows of numbers."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """Write what is left, and close the file."""


class CsvSink:
    """A CSV file with a line per row. One that exists is continued when it has the same columns.

    Parameters
    ----------
    path : path
        The file.
    columns : sequence of str
        Names of the numbers, after ``step``.

    Raises
    ------
    StateError
        The file exists with other columns.
    OSError
        It cannot be written.
    """

    def __init__(self, path: str | os.PathLike, columns: Sequence[str]):
        header = ["step", *columns]
        found = Path(path)
        continued = found.exists() and found.stat().st_size > 0
        if continued:
            with found.open(newline="", encoding="utf-8") as file:
                before = next(csv.reader(file))
            if before != header:
                raise StateError(f"{found} exists with the columns {before}, expected {header}: give another path, or "
                                 "remove it")
        self._file = found.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, header)
        if not continued:
            self._writer.writeheader()

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Append a line, at once."""
        self._writer.writerow({"step": step, **row})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard, written by tensorboardX.

    Parameters
    ----------
    logdir : path
        The directory of the run.
    prefix : str
        What the names of all scalars begin with.

    Raises
    ------
    StateError
        tensorboardX is not installed.
    """

    def __init__(self, logdir: str | os.PathLike, prefix: str):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise StateError("logging for TensorBoard needs tensorboardX: pip install 'gluon_amp[debug]', or log to CSV"
                             ) from error
        self._writer: Any = SummaryWriter(os.fspath(logdir))
        self._prefix = prefix

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Add one point to each scalar."""
        for name, value in row.items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()
