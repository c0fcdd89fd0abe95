"""Progress bars; where nobody watches, a line a minute."""
from __future__ import annotations

import sys
from typing import Any, Iterable

from tqdm import tqdm

_SECONDS = 60.0  # from line to line


class _Lines:
    """A file that gets whole lines of what redraws a bar."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass  # each line was


def _is_in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def progress_bar(values: Iterable[Any] | None = None, *, desc: str, unit: str, shown: bool) -> tqdm:
    """Return a progress bar: of values, or one that is told of its steps."""
    watched = sys.stderr.isatty() or _is_in_notebook()
    how = {} if watched else {"file": _Lines(), "mininterval": _SECONDS, "delay": _SECONDS, "miniters": 1, "ncols": 100}
    return tqdm(values, desc=desc, unit=unit, disable=not shown, **how)
