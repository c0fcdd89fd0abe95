"""What this machine runs, and processes on a CPU that oneDNN takes for a lesser one."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gluon_amp.machine.costs import Kernel, preferring, rates_of
from gluon_amp.machine.dtypes import BFLOAT16, FLOAT16, cpu_isa, cpu_support
from gluon_amp.machine.host import Cpu
from gluon_amp.state import devices, state
from gluon_amp.state.devices import support

LACKING = "this CPU has no"  # begins the reason of every test that is skipped for want of the CPU
NO_BF16 = ["AVX2", "AVX512_CORE"]  # instruction sets, as oneDNN names them
ALL_ISAS = [*NO_BF16, "AVX512_CORE_BF16"]
ROOT = Path(__file__).parents[2]
FASTEST = support("cpu").dtype  # what the CPU takes where nothing is named
RUNS_BFLOAT16 = support("cpu").requested(BFLOAT16) is not None  # native or emulated
EMULATES_BFLOAT16 = RUNS_BFLOAT16 and FASTEST != BFLOAT16
# For what compares the type that is taken where nothing is named with FP32.
in_bfloat16 = pytest.mark.skipif(FASTEST != BFLOAT16, reason=f"{LACKING} BF16 instructions that are faster than FP32")
LOW = BFLOAT16 if RUNS_BFLOAT16 else FLOAT16  # a type that runs here, if only imitated


def run_on(isa, code, **environ):
    """Run code in a fresh process whose CPU has an instruction set of oneDNN's and none above; return how it ended."""
    if cpu_isa(environ={"DNNL_MAX_CPU_ISA": isa}, amx=True) != isa:
        pytest.skip(f"{LACKING} {isa}")
    environ = {**os.environ, "DNNL_MAX_CPU_ISA": isa, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run([sys.executable, "-W", "always::UserWarning", "-c", code], env=environ, capture_output=True,
                          text=True, timeout=300)


def prefer(monkeypatch, nhwc):
    """Let operators in C++, or MXNet's, be the fastest for all of image networks, in low precision where they can."""
    rates = preferring(Kernel(True, nhwc))
    monkeypatch.setattr("gluon_amp.state.state.cpu_rates", lambda: rates)


def take_for(monkeypatch, isa):
    """Let this package take the CPU for one with an instruction set; oneDNN is not told."""
    monkeypatch.setattr(devices, "cpu_support", lambda: cpu_support(isa))
    monkeypatch.setattr(devices, "cpu_isa", lambda: isa)
    for module in (devices, state):
        monkeypatch.setattr(module, "cpu_rates", lambda: rates_of(Cpu("AuthenticAMD", 26, 2), isa))
    monkeypatch.setattr(devices, "_warned", set())
    devices.require_bfloat16.cache_clear()
