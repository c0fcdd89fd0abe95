"""Choose a batch size that fits the machine's memory and the time at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

_SAFE_SHARE = 0.85  # of the available memory: the estimate is rough, and there may be no swap
_EXPECTED_ROUNDS = 4  # with the warm-up steps of each process, about what a small budget must hold


@dataclass(frozen=True)
class Cost:
    """What one FP32 training process needs.

    Parameters
    ----------
    base_bytes : float
        Memory without any sample: libraries, weights, gradients, optimizer state.
    sample_bytes : float
        Memory for each sample of the batch.
    sample_gflop : float
        1e9 floating-point operations of a training step for each sample.
    """

    base_bytes: float
    sample_bytes: float
    sample_gflop: float

    def memory(self, batch_size: int) -> float:
        """Return the bytes that a process needs at this batch size."""
        return self.base_bytes + batch_size * self.sample_bytes

    def seconds(self, batch_size: int, gflops: float) -> float:
        """Return the seconds that a step takes on a machine of this speed."""
        return batch_size * self.sample_gflop / gflops


@dataclass(frozen=True)
class Machine:
    """What there is: bytes of available memory and 1e9 floating-point operations a second."""

    available_bytes: float
    gflops: float


def choose_batch_size(
    cost: Cost, machine: Machine, shares: Sequence[float], budget: float | None, preferred: int = 8
) -> tuple[int, str]:
    """Return the largest power of two up to the preferred size that fits, and the reason in words.

    Parameters
    ----------
    cost : Cost
        What one FP32 process needs.
    machine : Machine
        What there is.
    shares : sequence of float
        One a process that will be alive at the same time: its memory as a share of FP32's.
    budget : float or None
        Seconds for everything; None to look at memory alone.
    preferred : int
        The size to use when it fits.

    Examples
    --------
    >>> choose_batch_size(Cost(1e9, 1e9, 100), Machine(8e9, 100), [1.0], None)[0]
    4
    """
    batch_size, reason = preferred, "it fits"
    while batch_size > 1:
        tight = _what_is_short(cost, machine, shares, budget, batch_size)
        if tight is None:
            break
        reason = f"batch {batch_size} {tight}"
        batch_size //= 2
    return batch_size, f"batch size {batch_size} chosen: {reason}"


def _what_is_short(
    cost: Cost, machine: Machine, shares: Sequence[float], budget: float | None, batch_size: int
) -> str | None:
    memory = sum(shares) * cost.memory(batch_size)
    if machine.available_bytes and memory > _SAFE_SHARE * machine.available_bytes:
        return f"would need about {memory / 1e9:.0f} GB of {machine.available_bytes / 1e9:.0f} GB"
    seconds = len(shares) * (_EXPECTED_ROUNDS + 3) * cost.seconds(batch_size, machine.gflops)
    if budget is not None and seconds > budget:
        return f"would take about {seconds:.0f} s of {budget:.0f} s for a few rounds"
    return None
