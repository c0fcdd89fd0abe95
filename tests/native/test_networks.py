"""Which parts of graphs run in C++, and networks that do: values, gradients, several passes, batches and contexts."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import prefer, take_for
from graphs import conv, describe, graph, op, rewrite, variable
from mxnet.gluon import HybridBlock, nn
from native_cases import (
    SqueezeAndExcite,
    kinds,
    normal,
    requires_core,
    results_of_batches,
    with_gradients,
)

import gluon_amp as amp
from gluon_amp.graph import Entry
from gluon_amp.passes.activations import HARD_SWISH as SWISH
from gluon_amp.rules import FP32, Cause, Device, Policy, Rule

POOLING, RESIZE, SCALE = (f"_gluon_amp_{name}" for name in ("pooling", "resize", "scale_rows"))
NMS = "_gluon_amp_box_nms"
SOFTMAX = ("_gluon_amp_softmax", "_gluon_amp_log_softmax")
FACTORS, DATA, MAPS = (2, 32, 1, 1), (2, 32, 20, 20), (4, 120, 28, 28)


def rewritten(*heads, available, target="float32", values=16, policy=None, **settings):
    """Return the operators of a graph after all passes, on a CPU whose vectors have so many values."""
    result = graph(*heads)
    rewrite(result, policy or Policy(target), Device(values), native=frozenset([available]),
            check=True, **settings)
    return describe(result)


def pool(shape=MAPS, of=None, **attrs):
    attrs = {"global_pool": True, "pool_type": "avg", "kernel": "(1, 1)", **attrs}
    out = (shape[0], 1, 1, shape[-1]) if attrs.get("layout") == "NHWC" else (*shape[:2], 1, 1)
    return op("Pooling", "it", variable("data", shape) if of is None else of, shape=out, **attrs)


def windows(shape=(4, 12, 28, 28), of=None, **attrs):
    return pool(shape, of, **{"global_pool": False, "kernel": "(3, 3)", "pad": "(1, 1)", "pool_type": "max", **attrs})


def behind_a_product(pad):
    """Return maxima behind a convolution that oneDNN computes as a product of matrices where ``pad`` is wide."""
    shape = (4, 16, 28, 28)
    layer = op("Convolution", "layer", variable("data", shape), variable("weight", (16, 16, 3, 3)), shape=shape,
               num_filter=16, kernel=(3, 3), pad=(pad, pad), dilate=(pad, pad), no_bias=True)
    return windows(shape, op("Activation", "relu", layer, shape=shape, act_type="relu"))


def behind_a_transposition():
    data = op("transpose", "turned", variable("data", (4, 28, 28, 16)), shape=(4, 16, 28, 28), axes="(0, 3, 1, 2)")
    return windows((4, 16, 28, 28), data)


def up(inputs=1, **attrs):
    data = [variable(name, (2, 32, 16, 16)) for name in ("data", "like")[:inputs]]
    return op("_contrib_BilinearResize2D", "it", *data, shape=(2, 32, 32, 32), **{"height": 32, "width": 32, **attrs})


def up_behind_a_convolution():
    image, weight = variable("data", (2, 32, 16, 16)), variable("weight", (32, 32, 3, 3))
    layer = op("Convolution", "conv", image, weight, shape=(2, 32, 16, 16), kernel="(3, 3)", pad="(1, 1)",
               num_filter=32, no_bias=True)
    return op("_contrib_BilinearResize2D", "it", layer, shape=(2, 32, 32, 32), height=32, width=32)


def product(data=DATA, factors=FACTORS, kind="broadcast_mul"):
    shape = np.broadcast(np.empty(data), np.empty(factors)).shape
    return op(kind, "it", op("relu", "x", variable("data", data), shape=data), variable("f", factors), shape=shape)


def summed(which="first", rectified=False):
    it = product()
    terms = {"first": (it, variable("y", DATA)), "second": (variable("y", DATA), it), "twice": (it, it)}[which]
    total = op("elemwise_add", "total", *terms, shape=DATA)
    return op("Activation", "out", total, shape=DATA, act_type="relu") if rectified else total


def total(kind="sum", shape=(4, 2, 64, 28, 28), **attrs):
    axis = attrs.get("axis", 1)
    out = tuple(np.zeros(shape).sum(axis=axis if isinstance(axis, int) else None).shape)
    return op(kind, "it", op("relu", "before", variable("data", shape), shape=shape), shape=out or (1,),
              **{"axis": 1, **attrs})


def suppression(**attrs):
    return op("_contrib_box_nms", "it", variable("data", (2, 4096, 6)), shape=(2, 4096, 6), **attrs)


def between_convolutions():
    before = conv("before", variable("data", DATA), 32, 32)
    before.shapes = [DATA]
    return conv("after", op("broadcast_mul", "it", before, variable("f", FACTORS), shape=DATA), 32, 32)


# The operator in C++, the end of a graph, settings, and whether the node `it` becomes that operator.
GRAPHS = [
    # Global means where a map has more rows than there are blocks of channels, in training.
    *((POOLING, pool(shape), {"values": values, "recorded": True}, True) for shape, values in (
        (MAPS, 8), ((4, 128, 8, 17), 8), ((2, 48, 56, 14), 8), ((4, 128, 14, 14), 16))),
    *((POOLING, pool(**change), {"values": 8, "recorded": True}, False) for change in (
        {"shape": (4, 128, 14, 14)}, {"shape": (4, 128, 16, 16)}, {"shape": (1, 8, 28, 28)}, {"pool_type": "max"},
        {"pool_type": "sum"}, {"global_pool": False, "kernel": "(28, 28)"},
        {"layout": "NHWC", "shape": (4, 28, 28, 120)})),
    (POOLING, pool(), {"values": 8, "recorded": False}, False),
    # Windows of maps that lie in rows, which oneDNN takes value by value without AVX512.
    *((POOLING, head, {"values": 8, "recorded": False}, True) for head in (
        windows(), windows(pool_type="avg"), windows(pool_type="avg", count_include_pad="False"),
        behind_a_transposition(), behind_a_product(4))),
    *((POOLING, head, {"values": 8, "recorded": False}, False) for head in (
        windows((4, 16, 28, 28)), windows((1, 12, 28, 28)), windows(pool_type="sum"),
        windows(pool_type="lp", p_value=2), windows(pooling_convention="full"), windows(kernel="(1, 1)"),
        behind_a_product(3))),
    (POOLING, windows(), {"values": 16, "recorded": False}, False),
    *((RESIZE, up(**attrs), {}, True) for attrs in (
        {}, {"align_corners": False}, {"mode": "size", "scale_height": None})),
    *((RESIZE, up(**attrs), {}, False) for attrs in (
        {"mode": "like", "inputs": 2}, {"scale_height": 2.0, "scale_width": 2.0}, {"mode": "odd_scale"},
        {"height": 0})),
    (RESIZE, up_behind_a_convolution(), {"target": "bfloat16"}, True),
    *((SCALE, product(kind=kind), {}, True) for kind in ("broadcast_mul", "_npi_multiply")),
    *((SCALE, product(factors=factors), {}, False) for factors in (
        (1, 32, 1, 1), (2, 1, 1, 20), (1, 1, 1, 1), DATA, (32, 1, 1))),
    *((SCALE, product(data, (*data[:2], 1, 1)), {}, False) for data in ((2, 4, 20, 20), (8, 200, 3, 5))),  # no gain
    (SCALE, between_convolutions(), {"target": "bfloat16"}, True),
    *((f"_gluon_amp_{kind}", total(kind, axis=axis), {}, True) for kind in ("sum", "mean")
      for axis in (1, "(1,)", "[1]", -4, 0, "()", "None")),
    *((f"_gluon_amp_{kind}", total(kind, **change), {}, False) for kind in ("sum", "mean") for change in (
        {"axis": -1}, {"axis": 4}, {"axis": "(1, 2)"}, {"axis": 1, "exclude": True},
        {"axis": 1, "shape": (4, 2, 64, 2, 2)}, {"axis": 3, "shape": (4, 2, 64, 28, 15)})),
    *((NMS, suppression(**attrs), {}, True) for attrs in (
        {}, {"topk": 400, "id_index": 0}, {"in_format": "center", "out_format": "center"})),
    *((NMS, suppression(**attrs), {}, False) for attrs in ({"out_format": "center"}, {"topk": 0})),
]


@pytest.mark.parametrize(("name", "head", "settings", "is_replaced"), GRAPHS)
def test_where_an_operator_is_replaced(name, head, settings, is_replaced):
    lines = rewritten(head, available=name, **settings)
    assert any(line.startswith(f"it: {name}(") for line in lines) is is_replaced
    target = settings.get("target", "float32")
    assert not is_replaced or next(line for line in lines if line.startswith("it:")).endswith(f"-> {target}")


@pytest.mark.parametrize(("head", "settings", "joined"), [
    (summed(rectified=True), {"trains": True}, "it: _gluon_amp_scale_rows(x, f, y) -> float32"),
    (summed(rectified=True), {}, "it: _gluon_amp_scale_rows(x, f) -> float32"),
    (summed("second"), {"trains": True}, "it: _gluon_amp_scale_rows(x, f) -> float32"),
    (summed("twice"), {"trains": True}, "it: _gluon_amp_scale_rows(x, f) -> float32")])
def test_in_training_a_sum_and_its_rectifier_join_a_product(head, settings, joined):
    assert joined in rewritten(head, available=SCALE, **settings)


def test_a_sum_does_not_join_a_product_that_is_read_elsewhere():
    head = summed()
    lines = rewritten(head, head.inputs[0].node, available=SCALE, trains=True)
    assert "it: _gluon_amp_scale_rows(x, f) -> float32" in lines


SHAPE = (2, 16, 32, 32)


def swish(data, product="elemwise_mul", over=("_div_scalar", 6.0), plus="_plus_scalar", swapped=False, shape=SHAPE):
    moved = Entry(op(plus, "moved", data, shape=shape, scalar=3.0))
    limited = Entry(op("clip", "limited", moved, shape=shape, a_min=0.0, a_max=6.0))
    gate = Entry(op(over[0], "gate", limited, shape=shape, scalar=over[1]))
    return Entry(op(product, "it", *((gate, data) if swapped else (data, gate)), shape=shape)), limited


def after(*heads, policy=None):
    made = graph(*heads)
    rewrite(made, policy or Policy("float32"), native={SWISH, "_gluon_amp_swish"}, keep_outputs=False, check=True)
    return describe(made), made


@pytest.mark.parametrize(("how", "divisor"), [
    ({}, 6.0), ({"swapped": True}, 6.0), ({"over": ("_mul_scalar", 0.25)}, 4.0), ({"product": "broadcast_mul"}, 6.0),
    ({"product": "_npi_multiply", "plus": "_npi_add_scalar", "over": ("_npi_true_divide_scalar", 6.0)}, 6.0)])
def test_forms_of_a_hard_swish_are_one_operator(how, divisor):
    lines, made = after(swish(Entry(variable("data", SHAPE)), **how)[0])
    assert lines == [f"it: {SWISH}(data) -> float32", "out: it"]
    attrs = made.operators()[0].attrs
    assert [float(attrs[name]) for name in ("shift", "a_min", "a_max", "divisor")] == [3, 0, 6, divisor]


def soft_swish(data, sigmoid="sigmoid", beta=None, read=None, swapped=False, product="elemwise_mul"):
    """Return x * sigmoid(beta * x), and what of it is an output, too."""
    scaled = data if beta is None else Entry(op("_mul_scalar", "scaled", data, shape=SHAPE, scalar=beta))
    attrs = {"act_type": "sigmoid"} if sigmoid == "Activation" else {}
    gate = Entry(op(sigmoid, "gate", scaled, shape=SHAPE, **attrs))
    return [Entry(op(product, "it", *((gate, data) if swapped else (data, gate)), shape=SHAPE)),
            *{"gate": [gate], "scaled": [scaled], None: []}[read]]


@pytest.mark.parametrize("how", [{}, {"swapped": True}, {"beta": 1.5}, {"sigmoid": "Activation"}, {
    "sigmoid": "_npx_sigmoid", "product": "_npi_multiply"}])
def test_forms_of_a_swish_are_one_operator(how):
    lines, made = after(*soft_swish(Entry(variable("data", SHAPE)), **how))
    assert lines == ["it: _gluon_amp_swish(data) -> float32", "out: it"]
    assert made.operators()[0].attrs.get("beta") == (str(how["beta"]) if "beta" in how else None)


@pytest.mark.parametrize("heads", [
    lambda data: soft_swish(data, read="gate"), lambda data: soft_swish(data, beta=2.0, read="scaled"),
    lambda data: soft_swish(data, sigmoid="tanh"),
    lambda data: [Entry(op("elemwise_mul", "it", Entry(variable("other", SHAPE)), soft_swish(data)[0].node.inputs[1],
                           shape=SHAPE))]])
def test_products_that_are_no_swish_stay(heads):
    assert not any("_gluon_amp" in line for line in after(*heads(Entry(variable("data", SHAPE))))[0])


def test_products_that_are_no_hard_swish_of_their_data_stay():
    data, other = Entry(variable("data", SHAPE)), Entry(variable("other", SHAPE))
    head, limited = swish(data)
    small = swish(Entry(variable("data", (2, 16, 4, 4))), shape=(2, 16, 4, 4))[0]
    wished = Policy("bfloat16", {"clip": (Rule(FP32, note="wished", cause=Cause.USER_LIST),)})
    for heads in ([Entry(op("elemwise_mul", "it", other, swish(data)[0].node.inputs[1], shape=SHAPE))],
                  [head, limited], [small]):
        assert not any(SWISH in line for line in after(*heads)[0])
    assert not any(SWISH in line for line in after(swish(data)[0], policy=wished)[0])
    layer = op("Convolution", "conv", data, Entry(variable("weight", (16, 16, 1, 1))), shape=SHAPE, num_filter=16,
               kernel=(1, 1), no_bias=True)
    assert f"it: {SWISH}(conv) -> bfloat16" in after(swish(Entry(layer))[0], policy=Policy("bfloat16"))[0]


class Twice(HybridBlock):
    """A hard swish, and a swish, of what is read elsewhere, too, so that gradients meet."""

    def hybrid_forward(self, F, x):
        y = x * 2
        return y * (F.clip(y + 3.0, 0, 6) / 6.0) + y * F.sigmoid(1.5 * y) + F.sin(y)


class Pools(HybridBlock):
    """Cells of pooling side by side, as in NASNet."""

    def __init__(self):
        super().__init__()
        self.layers = nn.HybridSequential()
        for _ in range(2):
            self.layers.add(nn.Conv2D(12, 3, padding=1, in_channels=0), nn.Activation("relu"))

    def hybrid_forward(self, F, x):
        for layer in self.layers:
            x = layer(x)
        most = F.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max")
        means = F.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="avg", count_include_pad=False)
        return F.concat(most, means + F.Pooling(x, kernel=(1, 1), stride=(2, 2), pool_type="avg"), dim=1)


class Segmentation(HybridBlock):
    """A segmentation network's head and loss."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2D(21, 3, padding=1, in_channels=8)

    def hybrid_forward(self, F, x):
        maps = F.contrib.BilinearResize2D(self.conv(x), height=40, width=48)
        return F.broadcast_mul(F.slice_axis(F.log_softmax(maps, axis=1), axis=1, begin=3, end=4),
                               F.softmax(maps, axis=1))


