"""``amp.advise``: in words, what holds mixed precision back on this machine."""
from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Iterator

import mxnet as mx
from mxnet.gluon import Block

from .. import _isa
from ..errors import expected
from ..runtime.devices import device_supports
from ._checks import CHECKS, Advice, Situation
from .report import Report, report

__all__ = ["Advices", "advise"]


def advise(net: Block | mx.sym.Symbol | Report, data: Any = None, *, train: bool = False, time: bool = True) -> Advices:
    """Say what holds speed back: the machine, the settings, or the network.

    Parameters
    ----------
    net : Block, Symbol or Report
        The network, or what :func:`gluon_amp.report` returned for it.
    data : NDArray or sequence of them
        As :func:`gluon_amp.report` takes it. Not needed for a report.
    train, time : bool
        As in :func:`gluon_amp.report`. Without times nothing is said of where they go.

    Returns
    -------
    Advices
        Print it. Empty when nothing is known to hold the network back.

    Raises
    ------
    TypeError, StateError, GraphError
        As in :func:`gluon_amp.report`.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(4, in_units=8)
    >>> net.initialize()
    >>> print(amp.advise(net, mx.nd.ones((2, 8)), time=False))
    1. AMP is off: everything runs as the program says. ...
    """
    if isinstance(net, Report):
        if data is not None:
            raise TypeError(expected("no data beside a report", "data", data))
        found = net
    else:
        found = report(net, data, train=train, time=time)
    supports = device_supports()
    situation = Situation(found, supports.get(found.device_type, supports["cpu"]), _has_unused_amx(),
                          os.environ.get("OMP_NUM_THREADS"), os.cpu_count() or 1)
    return advices(situation)


def advices(situation: Situation) -> Advices:
    """Run all checks: those about everything first, then by how much they are about."""
    found = [advice for check in CHECKS for advice in [check(situation)] if advice is not None]
    return Advices(tuple(sorted(found, key=lambda advice: -2.0 if advice.share is None else -advice.share)))


def _has_unused_amx() -> bool:
    return "amx_bf16" in _isa.cpu_flags() and not _isa.granted()


@dataclass(frozen=True)
class Advices:
    """What :func:`gluon_amp.advise` found; print it.

    Attributes
    ----------
    items : tuple of Advice
        The most important first.
    """

    items: tuple[Advice, ...]

    def __iter__(self) -> Iterator[Advice]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics, in the same order."""
        return tuple(item.topic for item in self.items)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return everything as dicts, lists, strings and numbers."""
        return [asdict(item) for item in self.items]

    def __str__(self) -> str:
        if not self.items:
            return "Nothing is known to hold this network back"
        return "\n".join(f"{number}. {item.text}" for number, item in enumerate(self.items, 1))
