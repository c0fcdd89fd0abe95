"""Operators whose constants a low-precision type cannot hold stay in FP32."""
import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import gluon_amp as amp
from gluon_amp._mxnet.invoke import parameters_of
from gluon_amp.machine.dtypes import FORMATS
from gluon_amp.rules import Policy
from gluon_amp.rules.decision import _PARAMETERS

HELD = [0.0, 1.0, -0.5, 0.1, 1e-3, 6.2e-5, 65504.0, float("inf"), float("-inf"), float("nan")]
LOST = [1e-8, -1e-8, 2.9e-8, 1e-7, 1e-5, 65520.0, 1e6, -1e9, 3.4e38]


@pytest.mark.parametrize("value", [*HELD, *LOST])
def test_float16_holds_what_numpy_rounds_within_its_roundoff(value):
    with np.errstate(over="ignore"):
        rounded = float(np.float16(value))
    is_held = not np.isfinite(value) or abs(rounded - value) <= 2.0 ** -11 * abs(value)
    assert FORMATS["float16"].holds(value) == is_held == (value in HELD or np.isnan(value))


def test_bfloat16_holds_all_but_the_largest():
    assert all(map(FORMATS["bfloat16"].holds, [*HELD, 1e-8, 1e-30, 1e6, -1e9, 3.3e38]))
    assert not FORMATS["bfloat16"].holds(float(np.finfo("float32").max))


@pytest.mark.parametrize("op", _PARAMETERS)
def test_the_table_names_parameters_that_mxnet_has(op):
    assert set(_PARAMETERS[op]) <= set(parameters_of(op))


@pytest.mark.parametrize(("op", "attrs"), [
    ("_plus_scalar", {"scalar": "{}"}), ("_mul_scalar", {"scalar": "{}"}), ("_maximum_scalar", {"scalar": "{}"}),
    ("_npi_where_rscalar", {"scalar": "{}"}), ("clip", {"a_min": "{}", "a_max": "1"}),
    ("clip", {"a_min": "0", "a_max": "{}"}), ("_npi_add_scalar", {"scalar": "{}"}), ("Pad", {"constant_value": "{}"}),
    ("SequenceMask", {"value": "{}", "use_sequence_length": "True"})])
def test_the_policy(op, attrs):
    policy = Policy("float16")
    usual = policy.decide(op, {name: text.format(0.5) for name, text in attrs.items()})
    assert usual.rule != "FP32"
    for value in LOST:
        decision = policy.decide(op, {name: text.format(value) for name, text in attrs.items()})
        assert (decision.rule, decision.cause.value) == ("FP32", "constant")
        assert f"={value:g}" in decision.note
    for value in HELD:
        assert policy.decide(op, {name: text.format(value) for name, text in attrs.items()}) == usual


class Behind(mx.gluon.HybridBlock):
    """Runs a function behind a layer that is lowered, of which a half of the outputs is 0."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.dense = nn.Dense(16, in_units=16, activation="relu")

    def hybrid_forward(self, F, x):
        return self.run(F, self.dense(x))


RUNS = {
    "log": lambda F, y: F.log(y + 1e-8),
    "clip": lambda F, y: F.log(F.clip(y, 1e-7, 1)),
    "maximum": lambda F, y: 1e-8 / F.broadcast_maximum(y, F.full((1, 1), 1e-8)),
    "scalar_maximum": lambda F, y: F.log(F.maximum(y, 1e-8)),
    "product": lambda F, y: y * 1e6 / 1e6,
    "mask": lambda F, y: F.where(y > 0.1, y, F.ones_like(y) * -1e9) * 1e-9,
    "full": lambda F, y: F.log(F.broadcast_add(y, F.full((1, 1), 1e-8))),
    "ones": lambda F, y: F.log(F.broadcast_add(y, F.ones((1, 1)) * 1e-8)),
    "matrix": lambda F, y: F.log(F.dot(y, F.full((16, 4), 1e-8)) + 1e-12),
    "pad": lambda F, y: F.pad(F.reshape(y, (1, 1, 4, 16)), mode="constant", constant_value=-1e9,
                              pad_width=(0, 0, 0, 0, 1, 1, 1, 1)) * 1e-9}


def _network(name):
    mx.random.seed(3)
    net = Behind(RUNS[name])
    net.initialize(mx.init.Normal(0.5))
    return net, mx.nd.random.normal(shape=(4, 16))


def _close(got, want):
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
@pytest.mark.parametrize("name", RUNS)
def test_values_are_those_of_fp32(name, hybridize):
    if name == "matrix" and not hybridize:
        pytest.skip("outside of graphs nothing tells that an array is one constant")
    net, data = _network(name)
    expected = net(data).asnumpy()
    amp.init("float16")
    net.hybridize(hybridize)
    _close(net(data).asnumpy(), expected)


@pytest.mark.parametrize("name", RUNS)
def test_values_of_conversions_are_those_of_fp32(name):
    net, data = _network(name)
    expected = net(data).asnumpy()
    amp.init("float16")  # which has the type imitated
    net.hybridize()
    converted = amp.convert_hybrid_block(net, "float16")
    _close(converted(data).asnumpy(), expected)


def test_the_report_says_why():
    net, data = _network("log")
    amp.init("float16")
    net.hybridize()
    rows = {row.op: row for row in amp.report(net, data, time=False).operators}
    assert rows["_plus_scalar"].precision == "float32"
    assert "float16 cannot hold its scalar=1e-08" in rows["_plus_scalar"].reason


class Squares(mx.gluon.HybridBlock):
    """Multiplies what a lowered layer gives by itself."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        self.dense = nn.Dense(64, in_units=64, use_bias=False)

    def hybrid_forward(self, F, x):
        return self.times(F, self.dense(x))


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("size", [1e-4, 300.0])
@pytest.mark.parametrize("times", [
    lambda F, x: x * x, lambda F, x: F.broadcast_mul(x, x), lambda F, x: F.elemwise_mul(x, x),
    lambda F, x: F.broadcast_mul(x, F.rsqrt(F.mean(x * x, axis=-1, keepdims=True) + 1e-12))],
    ids=["operator", "broadcast_mul", "elemwise_mul", "root mean square"])
