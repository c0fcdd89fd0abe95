"""Show a comparison: progress while it runs, then a table, a JSON file and a plot."""

from __future__ import annotations

import sys
from typing import Any, Mapping

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import machine
from .compare import Comparison, Track
from .errors import reason
from .registry import implementation
from .stats import Spread

_DISTURBED = 0.1  # of all processors: beyond that the figures depend on what else ran


class TqdmProgress:
    """Lines of text above one progress bar of turns."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def say(self, text: str) -> None:
        """Show a line of text."""
        tqdm.write(text)

    def total(self, turns: int) -> None:
        """Start the bar, or change its length."""
        if self._bar is None:
            self._bar = tqdm(unit="turn", dynamic_ncols=True, disable=None)
        self._bar.total = turns
        self._bar.refresh()

    def turn(self, name: str, seconds: float) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{name} {seconds:.3f} s a step", refresh=False)
            self._bar.update()

    def __enter__(self) -> TqdmProgress:
        return self

    def __exit__(self, *error: object) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()


def references(comparison: Comparison) -> list[str]:
    """Return the names that the others are compared to: the reference rows, or else the first row."""
    names = [track.name for track in comparison.tracks]
    if len(names) < 2:
        return []
    return [name for name in names if implementation(name).is_reference] or names[:1]


def table(comparison: Comparison) -> Table:
    """Return the table of a comparison: a row an implementation, ratios above 1 where it is faster."""
    result = Table(title="Median over the rounds, minimum-maximum")
    result.add_column("implementation", no_wrap=True)
    for heading in ("s/step", "samples/s", *(f"speed vs {name}" for name in references(comparison))):
        result.add_column(heading, justify="right", min_width=9)
    result.add_column("peak memory", justify="right", no_wrap=True)
    for name in comparison.tracks[0].losses[0]:
        result.add_column(f"{name}:\nfirst, last", justify="right")
    for track in comparison.tracks:
        result.add_row(*_row(comparison, track))
    for name in comparison.failures:
        result.add_row(implementation(name).label, "fails")
    return result


def _row(comparison: Comparison, track: Track) -> list[str]:
    ratios = [
        "" if name == track.name else _spread_text(comparison.ratio(track.name, name), 2, "x")
        for name in references(comparison)
    ]
    times = [_spread_text(track.step, 3), _spread_text(track.speed, 2)]
    first, last = track.losses[0], track.losses[-1]
    losses = [f"{first[name]:.4g}\n{last[name]:.4g}" for name in first]
    return [_label(track), *times, *ratios, _memory(comparison, track), *losses]


def _label(track: Track) -> str:
    return f"{implementation(track.name).label}\n{track.about.get('dtype', '')}"


def _memory(comparison: Comparison, track: Track) -> str:
    text = f"{track.peak_memory / 1e9:.2f} GB"
    for name in references(comparison)[:1]:
        if name != track.name:
            text += f"\n{track.peak_memory / comparison.track(name).peak_memory:.2f}x {name}"
    return text


def _spread_text(value: Spread, digits: int, unit: str = "") -> str:
    text = f"{value.median:.{digits}f}{unit}"
    return text if value.count == 1 else f"{text}\n{value.low:.{digits}f}-{value.high:.{digits}f}"


def machine_text() -> str:
    """Return a line that says what this machine is."""
    about = machine.describe()
    sets = " ".join(about["instruction_sets"]) or "none of AVX2 and above"
    return (
        f"{about['cpu']} (family/model {about['cpu_family_model']}), {about['physical_cores']} cores, {sets}, "
        f"{about['memory'] / 1e9:.0f} GB{imitated(about)}\n"
    )


def imitated(about: Mapping[str, Any]) -> str:
    """Return the words for another machine that this one imitates."""
    limit = about["isa_limit"]
    return f", imitated by DNNL_MAX_CPU_ISA={limit}" if limit else ""


def conditions(settings: Mapping[str, Any], comparison: Comparison) -> str:
    """Return the lines that say what was measured, and on what."""
    about, first = machine.describe(), comparison.tracks[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.about.get("versions", {}).items())
    measured = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
    turns = f"{len(first.turns)} rounds of {len(first.turns[0])} steps, {comparison.seconds:.0f} s in all"
    failed = "".join(f"{implementation(name).label} fails: {reason(failure)}\n"
                     for name, failure in comparison.failures.items())
    notes = "".join(f"{note}\n" for note in comparison.notes)
    return (
        f"{failed}{notes}{machine_text()}"
        f"{about['system']}, Python {about['python']}, {versions}\n"
        f"{measured}; {turns}\n"
        f"{other_load_text(comparison.other_load)}"
    )


def is_disturbed(other_load: float) -> bool:
    """Return whether other programs took so much of the processors, as a share, that speeds depend on them."""
    return other_load > _DISTURBED


def other_load_text(other_load: float) -> str:
    """Say how much of the processors other programs took."""
    remark = " (too much: measure again)" if is_disturbed(other_load) else ""
    return f"other programs used {other_load:.0%} of the processors meanwhile{remark}"


def show(settings: Mapping[str, Any], comparison: Comparison, console: Console | None = None) -> None:
    """Print the table and the conditions under it."""
    # 80 columns, which a pipe gets by default, would break the table
    console = console or Console(width=None if sys.stdout.isatty() else 130)
    console.print(table(comparison))
    console.print(conditions(settings, comparison), highlight=False, soft_wrap=True)


def as_dict(settings: Mapping[str, Any], comparison: Comparison) -> dict[str, Any]:
    """Return everything that was measured, ready for JSON; times in seconds, memory in bytes."""
    names = [track.name for track in comparison.tracks]
    return {
        "settings": dict(settings),
        "machine": machine.describe(),
        "seconds": comparison.seconds,
        "other_load": comparison.other_load,
        "failures": {name: reason(failure) for name, failure in comparison.failures.items()},
        "notes": list(comparison.notes),
        "implementations": [_track_dict(track) for track in comparison.tracks],
        "speed_ratios": {
            f"{name} vs {other}": vars(comparison.ratio(name, other))
            for name in names
            for other in names
            if name != other
        },
    }


def _track_dict(track: Track) -> dict[str, Any]:
    summary = {"seconds_per_step": vars(track.step), "samples_per_second": vars(track.speed)}
    return {"label": implementation(track.name).label, **vars(track), **summary, "latency": track.latency}


def write_plot(path: str, title: str, comparison: Comparison) -> None:
    """Write a bar for each implementation's samples per second, from minimum to maximum, to an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = [track.speed for track in comparison.tracks]
    labels = [_label(track) for track in comparison.tracks]
    medians = [speed.median for speed in speeds]
    errors = [[speed.median - speed.low for speed in speeds], [speed.high - speed.median for speed in speeds]]
    figure, axes = pyplot.subplots(figsize=(1.8 * len(labels) + 1.5, 4), layout="constrained")
    colors = [f"C{number}" for number in range(len(labels))]
    axes.bar(labels, medians, yerr=errors, capsize=6, color=colors)
    for place, track in enumerate(comparison.tracks):  # at the foot, where no error bar crosses the text
        axes.text(place, 0.02 * max(medians), _bar_text(comparison, track), ha="center", color="white")
    axes.set_ylabel("samples per second")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bar_text(comparison: Comparison, track: Track) -> str:
    ratios = [
        f"{comparison.ratio(track.name, name).median:.2f}x {name}"
        for name in references(comparison)
        if name != track.name
    ]
    return "\n".join([f"{track.speed.median:.2f}", *ratios])
