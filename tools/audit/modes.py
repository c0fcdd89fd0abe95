"""The ways in which a sample runs."""
from __future__ import annotations

from itertools import product
from typing import NamedTuple

from gluon_amp.dtypes import BFLOAT16

from .samples.sample import LOW, Sample


class Mode(NamedTuple):
    """One way of running a sample."""

    # ``'plain'``; ``'blocked'``: inputs come from, and the first output goes into, a oneDNN convolution, which works on
    # blocked layouts; ``'blocked_in'``: only the inputs do; ``'blocked_out'``: only the output does; ``'mixed'``: only
    # the first input does
    layout: str
    # ``'infer'``: outside recording, in predict mode; ``'write'`` and ``'add'``: gradients of FP32 variables behind a
    # cast; ``'addlow'``: the operator itself adds to low-precision gradients
    grad: str
    run: str  # ``'eager'``, ``'cached'`` (CachedOp) or ``'static'`` (CachedOp with static_alloc and static_shape)

    def __str__(self) -> str:
        return f"{self.run}/{self.layout}/{self.grad}"


def _modes(layout: str, *grads: str) -> tuple[Mode, ...]:
    return tuple(Mode(layout, grad, run) for grad, run in product(grads, ("eager", "cached", "static")))


_PLAIN = _modes("plain", "infer", "write", "add", "addlow")
_BLOCKED = _modes("blocked", "infer", "write", "add") + _modes("blocked_in", "infer", "write")
_BLOCKED_OUT, _MIXED = _modes("blocked_out", "write"), _modes("mixed", "write")


def modes_for(item: Sample, dtype: str, device: str) -> tuple[Mode, ...]:
    """List the modes that make sense for a sample: blocked layouts exist for bfloat16 on the CPU only."""
    if not item.in_graphs:
        return (Mode("plain", "infer", "eager"),)
    modes = _PLAIN
    if device.startswith("cpu") and dtype == BFLOAT16:
        able = any(each.can_be_blocked for each in item.inputs)
        several = sum(each.kind == LOW for each in item.inputs) > 1
        modes += (_BLOCKED if able else ()) + _BLOCKED_OUT + (_MIXED if able and several else ())
    return modes if item.gradient else tuple(mode for mode in modes if mode.grad in ("infer", "write"))
