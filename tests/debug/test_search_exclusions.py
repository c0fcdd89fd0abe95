"""search_exclusions: planted faults stay in FP32 and nothing else does; policies go through files to init."""
from __future__ import annotations

import itertools
import json
import logging
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxnet import gluon
from mxnet.gluon import HybridBlock, nn
from networks import NETWORKS, outputs_of, ready

import gluon_amp as amp
from gluon_amp.base.metrics import fewest


def diagonal(*factors, width=4, hybridize=True):
    """Layers that multiply by a factor each."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in factors:
            net.add(nn.Dense(width, in_units=width, use_bias=False))
    net.initialize()
    for layer, factor in zip(net, factors):
        layer.weight.set_data(mx.nd.array(np.eye(width) * factor))
    net.hybridize(hybridize)
    return net, mx.nd.array(2.0 ** np.arange(width).reshape(1, width))


def search(net, data, *args, dtype="float16", **options):
    return amp.search_exclusions(net, data, *args, target_dtype=dtype, **options)


def error_of(net, data, policy):
    plain = outputs_of(net, data)
    amp.init(policy=policy)
    mixed = outputs_of(net, data)
    amp.deinit()
    return max(float(np.linalg.norm(a.astype("float64") - b) / np.linalg.norm(a)) for a, b in zip(plain, mixed))


def test_the_one_operator_that_overflows_is_found():
    net, data = diagonal(2, 2.0 ** 17, 2.0 ** -17, 2)  # float16 ends at 65504, and the third factor is too small for it
    policy = search(net, data, 1e-6)
    assert policy.excluded == {"net_dense1_fwd", "net_dense2_fwd"}
    assert error_of(net, data, policy) == 0
    assert np.isnan(error_of(net, data, replace(policy, excluded=frozenset())))


def test_the_one_operator_that_rounds_too_much_is_found():
    factors = [1 + 2.0 ** -9, 1 + 2.0 ** -11 + 2.0 ** -12, 2, 4]  # the second loses 2 ** -12, the others nothing
    net, data = diagonal(*factors)
    assert search(net, data, 2.0 ** -11).excluded == set()
    exact = search(net, data, 2.0 ** -16)
    assert "net_dense1_fwd" in exact.excluded
    assert error_of(net, data, exact) <= 2.0 ** -16


@pytest.mark.parametrize("share", [0.7, 0.4, 0.1])
def test_the_result_suffices_and_is_as_small_as_any(share):
    mx.random.seed(4)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(*(nn.Dense(24, in_units=24, use_bias=False) for _ in range(5)))
    net.initialize(mx.init.Normal(0.3))
    net.hybridize()
    data = mx.nd.random.normal(shape=(16, 24))
    names = [f"net_dense{i}_fwd" for i in range(5)]
    errors = {chosen: error_of(net, data, amp.Policy("float16", excluded=frozenset(chosen)))
              for count in range(6) for chosen in itertools.combinations(names, count)}
    limit = share * errors[()]
    smallest = min(len(chosen) for chosen, error in errors.items() if error <= limit)
    found = tuple(sorted(search(net, data, limit).excluded))
    assert errors[found] <= limit
    assert all(errors[tuple(name for name in found if name != left_out)] > limit for left_out in found)
    assert len(found) <= smallest + 1


class TwoWays(HybridBlock):
    """A large and a small layer that lose equally much, side by side."""

    def __init__(self):
        super().__init__(prefix="two_")
        with self.name_scope():
            self.large = nn.Dense(4, in_units=256, use_bias=False)
            self.small = nn.Dense(4, in_units=4, use_bias=False)

    def hybrid_forward(self, F, x, y):
        return self.large(x) + self.small(y)


def two_ways():
    net = TwoWays()
    net.initialize()
    lossy = 1 + 2.0 ** -11 - 2.0 ** -13
    net.small.weight.set_data(mx.nd.array(np.eye(4) * lossy))
    net.large.weight.set_data(mx.nd.array(np.eye(4, 256) * lossy))
    net.hybridize()
    return net, (mx.nd.ones((2, 256)), mx.nd.ones((2, 4)))


def test_cheap_operators_are_excluded_rather_than_costly_ones():
    net, data = two_ways()
    whole = amp.compare(net, data, target_dtype="float16", train_mode=False, gradients=False).outputs[0]
    assert search(net, data, 0.6 * whole).excluded == {"two_dense1_fwd"}  # the small one


@pytest.mark.parametrize("kind", [float, np.asarray, mx.nd.array])
@pytest.mark.parametrize(("sign", "greater_is_better"), [(1, True), (-1, False)])
def test_a_metric_with_a_budget(sign, greater_is_better, kind):
    net, data = diagonal(2, 2.0 ** 17, 2.0 ** -17, 2)
    seen = []

    def accuracy(block):
        seen.append(block)
        return sign * kind(np.isfinite(block(data).asnumpy()).mean(keepdims=True))

    policy = search(net, data, metric=accuracy, budget=0.1, greater_is_better=greater_is_better)
    assert policy.excluded == {"net_dense1_fwd", "net_dense2_fwd"}
    assert set(seen) == {net}
    assert search(net, data, metric=accuracy, budget=1.0, greater_is_better=greater_is_better).excluded == set()


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.bf16)])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_networks_of_every_kind_get_as_accurate_as_asked(name, dtype):
    make, shape = NETWORKS[name]
    net, data = ready(make(), shape)
    whole = max(amp.compare(net, data, target_dtype=dtype, train_mode=False, gradients=False).outputs)
    policy = search(net, data, 0.5 * whole, dtype=dtype)
    assert policy.excluded
    plain = outputs_of(net, data)
    amp.init(policy=policy)
    for expected, found in zip(plain, outputs_of(net, data)):
        assert np.linalg.norm(expected - found) <= 0.5001 * whole * np.linalg.norm(expected)


def test_nothing_is_left_behind(caplog):
    net, data = diagonal(2, 2.0 ** 17, 2.0 ** -17, 2)
    before = outputs_of(net, data)
    invoke = mx.ndarray.register._imperative_invoke
    with caplog.at_level(logging.INFO, "gluon_amp"):
        search(net, data, 1e-6)
    assert "2 of 4 operators stay in float32" in caplog.text
    assert mx.ndarray.register._imperative_invoke is invoke
    assert len(net._cached_op.planner._made) <= 1
    np.testing.assert_array_equal(outputs_of(net, data)[0], before[0])


class Noisy(gluon.Block):
    """Gives something else every time."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.random = np.random.RandomState(0)

    def forward(self, x):
        return self.net(x) + float(self.random.normal())


