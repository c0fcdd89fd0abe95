"""Several devices, of one kind or of different ones, on the null GPU. Dispatch is verified, numbers never."""
from __future__ import annotations

import contextlib
import io
import warnings

import pytest

import gluon_amp as amp

START = """
import gluon_amp as amp, mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
from device import Trace

def network(*contexts):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=4), nn.BatchNorm(in_channels=8), nn.Dense(4, in_units=8 * 36))
    net.initialize(ctx=list(contexts))
    net.hybridize()
    return net

def step(net, trainer, *contexts):
    data = gluon.utils.split_and_load(mx.nd.ones((4, 4, 8, 8)), list(contexts))
    with autograd.record():
        losses = [net(each).square().mean() for each in data]
        with amp.scale_loss(losses, trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(4)

def types(trace):
    return sorted({line.split()[2] for line in trace.of("CUDNN Convolution")})
"""


@pytest.fixture
def run(monkeypatch):
    """Run code with settings of the null GPU, which has two devices here, and return the lines that it prints."""
    def run(code, **settings):
        for name, value in settings.items():
            monkeypatch.setenv(f"NULLGPU_{name.upper()}", value)
        with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(START + code, "<code>", "exec"), {"__name__": "code"})  # as in a script
        return printed.getvalue().splitlines()

    yield run
    amp.deinit()


@pytest.mark.parametrize(("capability", "low"), [("9.0,8.0", 1), ("8.0,9.0", 0), ("3.7,6.1", 1)])
def test_each_gpu_runs_scales_and_reports_its_own_type(run, capability, low):
    found = run("""
amp.init()
for number in range(2):
    gpu = mx.gpu(number)
    net = network(gpu)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer)
    with Trace() as trace:
        step(net, trainer, gpu)
    data = mx.nd.ones((2, 4, 8, 8), ctx=gpu)
    seen = amp.report(net, data)
    why = str(amp.explain(net, "*conv*", data))
    converted = amp.convert_hybrid_block(net)
    print(types(trace), amp.get_loss_scaler(trainer).loss_scale, seen.target_dtypes, str(seen.device),
          bool(seen.reason), "rule LOWER" in why, converted.conversion.target_dtype)
""", capability=capability)
    wanted = [f"['data=float32'] 1.0 () gpu({number}) True False float32" for number in range(2)]
    wanted[low] = f"['data=float16'] 65536.0 ('float16',) gpu({low}) False True float16"
    assert found == wanted


def test_two_gpus_of_different_kinds_train_together(run):
    found = run("""
amp.init()
both = mx.gpu(0), mx.gpu(1)
net = network(*both)
trainer = gluon.Trainer(net.collect_params(), "sgd")
amp.init_trainer(trainer)
with Trace() as trace:
    step(net, trainer, *both)
print(types(trace), amp.get_loss_scaler(trainer).loss_scale)
""", capability="8.0,9.0")
    assert found == ["['data=float16', 'data=float32'] 65536.0"]


@pytest.mark.parametrize("store", ["device", "local", "nccl"])
@pytest.mark.parametrize("locally", [None, False])
def test_every_kvstore_of_a_process_reduces_and_updates(run, store, locally):
    found = run(f"""
amp.init()
both = mx.gpu(0), mx.gpu(1)
net = network(*both)
trainer = gluon.Trainer(net.collect_params(), "sgd", {{"momentum": 0.9}}, kvstore={store!r},
                        update_on_kvstore={locally})
amp.init_trainer(trainer)
for _ in range(2):
    step(net, trainer, *both)
with Trace() as trace:
    step(net, trainer, *both)
print(trainer._update_on_kvstore, trace.bytes_to_host().count(4), bool(trace.kernels("SGD") or trace.kernels("sgd")))
""")
    assert found == ["False 2 True"]


