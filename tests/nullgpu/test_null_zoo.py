"""Every network of the zoo trains, infers and converts on the null GPU. Dispatch is verified, numbers never."""
from __future__ import annotations

import json

import device
import pytest

NAMES_FILE = device.ROOT / "tests" / "helpers" / "zoo_networks.py"
# Names, read without importing GluonCV here.
_LINES = NAMES_FILE.read_text().split("NETWORKS: dict", 1)[1].split("\n}", 1)[0].splitlines()
NAMES = [line.split('"')[1] for line in _LINES if line.startswith('    "')]
CODE = """
import json, sys
sys.path[:0] = {paths!r}
import gluon_amp as amp
import mxnet as mx
from mxnet import autograd, gluon
from device import Trace
from zoo_networks import flat, make_task
found = {{}}
for name in {names!r}:
    try:
        with mx.gpu(0):
            task = make_task(name)
            amp.init()
            trainer = gluon.Trainer(task.net.collect_params(), "sgd", {{"learning_rate": 0.01}})
            amp.init_trainer(trainer)
            task.net.hybridize(static_alloc=True)
            with Trace() as trace:
                for _ in range(2):
                    with autograd.record():
                        loss = task.loss(task.net, task.data)
                        with amp.scale_loss(loss, trainer) as scaled:
                            autograd.backward(scaled)
                    trainer.step(1)
                task.net.hybridize(static_alloc=True)  # detectors take labels in training only
                task.infer(task.net, task.data)
            amp.deinit()
            if not isinstance(task.data, mx.np.ndarray):
                amp.convert_hybrid_block(task.net, "float16", device=mx.gpu(0))
            sums = [line for line in trace.of("CUBLAS", "CUDNN Conv") if "compute=float16" in line]
            low = [line for line in trace.of("CUBLAS", "CUDNN Conv") if "data=float16" in line]
            found[name] = {{"sums": sums, "low": len(low), "bad": trace.of("BAD_LAUNCH")}}
    except Exception as error:
        amp.deinit()
        found[name] = {{"error": (type(error).__name__ + ": " + str(error))[-400:]}}
    finally:
        mx.npx.reset_np()
print("FOUND", json.dumps(found))
"""


@pytest.mark.parametrize("start", range(0, len(NAMES), 6))
def test_networks_train_infer_and_convert(start):
    names = NAMES[start:start + 6]
    paths = [str(device.HERE), str(device.ROOT / "tests" / "helpers")]
    done = device.run(CODE.format(paths=paths, names=names), timeout=400)
    assert "FOUND" in done.stdout, (names, done.stderr[-1500:])
    found = json.loads(done.stdout.split("FOUND ", 1)[1])
    assert {name: each["error"] for name, each in found.items() if "error" in each} == {}
    assert {name: each for name, each in found.items() if each["sums"] or each["bad"]} == {}
    assert [name for name, each in found.items() if not each["low"]] == []