def test_a_reference_that_does_not_agree_with_itself_is_refused():
    net, data = diagonal(1, 1)
    with pytest.raises(amp.StateError, match="two runs in FP32 do not agree: they differ by"):
        search(Noisy(net), data, 0.01)
    values = iter(range(10))
    with pytest.raises(amp.StateError, match="two runs in FP32 do not agree: they differ by 1"):
        search(net, data, metric=lambda block: next(values), budget=0.5)
    with pytest.raises(amp.StateError, match="metric is nan in FP32"):
        search(net, data, metric=lambda block: float("nan"), budget=0.5)
    with pytest.raises(amp.StateError, match="not finite in FP32"):
        search(net, data * np.inf, 0.5)


def test_what_has_no_name_in_a_graph_cannot_be_excluded():
    net, data = diagonal(2.0 ** 17, 2.0 ** -17, hybridize=False)
    with pytest.raises(amp.StateError, match=r"call net.hybridize\(\) first"):
        search(net, data, 1e-6)


@pytest.mark.parametrize(("metric", "message"), [
    (lambda block: None, r"an array of one, received the result of metric=None"),
    (lambda block: (1.0, 2.0), r"received the result of metric=\(1\.0, 2\.0\)"),
    (lambda block: mx.nd.ones(3), "received the result of metric="),
    (mx.metric.Accuracy(), "a function of the network, received metric=")])
