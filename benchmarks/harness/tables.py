"""Markdown tables and plots of what a suite measured, from its JSON."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterable, Mapping, Sequence

from .registry import IMPLEMENTATIONS, OURS, TORCH, implementation

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
    """Return how many times as fast as the reference an implementation is, None where they were not compared.

    What was measured again, with more rounds, counts first.
    """
    key = f"{name} vs {reference}"
    comparisons = [*([result["again"]] if "again" in result else []), *result["comparisons"]]
    return next((each["speed_ratios"][key] for each in comparisons if key in each["speed_ratios"]), None)


def speed_against(result: Result, name: str, reference: str) -> float | None:
    """Return the median ratio, by way of ours where the two were not in one comparison."""
    if name == reference:
        return 1.0
    direct = ratio(result, name, reference)
    if direct is not None:
        return direct["median"]
    ours, other = ratio(result, OURS, reference), ratio(result, name, OURS)
    return None if ours is None or other is None else ours["median"] * other["median"]


def fastest_peer(result: Result) -> str | None:
    """Return the fastest of PyTorch's implementations in a result, None where none ran beside ours."""
    ratios = {name: ratio(result, OURS, name) for name in tracks(result) if implementation(name).framework == TORCH}
    found = {name: each["median"] for name, each in ratios.items() if each is not None}
    return min(found, key=lambda name: found[name]) if found else None


def _order(results: Sequence[Result]) -> list[str]:
    """Return the implementations that are in any result, ours first, then in the order of the registry."""
    seen = {name for result in results for name in (*tracks(result), *result["failures"])}
    known = [row.name for row in IMPLEMENTATIONS]
    return sorted(seen, key=lambda name: (name != OURS, known.index(name.partition("@")[0].partition("~")[0]), name))


def _wide(results: Sequence[Result], cell: Callable[[Result, str, Track], str], names_peer: bool = False) -> str:
    """Return a table with a row for each network and batch size, and a column for each implementation."""
    order = _order(results)
    heading = ["network", "batch", *(implementation(name).label for name in order)]
    names_peer = names_peer and any(fastest_peer(result) for result in results)
    rows = []
    for result in results:
        found = tracks(result)
        cells = [cell(result, name, found[name]) if name in found else _absent(result, name) for name in order]
        peer = fastest_peer(result)
        beaten = [implementation(peer).label if peer else ""] if names_peer else []
        rows.append([NAMES[result["network"]], str(result["batch_size"]), *cells, *beaten])
    return table([*heading, *(["fastest PyTorch"] if names_peer else [])], rows)


def _absent(result: Result, name: str | None, otherwise: str = "not run") -> str:
    """Say why an implementation is not in a result."""
    if name in result.get("no_time", ()):
        return "no time"
    return "fails" if name in result["failures"] else otherwise


def _time(result: Result, name: str, track: Track) -> str:
    ours = ratio(result, OURS, name)
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
    return "Left out:\n\n" + "".join(lines) if lines else ""


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
    texts = [f"{title}:\n\n{_wide(results, cell, cell is _time)}" for title, cell in parts if results]
    texts.append(_failures(measured["results"]))
    return "\n".join(text for text in texts if text)


def _against(result: Result, name: str | None) -> str:
    """Return how many times as fast as another implementation ours is, and from what to what."""
    found = ratio(result, OURS, name) if name else None
    if found is None:
        return _absent(result, name, "")
    return f"**{found['median']:.2f}x** ({span(found)})"


