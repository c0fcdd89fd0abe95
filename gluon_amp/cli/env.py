"""``gluon-amp env``: what this machine runs in low precision, and why."""
from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any, Iterator

import mxnet as mx
import numpy as np

from .. import _cpus, _cuda, _isa, _memory, _start, native
from .._mxnet import gpus
from ..dtypes import FLOAT32, cpu_isa, cuda_support
from ..state.devices import device_supports, verdict
from .words import add_json_argument, filled, print_facts, write_json

HELP = "show MXNet, oneDNN, the CPU's instruction sets, the GPUs, and the data type that init() chooses"

# oneDNN says what it is with its first operator; importing this package runs one on CPUs with AMX only.
_FIRST_OPERATOR = "from gluon_amp._mxnet.invoke import run_onednn_operator; run_onednn_operator()"
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_json_argument(parser)
    parser.add_argument("--library-path", action="store_true",
                        help="print the line for a shell that lets `import mxnet` find the CUDA libraries of pip's "
                             "packages without gluon_amp")


def run(args: argparse.Namespace) -> int:
    """Print what was found."""
    if args.library_path:
        print(f"export LD_LIBRARY_PATH={os.pathsep.join(map(str, _start.cuda_directories(sys.path)))}"
              "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
        return 0
    machine = environment()
    if write_json(machine, args.json):
        print(filled(machine["verdict"]) + "\n")
        print_facts(_facts(machine))
    return 0


def _facts(machine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what people look for, in their words."""
    yield "versions", (f"gluon_amp {machine['gluon_amp']}, MXNet {machine['mxnet']}, NumPy {machine['numpy']}, "
                       f"Python {machine['python']}")
    yield "CPU", f"{machine['cpu']}, {machine['processors']} logical processors"
    yield "its instructions", ", ".join(machine["instruction_sets"]) or "none that matter here"
    yield "oneDNN uses", machine["onednn_isa"] + (f", limited by {_isa.VARIABLE}" if machine["max_cpu_isa"] else "")
    if machine["onednn"]:
        yield "oneDNN says", "; ".join(machine["onednn"])
    yield "AMX tiles", machine["amx"]
    yield "threads", (f"OMP_NUM_THREADS={machine['threads']}" if machine["threads"] else
                      "OMP_NUM_THREADS is not set: MXNet takes half of the logical processors"
                      ) + (f". {machine['misfit']}" if machine["misfit"] else "")
    yield "freed memory", machine["freed_memory"]
    yield "GPUs", "; ".join(gpu["reason"] if gpu["has_kernels"] else f"unused: {gpu['reason']}"
                            for gpu in machine["gpus"]) or _no_gpus()
    for name, state in machine["native_operators"].items():
        yield f"C++ operators, {name}", state
    yield "MXNet's build", ", ".join(machine["features"])


def _freed_memory(obstacle: str) -> str:
    return f"goes back to the system: {obstacle}" if obstacle else "stays in the process for the next step's arrays"


def _no_gpus() -> str:
    problem = gpus.problem()
    return f"none: NVIDIA's driver does not work: {problem}" if problem else "none that this build of MXNet can use"


def environment() -> dict[str, Any]:
    """Describe the machine and MXNet's build."""
    flags, supports = _isa.cpu_flags(), device_supports()
    return {
        "verdict": f"amp.init() runs {verdict(supports)}.",
        "gluon_amp": metadata.version("gluon_amp"),
        "mxnet": mx.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "cpu": _isa.cpu_name(), "onednn": _onednn(), "onednn_isa": cpu_isa(), "amx_granted": _isa.granted(),
        "amx": _isa.outcome() or ("not asked for" if "amx_tile" in flags else "none"),
        "max_cpu_isa": os.environ.get(_isa.VARIABLE),
        "native_operators": {library.name: library.missing or "loaded" for library in native.load()},
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
        "threads": os.environ.get("OMP_NUM_THREADS"), "processors": os.cpu_count(),
        "usable_cpus": _cpus.allowed(), "misfit": _cpus.misfit(),
        "freed_memory": _freed_memory(_memory.obstacle(os.environ)),
        "gpus": [_gpu(index) for index in range(gpus.count())],
        "gpu_driver": _cuda_versions(),
        "features": sorted(name for name, feature in mx.runtime.Features().items() if feature.enabled),
        "chosen": {device: {"dtype": support.dtype, "native": support.native, "reason": support.reason}
                   for device, support in supports.items()},
    }


def _onednn() -> list[str]:
    """Return what oneDNN reports at its first operator: version, threads and instruction set."""
    environ = {**os.environ, "DNNL_VERBOSE": "1"}
    child = subprocess.run([sys.executable, "-c", _FIRST_OPERATOR], env=environ, capture_output=True, text=True,
                           check=False)
    prefix = "dnnl_verbose,info,"
    return [line[len(prefix):] for line in child.stdout.splitlines()
            if line.startswith(prefix) and "gpu" not in line and "template" not in line]


def _cuda_versions() -> dict[str, Any] | None:
    """Return what is known of the driver and the run-time compiler; None where MXNet is built without CUDA."""
    driver, compiler = _cuda.driver_version(), _cuda.nvrtc_version()
    if driver is None and compiler is None:
        return None
    return {"driver": driver, "nvrtc": compiler, "problem": gpus.problem() or _cuda.fusion_problem(driver, compiler)}


def _gpu(index: int) -> dict[str, Any]:
    capability = _cuda.compute_capability(index)
    support = cuda_support(capability)
    return {"name": _cuda.device_name(index), "compute_capability": capability,
            "has_kernels": support.dtype != FLOAT32, "reason": support.reason}
