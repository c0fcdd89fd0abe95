"""The networks of the zoos: what oneDNN runs by reference in training, and conversions to INT8."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import Child, command, executions  # noqa: E402
from benchmarks.networks import MEMBERS  # noqa: E402

FAST = ["squeezenet1.1", "cifar_resnet20_v1"]
MOST = 0.04  # of a step: a sum of two layouts in the residual attention network
CONVERTED = """
import json, sys, warnings
warnings.simplefilter("ignore")
import mxnet as mx, numpy as np
import gluon_amp as amp
from benchmarks.gluon_networks import create
from benchmarks.networks import MEMBERS

name = sys.argv[1]
net = create(name, 0, "static")
x = mx.nd.array(np.random.RandomState(0).normal(size=MEMBERS[name].shape(2)).clip(-2.1, 2.6))
net(x)
for variance in net.collect_params(".*running_var|.*moving_var").values():
    variance.set_data(variance.data().abs() + 0.1)

def flat(value):
    return [each for item in value for each in flat(item)] if isinstance(value, (list, tuple)) else [value.asnumpy()]

wanted = flat(net(x))
fast = amp.convert_hybrid_block(net, "int8", calib_data=x, dtypes=["int8"], data_example=x)
found = flat(fast(x))
record = fast.conversion
print(json.dumps({"finite": [bool(np.isfinite(each).all()) for each in wanted],
                  "found": [bool(np.isfinite(each).all()) for each in found], "int8": len(record.int8),
                  "wide": record.wide, "worst": max(record.layer_errors.values())}))
"""


def marked(names):
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(name for name, member in MEMBERS.items() if member.trains))
def test_training_leaves_nothing_to_reference_kernels(name):
    settings = {"device": "cpu", "dtype": None, "seed": 0, "threads": 2, "network": name, "batch_size": 4,
                "mode": "static"}
    with Child(command("training", "amp", settings)._replace(environment={"DNNL_VERBOSE": "1"})) as child:
        child.ask("run", steps=1)
        before = len(child.log())
        step = child.ask("run", steps=1)["seconds"][0]
        log = child.log()[before:]
    by_reference = [each for each in executions(log) if "ref" in each.kernel]
    assert sum(each.seconds for each in by_reference) <= MOST * step, by_reference


@pytest.mark.parametrize("name", marked(MEMBERS))
def test_conversions_to_int8_hold_layers_that_are_right(name):
    run = subprocess.run([sys.executable, "-c", CONVERTED, name], capture_output=True, text=True, check=False, cwd=ROOT,
                         env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["int8"] > 0, found["wide"]
    assert found["worst"] <= 0.15
    assert all(is_finite or not was for was, is_finite in zip(found["finite"], found["found"]))
