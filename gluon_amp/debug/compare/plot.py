"""The picture of a comparison."""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from ...errors import StateError
from ..report.plot import COLOURS, save_figure
from .differences import OperatorError, first_infinite

_LABELLED = 3
_PANELS = (("output", "accumulated", "isolated"), ("gradient", "gradient", "isolated_gradient"))


def draw(rows: Sequence[OperatorError], dtype: str, title: str, path: Any = None) -> Any:
    """Draw outputs' errors above, gradients' below, in the order of the operators; return the figure."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StateError(f"plot: {error}. Install it with pip install 'gluon_amp[debug]'") from error
    panels = [panel for panel in _PANELS if any(getattr(row, panel[1]) > 0 for row in rows)] or [_PANELS[0]]
    figure = Figure(figsize=(11, 3.6 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(np.atleast_1d(figure.subplots(len(panels), 1, sharex=True)), panels):
        _panel(axes, rows, dtype, *panel)
    figure.axes[-1].set_xlabel("operator, in the order of the forward pass")
    figure.suptitle(title, fontsize=9)
    if path is not None:
        save_figure(figure, path)
    return figure


def _panel(axes: Any, rows: Sequence[OperatorError], dtype: str, title: str, accumulated: str, isolated: str) -> None:
    positions = np.arange(len(rows))
    together = np.array([getattr(row, accumulated) for row in rows])
    alone = np.array([getattr(row, isolated) for row in rows])
    low = np.array([row.dtype == dtype for row in rows], dtype=bool)
    axes.plot(positions, np.where(np.isfinite(together), together, np.nan), color="#999999", linewidth=1,
              label="accumulated")
    axes.scatter(positions[low], alone[low], s=14, color=COLOURS[dtype], label=f"isolated, in {dtype}")
    axes.scatter(positions[~low], together[~low], s=9, color=COLOURS["float32"], label="accumulated, in float32")
    culprit = first_infinite(rows, accumulated)
    if culprit is not None:
        axes.axvline(culprit, color="#D55E00", linewidth=1, label="first infinite error")
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylabel(f"relative error of the {title}")
    axes.legend(fontsize=8, loc="lower right")
    for position in np.argsort(-np.nan_to_num(alone, nan=-1.0, posinf=-1.0))[:_LABELLED]:
        if low[position] and alone[position] > 0:
            axes.annotate(rows[position].name, (position, alone[position]), fontsize=7, xytext=(3, 3),
                          textcoords="offset points")
