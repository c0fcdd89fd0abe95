"""The fuzzer finds nothing in networks of fixed seeds, and it finds each defect that is planted in AMP."""
from __future__ import annotations

import random

import fuzz
import numpy as np
import pytest
from cpu_kinds import LOW, RUNS_BFLOAT16
from fuzz_programs import BLOCK, FAMILIES, SHAPES, SWITCHES, WAYS, Case, program_of
from planted_defects import DEFECTS

pytestmark = pytest.mark.filterwarnings("ignore")
NOT_IMITATED = "bfloat16" if RUNS_BFLOAT16 else "float32"


def drawn(seed, check, dtype=LOW, kind="operators"):
    """Draw a case; every fourth is exact."""
    draw, is_exact = random.Random(seed), seed % 4 == 3
    whole, *floats = FAMILIES[kind]
    genes = tuple((BLOCK if draw.random() < 0.15 else
                   draw.choice(draw.choice([whole] if is_exact else [whole, *floats])), draw.randrange(2 ** 16))
                  for _ in range(12))
    return Case(kind, genes, check, dtype, draw.choice(list(WAYS)), frozenset(draw.sample(SWITCHES, 3)),
                tuple(draw.sample(SHAPES[:3] if kind == "loops" else SHAPES, 2)), is_exact, seed)


def chain(check, dtype, *steps, **settings):
    """Make a case of templates that begin with a text, each of which reads what the one before made."""
    every = [row for rows in FAMILIES["operators"] for row in rows]
    rows = [next(row for row in every if row.text.startswith(text)) for text, _ in steps]
    case = Case("operators", tuple((row, number) for row, (_, number) in zip(rows, steps)), check, dtype, **settings)
    made = program_of(case).steps
    assert all(later.inputs == (earlier.result,) for earlier, later in zip(made[1:], made[2:])), program_of(case)
    return case


CONVOLUTION, POOLING = "F.Convolution({0}, <w:o,c,k,k>, kernel", "F.Pooling({0}, pool_type='$m', kernel=(2"
FUSED = chain("conversion", "float32", (CONVOLUTION, 9), ("F.Activation({0}, act_type='[[", 3))
SHRINKING = chain("executor", LOW, (POOLING, 3), (POOLING, 3), (CONVOLUTION, 27), shapes=((2, 8, 8), (2, 4, 4)))
DENSE, SOFTMAX = "F.FullyConnected({0}, <w:o,c>, <b:o>", "F.SoftmaxOutput"
FROZEN = chain("ways", LOW, (DENSE, 3), switches=frozenset({"frozen"}), seed=2)  # its weight has no gradient
FOLDED = chain("conversion", "float32", ("F.Convolution({0}, <w:o,c,k,k>, <b:o>, kernel", 0),
               ("F.BatchNorm({0}, <gamma:c>, <beta:c>, <mean:c>, <var:c>, fix_gamma=False, eps", 1))
FOUND = {
    "weight_without_gradient": drawn(7, "ways"), "cast_without_gradient": drawn(0, "ways"), "scaled": drawn(2, "ways"),
    "scaled_by_a_hundredth": drawn(3, "ways"), "output_order": drawn(0, "ways"), "channel_late": drawn(2, "ways"),
    "still_statistics": drawn(16, "ways"), "other_eps": drawn(18, "ways"), "added_is_written": drawn(0, "ways"),
    "added_is_written_eager": drawn(1, "ways"), "stale_weights": drawn(0, "ways"),
    "stale_weights_eager": drawn(1, "ways"), "exclusions_ignored": drawn(0, "ways"),
    "regions_ignored": drawn(0, "ways"), "first_call_stays": drawn(0, "first_call"),
    "bias_unwritten": drawn(22, "ways"),
    "bias_unwritten_eager": FROZEN, "first_variant_stays": SHRINKING, "first_plan_stays": SHRINKING,
    "output_fused_away": FUSED, "folded_without_bias": FOLDED,
    "scale_not_carried": chain("training", "float32", (DENSE, 3), (SOFTMAX, 0), seed=1),
    "statistics_of_skipped_steps": drawn(16, "training", "float32"),
    "constants_lost": chain("ways", "float16", (DENSE, 3), (SOFTMAX, 0)),
    "marks_in_files": drawn(0, "imported"), "converted_output_order": drawn(0, "conversion", "float32"),
    "converted_scaled": drawn(0, "conversion", "float32"),
    "converted_scaled_by_a_hundredth": drawn(0, "conversion", "float32")}
# An imitated type has guards of its own, and its convolutions need no padding.
NEED_BFLOAT16 = {"added_is_written", "added_is_written_eager", "bias_unwritten_eager", "channel_late",
                 "first_plan_stays", "first_variant_stays", "stale_weights_eager"}


@pytest.mark.parametrize(("check", "kind", "seed", "dtype"), [
    ("ways", "operators", 5, LOW), ("ways", "layers", 3, "float32"), ("ways", "numpy", 1, LOW),
    ("training", "layers", 2, NOT_IMITATED), ("conversion", "operators", 6, NOT_IMITATED),
    ("conversion", "loops", 1, NOT_IMITATED), ("first_call", "numpy", 4, LOW), ("executor", "operators", 7, LOW),
    ("symbols", "layers", 5, NOT_IMITATED), ("imported", "numpy", 3, LOW), ("empty", "numpy", 2, LOW)])
def test_nothing_is_wrong(check, kind, seed, dtype):
    assert fuzz.failure_apart(drawn(seed, check, dtype, kind)) == ""


@pytest.mark.parametrize("defect", [pytest.param(name, marks=pytest.mark.bf16 if name in NEED_BFLOAT16 else ())
                                    for name in FOUND])
def test_a_planted_defect_is_found(defect):
    message = fuzz.failure_apart(FOUND[defect], defect)
    assert message
    assert "planted_defects.py" not in message  # an error of the defect's own


@pytest.mark.parametrize("case", sorted(set(FOUND.values()), key=repr), ids=lambda case: f"{case.check}-{case.seed}")
def test_nothing_is_found_without_a_defect(case):
    assert fuzz.failure_apart(case) == ""


def test_every_defect_is_tried():
    assert set(FOUND) | {"ends_the_process"} == set(DEFECTS)


def test_a_case_that_ends_its_process_is_a_finding():
    assert fuzz.failure_apart(drawn(0, "conversion", "float32"), "ends_the_process") == "the process ended: SIGKILL"


def test_memory_of_a_case_is_bounded():
    assert "MemoryError" in fuzz.apart(np.ones, 1 << 30).ended  # 8 GB


def test_what_stock_mxnet_does_not_run_is_no_finding():
    row = next(row for row in FAMILIES["operators"][-1] if "'_contrib_count_sketch'" in row.text)  # on GPUs only
    assert fuzz.failure_apart(Case(genes=((row, 0),), check="conversion")) == ""
