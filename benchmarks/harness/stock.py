"""Make MXNet importable as gluon_amp does, without importing gluon_amp: that would let oneDNN use AMX.

Import it before mxnet in processes that measure MXNet as it is published.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def _start() -> ModuleType:
    """Load the one module of gluon_amp that needs nothing else of it."""
    package = importlib.util.find_spec("gluon_amp")
    if package is None or not package.origin:
        raise ModuleNotFoundError("gluon_amp is not installed: python -m pip install -e .")
    spec = importlib.util.spec_from_file_location("_stock_start", Path(package.origin).with_name("_start.py"))
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


_start().prepare()
