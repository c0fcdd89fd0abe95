"""The picture of a report: a bar for each operator, in the order in which they run, coloured by precision."""
from __future__ import annotations

from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any, Sequence

from ...errors import StateError
from ...files import replacing
from .rows import OperatorRow

# Colours that people with any kind of colour vision tell apart (https://jfly.uni-koeln.de/color/).
_COLOURS = {"int8": "#CC79A7", "bfloat16": "#56B4E9", "float16": "#009E73", "float32": "#E69F00"}
_OTHER, _CAST = "#BBBBBB", "#D55E00"
_MOST_NAMES = 60  # of operators below the picture


def draw(rows: Sequence[OperatorRow], title: str, is_timed: bool, path: Any = None) -> Any:
    """Draw each operator's part of the time, or of the arithmetic, and below it a strip of precisions and casts."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise StateError(f"plot: {error}. Install it with pip install 'gluon_amp[debug]'") from error
    sizes = [row.milliseconds if is_timed else row.flops for row in rows]
    whole = sum(sizes) or 1
    colours = [_COLOURS.get(str(row.precision), _OTHER) for row in rows]
    figure = Figure(figsize=(max(7.0, min(0.22 * len(rows), 16.0)), 4.5), layout="constrained")
    bars, strip = figure.subplots(2, sharex=True, height_ratios=(9, 1))
    bars.bar(range(len(rows)), [100 * size / whole for size in sizes], color=colours, width=0.9)
    bars.set(ylabel=f"% of the {'time' if is_timed else 'arithmetic'}")
    bars.set_title(title, fontsize=9, wrap=True, parse_math=False)
    strip.bar(range(len(rows)), [1] * len(rows), color=colours, width=1.0)
    cast = [position for position, row in enumerate(rows) if row.casts]
    strip.plot(cast, [1.3] * len(cast), "v", color=_CAST, markersize=4)
    strip.set(xlim=(-1, len(rows)), ylim=(0, 1.7), yticks=[], xlabel="operators, in the order in which they run")
    if len(rows) <= _MOST_NAMES:
        strip.set_xticks(range(len(rows)), [row.name for row in rows], rotation=90, fontsize=6, parse_math=False)
    kinds = [Patch(color=_COLOURS.get(str(dtype), _OTHER), label=f"{dtype}: {count}")
             for dtype, count in Counter(row.precision for row in rows).most_common()]
    casts = strip.plot([], [], "v", color=_CAST, label=f"casts for {len(cast)} operators")
    bars.legend(handles=[*kinds, *casts], fontsize=8, frameon=False)
    figure._repr_png_ = lambda: _png(figure)  # type: ignore[attr-defined]  # notebooks show it as text without
    if path is not None:
        with replacing(path) as (temporary,):
            figure.savefig(temporary, format=Path(path).suffix[1:] or "png", dpi=130)
    return figure


def _png(figure: Any) -> bytes:
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()
