"""trace_overflow, compare and search_exclusions on detectors of GluonCV and a transformer, in a process each."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NETWORKS = ["transformer", *(pytest.param(name, marks=pytest.mark.slow)
                             for name in ("ssd_512_resnet50_v1", "yolo3_mobilenet0.25", "faster_rcnn"))]

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import gluon_amp as amp
import mxnet as mx
from mxnet import autograd, gluon
from zoo_networks import make_task

task = make_task(sys.argv[1])
net, found = task.net, {}
net.hybridize()
parameters = net.collect_params()
weights = [name for name in parameters if name.endswith("weight") and parameters[name].grad_req != "null"]
found["weight"] = name = weights[len(weights) // 2]

if sys.argv[1] != "transformer":  # whose data is bound to its loss
    # With random weights SSD's values grow out of float16's range unless statistics of the batch normalize them.
    train_mode = sys.argv[1].startswith("ssd")
    comparison = amp.compare(net, task.data if train_mode else task.data[:1], target_dtype="float16",
                             train_mode=train_mode, gradients=False)
    low = [item for item in comparison.operators if item.dtype == "float16"]
    found["low"] = len(low)
    found["isolated"] = max(item.isolated for item in low)
    net.hybridize()  # Gluon traces a graph for inference or for training

amp.init("float16")
trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0})
amp.init_trainer(trainer, 1.0)
with amp.trace_overflow(net, trainer) as tracer:
    parameters[name].set_data(parameters[name].data() * 1e7)
    with autograd.record(), amp.scale_loss(task.loss(net, task.data), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
report = tracer.reports[0]
amp.deinit()
net.hybridize()

if sys.argv[1].startswith("ssd"):
    policy = amp.search_exclusions(net, task.data, max_error=0.3, target_dtype="float16", train_mode=True)
    found["excluded"] = sorted(policy.excluded)
found["operator"] = report.operator
found.update(phase=report.phase, op=report.op, inputs=[item.name for item in report.inputs], fp32=report.overflows)
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", NETWORKS)
def test_a_planted_overflow_is_found_and_every_operator_alone_is_near_fp32(name):
    places = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], env=environment, capture_output=True, text=True,
                          timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["phase"], found["fp32"]) == ("forward", True)
    assert found["op"] in ("Convolution", "FullyConnected")
    assert any(found["weight"] in read for read in found["inputs"]), found
    if name != "transformer":
        assert found["low"] > 20
        assert found["isolated"] < 0.01
    if "excluded" in found:
        assert found["operator"] in found["excluded"]
        assert len(found["excluded"]) < 10
