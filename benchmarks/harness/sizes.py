"""Choose a batch size that fits the machine's memory and the time at hand, from steps that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

_SAFE_SHARE = 0.85  # of the available memory: the estimate is rough, and there may be no swap
_SAFE_TIME = 0.9  # of the time at hand: the machine may become slower than it was
_FIRST_STEP = 0.5  # of a step: what the first one takes longer with the size of the batch, to touch new memory


@dataclass(frozen=True)
class Cost:
    """What one FP32 training process needs, roughly.

    Parameters
    ----------
    base_bytes : float
        Memory without any sample: libraries, weights, gradients, optimizer state.
    sample_bytes : float
        Memory for each sample of the batch.
    sample_seconds : float
        Time of a step for each sample, on two cores.
    compiled : int
        Different layers, which compilation takes time for.
    """

    base_bytes: float
    sample_bytes: float
    sample_seconds: float = 0.0
    compiled: int = 0

    def memory(self, batch_size: int) -> float:
        """Return the bytes that a process needs at this batch size."""
        return self.base_bytes + batch_size * self.sample_bytes


# by network, to choose sizes and processes that fit the memory, and to divide the time
COSTS = {
    "ssd512": Cost(1.0e9, 0.68e9, 1.0, 80), "resnet50": Cost(0.6e9, 0.15e9, 0.15, 50),
    "mobilenet_v2": Cost(0.4e9, 0.11e9, 0.1, 60), "densenet121": Cost(0.5e9, 0.2e9, 0.15, 120),
    "vgg16": Cost(1.9e9, 0.2e9, 0.4, 20), "lstm": Cost(0.5e9, 5e6, 0.03, 4),
    "encoder": Cost(2.2e9, 0.12e9, 0.4, 10), "encoder_masked": Cost(2.2e9, 0.12e9, 0.4, 10),
}  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """What a process took with one sample: seconds until it was ready, of its first step and of a later one."""

    startup: float
    first: float
    step: float

    def seconds(self, batch_size: int, steps: int) -> float:
        """Return what a process takes until it has run so many steps, at most: larger batches take less a sample."""
        return self.startup + max(0.0, self.first - self.step) + (steps + _FIRST_STEP) * batch_size * self.step


@dataclass(frozen=True)
class Choice:
    """A batch size, the warm-up steps of each process, and the reasons in words."""

    batch_size: int
    warmup: int
    reason: str


def largest_batch(cost: Cost, available: float, shares: Sequence[float], preferred: int) -> tuple[int, str]:
    """Return the largest power of two up to the preferred size that fits the memory, and the reason in words.

    Parameters
    ----------
    cost : Cost
        What one FP32 process needs.
    available : float
        Bytes; 0 when it is not known.
    shares : sequence of float
        One a process that will be alive at the same time: its memory as a share of FP32's.
    preferred : int
        The size to use when it fits.

    Examples
    --------
    >>> largest_batch(Cost(1e9, 1e9), 8e9, [1.0], 8)
    (4, 'batch 8 would need about 9 GB of 8 GB')
    """
    size, reason = preferred, f"batch {preferred} fits"
    while size > 1 and available and sum(shares) * cost.memory(size) > _SAFE_SHARE * available:
        needed = sum(shares) * cost.memory(size)
        reason = f"batch {size} would need about {needed / 1e9:.0f} GB of {available / 1e9:.0f} GB"
        size //= 2
    return size, reason


def choose(largest: int, why_largest: str, probes: Sequence[Probe], seconds: float, rounds: int, warmup: int) -> Choice:
    """Return the largest batch at which the fewest rounds fit the time, by halves; warm-up steps are given up first.

    Parameters
    ----------
    largest : int
        The size to begin with.
    why_largest : str
        Why no larger one.
    probes : sequence of Probe
        What was measured, one a process.
    seconds : float
        For everything that is still to be done.
    rounds : int
        The fewest that are worth measuring.
    warmup : int
        Steps before them, at best.

    Examples
    --------
    >>> choose(8, "batch 8 fits", [Probe(5.0, 2.0, 1.0)] * 2, 60.0, rounds=3, warmup=2)
    Choice(batch_size=4, warmup=2, reason='batch 8 would take about 92 s of 60 s for 3 rounds')
    """
    reason = why_largest
    size = largest
    while True:
        fewest = min(warmup, 1) if size > 1 else 0
        for steps in range(warmup, fewest - 1, -1):
            needed = sum(probe.seconds(size, steps + rounds) for probe in probes)
            if needed <= _SAFE_TIME * seconds or (size == 1 and steps == 0):
                return Choice(size, steps, reason)
        reason = f"batch {size} would take about {needed:.0f} s of {seconds:.0f} s for {rounds} rounds"
        size //= 2


def groups(
    cost: Cost, available: float, shares: Mapping[str, float], batch_size: int, common: str
) -> list[list[str]]:
    """Divide processes into groups that fit the memory together; one of them is in every group.

    One that does not fit even beside the common one is in none.

    Parameters
    ----------
    cost : Cost
        What one FP32 process needs.
    available : float
        Bytes.
    shares : mapping of str to float
        Memory of each process as a share of FP32's, by name.
    batch_size : int
        Samples in a batch.
    common : str
        The one that all others are compared to.

    Examples
    --------
    >>> groups(Cost(1e9, 1e9), 13e9, {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.5}, 4, "a")
    [['a', 'b'], ['a', 'c', 'd']]
    """
    limit = _SAFE_SHARE * available if available else float("inf")
    need = {name: share * cost.memory(batch_size) for name, share in shares.items()}
    found: list[list[str]] = []
    for name in need:
        if name == common:
            continue
        if need.get(common, 0.0) + need[name] > limit:
            continue
        group = next((group for group in found if sum(need[each] for each in group) + need[name] <= limit), None)
        if group is None:
            found.append(group := [common] if common in need else [])
        group.append(name)
    return found or [[name] for name in need if name == common]
