"""Measurements of operators: what is measured, what they change, and the file that keeps them."""
from __future__ import annotations

import json

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import take_for
from mxnet.gluon import nn
from networks import relative

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.errors import PolicyError
from gluon_amp.passes import channels_last
from gluon_amp.rules.measurements import signature
from gluon_amp.state.devices import machine
from gluon_amp.state.policies import tuned

pytestmark = pytest.mark.machine
DENSE = {"flatten": "True", "no_bias": "False"}


def net():
    made = nn.HybridSequential(prefix="net_")
    with made.name_scope():
        made.add(nn.Dense(32, in_units=16), nn.Dense(32, in_units=32), nn.Dense(32, in_units=32))
    made.initialize(mx.init.Xavier())
    return made


def measured(slow=(), fast=(), dtype="bfloat16"):
    """Times by number of inputs and units, for a batch of 4."""
    def entry(units, inputs):
        return signature("FullyConnected", {**DENSE, "num_hidden": str(units)}, (4, inputs))
    return amp.Tuning(machine("cpu", dtype), {**{entry(*each): (1.0, 3.0) for each in slow}, **{entry(*each): (3.0, 1.0)
                                                                                   for each in fast}})


@pytest.fixture(autouse=True)
def _off():
    yield
    amp.deinit()


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', '{"a": {"b": [1]}}', '{"a": {"b": [1, 2, 3]}}',
                                  '{"a": {"b": [null, 1]}}', '{"a": {"b": "xy"}}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    for read in (amp.Tuning.load_all, lambda path: amp.Tuning.load(path, "a"), amp.Tuning("a").save):
        with pytest.raises(PolicyError, match="not a file of measurements"):
            read(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == text


@pytest.mark.bf16
class TestTune:
    @pytest.fixture(autouse=True)
    def _as_with_instructions(self, monkeypatch):
        take_for(monkeypatch, "AVX512_CORE_BF16")

    def test_every_kind_of_low_precision_operator_is_measured_once(self, tmp_path):
        tuning = amp.tune(net(), mx.nd.ones((4, 16)), rounds=1, cache=tmp_path / "t.json", progress=False)
        assert set(tuning.milliseconds) == set(measured(fast=[(32, 16), (32, 32)]).milliseconds)
        assert all(low > 0 and fp32 > 0 for fp32, low in tuning.milliseconds.values())

    def test_the_file_keeps_what_other_machines_measured(self, tmp_path):
        kept = {"another": {"operator": [1.0, 2.0]}}
        (tmp_path / "t.json").write_text(json.dumps(kept))
        tuning = amp.tune(net(), mx.nd.ones((4, 16)), rounds=1, cache=tmp_path / "t.json", progress=False)
        found = json.loads((tmp_path / "t.json").read_text())
        assert found["another"] == kept["another"]
        assert set(found[machine()]) == set(tuning.milliseconds)

    def test_bad_arguments(self, tmp_path):
        with pytest.raises(ValueError, match="expected a number of rounds above 0, received rounds=0"):
            amp.tune(net(), mx.nd.ones((4, 16)), rounds=0)
        (tmp_path / "t.json").write_text("[]")
        with pytest.raises(PolicyError, match="not a file of measurements"):
            amp.tune(net(), mx.nd.ones((4, 16)), rounds=1, cache=tmp_path / "t.json", progress=False)
        assert (tmp_path / "t.json").read_text() == "[]"


def chained(limits=None):
    """Convolutions with BatchNorm and rectifiers, or ReLU6."""
    made = nn.HybridSequential(prefix="chained_")
    with made.name_scope():
        made.add(nn.Conv2D(16, 3, padding=1, in_channels=3))
        for _ in range(2):
            made.add(nn.Conv2D(16, 3, padding=1, in_channels=16), nn.BatchNorm(in_channels=16),
                     nn.HybridLambda(lambda F, x: F.clip(x, 0, 6)) if limits else nn.Activation("relu"))
        made.add(nn.GlobalAvgPool2D(), nn.Dense(4, in_units=16))
    made.initialize(mx.init.Xavier())
    return made


def trained(made):
    """Take a step and return what the network gave, the gradients, and how many operators ran in C++."""
    data = mx.nd.array(np.random.RandomState(0).normal(size=(4, 3, 12, 12)))
    made.hybridize()
    with mx.autograd.record():
        out = made(data)
    out.backward()
    graph = made._cached_op.latest.graph if amp.is_active() else None
    count = sum(node.op in channels_last.NATIVE for node in graph.operators()) if graph else 0
    grads = [each.grad().asnumpy() for each in made.collect_params().values() if each.grad_req != "null"]
    return [out.asnumpy(), *grads], count


@pytest.mark.skipif(not all(map(native.is_available, channels_last.NATIVE)), reason="the operators in C++ are missing")
class TestChains:
    @pytest.fixture(autouse=True)
    def _in_fp32(self, monkeypatch):
        take_for(monkeypatch, "AVX512_CORE")

    @staticmethod
    def tuned(made, tmp_path, **settings):
        return amp.tune(made, mx.nd.ones((4, 3, 12, 12)), rounds=1, cache=tmp_path / "t.json", progress=False,
                        **settings)

    def test_every_chain_is_measured_in_fp32_and_the_network_is_left_alone(self, tmp_path):
        made = chained()
        before = {name: each.data().asnumpy() for name, each in made.collect_params().items()}
        tuning = self.tuned(made, tmp_path)
        (key, times), = tuning.milliseconds.items()
        assert key.startswith("chain of 7 operators on (4, 16, 12, 12): ")
        assert min(times) > 0
        assert amp.Tuning.load(tmp_path / "t.json", machine()) == tuning
        for name, each in made.collect_params().items():
            np.testing.assert_array_equal(each.data().asnumpy(), before[name])

    def test_networks_with_loops_are_left_out(self, tmp_path):
        class Looping(nn.HybridSequential):
            def hybrid_forward(self, F, x):
                for layer in self._children.values():
                    x = layer(x)
                steps, _ = F.contrib.foreach(lambda step, state: (step + state, step), F.expand_dims(x, 0), x)
                return steps

        made = Looping()
        made.add(*chained()._children.values())
        assert not self.tuned(made, tmp_path).milliseconds

    def test_inference_has_no_chains(self, tmp_path):
        assert not self.tuned(chained(), tmp_path, training=False).milliseconds

    @pytest.mark.parametrize("limits", [False, True], ids=["rectifiers", "clips"])
    def test_a_chain_runs_as_it_was_faster(self, tmp_path, limits):
        made = chained(limits)
        expected, _ = trained(made)
        key, = self.tuned(made, tmp_path).milliseconds
        counts = {}
        for name, times in {"slow": (1.0, 2.0), "fast": (2.0, 1.0), "even": (1.0, 1.02)}.items():
            amp.init(tuning=amp.Tuning(machine(), {key: times}))
            received, counts[name] = trained(made)
            amp.deinit()
            for one, other in zip(received, expected):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
        amp.init()
        _, estimated = trained(made)
        assert counts["slow"] == 0
        assert counts["fast"] == 5
        assert counts["even"] == estimated == (5 if limits else 0)


def test_what_is_no_network():
    with pytest.raises(TypeError, match="expected a HybridBlock, received net=3"):
        amp.tune(3, mx.nd.ones((4, 16)))


class TestUse:
    @pytest.mark.bf16
    def test_slow_operators_of_these_shapes_stay_in_fp32(self):
        made, data = net(), mx.nd.ones((4, 16))
        expected = made(data).asnumpy()
        made.hybridize()
        amp.init("bfloat16", tuning=measured(slow=[(32, 16), (32, 32)]))
        np.testing.assert_allclose(made(data).asnumpy(), expected, rtol=1e-5, atol=1e-7)
        low = made(mx.nd.ones((3, 16))).asnumpy()  # another batch size was not measured
        assert 1e-4 < relative(expected[:3], low) < 0.03

    @pytest.mark.bf16
    def test_conversion_heeds_them(self):
        converted = amp.convert_hybrid_block(net(), "bfloat16", data_example=mx.nd.ones((4, 16)),
                                             tuning=measured(slow=[(32, 32)]))
        low = [name for name, parameter in converted.collect_params().items() if parameter.dtype != np.float32]
        assert sorted(low) == ["net_dense0_bias", "net_dense0_weight"]

    def test_files_and_the_default_one(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(FileNotFoundError, match=r"tuning\.json"):
            amp.init(tuning=True)
        assert not amp.is_active()
        measured(slow=[(32, 16)], dtype=None).save(tmp_path / "gluon_amp" / "tuning.json")
        amp.init(tuning=True)
        amp.deinit()
        amp.init(tuning=tmp_path / "gluon_amp" / "tuning.json")

    def test_measurements_of_another_machine_are_refused(self, tmp_path):
        other = amp.Tuning("another", {"operator": (1.0, 2.0)})
        other.save(tmp_path / "t.json")
        for tuning in (other, tmp_path / "t.json"):
            with pytest.raises(PolicyError, match="another"):
                amp.init(tuning=tuning)
        assert not amp.is_active()

    def test_devices_and_types_have_measurements_of_their_own(self, tmp_path):
        own, other = measured(slow=[(32, 16)]), measured(slow=[(32, 32)], dtype="float16")
        assert own.machine != other.machine
        for tuning in (own, other):
            tuning.save(tmp_path / "t.json")
        policies = tuned({"cpu": amp.Policy("bfloat16")}, tmp_path / "t.json")
        assert policies["cpu"].slow == own.slow
        assert machine("gpu(1)", "float16") not in (own.machine, other.machine)
