"""Choose a batch size that fits the machine's memory and the time at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

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


# by network; roughly, to choose sizes and processes that fit the memory
COSTS = {
    "ssd512": Cost(1.0e9, 0.68e9, 180.0), "resnet50": Cost(0.6e9, 0.15e9, 25.0),
    "mobilenet_v2": Cost(0.4e9, 0.11e9, 2.0), "densenet121": Cost(0.5e9, 0.2e9, 17.0),
    "vgg16": Cost(1.9e9, 0.2e9, 93.0), "lstm": Cost(0.5e9, 5e6, 4.0),
    "encoder": Cost(2.2e9, 0.12e9, 66.0), "encoder_masked": Cost(2.2e9, 0.12e9, 66.0),
}  # fmt: skip


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
    >>> groups(Cost(1e9, 1e9, 1), 13e9, {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.5}, 4, "a")
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
