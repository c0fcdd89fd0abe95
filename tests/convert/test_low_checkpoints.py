"""Networks and checkpoints whose parameters are in low precision already are converted as those in FP32 are."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import SymbolBlock, nn
from networks import sequential

import gluon_amp as amp
from gluon_amp._mxnet.arrays import cast_arrays

BF16 = pytest.mark.bf16
pytestmark = [pytest.mark.parametrize("target", [pytest.param("bfloat16", marks=BF16), "float16", "float32"]),
              pytest.mark.filterwarnings("ignore:(AMP|the b?float16 network) will be slow|the converted network stays")]


def network():
    mx.random.seed(1)
    net = sequential(lambda: [nn.Conv2D(16, 3, padding=1, in_channels=16), nn.BatchNorm(in_channels=16),
                              nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Flatten(),
                              nn.Dense(8, in_units=16)], mx.init.Xavier(), "net_", active=False)
    for parameter in net.collect_params(".*running_var").values():
        parameter.set_data(nd.random.uniform(0.5, 2, parameter.shape))
    net.hybridize()
    return net


def data(dtype="float32"):
    return nd.array(np.random.RandomState(0).standard_normal((2, 16, 8, 8))).astype(dtype)


def assert_close(found):
    expected = network()(data()).asnumpy()
    assert found.dtype == np.float32
    assert np.linalg.norm(found.asnumpy() - expected) < 0.03 * np.linalg.norm(expected)


def as_it_is(net, folder):
    return net


def run_before(net, folder):
    net.collect_params(".*(gamma|beta|running.*)").setattr("dtype", "float32")
    return net


def exported(net, folder):
    symbol, parameters = str(folder / "half-symbol.json"), str(folder / "half-0000.params")
    net(mx.sym.var("data")).save(symbol)
    net.collect_params().save(parameters)
    return SymbolBlock.imports(symbol, ["data"], parameters)


@pytest.mark.parametrize("example", [None, "float16", "float32"])
@pytest.mark.parametrize("given", ["float16", "float32"])
@pytest.mark.parametrize("made", [as_it_is, run_before, exported])
def test_blocks_of_float16(target, made, given, example, tmp_path):
    net = network()
    net.cast("float16")
    converted = amp.convert_hybrid_block(made(net, tmp_path), target, data_example=example and data(example))
    assert_close(converted(data(given)))
    assert np.dtype(net[0].weight.dtype) == np.float16  # the caller's is as it was


def test_float16_data_of_an_fp32_network(target):
    assert_close(amp.convert_hybrid_block(network(), target, data_example=data("float16"))(data("float16")))


@pytest.mark.parametrize("optimize", [None, "all", "none"])
@pytest.mark.parametrize(("low", "given"), [
    (["args"], "float32"), (["args"], "float16"), (["args", "aux"], "float32"),
    pytest.param(["bfloat16"], "float32", marks=BF16)], ids=["parameters", "data, too", "statistics, too", "bfloat16"])
def test_models(target, low, given, optimize):
    symbol = network()(mx.sym.var("data"))
    values = {name: parameter.data() for name, parameter in network().collect_params().items()}
    auxiliary = set(symbol.list_auxiliary_states())
    args, aux = ({name: array for name, array in values.items() if (name in auxiliary) == wanted}
                 for wanted in (False, True))
    args = {name: cast_arrays(array, "bfloat16" if "bfloat16" in low else "float16") for name, array in args.items()}
    aux = {name: array.astype("float16") if "aux" in low else array for name, array in aux.items()}
    kept = {name: array.dtype for name, array in args.items()}
    converted, new_args, new_aux = amp.convert_model(
        symbol, args, aux, target, data_example={"data": data(given)} if given == "float16" else None,
        **({} if optimize is None else {"optimize": optimize}))
    executor = converted.bind(mx.cpu(), {**new_args, "data": data(given)}, aux_states=new_aux, grad_req="null")
    assert_close(executor.forward()[0].astype("float32"))
    assert {name: array.dtype for name, array in args.items()} == kept
