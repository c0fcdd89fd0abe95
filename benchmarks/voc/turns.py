"""Train the two halves of the digits benchmark in turns, for equally many steps, within a time.

The learning rate follows the progress of the whole run, and that is the share of the wanted steps or of the time,
whichever is larger: a machine that is too slow for all steps takes fewer and still comes to the end of the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic
from typing import Any, Callable, Mapping, Sequence

from ..harness.children import Child
from ..harness.compare import turn_order
from ..harness.stats import Spread, round_ratios

STEPS = 600
SIDES = (128, 96)
FEWEST_STEPS = 300  # where fewer fit, the images become smaller first
_PROBE_STEPS, _PROBE_IMAGES = 4, 16
_TURNS = 30
_EVALUATION_SHARE = 0.25  # of the time, at most
_FEWEST_IMAGES = 50
_SAFETY = 1.25  # the machine may become slower than it was
_OVERTIME = 15.0  # seconds after the end in which a process may still answer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Probe:
    """Seconds that a half takes: until the end of its first step, for a later one, and to evaluate an image."""

    startup: float
    step: float
    image: float


@dataclass(frozen=True)
class Choice:
    """What both halves do, and why, in words.

    ``training_end`` is on the clock of `time.monotonic`; ``step`` the seconds of a step of both, 0 when not known.
    """

    steps: int
    side: int
    images: int
    training_end: float
    step: float
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What both halves gave, how fast the second was against the first, and what was chosen."""

    runs: tuple[Mapping[str, Any], Mapping[str, Any]]
    ratio: Spread
    choice: Choice

    @property
    def steps(self) -> int:
        """Steps of each half."""
        return int(self.runs[0]["settings"]["steps"])


def choose(probes: Sequence[Probe], now: float, end: float, images: int, side: int | None = None) -> Choice:
    """Return the side of the images and how many are evaluated, from steps that were measured at the largest side.

    Parameters
    ----------
    probes : sequence of Probe
        One a half.
    now, end : float
        The time that there is, on the clock of `time.monotonic`.
    images : int
        What is evaluated when the time allows.
    side : int, optional
        The side that was asked for, and measured.

    Examples
    --------
    >>> choice = choose([Probe(5.0, 0.1, 0.01)] * 2, 0.0, 100.0, 600)
    >>> choice.side, choice.images, choice.training_end
    (128, 600, 75.0)
    """
    step, image, startup = (sum(getattr(each, name) for each in probes) for name in ("step", "image", "startup"))
    evaluated = min(images, max(_FEWEST_IMAGES, int(_EVALUATION_SHARE * (end - now) / image)))
    # a network is built once to train, and once to be converted
    training_end = end - startup - _SAFETY * evaluated * image
    left = training_end - now - startup
    fitting = max(1, int(left / step))
    times = " and ".join(f"{each.step:.2f} s" for each in probes)
    pixels = side or SIDES[0]
    reason = f"a step took {times} at {pixels}x{pixels} pixels, so about {fitting} of both fit {max(0.0, left):.0f} s"
    return Choice(STEPS, side or (pixels if fitting >= FEWEST_STEPS else SIDES[-1]), evaluated,
                  training_end, step, reason)


def turn_steps(choice: Choice, done: int, expected: float, begin: float) -> int:
    """Return the steps of a turn: a thirtieth of all, or of the time where that holds fewer."""
    steps = min(math.ceil(choice.steps / _TURNS), choice.steps - done)
    if expected and math.isfinite(choice.training_end):
        steps = min(steps, int((choice.training_end - begin) / _TURNS / expected))
    return max(1, steps)


def progress_at(choice: Choice, done: int, now: float, begin: float) -> float:
    """Return the share of the steps or of the time that is over, whichever is larger, 0 to 1."""
    passed = (now - begin) / max(1.0, choice.training_end - begin) if math.isfinite(choice.training_end) else 0.0
    return min(1.0, max(done / choice.steps, passed))


class Turns:
    """Two processes of `worker`, told what to do until a point in time.

    Parameters
    ----------
    halves : sequence of Child
        FP32, then gluon_amp.
    end : float
        When everything must be over, on the clock of `time.monotonic`; infinity for no limit.
    say : callable
        Takes lines of text.
    """

    def __init__(self, halves: Sequence[Child], end: float, say: Say):
        self.halves, self.end, self.say = halves, end, say

    def ask(self, child: Child, command: str, **arguments: Any) -> dict[str, Any]:
        if math.isfinite(self.end):
            child.timeout = max(1.0, self.end + _OVERTIME - monotonic())
        return child.ask(command, **arguments)

    def probe(self, side: int) -> list[Probe]:
        """Measure both halves with images of this side."""
        answers = [self.ask(child, "probe", data_shape=side, steps=_PROBE_STEPS, images=_PROBE_IMAGES)
                   for child in self.halves]
        return [Probe(each["startup"], each["step"], each["image"]) for each in answers]

    def run(self, choice: Choice) -> Outcome:
        """Train both halves until the steps or the time are over, and evaluate them."""
        for child in self.halves:
            self.ask(child, "begin", steps=choice.steps, data_shape=choice.side)
        seconds: list[list[float]] = [[] for _ in self.halves]
        begin, done, progress, expected = monotonic(), 0, 0.0, choice.step
        while progress < 1.0:
            steps = turn_steps(choice, done, expected, begin)
            until = max(progress, progress_at(choice, done + steps, monotonic() + steps * expected, begin))
            started = monotonic()
            for place in turn_order(range(len(self.halves)), len(seconds[0])):
                answer = self.ask(self.halves[place], "run", steps=steps, progress=[progress, until])
                seconds[place].append(sum(answer["seconds"]) / steps)
            expected = (monotonic() - started) / steps
            done, progress = done + steps, until
        if done < choice.steps:
            self.say(f"the time allowed {done} of {choice.steps} steps")
        runs = [self.ask(child, "finish", images=choice.images)["result"] for child in self.halves]
        return Outcome((runs[0], runs[1]), round_ratios(*seconds), choice)


def train(halves: Sequence[Child], steps: int | None, side: int | None, end: float, say: Say) -> Outcome:
    """Choose what is not given from measured steps, say so, and train both halves in turns.

    Parameters
    ----------
    halves : sequence of Child
        FP32, then gluon_amp.
    steps, side : int, optional
        Steps of each half, for which there is no limit then, and side of the images in pixels.
    end : float
        When everything must be over, on the clock of `time.monotonic`.
    say : callable
        Takes lines of text.
    """
    abouts = [child.ready()["about"] for child in halves]
    for child, about in zip(halves, abouts):
        say(f"{child.name}: {about['dtype']}")
    images = abouts[0]["images"]
    if steps is not None:
        return Turns(halves, math.inf, say).run(Choice(steps, side or SIDES[0], images, math.inf, 0.0, "as asked for"))
    turns = Turns(halves, end, say)
    choice = choose(turns.probe(side or SIDES[0]), monotonic(), end, images, side)
    say(f"chosen: {choice.side}x{choice.side} pixels, at most {choice.steps} steps, mAP of {choice.images} images: "
        f"{choice.reason}")
    return turns.run(choice)
