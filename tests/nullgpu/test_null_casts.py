"""As many casts run on the device as were planned, no more and no fewer. Dispatch is verified, numbers never."""
from __future__ import annotations

import json

import device
import pytest

CODE = """
import json, sys
sys.path[:0] = {paths!r}
import gluon_amp as amp
import mxnet as mx
from device import Trace
from gluon_amp.plan.cached_op import prepared_operations
from mxnet import autograd
from zoo_networks import flat, make_task

CALLS = {{"training": lambda task: task.net(task.data), "inference": lambda task: task.infer(task.net, task.data),
         "loss": lambda task: [task.loss(task.net, task.data)]}}

def casts(task):
    for _ in range(2):  # the first makes the graph
        with Trace() as forward, autograd.record(train_mode={call!r} != "inference"):
            outputs = flat(CALLS[{call!r}](task))
        with Trace() as backward:
            autograd.backward(outputs)
    return [len(trace.kernels("TypecastExp")) for trace in (forward, backward)]

def planned(task):
    trained = {{name for name, parameter in task.net.collect_params().items() if parameter.grad_req != "null"}}
    nodes = [node for _, operation in prepared_operations(task.net) for node in operation.latest.graph.nodes()]
    needed = {{}}  # whether a gradient goes back through a node
    for node in nodes:
        needed[id(node)] = (node.name in trained if node.is_variable else node.op != "BlockGrad" and
                            any(needed[id(entry.node)] for entry in node.inputs))
    made = [node for node in nodes if node.op == "amp_cast"]
    return [len(made), sum(needed[id(node)] for node in made)]

found = {{}}
for name in {names!r}:
    with mx.gpu(0):
        task = make_task(name)
        task.net.hybridize(static_alloc=True, static_shape=True)
        own = casts(task)
        amp.init()
        found[name] = {{"own": own, "ran": casts(task), "planned": planned(task)}}
        amp.deinit()
        mx.npx.reset_np()
print("FOUND", json.dumps(found))
"""
# Those called with their data in training, those whose task knows the call, and those that take boxes in training.
NETWORKS = {"training": ["resnet18_v1", "mobilenetv2_1.0", "densenet121", "ssd_512_mobilenet1.0"],
            "inference": ["yolo3_mobilenet0.25", "lstm_plain", "transformer", "transformer_numpy"],
            "loss": ["faster_rcnn", "faster_rcnn_fpn", "mask_rcnn"]}


@pytest.mark.parametrize("call", sorted(NETWORKS))
def test_as_many_casts_run_as_are_planned(call, monkeypatch):
    names, paths = NETWORKS[call], [str(device.HERE), str(device.ROOT / "tests" / "helpers")]
    monkeypatch.setenv("MXNET_USE_FUSION", "0")  # a fused kernel may hold several
    done = device.run(CODE.format(paths=paths, names=names, call=call))
    assert "FOUND" in done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout.split("FOUND ", 1)[1])
    ran = {name: [ran - own for ran, own in zip(each["ran"], each["own"])] for name, each in found.items()}
    assert ran == {name: each["planned"] for name, each in found.items()}
    assert all(forward > 0 and backward > 0 for forward, backward in ran.values())
