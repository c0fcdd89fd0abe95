"""How the process of an implementation is started, and in which interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, Mapping

from _children import ChildCommand
from _errors import UsageError
from _registry import TORCH, implementation

WORKER = Path(__file__).with_name("_worker.py")
TORCH_VARIABLE = "TORCH_PYTHON"
_TORCH_ENVIRONMENT = WORKER.parent.parent / ".venv-torch"


def torch_python() -> str | None:
    """Return the interpreter for PyTorch, None when there is none.

    GluonCV refuses to be imported beside PyTorch 2, so it has an environment of its own: the interpreter in
    ``TORCH_PYTHON``, that of ``.venv-torch`` (``make bench`` makes it), or this one.
    """
    if os.environ.get(TORCH_VARIABLE):
        return os.environ[TORCH_VARIABLE]
    own = _TORCH_ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if own.exists():
        return str(own)
    return sys.executable if importlib.util.find_spec("torch") else None


def command(workload: str, name: str, settings: Mapping[str, Any]) -> ChildCommand:
    """Return how to start an implementation with a workload.

    Raises
    ------
    UsageError
        If there is no such implementation, or no interpreter for it.
    """
    row = implementation(name)
    python = torch_python() if row.framework == TORCH else sys.executable
    if python is None:
        raise UsageError(f"{name} needs PyTorch: name an interpreter that has it in {TORCH_VARIABLE}")
    spec = json.dumps({"workload": workload, "implementation": name, "settings": dict(settings)})
    threads = {} if row.threads is None else {"OMP_NUM_THREADS": str(row.threads)}
    return ChildCommand(name, [python, str(WORKER), spec], threads)
