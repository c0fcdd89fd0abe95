"""Matplotlib figures that show themselves in a notebook; Matplotlib is optional, and imported where one is drawn."""
from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Iterator

from ..errors import StateError
from ..files import replacing


@contextmanager
def installed() -> Iterator[None]:
    """Say how to install what a picture needs and cannot import."""
    try:
        yield
    except ImportError as error:
        raise StateError(f"plot: {error}. Install it with pip install 'gluon_amp[debug]'") from error


def new_figure(**options: Any) -> Any:
    """Return a figure that a notebook shows without ``%matplotlib inline``: one that pyplot did not make is text."""
    with installed():
        from matplotlib.figure import Figure
    figure = Figure(**options)
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Any) -> bytes:
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()


def save_figure(figure: Any, path: Any) -> None:
    """Write a picture whole or not at all; its kind comes from the suffix."""
    with replacing(path) as (temporary,):
        figure.savefig(temporary, format=Path(path).suffix[1:] or "png", dpi=130)
