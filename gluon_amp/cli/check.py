"""``gluon-amp check``: what this machine runs and why, and training steps on it: to be attached to a report."""
from __future__ import annotations

import argparse
import json
import os
import platform
import re
from importlib import metadata
from typing import Callable

import mxnet as mx
import numpy as np

from .. import native
from .._mxnet import gpus
from ..base.files import replacing
from ..errors import AmpError, expected
from ..machine import host
from ..machine.dtypes import cpu_isa
from ..state.devices import device_supports, verdict
from .files import filled
from .rates import keep, measure
from .selftest import WRONG, check

_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


def declare(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command and its arguments."""
    parser = command("check", run, "show what this machine runs in, and why; then test training steps, and their speed")
    parser.add_argument("--device", metavar="DEVICE", default="gpu(0)" if gpus.count() else "cpu",
                        help="cpu, or a GPU, as in gpu(0) (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="measure what kernels cost on this CPU, for the choices "
                        "that amp.init() makes: two minutes, on a machine that does nothing else")
    parser.add_argument("--json", metavar="FILE", help="write all of it into a file, too, for a report of a problem")


def run(args: argparse.Namespace) -> int:
    """Describe the machine and test it, or measure it; return 1 when something is wrong."""
    if args.measure:
        row = measure()
        print(f"bfloat16: {row['gain']} times as fast as FP32. What kernels cost is in {keep(row)}")
        return 0

    def say(name: str, text: str) -> None:
        print(filled(f"{name:<26}{text}", 26), flush=True)

    device, machine, findings = _device(args.device), environment(), []
    for name, text in machine.items():
        say(name, text)
    for found in check(device):
        findings.append(found._asdict())
        say(f"{found.verdict}: {found.name}", found.detail)
    wrong = sum(found["verdict"] == WRONG for found in findings)
    say(str(device), f"{wrong} of {len(findings)} lines are wrong" if wrong else "nothing is wrong")
    if args.json is not None:
        with replacing(args.json) as (temporary,), open(temporary, "w", encoding="utf-8") as file:
            json.dump({**machine, "device": str(device), "wrong": wrong, "findings": findings,
                       "libraries": host.loaded_libraries()}, file, indent=2)
    return 1 if wrong else 0


def environment() -> dict[str, str]:
    """Describe the machine and MXNet's build in words."""
    flags, threads = host.cpu_flags(), os.environ.get("OMP_NUM_THREADS")
    obstacle = host.memory_obstacle(os.environ)
    fit = host.threads_misfit() or host.threads_to_spare()
    return {
        "verdict": f"amp.init() runs {verdict(device_supports())}.",
        "versions": f"gluon_amp {metadata.version('gluon_amp')}, MXNet {mx.__version__}, NumPy {np.__version__}, "
                    f"Python {platform.python_version()}",
        "CPU": f"{host.cpu_fields().get('model name', 'unknown')}, {os.cpu_count()} logical processors, "
               f"{host.allowed_cpus()} for this process",
        "its instructions": ", ".join(name for name in _INSTRUCTION_SETS if name in flags) or "none that matter here",
        "oneDNN uses": cpu_isa() + (f", limited by {host.MAX_ISA}" if os.environ.get(host.MAX_ISA) else ""),
        "AMX tiles": host.amx_outcome() or ("not asked for" if "amx_tile" in flags else "none"),
        "threads": (f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set: MXNet takes half of the "
                    "logical processors") + f". {fit}".rstrip(". "),
        "freed memory": f"goes back to the system: {obstacle}" if obstacle else "stays for the next step's arrays",
        "GPUs": ", ".join(host.gpu(number)[0] or "" for number in range(gpus.count())) or gpus.problem() or "none",
        **{f"C++ operators, {library.name}": library.missing or "loaded" for library in native.load()},
    }


def _device(text: str) -> mx.Context:
    named = re.fullmatch(r"(cpu|gpu)(?:\((\d+)\))?", text)
    if named is None:
        raise AmpError(expected("cpu, gpu or a number in brackets, as in gpu(0)", "--device", text))
    device = mx.Context(named[1], int(named[2] or 0))
    if device.device_type == "gpu" and device.device_id >= gpus.count():
        raise AmpError(f"--device: MXNet finds {gpus.count()} GPUs here, and no {device}. {gpus.problem() or ''}")
    return device