class Split(HybridBlock):
    """Weighs two groups of channels and adds them up, as split attention does."""

    def __init__(self):
        super().__init__()
        self.conv, self.weigh = nn.Conv2D(32, 3, padding=1, in_channels=8), nn.Dense(32, in_units=16)

    def hybrid_forward(self, F, x):
        parts = F.reshape(F.expand_dims(F.relu(self.conv(x)), 1), (0, 2, 16, 0, 0))
        means = F.mean(F.sum(parts, axis=1), axis=(2, 3))
        factors = F.reshape(F.softmax(F.reshape(self.weigh(means), (0, 2, 16)), axis=1), (0, 2, 16, 1, 1))
        return F.sum(F.broadcast_mul(factors, parts), axis=1)


STATIC = {"static_alloc": True, "static_shape": True}
NETWORKS = {  # with the shapes of two batches, a CPU, and what runs in C++
    "hard swish": (Twice, [(2, 16, 32, 33)] * 2, None, {SWISH}),
    "pools": (Pools, [(4, 8, 34, 33)] * 2, "AVX2", {POOLING}),
    "segmentation": (Segmentation, [(2, 8, 10, 12)] * 2, None, {RESIZE, *SOFTMAX}),
    "split attention": (Split, [(4, 8, 24, 24)] * 2, None, {"_gluon_amp_sum", SCALE}),
    "squeeze and excite": (SqueezeAndExcite, [(4, 16, 24, 24), (1, 16, 24, 24)], None, {POOLING, SCALE}),
}


