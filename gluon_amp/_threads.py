"""Let MXNet's elementwise operators use several threads on a machine of two or three processors.

While it is loaded MXNet measures what it costs to start threads, with up to half of the processors, and lets an
elementwise operator (``relu``, ``exp``, products, their gradients) use threads where that is faster. Half of two
processors is one: nothing is measured, and all of these operators use one thread, whatever ``OMP_NUM_THREADS`` says.
A variable of MXNet's gives the number of processors to measure with. :func:`request` sets it before MXNet is loaded,
:func:`settle` takes it out again: a child process that measures MXNet as it is published would inherit it.
"""
from __future__ import annotations

import os
from typing import MutableMapping

__all__ = ["VARIABLE", "processors", "request", "settle"]

VARIABLE = "MXNET_USE_NUM_CORES_OPERATOR_TUNING"
_SWITCH = "MXNET_USE_OPERATOR_TUNING"  # the user decides about measuring at all
_ENOUGH = 4  # processors: half of them are several

_settings: list[MutableMapping[str, str]] = []  # environments to clean up


def request(environ: MutableMapping[str, str] | None = None, count: int | None = None) -> bool:
    """Have MXNet measure with all processors where it would measure with one.

    Parameters
    ----------
    environ : mutable mapping, optional
        The environment. MXNet's own variables in it stay as they are.
    count : int, optional
        Processors that this process may use; asked of the operating system when None.

    Returns
    -------
    bool
        Whether the variable was set; MXNet reads it once, when it is loaded.
    """
    environ = os.environ if environ is None else environ
    count = processors() if count is None else count
    if not 2 <= count < _ENOUGH or _threads(environ) < 2 or VARIABLE in environ or _SWITCH in environ:
        return False
    environ[VARIABLE] = str(count)
    _settings.append(environ)
    return True


def settle() -> None:
    """Take the variable out of the environment again."""
    while _settings:
        _settings.pop().pop(VARIABLE, None)


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads(environ: MutableMapping[str, str]) -> int:
    """Return the threads of the outermost parallel regions; without the variable MXNet takes half of the processors."""
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 1
