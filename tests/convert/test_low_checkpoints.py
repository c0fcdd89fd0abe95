"""Networks and checkpoints whose parameters are in low precision already are converted as those in FP32 are."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import SymbolBlock, nn

import gluon_amp as amp
from gluon_amp._mxnet.arrays import cast_arrays
from gluon_amp._mxnet.symbols import dtype_name

TARGETS = [pytest.param("bfloat16", marks=pytest.mark.bf16), "float16", "float32"]
pytestmark = [pytest.mark.parametrize("target", TARGETS),
              pytest.mark.filterwarnings("ignore:(AMP|the b?float16 network) will be slow|the converted network stays")]


def network():
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1, in_channels=16), nn.BatchNorm(in_channels=16), nn.Activation("relu"),
                nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(8, in_units=16))
    net.initialize(mx.init.Xavier())
    for parameter in net.collect_params(".*running_var").values():
        parameter.set_data(nd.random.uniform(0.5, 2, parameter.shape))
    return net


def data():
    return nd.array(np.random.RandomState(0).standard_normal((2, 16, 8, 8)))


def assert_close(found, expected):
    error = np.linalg.norm(found.astype("float32").asnumpy() - expected) / np.linalg.norm(expected)
    assert error < 0.03
    assert np.isfinite(found.astype("float32").asnumpy()).all()


@pytest.fixture
def expected():
    return network()(data()).asnumpy()


class TestBlocks:
    @pytest.mark.parametrize("example", [None, "float16", "float32"])
    @pytest.mark.parametrize("given", ["float16", "float32"])
    def test_of_float16(self, target, example, given, expected):
        net = network()
        net.cast("float16")
        converted = amp.convert_hybrid_block(net, target, data_example=example and data().astype(example))
        found = converted(data().astype(given))
        assert found.dtype == np.float32
        assert_close(found, expected)
        assert np.dtype(net[0].weight.dtype) == np.float16  # the caller's is as it was

    def test_of_float16_that_ran_before(self, target, expected):
        net = network()
        net.cast("float16")
        net.hybridize()
        net.collect_params(".*(gamma|beta|running.*)").setattr("dtype", "float32")
        assert_close(amp.convert_hybrid_block(net, target)(data()), expected)

    def test_exported_in_float16(self, target, expected, tmp_path):
        net = network()
        net.cast("float16")
        net.hybridize()
        symbol = net(mx.sym.var("data"))
        symbol.save(str(tmp_path / "half-symbol.json"))
        net.collect_params().save(str(tmp_path / "half-0000.params"))
        read = SymbolBlock.imports(str(tmp_path / "half-symbol.json"), ["data"], str(tmp_path / "half-0000.params"))
        for given in ("float16", "float32"):
            assert_close(amp.convert_hybrid_block(read, target)(data().astype(given)), expected)

    def test_float16_data_of_an_fp32_network(self, target, expected):
        converted = amp.convert_hybrid_block(network(), target, data_example=data().astype("float16"))
        assert_close(converted(data().astype("float16")), expected)


def model():
    net = network()
    symbol = net(mx.sym.var("data"))
    values = {name: parameter.data() for name, parameter in net.collect_params().items()}
    auxiliary = set(symbol.list_auxiliary_states())
    return (symbol, {name: value for name, value in values.items() if name not in auxiliary},
            {name: value for name, value in values.items() if name in auxiliary})


@pytest.mark.parametrize("optimize", [None, "all", "none"])
class TestModels:
    def run(self, symbol, args, aux, given):
        executor = symbol.bind(mx.cpu(), {**args, "data": given}, aux_states=aux, grad_req="null")
        return executor.forward()[0]

    @pytest.mark.parametrize("stored", ["float16", pytest.param("bfloat16", marks=pytest.mark.bf16)])
    def test_halved_parameters(self, target, stored, optimize, expected):
        symbol, args, aux = model()
        low = {name: value.astype("float16") if stored == "float16" else cast_arrays(value, "bfloat16")
               for name, value in args.items()}
        options = {} if optimize is None else {"optimize": optimize}
        converted = amp.convert_model(symbol, low, aux, target_dtype=target, **options)
        assert_close(self.run(*converted, data()), expected)
        assert {dtype_name(value.dtype) for value in low.values()} == {stored}

    def test_halved_parameters_and_data(self, target, optimize, expected):
        symbol, args, aux = model()
        half = {name: value.astype("float16") for name, value in args.items()}
        given = data().astype("float16")
        options = {} if optimize is None else {"optimize": optimize}
        converted = amp.convert_model(symbol, half, aux, target_dtype=target, data_example={"data": given}, **options)
        assert_close(self.run(*converted, given), expected)

    def test_running_statistics_in_float16(self, target, optimize, expected):
        symbol, args, aux = model()
        half = [{name: value.astype("float16") for name, value in each.items()} for each in (args, aux)]
        options = {} if optimize is None else {"optimize": optimize}
        converted = amp.convert_model(symbol, *half, target_dtype=target, **options)
        assert_close(self.run(*converted, data()), expected)
