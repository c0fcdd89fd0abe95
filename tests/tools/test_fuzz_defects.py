"""The fuzzer finds defects that are planted in AMP: for each there is a small program that shows it."""
from __future__ import annotations

import fuzz
import pytest
from cpu_kinds import LOW
from fuzz_defects import DEFECTS, finds
from fuzz_generate import generate
from fuzz_networks import shapes
from fuzz_programs import EXACT, FLOAT, Kind, Part, Program, Step

pytestmark = pytest.mark.filterwarnings("ignore")
# An imitated type has guards of its own, and its convolutions need no padding.
NEED_BFLOAT16 = {"added_is_written", "added_is_written_eager", "bias_unwritten_eager", "channel_late",
                 "first_plan_stays", "first_variant_stays", "stale_weights_eager"}
FOUND = {  # by the program of a seed, and a check
    "weight_without_gradient": (0, "ways"), "cast_without_gradient": (0, "ways"), "scaled": (0, "ways"),
    "scaled_by_a_hundredth": (3, "ways"), "output_order": (0, "ways"), "channel_late": (8, "ways"),
    "still_statistics": (0, "ways"), "other_eps": (28, "ways"), "added_is_written": (0, "ways"),
    "added_is_written_eager": (0, "ways"), "stale_weights": (4, "ways"), "stale_weights_eager": (0, "ways"),
    "exclusions_ignored": (4, "ways"), "regions_ignored": (2, "ways"), "first_call_stays": (0, "first_call"),
    "folded_without_bias": (21, "conversion"), "scale_not_carried": (2, "training"),
    "statistics_of_skipped_steps": (0, "training"), "constants_lost": (9, "ways"), "marks_in_files": (0, "imported"),
    "converted_output_order": (0, "conversion"), "converted_scaled": (0, "conversion"),
    "converted_scaled_by_a_hundredth": (3, "conversion")}
# Few small random programs show these.
RARE = {"bias_unwritten", "bias_unwritten_eager", "first_plan_stays", "first_variant_stays", "output_fused_away"}
FLAT = Kind("flat", 16)
# Its seed freezes the weight of the dense layer, and not the bias.
FROZEN = Program(525, FLOAT, (Part((
    Step(2, (0, 1), "F.mean({0} + {1}, axis=(2, 3))", FLAT),
    Step(3, (2,), "F.FullyConnected({0}, w0, b0, num_hidden=16)", FLAT, (("w0", (16, 16)), ("b0", (16,)))),
    Step(4, (3,), "F.tanh({0})", FLAT))),), (4,))


MAP = Kind("map", 16)
CONVOLUTION = "F.Convolution({0}, w0, kernel=(3, 3), pad=(1, 1), num_filter=16, no_bias=True)"
FUSED = Program(2, FLOAT, (Part((
    Step(2, (0, 1), "{0} + {1}", MAP), Step(3, (2,), CONVOLUTION, MAP, (("w0", (16, 16, 3, 3)),)),
    Step(4, (3,), "F.Activation({0}, act_type='sigmoid')", MAP))),), (3, 4))
SMALL = (2, 4, 4)  # whose map is one pixel where the convolution is, so that most of its filter meets padding
# Its seed calls it with small images after larger ones.
SHRINKING = next(program for seed in range(1, 999, 3) for program in [Program(seed, FLOAT, (Part((
    Step(2, (0, 1), "{0} + {1}", MAP),
    Step(3, (2,), "F.Pooling({0}, pool_type='avg', kernel=(4, 4), stride=(4, 4))", MAP),
    Step(4, (3,), CONVOLUTION, MAP, (("w0", (16, 16, 3, 3)),)))),), (4,))] if shapes(program)[1] == SMALL)


def program_of(seed):
    return generate(seed, 12, EXACT if seed % 4 == 3 else FLOAT)


def each(*defects):
    """Mark those that only a CPU with bfloat16 shows."""
    return [pytest.param(*defect, marks=pytest.mark.bf16 if defect[0] in NEED_BFLOAT16 else ()) for defect in defects]


def dtype_of(check, defect=""):
    return "float16" if defect == "constants_lost" else "float32" if check in ("conversion", "training") else LOW


@pytest.mark.parametrize(("seed", "check"), sorted(set(FOUND.values())))
def test_without_a_defect_nothing_is_found(seed, check):
    assert fuzz.failure(program_of(seed), check, dtype_of(check)) is None


@pytest.mark.parametrize("defect", each(*zip(sorted(FOUND))))
def test_a_defect_is_found(defect):
    seed, check = FOUND[defect]
    assert finds(program_of(seed), defect, {check: [dtype_of(check, defect)]})


@pytest.mark.parametrize("defect", each(("bias_unwritten",), ("bias_unwritten_eager",)))
def test_an_unwritten_bias_is_found_behind_a_frozen_weight(defect):
    assert fuzz.failure(FROZEN, "ways", LOW) is None
    assert finds(FROZEN, defect, {"ways": [LOW]})


@pytest.mark.parametrize(("defect", "program", "check"), each(
    ("output_fused_away", FUSED, "conversion"), ("first_variant_stays", SHRINKING, "executor"),
    ("first_plan_stays", SHRINKING, "executor")))
def test_a_rare_defect_is_found(defect, program, check):
    assert fuzz.failure(program, check, dtype_of(check)) is None
    assert finds(program, defect, {check: [dtype_of(check)]})


def test_every_defect_is_tried():
    assert set(FOUND) | RARE == set(DEFECTS)
