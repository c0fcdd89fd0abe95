"""What runs on a CPU with less than others, and on a GPU that cannot be used: the choice, what is said, what FP32 gives."""
from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from functools import lru_cache

import mxnet as mx
import numpy as np
import pytest
from machines import run_on
from mxnet import autograd, gluon
from mxnet.gluon import nn
from networks import NETWORKS, conv_net, gradients, outputs_of, ready

import gluon_amp as amp
from gluon_amp import _isa, devices
from gluon_amp.cli import env, main
from gluon_amp.dtypes import BFLOAT16, FLOAT16, FLOAT32, cpu_support, cuda_support

pytestmark = pytest.mark.machine
NO_BF16 = ["AVX2", "AVX512_CORE"]

FACTS = """
import json, logging, os, tempfile, warnings
import gluon_amp as amp, mxnet as mx
lines, warned, found = [], [], {}
class Keep(logging.Handler):
    def emit(self, record): lines.append((record.levelname, record.getMessage()))
logging.getLogger("gluon_amp").addHandler(Keep())
logging.getLogger("gluon_amp").setLevel(logging.INFO)
warnings.showwarning = lambda message, category, filename, *rest: warned.append((str(message), filename))
warnings.simplefilter("always", UserWarning)

def noted(name, action):
    lines.clear(); warned.clear()
    try:
        result = action()
    except amp.DTypeError as error:
        result = f"DTypeError: {error}"
    active = [amp.is_active(), amp.active_dtype()]
    found[name] = {"result": result, "active": active, "lines": list(lines), "warned": list(warned)}

net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Conv2D(32, 3, in_channels=16), mx.gluon.nn.BatchNorm(in_channels=32),
        mx.gluon.nn.Activation("relu"), mx.gluon.nn.Dense(4))
net.initialize()
data = mx.nd.random.normal(shape=(2, 16, 6, 6))
expected = net(data)
net.hybridize()

def run(net):
    return float((net(data) - expected).norm().asscalar() / expected.norm().asscalar())

def region(dtype):
    with amp.autocast(dtype=dtype):
        return amp.active_dtype()

def converted(*dtype):
    made = amp.convert_hybrid_block(net, *dtype)
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.getsize(file) for file in made.export(folder + "/net")]
    return {"summary": made.conversion.summary(), "dtype": made.conversion.target_dtype,
            "low": made.conversion.low_precision, "size": files[1], "block": made}

def running(*dtype):
    return run(amp.convert_hybrid_block(net, *dtype))

def init(*dtype):
    amp.deinit()
    amp.init(*dtype)
    return run(net)

noted("default", init)
noted("bfloat16", lambda: init("bfloat16"))
noted("bfloat16 again", lambda: init("bfloat16"))
amp.deinit()
noted("float32", lambda: init("float32"))
amp.deinit()
noted("region", lambda: region(None))
noted("bfloat16 region", lambda: region("bfloat16"))
for name, dtype in (("", ()), ("bfloat16 ", ("bfloat16",)), ("float32 ", ("float32",))):
    noted(name + "conversion", lambda: {key: value for key, value in converted(*dtype).items() if key != "block"})
    noted(name + "converted", lambda: running(*dtype))
print(json.dumps(found))
"""


