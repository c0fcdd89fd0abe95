"""Compare implementations that run in processes of their own, in turns.

All processes are started and stay alive; in every round each runs for a moment while the others sleep. What
disturbs the machine for a minute then disturbs all of them alike, and cancels in the ratios of a round.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Collection, Mapping, Protocol, Sequence

from .children import Child, ChildCommand
from .errors import ChildFailed, NoTime, Refused, reason
from .machine import OtherLoad
from .stats import Spread, percentiles, round_ratios, spread

_TURN_SECONDS = 1.0
FEWEST_ROUNDS = 3
_MOST_ROUNDS = 30
_TIMER_MARGIN = 0.95
_LEAST_PATIENCE = 1.0  # seconds
_CLEARLY = 0.75  # of the rounds: what is slower in fewer may be so by noise
_SAVE_PATIENCE = 60.0  # seconds to write the outputs of what was measured, which is not to be lost for them
_OPTIONAL_SHARE = 0.6  # of the time that is left


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
        How often every implementation takes its turn; chosen from `budget` by default, 0 for the warm-up alone.
    steps : int, optional
        Steps in one turn; by default enough for about a second.
    warmup : int
        Steps that every implementation runs before it is measured. The first builds graphs and kernels.
    budget : float
        Seconds that the whole comparison may take when `rounds` is not given.
    limit : float, optional
        Seconds after which the comparison ends, whatever is still running; by default the fewest rounds are always
        run to their end.
    keep : collection of str
        Implementations that are measured first of all; under a limit the others only take part as far as they fit.
        None are all.
    fewest : int
        Rounds that must fit the limit, or else the slowest is left out.
    """

    rounds: int | None = None
    steps: int | None = None
    warmup: int = 2
    budget: float = 300.0
    limit: float | None = None
    keep: Collection[str] = ()
    fewest: int = 1


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
    """The tracks of all implementations that ran, in the order asked for.

    ``seconds`` is the time for everything, ``other_load`` the share of the processors that other programs used
    meanwhile, ``failures`` why the others did not run, and ``notes`` what differs from the plan.
    """

    tracks: Sequence[Track]
    seconds: float
    other_load: float
    failures: Mapping[str, Refused | ChildFailed] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def track(self, name: str) -> Track:
        """Return the track of an implementation."""
        return next(track for track in self.tracks if track.name == name)

    def ratio(self, name: str, reference: str) -> Spread:
        """Return how many times as fast as the reference an implementation is."""
        return round_ratios(self.track(reference).round_seconds, self.track(name).round_seconds)

    def slower(self, name: str, references: Collection[str]) -> list[str]:
        """Name the references that an implementation is slower than: in the median, and in three quarters of rounds."""
        found, measured = [], {track.name for track in self.tracks}
        for reference in measured.intersection(references) if name in measured else ():
            below = [mine > theirs for mine, theirs in zip(self.track(name).round_seconds,
                                                           self.track(reference).round_seconds)]
            if self.ratio(name, reference).median < 1.0 and sum(below) >= _CLEARLY * len(below):
                found.append(reference)
        return sorted(found)

    def require(self, names: Collection[str] = ()) -> None:
        """Raise the failure of one of these names; of any, where nothing ran at all."""
        for name, failure in self.failures.items():
            if name in names or not self.tracks:
                raise failure


def compare(
    commands: Sequence[ChildCommand],
    plan: Plan,
    progress: Progress,
    timeout: float = 1800.0,
    save_to: Path | None = None,
) -> Comparison:
    """Run implementations in turns and return what was measured, and why the others could not run.

    Parameters
    ----------
    commands : sequence of ChildCommand
        One a process, in the order of the report. Each must speak the protocol of ``worker``.
    plan : Plan
        How long to measure.
    progress : Progress
        Where to report.
    timeout : float
        Seconds after which a child that does not answer counts as failed.
    save_to : Path, optional
        A folder in which every child writes its outputs at the end, in a folder of its name.
    """
    load, names = OtherLoad(), [command.name for command in commands]
    with contextlib.ExitStack() as stack:
        driver = _Driver(plan, progress, timeout)
        kept = [command for command in commands if driver.is_kept(command.name)]
        driver.start(stack, kept)
        driver.warm_up()
        for command in commands:
            if command not in kept and driver.fits(command.name):
                driver.start(stack, [command])
                driver.warm_up()
        driver.pairs.sort(key=lambda pair: names.index(pair[1].name))
        driver.run_rounds()
        if save_to is not None:
            driver.save(save_to)
    return Comparison([track for _, track in driver.pairs], monotonic() - driver.begin, load.share(), driver.failures,
                      driver.notes)


