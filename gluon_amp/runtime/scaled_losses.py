"""Trainers whose gradients carry a loss scale that they know nothing of, because a loss was scaled for others only.

MXNet does not tell where a gradient comes from. It is certain where all backward passes since a trainer's last update
were of scaled losses; what trains beside it on losses of its own is never warned of.
"""
from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple, Sequence
from weakref import WeakKeyDictionary, WeakSet

from mxnet.gluon import Trainer
from mxnet.ndarray import NDArray

from .._mxnet import trainers

_MOST_SHOWN = 3


class _Passes(NamedTuple):
    """How many backward passes there were."""

    scaled: int = 0  # of losses that all carry a scale other than 1
    others: int = 0


class _Record:
    """What is known of the backward passes since AMP was switched on."""

    def __init__(self) -> None:
        self.scales: dict[int, float] = {}  # of the losses that are being scaled, by their handles
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.passes = _Passes()
        self.latest = 1.0  # the scale of the latest scaled loss
        self.at_update: WeakKeyDictionary[Trainer, _Passes] = WeakKeyDictionary()
        self.told: WeakSet[Trainer] = WeakSet()


_record = _Record()
forget = _record.forget


@contextmanager
def noted(losses: Sequence[NDArray], scale: float) -> Iterator[None]:
    """Note that these arrays are losses with a scale, as long as the body runs."""
    handles = [loss.handle.value for loss in losses] if scale != 1.0 else []
    _record.scales.update(dict.fromkeys(handles, scale))
    try:
        yield
    finally:
        for handle in handles:
            _record.scales.pop(handle, None)


def note_backward(heads: Any) -> None:
    """Note a backward pass."""
    arrays = [heads] if isinstance(heads, NDArray) else heads if isinstance(heads, (list, tuple)) else []
    found = [_record.scales.get(array.handle.value) for array in arrays if isinstance(array, NDArray)]
    scaled, others = _record.passes
    if found and len(found) == len(arrays) and None not in found:
        _record.passes, _record.latest = _Passes(scaled + 1, others), max(filter(None, found))
    else:
        _record.passes = _Passes(scaled, others + 1)


def check(trainer: Trainer) -> None:
    """Warn when an update is about to apply gradients with a scale that the trainer does not divide out."""
    before = _record.at_update.get(trainer, _Passes())
    _record.at_update[trainer] = _record.passes
    if before.others != _record.passes.others or before.scaled == _record.passes.scaled or trainer in _record.told:
        return
    scaler = trainers.attached(trainer)
    if getattr(scaler, "state", "READY") != "READY" or getattr(scaler, "loss_scale", 1.0) != 1.0:
        return
    names = trainers.fresh_parameters(trainer)
    if not names:
        return
    _record.told.add(trainer)
    shown = ", ".join(names[:_MOST_SHOWN]) + (f" and {len(names) - _MOST_SHOWN} more" if names[_MOST_SHOWN:] else "")
    warnings.warn(f"the gradients of {shown} carry the loss scale {_record.latest:g} of another trainer: their own "
                  "trainer updates them without dividing it out. Give it the same scaler, amp.init_trainer(trainer, "
                  "loss_scaler=amp.get_loss_scaler(other)), and name both: amp.scale_loss(loss, [other, trainer])",
                  stacklevel=4)