@lru_cache(maxsize=None)
def facts(isa):
    """What init, regions and conversions do and say in a fresh process on such a CPU."""
    done = run_on(isa, FACTS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def texts(fact):
    return [message for message, _ in fact["warned"]]


class TestTheChoice:
    @pytest.mark.parametrize("isa", NO_BF16)
    def test_without_bf16_instructions_everything_stays_in_fp32_and_nothing_warns(self, isa):
        found = facts(isa)["default"]
        assert found["active"] == [True, None]
        assert found["result"] < 1e-6
        assert found["warned"] == []

    def test_with_them_it_is_bfloat16(self):
        found = facts("AVX512_CORE_BF16")["default"]
        assert found["active"] == [True, "bfloat16"]
        assert 1e-4 < found["result"] < 0.02
        assert found["warned"] == []

    @pytest.mark.parametrize("isa", [*NO_BF16, "AVX512_CORE_BF16"])
    def test_one_line_says_device_type_reason_and_what_is_on(self, isa):
        (level, line), = facts(isa)["default"]["lines"]
        has = "no " if isa in NO_BF16 else ""
        dtype = "float32" if isa in NO_BF16 else "bfloat16"
        assert level == "INFO"
        assert line.startswith(f"AMP runs {dtype} on the cpu, because this CPU has {has}BF16 instructions ({isa})")
        assert "Switched on: " in line
        on = line.split("Switched on: ")[1].split(", ")
        assert {"shape_operands", "faster updates"} <= set(on)
        assert ("place_casts" in on) is False  # what is required is not worth a word
        assert ("align_channels" in on) == (isa not in NO_BF16)

    def test_a_named_bfloat16_is_emulated_with_one_warning_a_process(self):
        found = facts("AVX512_CORE")
        text, = texts(found["bfloat16"])
        assert text == ("AMP will be slow on the cpu: this CPU has no BF16 instructions (AVX512_CORE): oneDNN emulates "
                        "bfloat16, about 2x slower than FP32")
        assert found["bfloat16"]["warned"][0][1] == "<string>"  # the user's code
        assert found["bfloat16"]["active"] == [True, "bfloat16"]
        assert 1e-4 < found["bfloat16"]["result"] < 0.02
        assert texts(found["bfloat16 again"]) == texts(found["bfloat16 region"]) == []
        assert found["bfloat16 region"]["result"] == "bfloat16"

    def test_without_avx512_a_named_bfloat16_is_refused(self):
        found = facts("AVX2")
        for name in ("bfloat16", "bfloat16 region"):
            assert "received 'bfloat16', which needs a CPU with AVX512 (cpu: this CPU has no BF16" in found[name]["result"]
            assert "Leave the type out" in found[name]["result"]
            assert found[name]["active"] == [False, None]

    @pytest.mark.parametrize("isa", [*NO_BF16, "AVX512_CORE_BF16"])
    def test_a_named_float32_is_taken(self, isa):
        found = facts(isa)["float32"]
        assert (found["active"], found["warned"]) == ([True, None], [])
        assert found["result"] < 1e-6

    @pytest.mark.parametrize("isa", [*NO_BF16, "AVX512_CORE_BF16"])
    def test_regions_take_the_machines_type(self, isa):
        found = facts(isa)["region"]
        assert found["result"] == (None if isa in NO_BF16 else "bfloat16")
        assert found["warned"] == []


class TestConversion:
    @pytest.mark.parametrize("isa", NO_BF16)
    def test_without_a_type_it_is_folded_fused_and_fp32(self, isa):
        found = facts(isa)
        made = found["conversion"]["result"]
        assert made["dtype"] == "float32"
        assert made["summary"].startswith(f"float32: this CPU has no BF16 instructions ({isa}), ")
        assert "fold_batch_norm 1" in made["summary"]
        assert found["converted"]["result"] < 1e-5
        assert found["conversion"]["warned"] == found["converted"]["warned"] == []

    def test_without_a_type_it_is_bfloat16_where_that_is_faster(self):
        found = facts("AVX512_CORE_BF16")
        assert found["conversion"]["result"]["dtype"] == "bfloat16"
        assert found["conversion"]["result"]["low"] > 0
        assert 1e-4 < found["converted"]["result"] < 0.02

    @pytest.mark.parametrize("isa", [*NO_BF16, "AVX512_CORE_BF16"])
    def test_with_a_type_it_is_that_on_any_machine(self, isa):
        found = facts(isa)
        low, full = (found[f"{dtype} conversion"]["result"] for dtype in ("bfloat16", "float32"))
        assert (low["dtype"], full["dtype"]) == ("bfloat16", "float32")
        assert low["low"] > 0
        assert low["size"] < 0.6 * full["size"]
        assert full["summary"].startswith("float32: float32 was asked for, " if isa not in NO_BF16 else "float32: ")
        assert found["float32 converted"]["result"] < 1e-5

    def test_it_warns_where_this_machine_is_slower_or_cannot_run_it(self):
        assert texts(facts("AVX512_CORE_BF16")["bfloat16 conversion"]) == []
        slow, = texts(facts("AVX512_CORE")["bfloat16 conversion"])
        assert slow.startswith("the bfloat16 network will be slower than FP32 on this machine: this CPU has no BF16 ins")
        never, = texts(facts("AVX2")["bfloat16 conversion"])
        assert never == ("the bfloat16 network cannot run on this machine, where this CPU has no BF16 instructions "
                         "(AVX2): it needs a CPU with AVX512, and is fast with BF16 instructions")

    def test_a_network_that_this_machine_cannot_run_is_refused_when_it_runs(self):
        found = facts("AVX2")["bfloat16 converted"]["result"]
        assert "expected a CPU with AVX512 to run a bfloat16 network, but this CPU has no BF16" in found
        assert "Export the network" in found
        assert 1e-4 < facts("AVX512_CORE")["bfloat16 converted"]["result"] < 0.02


@pytest.fixture(params=NO_BF16)
def lesser(request, monkeypatch):
    """A CPU without BF16 instructions, as far as this package knows."""
    take_for(monkeypatch, request.param)
    return request.param


def take_for(monkeypatch, isa):
    monkeypatch.setattr(devices, "cpu_support", lambda: cpu_support(isa))
    monkeypatch.setattr(devices, "cpu_isa", lambda: isa)
    monkeypatch.setattr(devices, "_warned", set())
    devices.require_bfloat16.cache_clear()


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def _asks_no_other_process(self, monkeypatch):
        monkeypatch.setattr(env, "_onednn", list)

    def test_env_begins_with_the_verdict(self, lesser, capsys):
        assert main(["env"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert said.startswith(f"amp.init() runs float32 on the cpu, because this CPU has no BF16 instructions ({lesser})")

    def test_env_in_json(self, lesser, capsys):
        assert main(["env", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert next(iter(found)) == "verdict"
        assert found["chosen"]["cpu"]["dtype"] == "float32"

    def test_convert_and_compare_say_the_same(self, lesser, tmp_path, capsys):
        net, data = ready(conv_net(), NETWORKS["conv"][1])
        net(data)
        net.export(str(tmp_path / "net"))
        files = [str(tmp_path / name) for name in ("net-symbol.json", "net-0000.params")]
        shape = ["--data", "data:4,3,16,16"]
        assert main(["convert", *files, "-o", str(tmp_path / "out"), *shape]) == 0
        assert f"float32: this CPU has no BF16 instructions ({lesser})" in " ".join(capsys.readouterr().out.split())
        assert main(["compare", *files, *shape, "--rounds", "1", "--batches", "1", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["max_error"] < 1e-5 * found["largest_output"]


def trained(mode, poison=None):
    """Weights and losses of five steps of SGD with momentum, under AMP if it is on; one batch may be poisoned."""
    mx.random.seed(3)
    np.random.seed(3)
    net = conv_net()
    net.initialize(mx.init.Xavier(magnitude=2))
    net.hybridize(**mode)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9, "wd": 1e-3},
                            update_on_kvstore=False)
    if amp.is_active():
        amp.init_trainer(trainer)
    random, losses, skipped = np.random.RandomState(0), [], []
    for number in range(5):
        data = mx.nd.array(random.normal(size=NETWORKS["conv"][1]))
        if number == poison:
            data[0, 0, 0, 0] = np.inf
        with autograd.record():
            loss = (net(data) ** 2).mean()
            with amp.scale_loss(loss, trainer, enabled=amp.is_active()) as scaled:
                autograd.backward(scaled)
        trainer.step(1)
        losses.append(float(loss.asscalar()))
        skipped.append(amp.is_active() and trainer._amp_loss_scaler.step_was_skipped)
    weights = [parameter.data().asnumpy() for parameter in net.collect_params().values()
               if parameter.grad_req != "null"]
    return weights, losses, skipped, trainer


def module_trained():
    mx.random.seed(2)
    np.random.seed(2)
    body = mx.sym.relu(mx.sym.Convolution(mx.sym.var("data"), num_filter=20, kernel=(3, 3), name="conv"))
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(body), num_hidden=5, name="fc"), name="softmax")
    module = mx.mod.Module(symbol, label_names=["softmax_label"])
    module.bind([("data", (8, 16, 8, 8))], [("softmax_label", (8,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 0.1})
    random = np.random.RandomState(3)
    for _ in range(3):
        module.forward_backward(mx.io.DataBatch([mx.nd.array(random.randn(8, 16, 8, 8))],
                                                [mx.nd.array(random.randint(0, 5, 8))]))
        module.update()
    return [array.asnumpy() for array in module.get_params()[0].values()]


class TestTraining:
    """In FP32 training is stock MXNet's, bit by bit."""

    @pytest.mark.parametrize("mode", [{"active": False}, {}, {"static_alloc": True},
                                      {"static_alloc": True, "static_shape": True}], ids=str)
    def test_weights_and_losses_are_those_of_fp32(self, lesser, mode):
        weights, losses, *_ = trained(mode)
        amp.init()
        found, found_losses, skipped, trainer = trained(mode)
        assert found_losses == losses
        for one, other in zip(weights, found):
            np.testing.assert_array_equal(one, other)
        assert skipped == [False] * 5
        assert trainer._amp_loss_scaler.loss_scale == 1

    def test_a_module_trains_as_in_fp32(self, lesser):
        weights = module_trained()
        amp.init()
        for one, other in zip(weights, module_trained()):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("name", NETWORKS)
    def test_every_kind_of_network(self, lesser, name):
        make, shape = NETWORKS[name]
        net, data = ready(make(), shape, static_alloc=True)
        outputs = outputs_of(net, data)
        amp.init()
        for one, other in zip(outputs, outputs_of(net, data)):
            np.testing.assert_array_equal(one, other)
        found = gradients(net, data)
        amp.deinit()
        expected = gradients(net, data)
        for key in expected:
            np.testing.assert_array_equal(expected[key], found[key])

    def test_overflow_is_checked_and_steps_are_skipped(self, lesser):
        amp.init()
        weights, _, skipped, trainer = trained({}, poison=2)
        assert skipped == [False, False, True, False, False]
        assert trainer._amp_loss_scaler.num_skipped == 1
        assert all(np.isfinite(weight).all() for weight in weights)

    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
    def test_levels_stay_in_fp32_without_a_scale(self, lesser, level):
        def losses(initialize):
            mx.random.seed(3)
            net = conv_net()
            net.initialize(mx.init.Xavier(magnitude=2))
            net.hybridize()
            trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02}, update_on_kvstore=False)
            if initialize:
                net, trainer = amp.initialize(net, trainer, opt_level=level, verbosity=0)
                assert amp.active_dtype() is None
                assert getattr(trainer, "_amp_loss_scaler", None) is None or trainer._amp_loss_scaler.loss_scale == 1
            made = []
            for _ in range(3):
                with autograd.record():
                    loss = (net(mx.nd.ones((4, 3, 16, 16))) ** 2).mean()
                    with amp.scale_loss(loss, trainer, enabled=initialize) as scaled:
                        autograd.backward(scaled)
                trainer.step(1)
                made.append(float(loss.asscalar()))
            return made
        assert losses(False) == losses(True)

    def test_a_type_named_to_a_level_is_refused(self, monkeypatch):
        take_for(monkeypatch, "AVX2")
        net = nn.Dense(2, in_units=2)
        net.initialize()
        with pytest.raises(amp.DTypeError, match="needs a CPU with AVX512"):
            amp.initialize(net, opt_level="O2", cast_model_type="bfloat16", verbosity=0)
        assert not amp.is_active()

    def test_the_users_lists_are_checked_as_elsewhere(self, lesser):
        with pytest.raises(amp.PolicyError, match="Did you mean 'Convolution'"):
            amp.init(fp32_ops=["Convolutin"])
        with pytest.raises(amp.PolicyError, match="cannot run in bfloat16"):
            amp.init(target_precision_ops=["batch_dot"])
        amp.init(fp32_ops=["Convolution"])
        assert amp.is_active()


class TestTools:
    @pytest.fixture
    def network(self, lesser):
        amp.init()
        return ready(conv_net(), NETWORKS["conv"][1])

    def test_report(self, network, lesser):
        found = amp.report(*network)
        assert found.reason == f"this CPU has no BF16 instructions ({lesser})"
        assert f"float32: {found.reason}" in found.summary
        assert "AMP is off" not in found.summary
        assert found.casts == found.target_dtypes == ()
        assert {row.observed for row in found.operators} == {"float32"}
        assert found.to_dict()["reason"] == found.reason

    def test_explain(self, network, lesser):
        (item,) = amp.explain(network[0], "net_conv2_fwd", network[1]).operators
        assert f"float32: this CPU has no BF16 instructions ({lesser})" in item.why
        assert item.remedies == ("FP32 is fastest here: a type that amp.init is given runs nevertheless, where the device "
                                 "can, as in amp.init('bfloat16')",)

    def test_advise(self, network):
        found = amp.advise(*network, time=False)
        (advice,) = [item for item in found if item.topic == "hardware"]
        assert "FP32 is fastest on this device: this CPU has no BF16 instructions" in advice.text
        assert "off" not in found.topics

    def test_advise_where_a_slow_type_was_named(self, monkeypatch, recwarn):
        take_for(monkeypatch, "AVX512_CORE")
        amp.init("float16")
        text = str(amp.advise(*ready(conv_net(), NETWORKS["conv"][1]), time=False))
        assert "imitated" in text

    def test_tune_measures_nothing_and_says_why(self, network, tmp_path, caplog):
        with caplog.at_level(logging.INFO, "gluon_amp"):
            found = amp.tune(network[0], network[1], cache=tmp_path / "t.json", progress=False)
        assert found.milliseconds == {}
        assert found.slow == frozenset()
        assert "There is nothing to measure: the cpu runs in float32, because this CPU has no BF16" in caplog.text
        amp.deinit()
        amp.init(tuning=tmp_path / "t.json")
        assert amp.active_dtype() is None

    @pytest.mark.parametrize("tool", ["compare", "search_exclusions"])
    def test_what_looks_at_low_precision_asks_for_a_type(self, network, tool):
        options = {"max_error": 0.1, "progress": False} if tool == "search_exclusions" else {}
        with pytest.raises(amp.DTypeError, match=r"no low precision to look at: .*float32 on the cpu.*dtype='float16'"):
            getattr(amp, tool)(*network, **options)

    def test_compare_and_search_with_an_imitated_type(self, network, recwarn):
        assert 0 < amp.compare(*network, dtype="float16").outputs[0] < 0.01
        policy = amp.search_exclusions(*network, max_error=0.1, dtype="float16", progress=False)
        assert (policy.target_dtype, policy.excluded) == ("float16", frozenset())

    def test_preflight_looks_at_what_would_be_stored(self, network):
        assert amp.preflight(network[0]).target_dtype == "bfloat16"
        assert amp.preflight(network[0]).problems == ()
        assert amp.preflight(network[0], target_dtype="float16").target_dtype == "float16"

    def test_the_policy_of_a_file_is_refused_where_nothing_runs_its_type(self, monkeypatch):
        take_for(monkeypatch, "AVX2")
        with pytest.raises(amp.DTypeError, match="received 'bfloat16', which needs a CPU with AVX512"):
            amp.init(policy=amp.Policy("bfloat16"))
        amp.init(policy=amp.Policy("float32"))
        assert amp.is_active()
        assert amp.active_dtype() is None


class TestGpus:
    """A GPU beside a good CPU, as far as this package is told."""

    @pytest.fixture
    def beside(self, monkeypatch):
        def beside(capability, isa="AVX512_CORE_BF16"):
            found = {"cpu": cpu_support(isa), "gpu": cuda_support(capability)}
            monkeypatch.setattr(devices, "_warned", set())
            monkeypatch.setattr(sys.modules["gluon_amp.autocast"], "device_supports", lambda: found)
        return beside

    @pytest.mark.parametrize("capability", [(9, 0), (3, 5)])
    def test_one_that_cannot_be_used_is_named_and_the_cpu_takes_its_own(self, beside, capability):
        beside(capability)
        with pytest.warns(UserWarning, match=rf"FP32 on the GPU: the GPU has compute capability {capability[0]}\."
                                             rf"{capability[1]}, and MXNet's wheels hold kernels for 5.0 to 8.9 only"):
            amp.init()
        assert (amp.active_dtype("cpu"), amp.active_dtype("gpu")) == ("bfloat16", None)

    def test_one_that_can_be_used_leaves_a_lesser_cpu_in_fp32(self, beside, caplog):
        beside((7, 5), "AVX512_CORE")
        with caplog.at_level(logging.INFO, "gluon_amp"):
            amp.init()
        assert (amp.active_dtype("cpu"), amp.active_dtype("gpu")) == (None, "float16")
        assert "AMP runs float32 on the cpu, because this CPU has no BF16" in caplog.text
        assert "float16 on the gpu, because the GPU has compute capability 7.5" in caplog.text

    def test_a_named_type_leaves_the_others_in_fp32(self, beside):
        beside((7, 5))
        amp.init("float16")
        assert (amp.active_dtype("cpu"), amp.active_dtype("gpu")) == (None, "float16")
        amp.deinit()
        amp.init("bfloat16")
        assert (amp.active_dtype("cpu"), amp.active_dtype("gpu")) == ("bfloat16", None)

    def test_float16_is_not_imitated_beside_a_gpu_that_cannot_run_it(self, beside):
        beside((9, 0))
        with pytest.raises(amp.DTypeError, match=r"which needs a CUDA GPU of compute capability 5\.0 to 8\.9"):
            amp.init("float16")


AMX_CPU = "flags : avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_bf16 amx_tile"


class TestAmx:
    """A CPU with AMX that oneDNN does not use."""

    @pytest.fixture(autouse=True)
    def _with_amx(self, monkeypatch):
        for name in ("_granted", "_state", "_settings"):
            monkeypatch.setattr(_isa, name, [])
        monkeypatch.setattr(devices, "_warned", set())
        devices._amx_runs.cache_clear()
        yield
        devices._amx_runs.cache_clear()

    @pytest.fixture
    def timings(self, monkeypatch):
        """Let the probe find these milliseconds in FP32 and bfloat16; return how often it was asked."""
        asked = []

        def pretend(fp32, low):
            monkeypatch.setattr(devices, "time_in_both", lambda *args, **options: asked.append(args) or (fp32, low))
            monkeypatch.setattr(devices, "cpu_support", lambda: cpu_support("AVX512_CORE_AMX"))
            return asked
        return pretend

    def test_a_request_that_simply_succeeds(self, monkeypatch, timings):
        asked = timings(5.0, 1.0)
        monkeypatch.delitem(sys.modules, "mxnet")
        assert _isa.request(AMX_CPU, {}, lambda: True)
        assert _isa.amx_state() is None
        assert devices.lost_amx() is None
        assert asked == []
        assert devices.support("cpu").amx

    def test_a_request_that_the_operating_system_refuses(self):
        assert not _isa.request(AMX_CPU, {}, lambda: False)
        assert (_isa.amx_state(), _isa.granted()) == (_isa.REFUSED, False)
        assert "which the operating system does not let this process use" in devices.lost_amx()

    def test_a_cpu_without_amx_has_nothing_to_lose(self):
        assert not _isa.request("flags : avx512_bf16", {}, lambda: False)
        assert _isa.amx_state() is None
        assert devices.lost_amx() is None

    def test_a_user_who_limits_onednn_has_lost_nothing(self):
        assert not _isa.request(AMX_CPU, {"DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16"}, lambda: True)
        assert devices.lost_amx() is None

    @pytest.mark.parametrize(("fp32", "low", "runs"), [(5.0, 1.0, True), (1.0, 1.5, False), (1.5, 1.0, False)])
    def test_a_late_request_is_measured_once(self, timings, fp32, low, runs):
        asked = timings(fp32, low)
        assert _isa.request(AMX_CPU, {}, lambda: True)
        assert _isa.amx_state() == _isa.GRANTED_LATE
        for _ in range(3):
            assert (devices.lost_amx() is None) == runs
        assert len(asked) == 1
        assert devices.support("cpu").dtype == (BFLOAT16 if runs else FLOAT32)

    def test_the_choice_follows_and_a_warning_says_what_to_do(self, timings):
        timings(1.0, 1.5)
        _isa.request(AMX_CPU, {}, lambda: True)
        with pytest.warns(UserWarning, match=r"stays in FP32, although bfloat16 could be several times as fast: .*before "
                                             r"gluon_amp was imported\. Import gluon_amp before anything") as caught:
            amp.init()
        assert caught[0].filename == __file__
        assert amp.active_dtype() is None
        amp.deinit()
        amp.init()  # it has been said

    def test_a_named_bfloat16_runs_without_the_tiles(self, timings):
        timings(1.0, 1.5)
        _isa.request(AMX_CPU, {}, lambda: True)
        found = devices.support("cpu").requested(BFLOAT16)
        assert (found.dtype, found.native, found.amx) == (BFLOAT16, False, False)
        assert found.reason.endswith("before gluon_amp was imported: bfloat16 is slower than FP32 without them")

    def test_the_probe_runs(self):
        assert devices._amx_runs() in (True, False)

    def test_an_operator_before_the_import_is_found_out(self):
        """MXNet first: the request comes late; what follows depends on the CPU, and says so."""
        code = ("import numpy as np\n"
                "for name in ('bool', 'object', 'int', 'float', 'complex', 'str'): np.__dict__.setdefault(name, eval(name))\n"
                "import mxnet as mx\nmx.nd.ones((2, 2)).wait_to_read()\nimport gluon_amp as amp\n"
                "from gluon_amp import _isa, devices\namp.init()\n"
                "print(_isa.amx_state(), devices.lost_amx(), amp.active_dtype())")
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120,
                              env={name: value for name, value in os.environ.items() if name != "DNNL_MAX_CPU_ISA"})
        assert done.returncode == 0, done.stderr
        has_amx = _isa.cpu_flags() >= {"amx_bf16", "amx_tile"}
        assert done.stdout.startswith("None None") != has_amx


def test_float16_is_never_chosen_on_a_cpu(lesser):
    assert devices.support("cpu").dtype != FLOAT16
