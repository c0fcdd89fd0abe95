"""Pictures of a report: the network as a graph whose boxes are coloured by precision."""
from __future__ import annotations

from collections import Counter, defaultdict
from math import ceil, sqrt
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from ...errors import StateError, expected
from ...files import replacing
from ..figures import installed, new_figure, save_figure
from .rows import OperatorRow

# Colours that people with any kind of colour vision tell apart (https://jfly.uni-koeln.de/color/).
COLOURS = {"int8": "#CC79A7", "bfloat16": "#56B4E9", "float16": "#009E73", "float32": "#E69F00"}
_OTHER, _CAST, _PLAIN = "#BBBBBB", "#D55E00", "#999999"
_MOST_LABELS = 60


class Box(NamedTuple):
    """One operator or block of a picture."""

    label: str  # what is written in it
    precision: str | None  # what most of its arithmetic runs in
    flops: int  # its arithmetic


class Picture(NamedTuple):
    """Boxes in the order in which they run; edges from box to box, and whether there is a cast on them."""

    boxes: list[Box]
    edges: dict[tuple[int, int], bool]


class Place(NamedTuple):
    """Where a box stands."""

    x: float
    y: float
    aisle: float  # the x of the free strip to the right of its column


def plot(rows: Sequence[OperatorRow], title: str, path: Any, backend: str, by: str) -> Any:
    """Draw operators, as ``Report.plot`` describes."""
    if backend not in _BACKENDS:
        raise ValueError(expected("'matplotlib' or 'graphviz'", "backend", backend))
    if by not in _PICTURES:
        raise ValueError(expected("'operator' or 'block'", "by", by))
    picture = _PICTURES[by](rows)
    with installed():
        return _BACKENDS[backend](picture, title, None if path is None else Path(path))


def _by_operator(rows: Sequence[OperatorRow]) -> Picture:
    boxes = [Box(f"{row.name}\n{row.op}" if row.op.lower() not in row.name else row.name, row.precision, row.flops)
             for row in rows]
    return Picture(boxes, _edges(rows, list(range(len(rows)))))


def _by_block(rows: Sequence[OperatorRow]) -> Picture:
    groups: dict[str, int] = {}
    members: dict[int, list[OperatorRow]] = defaultdict(list)
    for row in rows:
        members[groups.setdefault(row.path or row.block, len(groups))].append(row)
    boxes = []
    for name, number in groups.items():
        weights: Counter[str | None] = Counter()
        for row in members[number]:
            weights[row.precision] += row.flops + 1  # where nothing computes, operators count
        boxes.append(Box(name, weights.most_common(1)[0][0], sum(row.flops for row in members[number])))
    return Picture(boxes, _edges(rows, [groups[row.path or row.block] for row in rows]))


def _edges(rows: Sequence[OperatorRow], box: Sequence[int]) -> dict[tuple[int, int], bool]:
    edges: dict[tuple[int, int], bool] = {}
    for target, row in enumerate(rows):
        for read in row.inputs:
            if read.operator is not None and box[read.operator] != box[target]:
                key = (box[read.operator], box[target])
                edges[key] = edges.get(key, False) or read.dtype != read.source_dtype
    return edges


def _colour(box: Box) -> str:
    return COLOURS.get(str(box.precision), _OTHER)


def _graphviz(picture: Picture, title: str, path: Path | None) -> Any:
    import graphviz

    drawing = graphviz.Digraph(node_attr={"shape": "box", "style": "filled,rounded", "fontname": "Helvetica"},
                               graph_attr={"label": title, "labelloc": "t", "fontname": "Helvetica"})
    for number, box in enumerate(picture.boxes):
        drawing.node(str(number), box.label, fillcolor=_colour(box))
    for (source, target), is_cast in picture.edges.items():
        drawing.edge(str(source), str(target), color=_CAST if is_cast else _PLAIN, penwidth="2" if is_cast else "1")
    if path is not None:
        content = _rendered(drawing, path)
        with replacing(path) as (temporary,):
            Path(temporary).write_bytes(content)
    return drawing


def _rendered(drawing: Any, path: Path) -> bytes:
    import graphviz

    if path.suffix in (".gv", ".dot"):
        return drawing.source.encode()
    try:
        return drawing.pipe(format=path.suffix.lstrip("."))
    except graphviz.ExecutableNotFound as error:
        raise StateError(f"plot: writing {path.suffix!r} with Graphviz needs its program dot, which is not installed. "
                         "Write a .gv file, or use backend='matplotlib'") from error