def test_what_is_no_metric_is_named(metric, message):
    net, data = diagonal(1)
    with pytest.raises(amp.PolicyError, match=message):
        search(net, data, metric=metric, budget=0.1)


def test_mistakes_are_refused():
    net, data = diagonal(1)
    for arguments in ({}, {"max_error": 0.1, "metric": len, "budget": 1}, {"metric": len}, {"budget": 1.0}):
        with pytest.raises(amp.PolicyError, match=r"either max_error, or metric and budget|metric and budget belong"):
            search(net, data, **arguments)
    with pytest.raises(amp.PolicyError, match=r"0 or above, received max_error=-1"):
        search(net, data, -1)


def test_a_policy_goes_through_a_file_to_init_and_conversion(tmp_path):
    net, data = diagonal(2, 2.0 ** 17, 2.0 ** -17, 2)
    policy = search(net, data, 1e-6)
    policy.save(tmp_path / "policy.json")
    assert json.loads((tmp_path / "policy.json").read_text())["excluded"] == ["net_dense1_fwd", "net_dense2_fwd"]
    loaded = amp.Policy.load(tmp_path / "policy.json")
    assert error_of(net, data, loaded) == 0
    amp.init(policy=loaded)
    assert amp.active_dtype("cpu") == "float16"
    with pytest.raises(amp.StateError, match="other settings"):
        amp.init("float16")
    amp.init(policy=loaded)


@pytest.mark.bf16
@pytest.mark.filterwarnings("ignore:the converted network stays in FP32")
def test_conversion_takes_a_policy():
    net, data = diagonal(1.003, 1.003, width=32)
    policy = replace(amp.Policy("bfloat16"), excluded=frozenset({"net_dense1_fwd"}))
    plain = outputs_of(net, data * 0 + 1)[0]
    converted = amp.convert_hybrid_block(net, "bfloat16", exclude=policy)
    both = amp.convert_hybrid_block(net, "bfloat16", exclude=["net_dense0_fwd", "net_dense1_fwd"])
    error = [np.abs(outputs_of(block, data * 0 + 1)[0] - plain).max() for block in (converted, both)]
    assert error[1] == 0
    assert error[0] > 0
    with pytest.raises(amp.PolicyError, match="no node or block 'elsewhere'"):
        amp.convert_hybrid_block(net, "bfloat16", exclude=amp.Policy("bfloat16", excluded=frozenset({"elsewhere"})))


def test_init_takes_a_policy_alone():
    with pytest.raises(amp.PolicyError, match="expected policy alone, received fp32_ops, policy: "):
        amp.init(policy=amp.Policy("float16"), fp32_ops=["dot"])
    with pytest.raises(amp.PolicyError, match="expected policy alone, received target_dtype, policy: "):
        amp.init("float16", policy=amp.Policy("float16"))
    with pytest.raises(TypeError, match="expected a Policy, received policy='float16'"):
        amp.init(policy="float16")
    with pytest.raises(amp.DTypeError):
        amp.init(policy=amp.Policy("int8"))


@given(st.integers(1, 40), st.data())
def test_subsets_are_minimal_for_conditions_that_more_items_cannot_break(count, data):
    items = list(range(count))
    needed = data.draw(st.sets(st.sampled_from(items)))
    asked = []

    def holds(found):
        asked.append(tuple(found))
        return needed <= set(found)

    prefix = fewest(items, holds)
    assert prefix == items[:max(needed, default=-1) + 1]
    assert len(asked) <= 2 + count.bit_length()
    assert set(fewest(items, holds, prune=True)) == needed
    assert fewest(items, lambda found: False) is None
