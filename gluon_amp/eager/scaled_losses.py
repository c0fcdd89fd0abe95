"""Scaled losses, which MXNet's record of what was computed tells from others, and trainers that know nothing of them.

A loss is scaled by an operator with the scale as its attribute: so it is known whether the losses of a backward pass
were scaled, in which order and in which thread they may come.

MXNet does not tell where a gradient comes from. It is certain where all backward passes since a trainer's last update
were of scaled losses; what trains beside it on losses of its own is never warned of.
"""
from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Sequence
from weakref import WeakKeyDictionary, WeakSet

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray import NDArray

from .._mxnet import trainers
from .._mxnet.invoke import invoke
from ..errors import some_of, warn

_MARK = "__amp_loss_scale__"  # on the operators that scale losses


class _Passes(NamedTuple):
    """How many backward passes there were."""

    scaled: int = 0  # of losses that all carry a scale other than 1
    others: int = 0


class _Record:
    """What is known of the backward passes since AMP was switched on."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.passes = _Passes()
        self.latest = 1.0  # the scale of the latest scaled loss whose gradients were computed
        self.any = False  # whether a loss was scaled at all
        self.at_update: WeakKeyDictionary[Trainer, _Passes] = WeakKeyDictionary()
        self.told: WeakSet[Trainer] = WeakSet()


_record = _Record()
forget = _record.forget


def scaled(loss: NDArray, scale: float) -> NDArray:
    """Multiply a loss by a scale; MXNet's record of it tells so."""
    _record.any = True
    is_numpy = isinstance(loss, mx.np.ndarray)
    return invoke("_npi_multiply_scalar" if is_numpy else "_mul_scalar", [loss], {"scalar": scale, _MARK: scale},
                  is_numpy)[0]


def scales_behind(heads: Sequence[NDArray]) -> set[float]:
    """Return the scales of the losses that arrays are, or are computed from."""
    found: set[float] = set()
    for symbol in _computations(heads if _record.any else ()):
        own = symbol.attr(_MARK)
        texts = [own] if own else [attrs[_MARK] for attrs in symbol.attr_dict().values() if _MARK in attrs]
        found.update(map(float, texts))
    return found


def _computations(arrays: Sequence[NDArray]) -> Iterator[mx.sym.Symbol]:
    """Yield what MXNet has recorded of how arrays were computed, of those of which it has recorded anything."""
    for array in arrays:
        try:
            yield autograd.get_symbol(array)
        except mx.MXNetError:  # which the backward pass is about to raise as well
            continue


def heads_of(heads: Any) -> list[NDArray]:
    """Return the arrays that a backward pass begins with."""
    given = [heads] if isinstance(heads, NDArray) else heads if isinstance(heads, (list, tuple)) else []
    return [array for array in given if isinstance(array, NDArray)]


def note_backward(heads: Sequence[NDArray]) -> None:
    """Note a backward pass."""
    found = [float(symbol.attr(_MARK) or 1.0) for symbol in _computations(heads)]
    scaled, others = _record.passes
    if found and 1.0 not in found:
        _record.passes, _record.latest = _Passes(scaled + 1, others), max(found)
    else:
        _record.passes = _Passes(scaled, others + 1)


def passes() -> tuple[int, int]:
    """Return how many backward passes there were: of scaled losses, and of others."""
    return _record.passes


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
    warn(f"the gradients of {some_of(names, 3)} carry the loss scale {_record.latest:g} of another trainer: "
         "their own trainer updates them without dividing it out. Give it the same scaler, "
         "amp.init_trainer(trainer, loss_scaler=amp.get_loss_scaler(other)), and name both: "
         "amp.scale_loss(loss, [other, trainer])")
