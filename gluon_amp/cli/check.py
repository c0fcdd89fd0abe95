"""``gluon-amp check``: what this machine runs and why, and training steps on it: to be attached to a report."""
from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from importlib import metadata

import mxnet as mx
import numpy as np

from .. import _cpus, _cuda, _isa, _memory, _start, native
from .._mxnet import gpus
from ..dtypes import FLOAT32, cpu_isa, cuda_support
from ..errors import AmpError, expected
from ..selftest import WRONG, check
from ..state.devices import device_supports, verdict
from .words import STANDARD_OUTPUT, add_json_argument, filled, print_facts, write_json

HELP = "show what this machine runs in, and why; then test training steps in each type, and their speed"

_FORMAT = "gluon_amp check 2"
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--device", metavar="DEVICE", default=None,
                        help="cpu, or a GPU, as in gpu(0) (default: the first GPU, the CPU without one)")
    add_json_argument(parser)
    parser.add_argument("--library-path", action="store_true",
                        help="only print the line for a shell that lets `import mxnet` find the CUDA libraries of "
                             "pip's packages without gluon_amp")


def run(args: argparse.Namespace) -> int:
    """Describe the machine and test it; return 1 when something is wrong."""
    if args.library_path:
        print(f"export LD_LIBRARY_PATH={os.pathsep.join(map(str, _start.cuda_directories(sys.path)))}"
              "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
        return 0
    device, machine, has_text = _device(args.device), environment(), args.json != STANDARD_OUTPUT
    if has_text:
        print(filled(machine["verdict"]) + "\n")
        print_facts((name, value) for name, value in machine.items() if name != "verdict")
        print()
    findings = []
    for found in check(device):
        findings.append(found)
        if has_text:
            print(filled(f"{found.verdict:7}{found.name}: {found.detail}", 7), flush=True)
    wrong = sum(found.verdict == WRONG for found in findings)
    if has_text:
        print(f"{device}: {f'{wrong} of {len(findings)} lines are wrong' if wrong else 'nothing is wrong'}")
    write_json({**machine, "format": _FORMAT, "device": str(device), "wrong": wrong,
                "findings": [found._asdict() for found in findings], "libraries": _cuda.loaded_libraries()}, args.json)
    return 1 if wrong else 0


def environment() -> dict[str, str]:
    """Describe the machine and MXNet's build in words."""
    flags = _isa.cpu_flags()
    threads = os.environ.get("OMP_NUM_THREADS")
    obstacle = _memory.obstacle(os.environ)
    return {
        "verdict": f"amp.init() runs {verdict(device_supports())}.",
        "versions": f"gluon_amp {metadata.version('gluon_amp')}, MXNet {mx.__version__}, NumPy {np.__version__}, "
                    f"Python {platform.python_version()}",
        "CPU": f"{_isa.cpu_name()}, {os.cpu_count()} logical processors, {_cpus.allowed()} for this process",
        "its instructions": ", ".join(name for name in _INSTRUCTION_SETS if name in flags) or "none that matter here",
        "oneDNN uses": cpu_isa() + (f", limited by {_isa.VARIABLE}" if os.environ.get(_isa.VARIABLE) else ""),
        "AMX tiles": _isa.outcome() or ("not asked for" if "amx_tile" in flags else "none"),
        "threads": (f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set: MXNet takes half of the "
                    "logical processors") + (f". {_cpus.misfit()}" if _cpus.misfit() else ""),
        "freed memory": f"goes back to the system: {obstacle}" if obstacle else "stays for the next step's arrays",
        "GPUs": _gpus(),
        **{f"C++ operators, {library.name}": library.missing or "loaded" for library in native.load()},
        "MXNet's build": ", ".join(sorted(name for name, feature in mx.runtime.Features().items() if feature.enabled)),
    }


def _gpus() -> str:
    found = []
    for index in range(gpus.count()):
        runs = cuda_support(_cuda.compute_capability(index))
        found.append(f"{_cuda.device_name(index)}, {'unused: ' if runs.dtype == FLOAT32 else ''}{runs.reason}")
    problem = gpus.problem()
    return "; ".join(found) or ("none: " + (f"NVIDIA's driver does not work: {problem}" if problem else
                                            "this build of MXNet can use none"))


def _device(text: str | None) -> mx.Context:
    count = gpus.count()
    if text is None:
        return mx.gpu(0) if count else mx.cpu()
    named = re.fullmatch(r"(cpu|gpu)(?:\((\d+)\)|:(\d+))?", text)
    if named is None:
        raise AmpError(expected("cpu, gpu or a number in brackets, as in gpu(0)", "--device", text))
    device = mx.Context(named[1], int(named[2] or named[3] or 0))
    if device.device_type == "gpu" and device.device_id >= count:
        raise AmpError(f"--device: MXNet finds {count} GPUs here, and no {device}. {gpus.problem() or ''}".rstrip())
    return device
