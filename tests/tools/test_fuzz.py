"""A bounded part of tools/fuzz.py: fixed seeds, small programs."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import fuzz
import fuzz_stock
import mxnet as mx
import pytest
from cpu_kinds import LOW, RUNS_BFLOAT16
from fuzz_checks import CHECKS, full_source
from fuzz_generate import generate
from fuzz_networks import network, semantics, shapes, trains_batches
from fuzz_programs import EXACT, FLOAT
from fuzz_stock import stock_outputs

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")
NOT_IMITATED = "bfloat16" if RUNS_BFLOAT16 else "float32"
IN_BFLOAT16 = pytest.param("bfloat16", marks=pytest.mark.bf16)


@pytest.mark.parametrize("dtype", ["float32", IN_BFLOAT16])
@pytest.mark.parametrize(("seed", "mode"), [(112, FLOAT), (141, FLOAT), (3, EXACT)])
def test_conversions(seed, mode, dtype):
    CHECKS["conversion"](generate(seed, 20, mode), dtype)


@pytest.mark.parametrize(("seed", "mode"), [(2, FLOAT), (7, EXACT)])
@pytest.mark.parametrize("dtype", ["float32", LOW])
def test_ways_to_run(seed, mode, dtype):
    CHECKS["ways"](generate(seed, 12, mode), dtype)


@pytest.mark.parametrize("seed", [1, 4])
def test_the_first_call(seed):
    CHECKS["first_call"](generate(seed, 12, FLOAT), LOW)


@pytest.mark.parametrize(("check", "seed", "mode", "dtype"), [
    ("executor", 2, FLOAT, LOW), ("executor", 7, EXACT, LOW),
    pytest.param("symbols", 5, FLOAT, "bfloat16", marks=pytest.mark.bf16),
    ("symbols", 6, FLOAT, "float32"), ("imported", 4, FLOAT, LOW)])
def test_symbols(check, seed, mode, dtype):
    CHECKS[check](generate(seed, 12, mode), dtype)


@pytest.mark.parametrize("check", ["ways", "training", "conversion", "executor", "imported"])
@pytest.mark.parametrize(("seed", "mode"), [(1, FLOAT), (3, EXACT)])
def test_numpy_style_operators(check, seed, mode):
    dtype = NOT_IMITATED if check in ("training", "conversion") else LOW
    CHECKS[check](generate(seed, 12, mode, numpy=True), dtype)


def infers_without_amp(program):
    try:
        for shape in shapes(program):
            stock_outputs(program, shape)
    except mx.MXNetError:
        return False
    return True


def with_operator(name):
    return next(made for seed in range(1000) for made in [generate(seed, 12, numpy=False)]
                if name in made.source() and ("contrib." in name or "F.contrib." not in made.source())
                and infers_without_amp(made))


# Training such programs MXNet itself ends processes, fails at times, or gives gradients of what was in memory.
@pytest.mark.parametrize("name", ["contrib.cond", "contrib.foreach", "contrib.while_loop", "gluon.rnn.LSTM"])
def test_loops_branches_and_layers(name):
    CHECKS["conversion"](with_operator(name), NOT_IMITATED)


@pytest.mark.parametrize("numpy", [True, False])
def test_programs_build(numpy):
    programs = [generate(seed, 30, EXACT if seed % 4 == 3 else FLOAT, numpy) for seed in range(20)]
    for program in programs:
        with semantics(program):
            network(program)


def test_gradients_are_those_of_inference_only_where_mxnet_has_them():
    # Its max pooling takes them from memory that nothing has written, and its recurrent layers raise.
    programs = [generate(seed, 30, mode) for seed in range(60) for mode in (EXACT, FLOAT)]
    outside = [program.source() for program in programs if not trains_batches(program)]
    assert outside
    assert not any(name in source for source in outside for name in ("RNN", "rnn", "MaxPool", "'max'"))


@pytest.mark.parametrize("numpy", [True, False])
def test_the_printed_program_runs_by_itself(numpy):
    script = full_source(generate(1, 6, FLOAT, numpy), "first_call", LOW)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_difference_near_its_bound_is_measured_again(monkeypatch):
    asked = []

    def wrong(excess):
        def check(program, dtype):
            asked.append(excess)
            if excess > 4 or len(asked) == 1:
                raise fuzz_stock.Wrong("off", excess)
        return check

    monkeypatch.setitem(CHECKS, "near", wrong(1.5))
    assert fuzz.failure(generate(1), "near", "float32") is None
    assert asked == [1.5, 1.5]
    monkeypatch.setitem(CHECKS, "near", wrong(10.0))
    assert fuzz.failure(generate(1), "near", "float32") == "off"
    assert asked == [1.5, 1.5, 10.0]


def test_programs_that_end_the_process_are_shrunk(monkeypatch):
    def deadly(program, dtype):
        if "F.tanh" in program.source():
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setitem(CHECKS, "deadly", deadly)
    program = next(made for made in map(generate, range(20)) if "F.tanh" in made.source())
    small = fuzz.shrink(program, "deadly", "float32", seconds=60)
    assert len(small.steps) < len(program.steps) // 3
    assert "F.tanh" in small.source()
    assert fuzz.failure_apart(small, "deadly", "float32") == "the process ended with -9"


def test_what_is_wrong_with_a_program_comes_out_of_its_process(monkeypatch):
    monkeypatch.setitem(CHECKS, "picky", lambda program, dtype: [][int(dtype)])
    assert fuzz.failure_apart(generate(1), "picky", "0") == "IndexError in test_fuzz.py: list index out of range"
