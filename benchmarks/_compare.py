"""Compare implementations that run in processes of their own, in turns.

All processes are started and stay alive; in every round each runs for a moment while the others sleep. What
disturbs the machine for a minute then disturbs all of them alike, and cancels in the ratios of a round.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Sequence

from _children import Child, ChildCommand
from _machine import OtherLoad
from _stats import Spread, percentiles, round_ratios, spread

_TURN_SECONDS = 1.0
_FEWEST_ROUNDS = 3
_MOST_ROUNDS = 30
_TIMER_MARGIN = 0.95


class Progress(Protocol):
    """Where the driver reports what it does."""

    def say(self, text: str) -> None:
        """Show a line of text."""

    def total(self, turns: int) -> None:
        """Say how many turns there will be; said again when that changes."""

    def turn(self, name: str, seconds: float) -> None:
        """Report a finished turn and its seconds per step."""


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Parameters
    ----------
    rounds : int, optional
        How often every implementation takes its turn; chosen from `budget` by default.
    steps : int, optional
        Steps in one turn; by default enough for about a second.
    warmup : int
        Steps that every implementation runs before it is measured. The first builds graphs and kernels.
    budget : float
        Seconds that the whole comparison may take when `rounds` is not given.
    """

    rounds: int | None = None
    steps: int | None = None
    warmup: int = 2
    budget: float = 300.0


@dataclass
class Track:
    """Everything that was measured of one implementation; times in seconds, memory in bytes."""

    name: str
    about: dict[str, Any] = field(default_factory=dict)
    library_settings: dict[str, str] = field(default_factory=dict)
    startup: float = 0.0
    warmup: list[float] = field(default_factory=list)
    turns: list[list[float]] = field(default_factory=list)
    losses: list[dict[str, float]] = field(default_factory=list)
    peak_memory: int = 0
    saved: dict[str, Any] = field(default_factory=dict)

    @property
    def latency(self) -> dict[str, float]:
        """Percentiles of the seconds of all steps."""
        return percentiles([seconds for turn in self.turns for seconds in turn])

    @property
    def round_seconds(self) -> list[float]:
        """Seconds per step, one value a round: the median of the turn's steps."""
        return [statistics.median(turn) for turn in self.turns]

    @property
    def step(self) -> Spread:
        """Seconds per step over the rounds."""
        return spread(self.round_seconds)

    @property
    def speed(self) -> Spread:
        """Samples per second over the rounds."""
        return spread([self.about["samples_per_step"] / seconds for seconds in self.round_seconds])


@dataclass(frozen=True)
class Comparison:
    """The tracks of all implementations, in the order asked for.

    ``seconds`` is the time for everything, ``other_load`` the share of the processors that other programs used
    meanwhile.
    """

    tracks: Sequence[Track]
    seconds: float
    other_load: float

    def track(self, name: str) -> Track:
        """Return the track of an implementation."""
        return next(track for track in self.tracks if track.name == name)

    def ratio(self, name: str, reference: str) -> Spread:
        """Return how many times as fast as the reference an implementation is."""
        return round_ratios(self.track(reference).round_seconds, self.track(name).round_seconds)


def compare(
    commands: Sequence[ChildCommand],
    plan: Plan,
    progress: Progress,
    timeout: float = 1800.0,
    save_to: Path | None = None,
) -> Comparison:
    """Run implementations in turns and return what was measured.

    Parameters
    ----------
    commands : sequence of ChildCommand
        One a process, in the order of the report. Each must speak the protocol of ``_worker``.
    plan : Plan
        How long to measure.
    progress : Progress
        Where to report.
    timeout : float
        Seconds after which a child that does not answer counts as failed.
    save_to : Path, optional
        A folder in which every child writes its outputs at the end, in a folder of its name.

    Raises
    ------
    Refused
        If a child refuses the request.
    ChildFailed
        If a child dies or hangs. The others are ended.
    """
    begin, load = time.monotonic(), OtherLoad()
    with contextlib.ExitStack() as stack:
        pairs = [_start(stack, command, progress, timeout) for command in commands]
        for child, track in pairs:
            _warm_up(child, track, plan.warmup, progress)
        _run_rounds(pairs, plan, begin, progress)
        for child, track in pairs if save_to else ():
            _save(child, track, save_to / child.name)
    return Comparison([track for _, track in pairs], time.monotonic() - begin, load.share())