class _Driver:
    """The processes of a comparison that are still in it."""

    def __init__(self, plan: Plan, progress: Progress, timeout: float):
        self.plan, self.progress, self.timeout = plan, progress, timeout
        self.begin = monotonic()
        self.pairs: list[tuple[Child, Track]] = []
        self.failures: dict[str, Refused | ChildFailed] = {}
        self.notes: list[str] = []
        self.steps = plan.steps or 1

    def is_kept(self, name: str) -> bool:
        return not self.plan.keep or name in self.plan.keep

    def fits(self, name: str) -> bool:
        """Return whether there is time for one more, taken for as slow as the slowest that runs."""
        runs = self._expected()
        if math.isinf(self._left()) or not runs:
            return True
        startup = max(track.startup for _, track in self.pairs)
        rounds = FEWEST_ROUNDS * (self.plan.steps or 1)
        needed = startup + self.plan.warmup * max(runs) + rounds * (max(runs) + sum(runs))
        if needed > self._left():
            self._note_failure(name, NoTime(name, f"not measured: {self._left():.0f} s are left, and it would "
                                                  f"take about {needed:.0f} s"))
            return False
        return True

    def start(self, stack: contextlib.ExitStack, commands: Sequence[ChildCommand]) -> None:
        """Start processes, all at once."""
        begin = monotonic()
        started = [(stack.enter_context(Child(command, self._patience())), Track(command.name)) for command in commands]
        self.pairs += started
        for child, track in started:
            answer = self._ask(child)
            if answer is None:
                continue
            track.about, track.library_settings = answer["about"], answer.get("library_settings", {})
            track.startup = monotonic() - begin
            for text in [f"ready after {track.startup:.1f} s", *track.about.get("notes", [])]:
                self.progress.say(f"{track.name}: {text}")

    def warm_up(self) -> None:
        """Let each new process run its first step, then each a further one; what would not end in time is not begun."""
        new = [pair for pair in self.pairs if not pair[1].warmup]
        for _ in range(self.plan.warmup):
            for child, track in new:
                if (child, track) not in self.pairs or self._is_too_long(track):
                    continue
                answer = self._ask(child, "run", steps=1)
                if answer is not None:
                    track.warmup += answer["seconds"]
                    _record(track, answer)
        for _, track in new:
            if track.warmup:
                first, last = track.warmup[0], track.warmup[-1]
                self.progress.say(f"{track.name}: first step {first:.2f} s, last warm-up step {last:.2f} s")

    def _is_too_long(self, track: Track) -> bool:
        """Return whether one more warm-up step would not end in time, or would not leave the time to measure."""
        if not track.warmup:
            return False
        rounds = 0 if self.plan.rounds == 0 else FEWEST_ROUNDS
        return track.warmup[-1] + rounds * sum(self._expected()) > self._patience(track.name)

    def run_rounds(self) -> None:
        """Run as many rounds as there is time for; rounds that are not complete do not count."""
        if not self.pairs:
            return
        self.steps = self.plan.steps or steps_per_turn(self._expected())
        if self.plan.rounds != 0:
            self._leave_out_the_slowest()
        planned = self._planned(0, self.steps * sum(self._expected()))
        done = 0
        while self.pairs and done < planned:
            self.progress.total(planned * len(self.pairs))
            seconds = self._run_round(done)
            if seconds is None:
                break
            done += 1
            if self._left() < seconds:
                self._stop(done, planned)
                break
            planned = self._planned(done, seconds)  # the machine may have become faster or slower

    def save(self, folder: Path) -> None:
        for child, track in list(self.pairs):
            (folder / child.name).mkdir()
            patience = max(_SAVE_PATIENCE, self._patience(child.name))
            track.saved = self._ask(child, "save", patience, folder=str(folder / child.name)) or {}

    def _expected(self) -> list[float]:
        return [track.warmup[-1] for _, track in self.pairs if track.warmup]

    def _left(self) -> float:
        """Return the seconds until the limit."""
        return math.inf if self.plan.limit is None else self.begin + self.plan.limit - monotonic()

    def _patience(self, name: str | None = None) -> float:
        """Return how long to wait; one that may be left out does not take all of the time from the others."""
        share = 1.0 if name is None or name in self.plan.keep else _OPTIONAL_SHARE
        return max(_LEAST_PATIENCE, min(self.timeout, share * self._left()))

    def _planned(self, done: int, seconds_per_round: float) -> int:
        """Return how many rounds there are to be, and say so when nothing is done yet."""
        left = self.begin + self.plan.budget - monotonic()
        given = self.plan.rounds
        planned = affordable_rounds(done, left, seconds_per_round) if given is None else given
        if done == 0 and planned:
            self.progress.say(f"{planned} rounds of {self.steps} step{'s' * (self.steps > 1)} for each of "
                              f"{len(self.pairs)} processes")
            if self.plan.rounds is None and self.plan.limit is None and planned * seconds_per_round > left:
                self.progress.say(f"this will exceed the budget of {self.plan.budget:.0f} s; a smaller batch would "
                                  f"fit")
        return planned

    def _leave_out_the_slowest(self) -> None:
        """Leave out what makes the fewest rounds longer than the time that is left."""
        while self.plan.fewest * self.steps * sum(self._expected()) > self._left():
            others = [pair for pair in self.pairs if pair[1].name not in self.plan.keep]
            if not others or len(self.pairs) == 1:
                return
            child, track = max(others, key=lambda pair: pair[1].warmup[-1] if pair[1].warmup else 0.0)
            step = track.warmup[-1] if track.warmup else 0.0
            self._leave_out(child, NoTime(track.name, f"too slow: a step took {step:.0f} s, and a step of all "
                                          f"would not end in time, {self._left():.0f} s are left"))

    def _run_round(self, number: int) -> float | None:
        """Let each process take its turn; return the seconds of all, None when the limit came before the end."""
        begin = monotonic()
        for child, track in turn_order(self.pairs, number):
            try:
                child.timeout = self._patience()
                answer = child.ask("run", steps=self.steps)
            except (Refused, ChildFailed) as failure:
                if number and self._left() <= 0:  # not its fault: what was measured before counts
                    for _, each in self.pairs:
                        del each.turns[number:]
                    self._stop(number, number + 1)
                    return None
                self._leave_out(child, failure)
                continue
            track.turns.append(answer["seconds"])
            _record(track, answer)
            self.progress.turn(track.name, track.round_seconds[-1])
        return monotonic() - begin

    def _stop(self, done: int, planned: int) -> None:
        if done < planned:
            limit = self.plan.limit or 0.0
            self.notes.append(f"stopped after {done} round{'s' * (done > 1)}: the {limit:.0f} s for all are over")
            self.progress.say(self.notes[-1])

    def _ask(self, child: Child, command: str | None = None, patience: float | None = None, **arguments: Any
             ) -> dict[str, Any] | None:
        """Return a child's answer to a command, or what it says when it is ready; one that has none is left out."""
        child.timeout = patience or self._patience(child.name)
        try:
            return child.ready() if command is None else child.ask(command, **arguments)
        except (Refused, ChildFailed) as failure:
            self._leave_out(child, failure)
            return None

    def _leave_out(self, child: Child, failure: Refused | ChildFailed) -> None:
        self.pairs = [pair for pair in self.pairs if pair[0] is not child]
        child.end(politely=False)
        self._note_failure(child.name, failure)

    def _note_failure(self, name: str, failure: Refused | ChildFailed) -> None:
        self.failures[name] = failure
        self.progress.say(f"{name} is left out: {reason(failure)}")


def _record(track: Track, answer: dict[str, Any]) -> None:
    track.losses += answer["losses"]
    track.peak_memory = answer["peak_memory"]


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
    return max(FEWEST_ROUNDS, min(_MOST_ROUNDS, done + max(0, more)))