def test_a_network_moves_between_devices(run):
    found = run("""
amp.init()
net = network(mx.cpu())
for context in (mx.cpu(), mx.gpu(0), mx.gpu(1), mx.cpu(), mx.gpu(1), mx.gpu(0)):
    net.collect_params().reset_ctx(context)
    data = mx.nd.ones((2, 4, 8, 8)).as_in_context(context)
    with Trace() as trace:
        result = net(data)
        result.wait_to_read()
    print(context, result.context, str(result.dtype)[-9:-2], types(trace))
moved = result.copyto(mx.gpu(1)).as_in_context(mx.cpu()).as_in_context(mx.gpu(0))
print(moved.context)
""", capability="8.0,9.0")
    low, fp32 = "['data=float16']", "['data=float32']"
    ran = {"cpu(0)": "[]", "gpu(0)": low, "gpu(1)": fp32}
    order = ["cpu(0)", "gpu(0)", "gpu(1)", "cpu(0)", "gpu(1)", "gpu(0)"]
    assert found == [*(f"{each} {each} float32 {ran[each]}" for each in order), "gpu(0)"]


def test_operators_in_cplusplus_stay_on_the_cpu(run):
    found = run("""
from mxnet.gluon import rnn
class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.norm, self.lstm = nn.LayerNorm(in_channels=128), rnn.LSTM(128, input_size=128, layout="NTC")
    def hybrid_forward(self, F, x):
        y = F.clip(self.norm(x), 0, 6)
        return F.batch_dot(self.lstm(y), y, transpose_b=True)
net = Net()
net.initialize(ctx=[mx.cpu(), mx.gpu(0)])
for hybrid in (True, False):
    net.hybridize(hybrid)
    for policy in ("init", "O2"):
        if policy == "init":
            amp.init()
        else:
            trainer = gluon.Trainer(net.collect_params(), "sgd")
            amp.initialize(net, trainer, opt_level="O2", verbosity=0)
        for context in (mx.cpu(), mx.gpu(0)):
            data = mx.nd.ones((32, 64, 128), ctx=context)
            with autograd.record():
                net(data).backward()
            if context != mx.cpu() and hybrid:
                print(policy, [node.op for node in net._cached_op.latest.graph.operators() if "gluon_amp" in node.op])
            mx.nd.waitall()
        amp.deinit()
print("ran")
""")
    assert found == ["init []", "O2 []", "ran"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_levels_keep_sums_in_fp32(run, level):
    found = run(f"""
class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense, self.norm = nn.Dense(16, in_units=8), nn.LayerNorm(in_channels=16)
    def hybrid_forward(self, F, x):
        return F.softmax(self.norm(self.dense(x))).sum(axis=1)
net = Net()
net.initialize(ctx=mx.gpu(0))
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "sgd")
amp.initialize(net, trainer, opt_level={level!r}, verbosity=0)
with Trace() as trace:
    with autograd.record():
        loss = net(mx.nd.ones((4, 8), ctx=mx.gpu(0))).mean()
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(1)
kernels = [name for part in ("softmax", "Softmax", "LayerNorm", "reduce_kernel") for name in trace.kernels(part)]
print(amp.get_loss_scaler(trainer).loss_scale, bool(kernels), [name for name in kernels if "half_t" in name])
products = trace.of("CUBLAS")
print([line.split()[2] for line in products][:1], [line for line in products if "compute=float16" in line])
""")
    assert found == ["65536.0 True []", "['data=float16'] []"]


def test_module_on_two_gpus(run):
    found = run("""
amp.init()
net = network(mx.cpu())
symbol = mx.sym.SoftmaxOutput(net(mx.sym.var("data")), name="softmax")
module = mx.mod.Module(symbol, context=[mx.gpu(0), mx.gpu(1)])
module.bind([("data", (4, 4, 8, 8))], [("softmax_label", (4,))])
module.init_params()
module.init_optimizer(kvstore="device")
with Trace() as trace:
    module.forward_backward(mx.io.DataBatch([mx.nd.ones((4, 4, 8, 8))], [mx.nd.zeros((4,))]))
    module.update()
print(types(trace))
""", capability="8.0,9.0")
    assert found == ["['data=float16', 'data=float32']"]