def _start(
    stack: contextlib.ExitStack, command: ChildCommand, progress: Progress, timeout: float
) -> tuple[Child, Track]:
    begin = time.monotonic()
    child = stack.enter_context(Child(command, timeout))
    answer = child.ready()
    track = Track(command.name, answer["about"], answer.get("library_settings", {}), time.monotonic() - begin)
    for text in [f"ready after {track.startup:.1f} s", *track.about.get("notes", [])]:
        progress.say(f"{track.name}: {text}")
    return child, track


def _warm_up(child: Child, track: Track, steps: int, progress: Progress) -> None:
    for _ in range(steps):
        answer = child.run(1)
        track.warmup += answer["seconds"]
        _record(track, answer)
    if steps:
        first, last = track.warmup[0], track.warmup[-1]
        progress.say(f"{track.name}: first step {first:.2f} s, last warm-up step {last:.2f} s")


def _save(child: Child, track: Track, folder: Path) -> None:
    folder.mkdir()
    track.saved = child.save(folder)


def _record(track: Track, answer: dict[str, Any]) -> None:
    track.losses += answer["losses"]
    track.peak_memory = answer["peak_memory"]


def _run_rounds(pairs: Sequence[tuple[Child, Track]], plan: Plan, begin: float, progress: Progress) -> None:
    expected = [track.warmup[-1] for _, track in pairs if track.warmup]
    steps = plan.steps or steps_per_turn(expected)
    end = begin + plan.budget
    planned = plan.rounds or affordable_rounds(0, end - time.monotonic(), steps * sum(expected))
    progress.say(f"{planned} rounds of {steps} step{'s' * (steps > 1)} for each of {len(pairs)} processes")
    if not plan.rounds and time.monotonic() + planned * steps * sum(expected) > end:
        progress.say(f"this will exceed the budget of {plan.budget:.0f} s; a smaller batch would fit")
    done = 0
    while done < planned:
        progress.total(planned * len(pairs))
        seconds = _run_round(turn_order(pairs, done), steps, progress)
        done += 1
        if not plan.rounds:  # the machine may have become faster or slower than it was in the warm-up
            planned = affordable_rounds(done, end - time.monotonic(), seconds)


def _run_round(pairs: Sequence[tuple[Child, Track]], steps: int, progress: Progress) -> float:
    """Let each process take its turn and return the seconds that all of them took."""
    begin = time.monotonic()
    for child, track in pairs:
        answer = child.run(steps)
        track.turns.append(answer["seconds"])
        _record(track, answer)
        progress.turn(track.name, track.round_seconds[-1])
    return time.monotonic() - begin


def turn_order(items: Sequence[Any], number: int) -> list[Any]:
    """Return the order of a round: every round begins with the next one, so that no place is favoured.

    Examples
    --------
    >>> turn_order(["a", "b", "c"], 1)
    ['b', 'c', 'a']
    """
    first = number % len(items)
    return [*items[first:], *items[:first]]


def steps_per_turn(expected: Sequence[float]) -> int:
    """Return how many steps make the turn of the fastest implementation about a second long.

    Parameters
    ----------
    expected : sequence of float
        Seconds per step of the implementations; may be empty when nothing is known.
    """
    if not expected:
        return 1
    return max(1, min(100, math.ceil(_TURN_SECONDS / min(expected))))


def affordable_rounds(done: int, seconds: float, seconds_per_round: float) -> int:
    """Return how many rounds there can be in all, within reasonable bounds.

    Parameters
    ----------
    done : int
        Rounds that are over.
    seconds : float
        The time that is left.
    seconds_per_round : float
        What a round takes; 0 when nothing is known.

    Examples
    --------
    >>> affordable_rounds(2, 100.0, 10.0)
    11
    """
    more = int(seconds * _TIMER_MARGIN / seconds_per_round) if seconds_per_round > 0 else 0
    return max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, done + max(0, more)))
