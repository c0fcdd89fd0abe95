"""List what keeps a network from running faster: ``advise``."""
from __future__ import annotations

import os
from typing import Any

import mxnet as mx
from mxnet.gluon import Block

from ... import _isa
from ...errors import expected
from ...runtime.devices import support
from ..report import Report, report
from .causes import CHECKS
from .situation import Advices, Situation


def advise(net: Block | mx.sym.Symbol | Report, data: Any = None, *, train: bool = False, time: bool = True) -> Advices:
    """List what keeps the network from running faster: the machine, the settings, or the network itself.

    Parameters
    ----------
    net : Block, Symbol or Report
        The network, or what :func:`gluon_amp.report` returned for it.
    data : NDArray or sequence of them
        As :func:`gluon_amp.report` takes it. Not needed for a report.
    train, time : bool
        As in :func:`gluon_amp.report`. Without times the advice does not say where the time goes.

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
        reported = net
    else:
        reported = report(net, data, train=train, time=time)
    situation = Situation(reported, support(reported.device_type, reported.device_id),
                          "amx_bf16" in _isa.cpu_flags() and not _isa.granted(),
                          os.environ.get("OMP_NUM_THREADS"), os.cpu_count() or 1)
    return advices(situation)


def advices(situation: Situation) -> Advices:
    """Run all checks; sort advice by the share of the network that it concerns, general advice first."""
    given = [advice for check in CHECKS for advice in [check(situation)] if advice is not None]
    return Advices(tuple(sorted(given, key=lambda advice: -2.0 if advice.share is None else -advice.share)))
