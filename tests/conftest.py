"""Shared fixtures: AMP is off before and after every test, and rewrites are verified."""
from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("GLUON_AMP_VERIFY", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are of the CPU; the null GPU's do not heed it
os.environ.pop("COLUMNS", None)  # several processes of pytest are told how wide the terminal is

import pytest
from cpu_kinds import LACKING, NO_BF16, RUNS_BFLOAT16, take_for

import gluon_amp as amp
from gluon_amp.state.devices import support

# For programs that import the CUDA build without gluon_amp. The null GPU's tests look at what happens without.
CUDA = [path for root in sys.path for path in sorted(Path(root).glob("nvidia/*/lib"))]
if CUDA and os.environ.get("NULLGPU_DEVICES", "0") == "0":
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, CUDA))


@pytest.fixture(autouse=True)
def _amp_off():
    amp.deinit()
    yield
    amp.deinit()


@pytest.fixture(params=NO_BF16)
def lesser(request, monkeypatch):
    """A CPU without BF16 instructions, as far as this package knows."""
    take_for(monkeypatch, request.param)
    return request.param


def pytest_collection_modifyitems(items):
    if RUNS_BFLOAT16:
        return
    skip = pytest.mark.skip(reason=f"{LACKING} bfloat16, not even emulated: {support('cpu').reason}")
    for item in items:
        if "bf16" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Say at the end how many tests did not run because of the CPU: a green run on a lesser one proves less."""
    yield
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if LACKING in str(report.longrepr)]
    if skipped:
        ran = sum(len(terminalreporter.stats.get(outcome, [])) for outcome in ("passed", "failed"))
        terminalreporter.write_line(f"{len(skipped)} of {ran + len(terminalreporter.stats['skipped'])} tests were "
                                    "SKIPPED FOR WANT OF THE CPU: run them on one that has what they need",
                                    yellow=True, bold=True)
