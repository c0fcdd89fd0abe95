"""Stand in for ``mxnet.contrib.amp``, for libraries that import it themselves."""
from __future__ import annotations

import sys
from typing import Any

import mxnet.contrib

__all__ = ["install", "uninstall"]

_NAME = "mxnet.contrib.amp"
_original: list[Any] = []


def install() -> None:
    """Make ``mxnet.contrib.amp`` resolve to this package, until :func:`uninstall`.

    GluonCV's R-CNN tasks, for one, import it inside their functions.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.install()
    >>> from mxnet.contrib import amp as theirs
    >>> theirs is amp
    True
    >>> amp.uninstall()
    """
    if not _original:
        import mxnet.contrib.amp
        _original.append(mxnet.contrib.amp)
    _set(sys.modules[__package__])


def uninstall() -> None:
    """Give ``mxnet.contrib.amp`` back to MXNet; does nothing when it is.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.uninstall()
    """
    if _original:
        _set(_original.pop())


def _set(module: Any) -> None:
    sys.modules[_NAME] = module
    mxnet.contrib.amp = module
