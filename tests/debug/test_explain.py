"""Explanations: the reason, what is read, and remedies that do what they say."""
from __future__ import annotations

import mxnet as mx
import pytest
from mxnet.gluon import nn
from networks import NETWORKS, Attention, conv_net, ready

import gluon_amp as amp


@pytest.fixture(params=[pytest.param("bfloat16", marks=pytest.mark.bf16), "float16"])
def low(request):
    amp.init(request.param)
    return request.param


def only(explanation):
    (item,) = explanation.operators
    return item


def test_a_lowered_operator(low):
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    item = only(amp.explain(net, "net_conv2_fwd", data))
    assert item.why.startswith("rule LOWER: ")
    assert item.reads == (f"net_leakyrelu0_fwd: {low}", f"net_conv2_weight: float32, cast to {low}",
                          f"net_conv2_bias: float32, cast to {low}")
    text = str(item)
    assert f"net_conv2_fwd (Convolution, in block net_conv2 at 6) runs in {low}: planned {low}, observed {low}" in text
    assert "amp.exclude('net_conv2')" in text


def test_its_remedies_work(low):
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    assert "amp.init(fp32_ops=['Convolution']) keeps all" in str(amp.explain(net, "net_conv2_fwd", data))
    amp.exclude("net_conv2")
    item = only(amp.explain(net, "net_conv2_fwd", data))
    assert item.operator.observed == "float32"
    assert any("out of amp.exclude" in remedy for remedy in item.remedies)
    amp.deinit()
    amp.init(low, fp32_ops=["Convolution"])
    item = only(amp.explain(net, "net_conv2_fwd", data))
    assert item.operator.observed == "float32"
    assert item.why == "rule FP32: in the fp32_ops list"
    assert item.remedies == ("take 'Convolution' out of the fp32_ops or conditional_fp32_ops given to amp.init",)


def test_an_operator_kept_in_fp32_by_the_tables_can_be_lowered_as_it_says(low):
    net, data = ready(Attention(), NETWORKS["attention"][1])
    item = only(amp.explain(net, "*softmax*", data))
    assert item.operator.observed == "float32"
    assert item.remedies == (f"amp.init(target_precision_ops=[*amp.list_lp16_ops('{low}'), 'softmax']) lowers all "
                             "operators of its kind",)
    amp.deinit()
    amp.init(low, target_precision_ops=[*amp.list_lp16_ops(low), "softmax"])
    assert only(amp.explain(net, "*softmax*", data)).operator.observed == low


@pytest.mark.bf16
def test_what_has_no_kernel_cannot_be_lowered():
    amp.init("bfloat16")
    net, data = ready(Attention(), NETWORKS["attention"][1])
    item = only(amp.explain(net, "*batch_dot0", data))
    assert item.remedies == ("it cannot run in low precision: lists that ask for it are refused",)
    amp.deinit()
    with pytest.raises(amp.PolicyError, match="cannot run in bfloat16"):
        amp.init("bfloat16", target_precision_ops=["batch_dot"])


def test_what_follows_its_data_and_what_widens(low):
    net, data = ready(Attention(), NETWORKS["attention"][1])
    item = only(amp.explain(net, "*_plus0", data))
    assert "Of its inputs data is FP32" in item.why
    assert item.remedies == ("lower what comes in FP32: data",)
    follower = amp.explain(net, "*slice_axis0", data).operators[0]
    first = follower.operator.inputs[0]
    assert f"It follows its first input, {first.name}, which is {first.source_dtype}" in follower.why


def test_without_data_the_last_call_is_explained(low):
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    net(data)
    item = only(amp.explain(net, "net_conv2_fwd"))
    assert (item.operator.planned, item.operator.observed) == (low, None)
    assert "not observed" in str(item)
    assert item.reads == only(amp.explain(net, "net_conv2_fwd", data)).reads


def test_names_of_blocks_paths_and_parameters(low):
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    found = amp.report(net, data)
    for name in ("net_conv2", "6", "net_conv2_weight", "net_conv2_f*"):
        assert only(amp.explain(found, name)).operator.name == "net_conv2_fwd"
    assert len(amp.explain(found, "*").operators) == len(found.operators)


def test_a_network_without_amp():
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    item = only(amp.explain(net, "net_conv2_fwd", data))
    assert item.why.startswith("AMP did not decide about it")


def test_errors(low):
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    with pytest.raises(amp.GraphError, match=r"no operator, block or parameter 'net_conv9'.* Did you mean 'net_conv"):
        amp.explain(net, "net_conv9", data)
    with pytest.raises(TypeError, match="name of an operator"):
        amp.explain(net, 3, data)
    fresh = nn.Dense(2, in_units=3)
    fresh.initialize()
    with pytest.raises(amp.StateError, match="not been called under AMP while hybridized"):
        amp.explain(fresh, "dense")
    with pytest.raises(TypeError, match="a Gluon block"):
        amp.explain(mx.sym.var("x"), "x")
