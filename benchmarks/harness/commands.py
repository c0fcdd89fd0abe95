"""How the process of an implementation is started, and in which interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, Mapping

from . import machine
from .children import ChildCommand
from .errors import UsageError
from .registry import AMX, BFLOAT16, IPEX, TORCH, implementation

_WORKER = Path(__file__).parents[1] / "worker.py"
_PROJECT = _WORKER.parents[1]
# interpreter -> (the variable that names it, the environment that make makes, the package it must have)
PEERS: Mapping[str, tuple[str, str, str]] = {
    TORCH: ("TORCH_PYTHON", ".venv-torch", "torch"),
    IPEX: ("IPEX_PYTHON", ".venv-ipex", "intel_extension_for_pytorch"),
}
# what PyTorch is told where MXNet's oneDNN is told to stop at an instruction set
_CAPABILITIES = {"AVX2": "avx2"}


def peer_python(interpreter: str) -> str | None:
    """Return the interpreter for a peer, None when there is none.

    GluonCV refuses to be imported beside PyTorch 2, so it has an environment of its own: the interpreter in
    ``TORCH_PYTHON``, that of ``.venv-torch`` (``make bench`` makes it), or this one. Intel's extension needs another
    PyTorch: ``IPEX_PYTHON``, ``.venv-ipex`` (``make ipex``), or this one.
    """
    variable, folder, package = PEERS[interpreter]
    if os.environ.get(variable):
        return os.environ[variable]
    own = _PROJECT / folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if own.exists():
        return str(own)
    return sys.executable if importlib.util.find_spec(package) else None


def runs_here(name: str) -> bool:
    """Return whether an implementation has an interpreter and the CPU that it is meant for."""
    row = implementation(name)
    if row.interpreter is not None and peer_python(row.interpreter) is None:
        return False
    return {BFLOAT16: machine.has_bfloat16, AMX: machine.has_amx, None: lambda: True}[row.needs]()


def command(workload: str, name: str, settings: Mapping[str, Any]) -> ChildCommand:
    """Return how to start an implementation with a workload.

    Raises
    ------
    UsageError
        If there is no such implementation, or no interpreter for it.
    """
    row = implementation(name)
    python = sys.executable if row.interpreter is None else peer_python(row.interpreter)
    if python is None:
        variable, _, package = PEERS[row.interpreter or ""]
        raise UsageError(f"{name} needs {package}: name an interpreter that has it in {variable}")
    environment = {} if row.threads is None else {"OMP_NUM_THREADS": str(row.threads)}
    capability = _CAPABILITIES.get(machine.isa_limit())
    if row.framework == TORCH and capability:
        environment["ATEN_CPU_CAPABILITY"] = capability
    spec = {"workload": workload, "implementation": name, "settings": dict(settings)}
    return worker_command(name, python, "harness.worker:Steps", spec, environment)


def worker_command(name: str, python: str, serves: str, arguments: Mapping[str, Any], environment: Mapping[str, str]
                   ) -> ChildCommand:
    """Return how to start a process that serves a class, made with these arguments; see `worker`."""
    return ChildCommand(name, [python, str(_WORKER), json.dumps({"serves": serves, **arguments})], environment)