def trained(name, grad_req, flags):
    """Return a network, and its values and gradients of two passes for each batch."""
    block, shapes, _, _ = NETWORKS[name]
    mx.random.seed(3)
    net = block()
    net.initialize(mx.init.Xavier())
    if flags is not None:
        net.hybridize(**flags)
    net(normal(*shapes[0]))
    net.collect_params().setattr("grad_req", grad_req)
    return net, results_of_batches(net, grad_req, [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)])


@requires_core
@pytest.mark.parametrize("flags", [None, {}, STATIC], ids=str)
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_as_with_mxnets_operators(name, grad_req, flags, monkeypatch):
    check_trained(name, grad_req, flags, "float32", 1e-5, monkeypatch)


@requires_core
@pytest.mark.bf16
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_squeeze_and_excite_in_bfloat16(grad_req, monkeypatch):
    check_trained("squeeze and excite", grad_req, STATIC, "bfloat16", 0.03, monkeypatch, {SCALE})


def check_trained(name, grad_req, flags, target, tolerance, monkeypatch, operators=None):
    _, _, cpu, expected_operators = NETWORKS[name]
    expected = trained(name, grad_req, flags)[1]
    prefer(monkeypatch, nhwc=False)
    if cpu:
        take_for(monkeypatch, cpu)
    amp.init(target)
    net, received = trained(name, grad_req, flags)
    assert flags is None or (operators or expected_operators) <= kinds(net)
    for one, other in zip(received, expected):
        assert np.linalg.norm(one - other) < tolerance * np.linalg.norm(other)


