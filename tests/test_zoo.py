"""Networks of GluonCV's and MXNet's model zoos, each in a process of its own, so that a crash fails one test only."""
from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bf16

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "helpers" / "zoo.py"
FAST = ["mobilenetv3_small", "resnet18_v1", "lstm_tied", "transformer_numpy"]
SLOW = ["resnet50_v1", "resnet18_v2", "resnet50_v2", "mobilenet1.0", "mobilenetv2_1.0", "mobilenetv3_large",
        "densenet121", "inceptionv3", "squeezenet1.1", "vgg11", "vgg11_bn", "resnext50_32x4d", "se_resnet18_v1",
        "ssd_512_resnet50_v1", "ssd_512_mobilenet1.0", "ssd_300_vgg16_atrous", "yolo3_mobilenet0.25",
        "yolo3_darknet53", "faster_rcnn", "faster_rcnn_fpn", "mask_rcnn", "fcn", "deeplab", "lstm_plain", "transformer"]
MODES = ["eager", "hybrid", "static_alloc", "static_shape"]
KINDS = ["outputs", "gradients", "batch_gradients"]

# Networks whose training takes random samples of boxes, which rounding changes.
SAMPLED = {"faster_rcnn", "faster_rcnn_fpn", "mask_rcnn"}


@functools.lru_cache(maxsize=None)
def child(name, kind):
    environment = {**os.environ, "GLUON_AMP_VERIFY": "1", "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), name, kind], env=environment,
                          capture_output=True, text=True, timeout=1800)
    if done.returncode:
        pytest.fail(f"{name} {kind} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


networks = pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])


@networks
class TestCloseness:
    def test_results_are_finite(self, name):
        result = child(name, "compare")
        assert [result[mode]["not_finite"] for mode in MODES] == [[]] * 4

    @pytest.mark.parametrize("kind", KINDS)
    def test_results_are_as_close_to_fp32_as_rounding_the_weights_leaves_them(self, name, kind):
        result = child(name, "compare")
        assert all(result[mode][kind] < 2.5 * result["yardstick"][kind] + 0.01 for mode in MODES), result

    def test_memory_planning_changes_nothing(self, name):
        result = child(name, "compare")
        kinds = ["outputs"] if name in SAMPLED else KINDS
        for mode in MODES[2:]:
            for kind in kinds:
                assert result[mode][kind] == pytest.approx(result["hybrid"][kind], rel=0.05, abs=1e-5), result


@networks
class TestConversion:
    def test_outputs_are_as_close_to_fp32_as_rounding_the_weights_leaves_them(self, name):
        result = child(name, "convert")
        assert [result[kind]["not_finite"] for kind in ("all", "none", "float32")] == [[]] * 3
        if name not in SAMPLED:
            limit = 2.5 * result["yardstick"]["outputs"] + 0.01
            assert all(result[kind]["outputs"] < limit for kind in ("all", "none")), result

    def test_graph_work_alone_changes_nothing_but_rounding(self, name):
        result = child(name, "convert")
        assert result["float32"]["outputs"] < 2e-5, result

    def test_the_network_stays_as_it_was_and_files_give_the_same(self, name):
        result = child(name, "convert")
        assert result["untouched"] == 0
        assert [result[kind]["imported"] for kind in ("all", "none", "float32")] == [0, 0, 0]


@networks
def test_training_follows_fp32(name):
    result = child(name, "train")
    plain = result["fp32"]
    gained = plain[0] - late(plain)
    assert gained > 0, f"the FP32 run does not train: {plain}"
    for mode in set(MODES) - {"static_alloc"}:
        losses = result[mode]
        assert len(losses) == 20
        assert all(map(math.isfinite, losses)), (mode, losses)
        assert losses[0] == pytest.approx(plain[0], rel=0.1), (mode, losses, plain)
        assert losses[0] - late(losses) > 0.7 * gained, (mode, losses, plain)


def late(losses):
    return sum(losses[-5:]) / 5
