"""Advice: each cause brought about on purpose, and named; nothing where there is nothing to say."""
from __future__ import annotations

import json
import re
from dataclasses import replace

import mxnet as mx
import pytest
from cpu_kinds import LOW
from mxnet.gluon import nn
from networks import NETWORKS, Attention, conv_net, ready

import gluon_amp as amp
from gluon_amp.debug.advise import Situation, advices
from gluon_amp.dtypes import cpu_support

FAST = cpu_support("AVX512_CORE_BF16")


@pytest.fixture
def _on():
    amp.init(LOW)


def topics(found, **changes):
    """Topics of the advice on a report, on a machine that has everything unless said otherwise."""
    machine = {"support": FAST, "unused_amx": False, "threads": "2", "processors": 2, **changes}
    return advices(Situation(replace(found, imitated=False), **machine)).topics


def dense(units=64):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(units, in_units=units))
    return ready(net, (32, units))


def test_amp_is_off():
    net, data = dense()
    assert topics(amp.report(net, data)) == ("off",)
    assert "AMP is off" in str(amp.advise(net, data, time=False))


@pytest.mark.usefixtures("_on")
def test_a_network_that_is_as_it_should_be():
    net, data = dense()
    found = amp.report(net, data, train=True)
    assert topics(found) == ()
    assert str(advices(Situation(replace(found, imitated=False), FAST, False, "2", 2))) == \
        "Nothing is known to hold this network back"


@pytest.mark.usefixtures("_on")
@pytest.mark.parametrize(("changes", "topic"), [
    ({"support": cpu_support("AVX2")}, "hardware"), ({"support": cpu_support("AVX512_CORE")}, "hardware"),
    ({"unused_amx": True}, "AMX"), ({"threads": None, "processors": 8}, "threads")])
def test_the_machine(changes, topic):
    net, data = dense()
    assert topics(amp.report(net, data, train=True), **changes) == (topic,)


@pytest.mark.usefixtures("_on")
def test_casts_of_parameters_in_inference_and_small_batches():
    net, data = dense()
    assert topics(amp.report(net, data)) == ("parameter casts",)
    assert topics(amp.report(net, data[:1], train=True)) == ("batch",)
    assert topics(amp.report(net, data[:4], train=True)) == ()


@pytest.mark.usefixtures("_on")
def test_code_that_is_not_hybridized():
    net, data = dense()
    net.hybridize(active=False)
    found = advices(Situation(amp.report(net, data, train=True), FAST, False, "2", 2))
    (advice,) = [item for item in found if item.topic == "hybridize"]
    assert advice.share == 1.0
    assert "net.hybridize(" in advice.text


@pytest.mark.parametrize("arguments", [{"fp32_ops": ["FullyConnected"]}, {"target_precision_ops": ["Convolution"]},
                                       {"conditional_fp32_ops": [("FullyConnected", "num_hidden", ["64"])]}])
def test_lists_that_force_fp32(arguments):
    amp.init(LOW, **arguments)
    net, data = dense()
    found = amp.report(net, data, train=True)
    assert topics(found) == ("lists",)
    (advice,) = advices(Situation(replace(found, imitated=False), FAST, False, "2", 2))
    assert advice.share == 1.0
    assert "FullyConnected" in advice.text
    assert advice.operators == ("net_dense0_fwd",)


@pytest.mark.usefixtures("_on")
def test_excluded_blocks():
    amp.exclude("net_dense0")
    net, data = dense()
    assert topics(amp.report(net, data, train=True)) == ("exclusions",)


@pytest.mark.bf16
def test_channels_that_are_no_multiple():
    amp.init("bfloat16")

    def found(channels, groups=1):
        net = nn.HybridSequential()
        net.add(nn.Conv2D(channels, 3, padding=1, in_channels=32, groups=groups))
        return topics(amp.report(*ready(net, (4, 32, 16, 16)), train=True), support=replace_multiple(16))
    assert found(32) == ()
    assert found(36) == ("channels",)
    assert found(32, groups=4) == ()  # channels of a group are no channels of the data


def replace_multiple(multiple):
    return FAST._replace(channel_multiple=multiple)


@pytest.mark.bf16
def test_kernels_that_are_missing_and_shapes_that_are_unsound():
    amp.init("bfloat16")
    net, data = ready(Attention(units=8, heads=2), (4, 64, 8))
    assert "no kernel" in topics(amp.report(net, data, train=True))
    small = nn.HybridSequential()
    small.add(nn.Conv2D(32, 3, padding=1, in_channels=32))
    assert topics(amp.report(*ready(small, (4, 32, 1, 1)), train=True)) == ("shapes",)


@pytest.mark.usefixtures("_on")
def test_where_the_time_goes():
    net, data = dense()
    found = amp.report(net, data, train=True, time=True)
    slow = replace(found.operators[0], op="BatchNorm", milliseconds=90.0)
    fast = replace(found.operators[0], milliseconds=5.0)
    casts = tuple(replace(row, milliseconds=0.0) for row in found.inserted)
    busy = replace(found, operators=(fast, slow), inserted=casts, other_milliseconds=0.0)
    assert topics(busy) == ("time",)
    casting = tuple(replace(row, milliseconds=50.0) for row in found.inserted)
    assert topics(replace(found, operators=(replace(fast, milliseconds=1000.0),), inserted=casting,
                          other_milliseconds=0.0)) == ("casts",)


@pytest.mark.usefixtures("_on")
def test_advice_on_a_report_and_as_dicts():
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    found = amp.report(net, data)
    told = amp.advise(found)
    assert len(told) == len(told.topics) == len(list(told)) > 0
    assert [item["topic"] for item in json.loads(json.dumps(told.to_dict()))] == list(told.topics)
    assert str(told).startswith("1. ")
    with pytest.raises(TypeError, match="no data beside a report"):
        amp.advise(found, data)
    shares = [item.share for item in told if item.share is not None]
    assert shares == sorted(shares, reverse=True)


def test_imitated_float16_is_not_for_speed():
    amp.init("float16")
    net, data = dense()
    assert "hardware" in amp.advise(net, data, time=False).topics


def test_shares_of_the_time_add_up():
    net = nn.HybridSequential()
    net.add(nn.Activation("tanh"), nn.LayerNorm(in_channels=4096), nn.Dense(1, in_units=4096))
    net.initialize()
    net.hybridize()
    amp.init()
    data = mx.nd.ones((256, 4096))  # next to nothing of the time goes into the one row of products
    net(data)
    advice = next(item for item in amp.advise(net, data) if item.topic == "time")
    percents = [int(found) for found in re.findall(r"(\d+)%", advice.text)]
    assert sum(percents) in (99, 100, 101)
