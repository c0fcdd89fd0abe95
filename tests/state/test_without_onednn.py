"""MXNet without oneDNN, as with ``MXNET_MKLDNN_ENABLED=0`` or in a build that has none: no kernels for bfloat16."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import mxnet as mx
import pytest
from cpu_kinds import ROOT

import gluon_amp as amp
from gluon_amp.state import devices

SCRIPT = """
import json, tempfile, warnings
warnings.simplefilter("error", UserWarning)
import gluon_amp as amp, mxnet as mx
from mxnet import autograd, gluon
mx.random.seed(1)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(16, 3, in_channels=16), gluon.nn.BatchNorm(in_channels=16), gluon.nn.Activation("relu"),
        gluon.nn.Conv2D(16, 3, in_channels=16), gluon.nn.Dense(4, in_units=256))
net.initialize(mx.init.Xavier())
data = mx.nd.random.normal(shape=(2, 16, 8, 8))
found = {}
def relative(value, expected):
    return float(((value - expected).norm() / expected.norm()).asscalar())
def gradient(hybridize):
    net.hybridize(hybridize)
    with autograd.record():
        loss = (net(data) ** 2).sum()
    loss.backward()
    return net[0].weight.grad().copy()
of_weight = gradient(False)
for hybridize in (False, True):
    amp.init()
    found[f"gradient {hybridize}"] = relative(gradient(hybridize), of_weight)
    found["dtype"] = amp.active_dtype()
    amp.deinit()
expected = net(data)
for dtype in (None, "float32"):
    found[f"converted {dtype}"] = relative(amp.convert_hybrid_block(net, dtype, data_example=data)(data), expected)
for action in ("init", "autocast"):
    try:
        amp.init("bfloat16") if action == "init" else amp.autocast(dtype="bfloat16").__enter__()
    except amp.DTypeError as error:
        found[action] = str(error)
print(json.dumps(found))
"""


@pytest.mark.machine
def test_the_cpu_stays_in_fp32():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "MXNET_MKLDNN_ENABLED": "0", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("dtype") is None
    assert {name for name, value in found.items() if isinstance(value, float) and not value < 1e-5} == set()
    for action in ("init", "autocast"):
        assert "MXNET_MKLDNN_ENABLED=0" in found[action]


@pytest.mark.parametrize(("value", "runs"), [("0", False), ("false", False), ("False", False), ("1", True),
                                             ("true", True), ("", True), (None, True)])
def test_the_variable_is_read_as_mxnet_does(value, runs, monkeypatch):
    assert devices.lacks_onednn({} if value is None else {"MXNET_MKLDNN_ENABLED": value}) == (
        "" if runs else f"MXNET_MKLDNN_ENABLED={value} switches oneDNN off, whose kernels bfloat16 needs")


def test_a_build_without_it(monkeypatch):
    monkeypatch.setattr(mx.runtime, "Features", lambda: type("", (), {"is_enabled": lambda self, name: False})())
    monkeypatch.setattr(devices, "_ONEDNN_FAULT", devices.lacks_onednn({}))
    assert devices.support("cpu").dtype == "float32"
    assert "built without oneDNN" in devices.support("cpu").reason
    amp.init()
    assert amp.active_dtype("cpu") is None