def machine_section(machine: Mapping[str, Any], versions: Mapping[str, str], suites: Sequence[Mapping[str, Any]],
                    total: float) -> str:
    """Return the section of a kind of machine for ``README.md``: what it is, and one table of one run.

    Parameters
    ----------
    machine : mapping
        Of `machine.describe`.
    versions : mapping of str to str
        Of the packages of this process; those of the peers are in the suites.
    suites : sequence of mapping
        What `suites.run` returned for training and inference.
    total : float
        Seconds that the run took.
    """
    versions = dict(versions)
    rows = []
    for suite in suites:
        for result in suite["results"]:
            found = tracks(result)
            for track in found.values():
                versions.update({key: each for key, each in track["about"].get("versions", {}).items()
                                 if key not in versions})
            rows.append([suite["workload"], *_machine_row(result, found)])
    limit = machine["isa_limit"]
    imitated = f", imitated by `DNNL_MAX_CPU_ISA={limit}`" if limit else ""
    settings = suites[0]["settings"] if suites else {}
    conditions = (f"{machine['cpu']} (family {machine['cpu_family_model'].replace('/', ', model ')}), "
                  f"{machine['physical_cores']} cores, {settings.get('threads', '?')} threads, "
                  f"{machine['memory'] / 1e9:.0f} GB{imitated}; Python {machine['python']}, "
                  f"{', '.join(f'{name} {each}' for name, each in versions.items())}; one run of `make bench`, "
                  f"{total / 60:.0f} minutes.")
    heading = ["", "network", "batch", "type chosen", "gluon_amp", "against MXNet FP32", "against mxnet.contrib.amp",
               "against the fastest PyTorch", "which"]
    return f"### {machine['kind']}\n\n{conditions}\n\n{table(heading, rows)}"


def _machine_row(result: Result, found: Mapping[str, Track]) -> list[str]:
    name = [NAMES[result["network"]], str(result["batch_size"])]
    if OURS not in found:
        return [*name, _absent(result, OURS), "", "", "", "", ""]
    ours, peer = found[OURS], fastest_peer(result)
    label = implementation(peer).label if peer else ""
    return [*name, ours["about"]["dtype"], seconds(ours["seconds_per_step"]["median"]), _against(result, "fp32"),
            _against(result, "mxnet-amp"), _against(result, peer), label]


_PANELS_A_ROW = 2


def plot(measured: Mapping[str, Any], path: str) -> None:
    """Write bars of each implementation's speed against MXNet FP32 to an image file, a panel a network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [result for result in measured["results"] if "fp32" in tracks(result)]
    order = [name for name in _order(results) if name != "fp32" and any(name in tracks(each) for each in results)]
    networks = list(dict.fromkeys(result["network"] for result in results))
    columns = min(_PANELS_A_ROW, len(networks)) or 1
    lines = math.ceil(len(networks) / columns) or 1
    figure, grid = pyplot.subplots(lines, columns, figsize=(6.5 * columns, 2.9 * lines + 0.9), squeeze=False,
                                   layout="constrained")
    for axes, network in zip(grid.flat, networks):
        _panel(axes, [result for result in results if result["network"] == network], order)
    for axes in list(grid.flat)[len(networks):]:
        axes.axis("off")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * columns, fontsize=11, frameon=False)
    figure.supylabel("speed against MXNet FP32", fontsize=12)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axes: Any, results: Sequence[Result], order: Sequence[str]) -> None:
    """Draw one network: a group of bars a batch size, and the number above each bar."""
    width = 0.84 / max(1, len(order))
    heights = {name: [speed_against(result, name, "fp32") for result in results] for name in order}
    top = max((height for each in heights.values() for height in each if height), default=1.0)
    upright = 90 if len(results) * len(order) > 12 else 0
    axes.axhline(1.0, color="black", linewidth=0.8, zorder=0, label="MXNet FP32")
    for place, name in enumerate(order):
        left = [group + (place - len(order) / 2 + 0.5) * width for group in range(len(results))]
        axes.bar(left, [height or math.nan for height in heights[name]], width, label=implementation(name).label,
                 color=f"C{place}")
        for x, height, result in zip(left, heights[name], results):
            if height or name in result["failures"]:
                axes.annotate(f"{height:.2f}" if height else _absent(result, name), (x, height or 0.0), (0, 3),
                              textcoords="offset points", ha="center", va="bottom", fontsize=8,
                              rotation=upright if height else 90)
    axes.set_ylim(0, 1.25 * max(top, 1.0))
    axes.set_title(NAMES[results[0]["network"]], fontsize=12)
    axes.set_xticks(range(len(results)), [f"batch {result['batch_size']}" for result in results], fontsize=11)
    axes.tick_params(axis="y", labelsize=10)
