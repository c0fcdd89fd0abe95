"""The fuzzer finds defects that are planted in AMP: for each there is a small program that shows it."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import fuzz
from fuzz_defects import DEFECTS, finds
from fuzz_operators import generate
from fuzz_programs import EXACT, FLOAT, Kind, Part, Program, Step

pytestmark = [pytest.mark.bf16, pytest.mark.filterwarnings("ignore")]
FOUND = {  # by the program of a seed, and a check
    "weight_without_gradient": (0, "ways"), "cast_without_gradient": (0, "ways"), "scaled": (0, "ways"),
    "scaled_by_a_hundredth": (1, "ways"), "output_order": (0, "ways"), "channel_late": (4, "ways"),
    "still_statistics": (0, "ways"), "other_eps": (28, "ways"), "added_is_written": (0, "ways"),
    "added_is_written_eager": (0, "ways"), "stale_weights": (1, "ways"), "stale_weights_eager": (0, "ways"),
    "exclusions_ignored": (1, "ways"), "regions_ignored": (1, "ways"), "first_call_stays": (0, "first_call"),
    "output_fused_away": (4, "conversion"), "folded_without_bias": (21, "conversion"),
    "converted_output_order": (0, "conversion"), "converted_scaled": (0, "conversion"),
    "converted_scaled_by_a_hundredth": (1, "conversion")}
RARE = {"bias_unwritten", "bias_unwritten_eager", "first_plan_stays"}  # few random programs show them
FLAT = Kind("flat", 16)
# Its seed freezes the weight of the dense layer, and not the bias.
FROZEN = Program(525, FLOAT, (Part((
    Step(2, (0, 1), "F.mean({0} + {1}, axis=(2, 3))", FLAT),
    Step(3, (2,), "F.FullyConnected({0}, w0, b0, num_hidden=16)", FLAT, (("w0", (16, 16)), ("b0", (16,)))),
    Step(4, (3,), "F.tanh({0})", FLAT))),), (4,))


def program_of(seed):
    return generate(seed, 12, EXACT if seed % 4 == 3 else FLOAT)


@pytest.mark.parametrize(("seed", "check"), sorted(set(FOUND.values())))
def test_without_a_defect_nothing_is_found(seed, check):
    assert fuzz.failure(program_of(seed), check, "bfloat16") is None


@pytest.mark.parametrize("defect", sorted(FOUND))
def test_a_defect_is_found(defect):
    seed, check = FOUND[defect]
    assert finds(program_of(seed), defect, {check: ["bfloat16"]})


@pytest.mark.parametrize("defect", ["bias_unwritten", "bias_unwritten_eager"])
def test_an_unwritten_bias_is_found_behind_a_frozen_weight(defect):
    assert fuzz.failure(FROZEN, "ways", "bfloat16") is None
    assert finds(FROZEN, defect, {"ways": ["bfloat16"]})


def test_every_defect_is_tried():
    assert set(FOUND) | RARE == set(DEFECTS)
