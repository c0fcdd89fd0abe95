"""A bounded part of tools/fuzz.py: fixed seeds, small programs."""
from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import fuzz
from fuzz_checks import CHECKS
from fuzz_operators import generate
from fuzz_programs import EXACT, FLOAT

pytestmark = [pytest.mark.bf16, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("seed", "mode"), [(112, FLOAT), (141, FLOAT), (3, EXACT)])
def test_conversions(seed, mode, dtype):
    CHECKS["conversion"](generate(seed, 20, mode), dtype)


@pytest.mark.parametrize(("seed", "mode"), [(2, FLOAT), (7, EXACT)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ways_to_run(seed, mode, dtype):
    CHECKS["ways"](generate(seed, 12, mode), dtype)


@pytest.mark.parametrize("seed", [1, 4])
def test_the_first_call(seed):
    CHECKS["first_call"](generate(seed, 12, FLOAT), "bfloat16")


@pytest.mark.parametrize(("check", "seed", "mode", "dtype"), [
    ("executor", 2, FLOAT, "bfloat16"), ("executor", 7, EXACT, "bfloat16"), ("symbols", 5, FLOAT, "bfloat16"),
    ("symbols", 6, FLOAT, "float32"), ("imported", 4, FLOAT, "bfloat16")])
def test_symbols(check, seed, mode, dtype):
    CHECKS[check](generate(seed, 12, mode), dtype)


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