def test_a_product_of_a_tensor_with_itself_is_a_square(times, size, hybridized):
    net, x = Squares(times), mx.nd.array(np.random.RandomState(0).normal(size=(8, 64)) * size)
    net.initialize(mx.init.Normal(0.1))
    expected = net(x).asnumpy()
    if hybridized:
        net.hybridize()
    amp.init("float16")
    np.testing.assert_allclose(net(x).asnumpy(), expected, rtol=5e-3, atol=5e-3 * np.abs(expected).max())


@mx.util.use_np
def test_a_numpy_product_of_a_tensor_with_itself_is_a_square():
    net, x = Squares(lambda F, x: F.np.multiply(x, x)), mx.np.full((8, 64), 300.0)
    net.initialize(mx.init.Constant(0.5))
    expected = net(x).asnumpy()
    amp.init("float16")
    for _ in range(2):
        np.testing.assert_allclose(net(x).asnumpy(), expected, rtol=5e-3)
        net.hybridize()


def test_a_users_list_holds_for_squares():
    net, x = Squares(lambda F, x: x * x), mx.nd.full((8, 64), 300.0)
    net.initialize(mx.init.Constant(0.5))
    net.hybridize()
    amp.init("float16", target_precision_ops=["FullyConnected", "elemwise_mul"])
    assert np.isinf(net(x).asnumpy()).all()


CLASSES = 3000
NUMBERS = {
    "dot": lambda F, hot: F.dot(hot, F.arange(0, CLASSES)),
    "column": lambda F, hot: F.floor(F.dot(hot, F.expand_dims(F.arange(0, CLASSES), axis=1)).reshape((-1,)) + 0.5),
    "dense": lambda F, hot: F.FullyConnected(hot, F.expand_dims(F.arange(0, CLASSES), axis=0), num_hidden=1,
                                             no_bias=True).reshape((-1,)),
    "compared": lambda F, hot: F.dot(F.broadcast_equal(hot, F.ones(shape=(1, 1))), F.arange(0, CLASSES))}
READERS = {
    "Embedding": lambda F, rows, numbers: F.Embedding(numbers, rows, input_dim=CLASSES, output_dim=4),
    "take": lambda F, rows, numbers: F.take(rows, numbers),
    "pick": lambda F, rows, numbers: F.pick(F.broadcast_axis(F.slice_axis(F.transpose(
        rows), axis=0, begin=0, end=1), axis=0, size=3), numbers)}


class Looked(mx.gluon.HybridBlock):
    """Computes class numbers, and looks rows up by them."""

    def __init__(self, numbers, read):
        super().__init__()
        self.numbers, self.read = numbers, read
        self.rows = self.params.get("rows", shape=(CLASSES, 4))

    def hybrid_forward(self, F, classes, rows):
        return self.read(F, rows, self.numbers(F, F.one_hot(classes, CLASSES)))


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.bf16)])
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_whole_numbers_that_are_read_as_positions_are_exact(numbers, read, dtype):
    net, classes = Looked(NUMBERS[numbers], READERS[read]), mx.nd.array([2049, 2051, 2999])
    net.initialize(mx.init.Normal(1.0))
    expected = net(classes).asnumpy()
    net.hybridize()
    amp.init(dtype)
    np.testing.assert_allclose(net(classes).asnumpy(), expected, rtol=1e-2)


def test_a_layer_whose_largest_value_is_a_position_stays_in_low_precision():
    class Chooses(Squares):
        def hybrid_forward(self, F, x):
            return F.one_hot(F.argmax(self.dense(x), axis=1), 64)

    net = Chooses(None)
    net.initialize()
    net.hybridize()
    amp.init("float16")
    net(mx.nd.ones((8, 64)))
    assert "runs in float16" in str(amp.explain(net, f"{net.dense.name}_fwd"))
