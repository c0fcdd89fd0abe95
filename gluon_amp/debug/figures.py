"""Matplotlib figures that show themselves in a notebook; imported where one is drawn, since Matplotlib is optional."""
from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..files import replacing


class NotebookFigure(Figure):
    """A figure that a notebook shows without ``%matplotlib inline``: one that pyplot did not make is text there."""

    def _repr_png_(self) -> bytes:
        content = BytesIO()
        self.savefig(content, format="png", dpi=100)
        return content.getvalue()

    def write(self, path: Any) -> None:
        """Write the picture whole or not at all; its kind comes from the suffix."""
        with replacing(path) as (temporary,):
            self.savefig(temporary, format=Path(path).suffix[1:] or "png", dpi=130)
