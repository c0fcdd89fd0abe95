"""Markdown tables and plots of what a suite measured, from its JSON."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterable, Mapping, Sequence

from _registry import implementation

_OURS = "amp"
NAMES = {
    "ssd512": "SSD-512 ResNet-50", "resnet50": "ResNet-50 v1", "mobilenet_v2": "MobileNet v2",
    "densenet121": "DenseNet-121", "vgg16": "VGG-16", "lstm": "LSTM", "encoder": "encoder",
    "encoder_masked": "encoder, masked",
}  # fmt: skip

Track = Mapping[str, Any]
Result = Mapping[str, Any]


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    Examples
    --------
    >>> print(table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [heading, ["---"] * len(heading), *rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text.replace("| --- " * len(heading) + "|", "|---" * len(heading) + "|")


def tracks(result: Result) -> dict[str, Track]:
    """Return the tracks of a result by implementation, each from the first comparison that it is in."""
    found: dict[str, Track] = {}
    for comparison in result["comparisons"]:
        for track in comparison["implementations"]:
            found.setdefault(track["name"], track)
    return found


def ratio(result: Result, name: str, reference: str) -> Mapping[str, float] | None:
    """Return how many times as fast as the reference an implementation is, None where they were not compared."""
    key = f"{name} vs {reference}"
    return next((each["speed_ratios"][key] for each in result["comparisons"] if key in each["speed_ratios"]), None)


def speed_against(result: Result, name: str, reference: str) -> float | None:
    """Return the median ratio, by way of ours where the two were not in one comparison."""
    if name == reference:
        return 1.0
    direct = ratio(result, name, reference)
    if direct is not None:
        return direct["median"]
    ours, other = ratio(result, _OURS, reference), ratio(result, name, _OURS)
    return None if ours is None or other is None else ours["median"] * other["median"]


def _order(results: Sequence[Result]) -> list[str]:
    """Return the implementations that are in any result, ours first."""
    seen = dict.fromkeys(name for result in results for name in (*tracks(result), *result["failures"]))
    return sorted(seen, key=lambda name: name != _OURS)


def _wide(results: Sequence[Result], cell: Callable[[Result, str, Track], str]) -> str:
    """Return a table with a row for each network and batch size, and a column for each implementation."""
    order = _order(results)
    heading = ["network", "batch", *(implementation(name).label for name in order)]
    rows = []
    for result in results:
        found = tracks(result)
        cells = (cell(result, name, found[name]) if name in found else "not run" for name in order)
        rows.append([NAMES[result["network"]], str(result["batch_size"]), *cells])
    return table(heading, rows)


def _time(result: Result, name: str, track: Track) -> str:
    ours = ratio(result, _OURS, name)
    median = track["seconds_per_step"]["median"]
    return seconds(median) + ("" if ours is None else f", **{ours['median']:.2f}x** ({span(ours)})")


def span(spread: Mapping[str, float], factor: float = 1.0) -> str:
    """Return the lowest and the highest value in words, times a factor."""
    return f"{spread['low'] * factor:.2f}-{spread['high'] * factor:.2f}"


def seconds(value: float) -> str:
    """Return a time in words.

    Examples
    --------
    >>> seconds(2.345), seconds(0.0123)
    ('2.35 s', '12.3 ms')
    """
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _latency(_: Result, __: str, track: Track) -> str:
    return " / ".join(f"{track['latency'][share] * 1e3:.3g}" for share in ("p50", "p90", "p99"))


def _peak(result: Result, name: str, track: Track) -> str:
    return _share(result, track, name, lambda each: each["peak_memory"])


def _resident(result: Result, name: str, track: Track) -> str:
    return _share(result, track, name, lambda each: each["saved"]["memory"])


def _file(result: Result, name: str, track: Track) -> str:
    return _share(result, track, name, lambda each: each["saved"]["parameter_file"])


def _share(result: Result, track: Track, name: str, figure: Callable[[Track], float]) -> str:
    """Return megabytes, and what share of FP32's they are."""
    reference = tracks(result).get("fp32")
    share = "" if reference is None or name == "fp32" else f", {figure(track) / max(figure(reference), 1):.2f}x"
    return f"{figure(track) / 1e6:.0f} MB{share}"


def _error(_: Result, name: str, track: Track) -> str:
    saved = track["saved"]
    return f"{saved['max_error']:.1e} / {saved['mean_error']:.1e} / {saved['top1']:.0%}"


def _failures(results: Sequence[Result]) -> str:
    lines = [
        f"- {NAMES[result['network']]}, batch {result['batch_size']}, {implementation(name).label}: {reason}\n"
        for result in results
        for name, reason in result["failures"].items()
    ]
    return "Not run:\n\n" + "".join(lines) if lines else ""


_TIMES = "Time of a step, and how many times as fast gluon_amp is (lowest to highest of the rounds)"
_TRAINING_PARTS = ((_TIMES, _time), ("Peak memory, and its share of FP32's", _peak))
_INFERENCE_PARTS = (
    (_TIMES, _time),
    ("Latency in milliseconds: median, 90th and 99th percentile", _latency),
    ("Error against FP32: largest and mean, as shares of the largest output; rows with the same best class", _error),
    ("Memory that the network holds (resident, without the libraries), and its share of FP32's", _resident),
    ("Parameter file, and its share of FP32's", _file),
)


def suite(measured: Mapping[str, Any]) -> str:
    """Return the tables of a suite as Markdown."""
    results = [result for result in measured["results"] if result["comparisons"]]
    parts = _INFERENCE_PARTS if measured["workload"] == "inference" else _TRAINING_PARTS
    texts = [f"{title}:\n\n{_wide(results, cell)}" for title, cell in parts if results]
    texts.append(_failures(measured["results"]))
    return "\n".join(text for text in texts if text)


def plot(measured: Mapping[str, Any], path: str) -> None:
    """Write bars of each implementation's speed against MXNet FP32 to an image file, a group a network and batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [result for result in measured["results"] if "fp32" in tracks(result)]
    order = _order(results)
    width = 0.8 / max(1, len(order))
    figure, axes = pyplot.subplots(figsize=(1.2 * len(results) + 3, 4.5), layout="constrained")
    for place, name in enumerate(order):
        heights = [speed_against(result, name, "fp32") or math.nan for result in results]
        left = [group + (place - len(order) / 2 + 0.5) * width for group in range(len(results))]
        axes.bar(left, heights, width, label=implementation(name).label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    labels = [f"{NAMES[result['network']]}\nbatch {result['batch_size']}" for result in results]
    axes.set_xticks(range(len(results)), labels, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("speed against MXNet FP32")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
