"""Values times their hard sigmoid in C++, against NumPy in float64, and where the operators of it are replaced."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import describe, graph, op, rewrite, variable
from mxnet import autograd, nd
from mxnet.gluon import HybridBlock
from native_cases import (
    BFLOAT16_ROUNDING,
    assert_close,
    bfloat16,
    float32,
    kinds,
    normal,
    requires_core,
    rounded,
    run,
    shapes_of_empty,
    with_gradients,
)

import gluon_amp as amp
from gluon_amp.graph import Entry
from gluon_amp.passes.activations import HARD_SWISH
from gluon_amp.rules import FP32, Cause, Policy, Rule

ATTRS = {"shift": 3.0, "a_min": 0.0, "a_max": 6.0, "divisor": 6.0}
SHAPES = [(1,), (3, 5), (2, 7, 33), (2, 16, 60, 61)]


def reference(x, grad):
    """Return the value and the gradient; values at a limit have one, as in MXNet's clip."""
    moved = x + 3
    gate = np.clip(moved, 0, 6) / 6
    return x * gate, grad * (gate + np.where((moved < 0) | (moved > 6), 0, x / 6))


@requires_core
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_numpy(shape):
    data, out_grad = normal(*shape, scale=3), normal(*shape, seed=1)
    wanted = reference(*(each.asnumpy().astype("float64") for each in (data, out_grad)))
    for one, other in zip(with_gradients(lambda x: run(HARD_SWISH, [x], **ATTRS), [data], out_grad), wanted):
        assert_close(one, other, 1e-6)


@pytest.mark.bf16
@requires_core
@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_it_is_rounded_once(shape):
    data, out_grad = rounded(normal(*shape, scale=3)), rounded(normal(*shape, seed=1))
    wanted = reference(*(each.asnumpy().astype("float64") for each in (data, out_grad)))
    received = with_gradients(lambda x: float32(run(HARD_SWISH, [bfloat16(x)], **ATTRS)), [data], out_grad)
    for one, other in zip(received, wanted):
        np.testing.assert_allclose(one, other, rtol=BFLOAT16_ROUNDING, atol=1e-6)


@requires_core
def test_limits_and_special_values():
    data = nd.array([-3.0, 3.0, -np.inf, np.inf, np.nan, -4.0, 5.0, 0.0])
    out, grad = with_gradients(lambda x: run(HARD_SWISH, [x], **ATTRS), [data], nd.ones(8))
    np.testing.assert_array_equal(out, np.array([0, 3, np.nan, np.inf, np.nan, 0, 5, 0], "float32"))
    np.testing.assert_allclose(grad[[0, 1, 3, 5, 6, 7]], [-0.5, 1.5, 1, 0, 1, 0.5], rtol=1e-6)
    assert np.isnan(grad[4])


@requires_core
def test_no_values():
    with mx.util.np_shape(True):
        data = nd.zeros((0, 3))
        assert shapes_of_empty(lambda x: run(HARD_SWISH, [x], **ATTRS), [data], data) == [(0, 3)] * 2


@requires_core
def test_a_missing_attribute_is_named():
    with pytest.raises(mx.MXNetError, match="shift"):
        run(HARD_SWISH, [nd.ones(3)], a_min=0, a_max=6, divisor=6).wait_to_read()


SHAPE = (2, 16, 32, 32)


def parts(data, product="elemwise_mul", over=("_div_scalar", 6.0), plus="_plus_scalar", limits="clip", swapped=False,
          shape=SHAPE):
    moved = Entry(op(plus, "moved", data, shape=shape, scalar=3.0))
    limited = Entry(op(limits, "limited", moved, shape=shape, a_min=0.0, a_max=6.0))
    gate = Entry(op(over[0], "gate", limited, shape=shape, scalar=over[1]))
    return Entry(op(product, "swish", *((gate, data) if swapped else (data, gate)), shape=shape)), limited


def after(*heads, policy=None):
    made = graph(*heads)
    rewrite(made, policy or Policy("float32"), native={HARD_SWISH}, keep_outputs=False, check=True)
    return describe(made), made


@pytest.mark.parametrize(("how", "divisor"), [
    ({}, 6.0), ({"swapped": True}, 6.0), ({"over": ("_mul_scalar", 0.25)}, 4.0), ({"product": "broadcast_mul"}, 6.0),
    ({"product": "_npi_multiply", "plus": "_npi_add_scalar", "over": ("_npi_true_divide_scalar", 6.0)}, 6.0)])
def test_forms_of_a_hard_swish_are_one_operator(how, divisor):
    head, _ = parts(Entry(variable("data", how.get("shape", SHAPE))), **how)
    lines, made = after(head)
    assert lines == ["swish: _gluon_amp_hard_swish(data) -> float32", "out: swish"]
    attrs = made.operators()[0].attrs
    assert [float(attrs[name]) for name in ("shift", "a_min", "a_max", "divisor")] == [3, 0, 6, divisor]


def test_what_is_no_hard_swish_of_its_data_stays():
    data, other = Entry(variable("data", SHAPE)), Entry(variable("other", SHAPE))
    small = Entry(variable("data", (2, 16, 4, 4)))
    head, limited = parts(data)
    for heads in ([Entry(op("elemwise_mul", "swish", other, parts(data)[0].node.inputs[1], shape=SHAPE))],
                  [head, limited], [parts(small, shape=(2, 16, 4, 4))[0]]):
        assert not any(HARD_SWISH in line for line in after(*heads)[0])


def test_a_wish_for_fp32_of_a_part_is_heeded():
    wished = Policy("bfloat16", {"clip": (Rule(FP32, note="wished", cause=Cause.USER_LIST),)})
    head, _ = parts(Entry(variable("data", SHAPE)))
    assert not any(HARD_SWISH in line for line in after(head, policy=wished)[0])
    head, _ = parts(Entry(op("Convolution", "conv", Entry(variable("data", SHAPE)),
                             Entry(variable("weight", (16, 16, 1, 1))), shape=SHAPE, num_filter=16, kernel=(1, 1),
                             no_bias=True)))
    assert "swish: _gluon_amp_hard_swish(conv) -> bfloat16" in after(head, policy=Policy("bfloat16"))[0]


class Twice(HybridBlock):
    """A hard swish of what is read elsewhere, too, so that gradients meet."""

    def hybrid_forward(self, F, x):
        y = x * 2
        return y * (F.clip(y + 3.0, 0, 6) / 6.0) + F.sin(y)


@requires_core
@pytest.mark.machine
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}])
def test_gradients_that_meet_are_added(flags, grad_req):
    amp.init("float32")
    net = Twice()
    net.hybridize(**flags)
    for seed in range(2):
        x = normal(2, 16, 32, 33, scale=2, seed=seed)
        x.attach_grad(grad_req)
        for _ in range(2):
            with autograd.record():
                out = net(x)
            out.backward()
        y = 2 * x.asnumpy().astype("float64")
        value, grad = reference(y, 1)
        assert_close(out.asnumpy(), value + np.sin(y), 1e-6)
        assert_close(x.grad.asnumpy(), 2 * (grad + np.cos(y)) * (2 if grad_req == "add" else 1), 1e-6)
        assert HARD_SWISH in kinds(net)
