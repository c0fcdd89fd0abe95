"""Running statistics that a backward pass still writes when they are asked for.

MXNet's graphs with static_shape, and its modules, give those of the step before then.
"""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from networks import differentiate, relative

import gluon_amp as amp

SHAPE = (8, 32, 56, 56)  # large enough that the backward pass runs when its call has returned


def trained():
    """A network right after its first backward passes, and data."""
    mx.random.seed(3)
    net = nn.HybridSequential()
    for _ in range(4):
        net.add(nn.Conv2D(32, 3, padding=1, in_channels=32), nn.BatchNorm(in_channels=32))
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    data = mx.nd.random.uniform(shape=SHAPE)
    for _ in range(2):
        differentiate(lambda: (net(data) ** 2).mean())
    return net, data


def statistics(net):
    mx.nd.waitall()
    return [parameter.data().asnumpy() for name, parameter in net.collect_params().items() if "running" in name]


@pytest.mark.parametrize("of_symbol", [False, True])
def test_networks_are_converted_with_those_of_the_last_step(of_symbol):
    net, data = trained()
    if of_symbol:
        arrays = {name: parameter.data() for name, parameter in net.collect_params().items()}
        symbol, args, aux = amp.convert_model(net(mx.sym.var("data")), arrays, {}, "float32")
        arrays = {**args, **aux, "data": data}
        found = mx.nd.CachedOp(symbol)(*[arrays[name] for name in symbol.list_inputs()]).asnumpy()
    else:
        found = amp.convert_hybrid_block(net, "float32")(data).asnumpy()
    mx.nd.waitall()
    assert relative(net(data).asnumpy(), found) < 1e-5


def test_tools_put_back_those_of_the_last_step():
    net, data = trained()
    amp.compare(net, data, target_dtype="float16")
    found = statistics(net)
    expected = statistics(trained()[0])
    assert all((one == other).all() for one, other in zip(expected, found))


def test_modules_are_converted_with_those_of_the_last_step():
    symbol = mx.sym.var("data")
    for number in range(4):
        symbol = mx.sym.Convolution(symbol, kernel=(3, 3), pad=(1, 1), num_filter=32, name=f"conv{number}")
        symbol = mx.sym.BatchNorm(symbol, fix_gamma=False, name=f"norm{number}")
    module = mx.mod.BucketingModule(lambda _: (mx.sym.MakeLoss(symbol), ("data",), ()), default_bucket_key=1)
    module.bind([("data", SHAPE)], None)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 1e-6})
    batch = mx.io.DataBatch([mx.nd.random.uniform(shape=SHAPE)], bucket_key=1, provide_data=[("data", SHAPE)])
    for _ in range(2):
        module.forward(batch, is_train=True)
        module.backward()
        module.update()
    converted = amp.convert_bucketing_module(module, "float32")
    converted.bind([("data", SHAPE)], None, for_training=False)
    outputs = []
    for each in (module, converted):
        mx.nd.waitall()
        each.forward(batch, is_train=False)
        outputs.append(each.get_outputs()[0].asnumpy())
    assert np.isfinite(outputs[0]).all()
    assert relative(*outputs) < 1e-5