class Scaled(HybridBlock):
    def hybrid_forward(self, F, x, y):
        return F.broadcast_mul(F.relu(x), F.relu(y))


@requires_core
@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_factors_and_data_may_change_places_from_call_to_call(target):
    net = Scaled()
    net.hybridize()
    amp.init(target)
    data, factors = normal(4, 32, 20, 20), normal(4, 32, 1, 1, seed=1)
    for inputs in ([data, factors], [factors, data], [data, factors]):
        out_grad = normal(4, 32, 20, 20, seed=2)
        received = with_gradients(net, inputs, out_grad)
        with amp.autocast(enabled=False):
            expected = with_gradients(Scaled(), inputs, out_grad)
        assert SCALE in kinds(net)
        for one, other in zip(received, expected):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def converted(net, data, monkeypatch):
    """Convert a network on a CPU with AVX2, and compare it: it pools in C++."""
    net.initialize(mx.init.Xavier())
    net.hybridize()
    expected = net(data).asnumpy()
    take_for(monkeypatch, "AVX2")
    made = amp.convert_hybrid_block(net, "float32", data_example=data)
    np.testing.assert_allclose(made(data).asnumpy(), expected, rtol=1e-4, atol=1e-5)
    assert POOLING in kinds(made)
    return made


@requires_core
def test_a_converted_network_of_windows(monkeypatch):
    net = Pools()
    made = converted(net, normal(4, 8, 34, 33), monkeypatch)
    other = normal(2, 8, 20, 11, seed=5)  # another size than it was converted with
    np.testing.assert_allclose(made(other).asnumpy(), net(other).asnumpy(), rtol=1e-4, atol=1e-5)


@requires_core
def test_behind_a_product_of_matrices_that_was_fused(monkeypatch):
    """As in AlexNet."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 11, strides=4, padding=2, in_channels=3), nn.Activation("relu"), nn.MaxPool2D(3, 2))
    converted(net, normal(4, 3, 131, 131), monkeypatch)
