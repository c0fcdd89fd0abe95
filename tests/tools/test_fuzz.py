"""A bounded part of tools/fuzz.py: fixed seeds, small programs."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from fuzz_checks import CHECKS
from fuzz_programs import EXACT, FLOAT, generate

pytestmark = [pytest.mark.bf16, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("seed", "mode"), [(110, FLOAT), (112, FLOAT), (141, FLOAT), (3, EXACT)])
def test_conversions(seed, mode, dtype):
    CHECKS["conversion"](generate(seed, 20, mode), dtype)


@pytest.mark.parametrize(("seed", "mode"), [(1, FLOAT), (7, EXACT)])
def test_ways_to_run(seed, mode):
    CHECKS["ways"](generate(seed, 12, mode), "bfloat16")


@pytest.mark.parametrize("seed", [1, 4])
def test_the_first_call(seed):
    CHECKS["first_call"](generate(seed, 12, FLOAT), "bfloat16")