def _matplotlib(picture: Picture, title: str, path: Path | None) -> Any:
    from matplotlib.collections import LineCollection

    places, width, height = _layout(picture)
    labelled = _is_labelled(picture)
    scale = (1.5, 0.55) if labelled else (0.2, 0.16)
    inches = max(7.0, width * scale[0]), max(3.0, height * scale[1] + 1.0)
    figure = new_figure(figsize=inches, layout="constrained")
    axes = figure.add_subplot()
    for is_cast, colour in ((False, _PLAIN), (True, _CAST)):
        lines = [_way(places[a], places[b]) for (a, b), cast in picture.edges.items() if cast == is_cast]
        width_of_line = 1.4 if is_cast else 0.7
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=width_of_line, zorder=1 + is_cast))
    if labelled:
        for box, place in zip(picture.boxes, places):
            axes.text(place.x, place.y, box.label, ha="center", va="center", fontsize=6, zorder=3,
                      bbox={"boxstyle": "round", "facecolor": _colour(box), "edgecolor": "white"})
    else:
        most = max(box.flops for box in picture.boxes) or 1
        axes.scatter([place.x for place in places], [place.y for place in places],
                     s=[12 + 110 * sqrt(box.flops / most) for box in picture.boxes],
                     c=[_colour(box) for box in picture.boxes], marker="s", zorder=3)
    axes.set(xlim=(-1, width), ylim=(-height, 1), title=title)
    axes.title.set(fontsize=9, wrap=True)
    axes.axis("off")
    _add_legend(axes, picture)
    if path is not None:
        save_figure(figure, path)
    return figure


def _add_legend(axes: Any, picture: Picture) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    counts = Counter(box.precision for box in picture.boxes)
    handles: list[Any] = [Patch(color=COLOURS.get(str(dtype), _OTHER), label=f"{dtype}: {count}")
                          for dtype, count in counts.most_common()]
    handles.append(Line2D([], [], color=_CAST, label=f"casts on {sum(picture.edges.values())} edges"))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=len(handles), fontsize=8,
                frameon=False)


def _way(source: Place, target: Place) -> list[tuple[float, float]]:
    """Return the corners of an edge, which goes around the boxes between its ends."""
    ends = source.x, source.y, target.x, target.y
    if source.aisle != target.aisle:
        return [ends[:2], (source.x, source.y - 0.5), (source.aisle, source.y - 0.5),
                (source.aisle, target.y + 0.5), (target.x, target.y + 0.5), ends[2:]]
    if source.x == target.x and source.y - target.y > 1:
        return [ends[:2], (source.x + 0.45, source.y - 0.5), (source.x + 0.45, target.y + 0.5), ends[2:]]
    return [ends[:2], ends[2:]]


def _layout(picture: Picture) -> tuple[list[Place], float, float]:
    """Place boxes below those that they read, in columns; return places, width and height."""
    rows = _rows(picture)
    # About as wide as high.
    across, ratio = max(map(len, rows), default=1), 2.7 if _is_labelled(picture) else 1.25
    length = max(8, ceil(sqrt(len(rows) * min(across + 0.6, 3) * ratio)))
    places = [Place(0.0, 0.0, 0.0)] * len(picture.boxes)
    left = 0.0
    for start in range(0, len(rows), length):
        column = rows[start:start + length]
        across = max(map(len, column))
        for line, row in enumerate(column):
            for position, number in enumerate(row):
                places[number] = Place(left + (across - len(row)) / 2 + position, -float(line), left + across - 0.2)
        left += across + 0.6
    return places, left, float(min(length, len(rows)))


def _is_labelled(picture: Picture) -> bool:
    return len(picture.boxes) <= _MOST_LABELS


def _rows(picture: Picture) -> list[list[int]]:
    """Put boxes in rows by the length of the longest way to each; long rows are broken."""
    levels: dict[int, list[int]] = defaultdict(list)
    for number, depth in enumerate(_depths(picture)):
        levels[depth].append(number)
    longest = 6 if _is_labelled(picture) else 16
    return [level[start:start + longest] for _, level in sorted(levels.items())
            for start in range(0, len(level), longest)]


def _depths(picture: Picture) -> list[int]:
    """Return the length of the longest way to each box."""
    before: dict[int, list[int]] = defaultdict(list)
    for source, target in picture.edges:
        if source < target:  # between blocks there are ways back
            before[target].append(source)
    depths: list[int] = []
    for number in range(len(picture.boxes)):
        depths.append(1 + max((depths[source] for source in before[number]), default=-1))
    return depths


_PICTURES = {"operator": _by_operator, "block": _by_block}
_BACKENDS = {"matplotlib": _matplotlib, "graphviz": _graphviz}
