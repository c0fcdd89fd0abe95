"""What each kind of CPU and GPU runs in when nothing is named and when a type is, and what is said about it."""
from __future__ import annotations

import json
import logging
import sys
from functools import lru_cache

import pytest
from cpu_kinds import ALL_ISAS, LACKING, NO_BF16, run_on
from networks import NETWORKS, conv_net, ready

import gluon_amp as amp
from gluon_amp.cli import main
from gluon_amp.machine.dtypes import cpu_support, cuda_support
from gluon_amp.state import devices

pytestmark = pytest.mark.machine

FACTS = """
import json, logging, os, tempfile, warnings
import gluon_amp as amp, mxnet as mx
from gluon_amp.state import devices
lines, warned, found = [], [], {}
class Keep(logging.Handler):
    def emit(self, record): lines.append((record.levelname, record.getMessage()))
logging.getLogger("gluon_amp").addHandler(Keep())
logging.getLogger("gluon_amp").setLevel(logging.DEBUG)
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

found["gain"] = devices.cpu_rates().gain if amp.machine.dtypes.cpu_support().dtype == "bfloat16" else 0
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


def chosen(isa):
    """The type that such a CPU should run in: bfloat16 where instructions for it are clearly the faster ones."""
    return "float32" if isa in NO_BF16 or facts(isa)["gain"] < 1.3 else "bfloat16"


@pytest.fixture
def with_fast_bf16():
    if chosen("AVX512_CORE_BF16") != "bfloat16":
        pytest.skip(f"{LACKING} BF16 instructions that are faster than FP32 without AMX")


def texts(fact):
    return [message for message, _ in fact["warned"]]


class TestTheChoice:
    @pytest.mark.parametrize("isa", NO_BF16)
    def test_without_bf16_instructions_everything_stays_in_fp32_and_nothing_warns(self, isa):
        found = facts(isa)["default"]
        assert found["active"] == [True, None]
        assert found["result"] < 1e-6
        assert found["warned"] == []

    @pytest.mark.usefixtures("with_fast_bf16")
    def test_with_them_it_is_bfloat16(self):
        found = facts("AVX512_CORE_BF16")["default"]
        assert found["active"] == [True, "bfloat16"]
        assert 1e-4 < found["result"] < 0.02
        assert found["warned"] == []

    @pytest.mark.parametrize("isa", ALL_ISAS)
    def test_one_line_says_device_type_and_reason(self, isa):
        level, line = facts(isa)["default"]["lines"][0]
        has = "no " if isa in NO_BF16 else ""
        assert level == "INFO"
        because = f"because this CPU has {has}BF16 instructions ({isa})"
        assert line.startswith(f"AMP runs {chosen(isa)} on the cpu, {because}")

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
            said = found[name]["result"]
            assert "received 'bfloat16', which needs a CPU with AVX512 (cpu: this CPU has no BF16" in said
            assert "Leave the type out" in said
            assert found[name]["active"] == [False, None]

    @pytest.mark.parametrize("isa", ALL_ISAS)
    def test_a_named_float32_is_taken(self, isa):
        found = facts(isa)["float32"]
        assert (found["active"], found["warned"]) == ([True, None], [])
        assert found["result"] < 1e-6

    @pytest.mark.parametrize("isa", ALL_ISAS)
    def test_regions_take_the_machines_type(self, isa):
        found = facts(isa)["region"]
        assert found["result"] == {"float32": None}.get(chosen(isa), "bfloat16")
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

    @pytest.mark.usefixtures("with_fast_bf16")
    def test_without_a_type_it_is_bfloat16_where_that_is_faster(self):
        found = facts("AVX512_CORE_BF16")
        assert found["conversion"]["result"]["dtype"] == "bfloat16"
        assert found["conversion"]["result"]["low"] > 0
        assert 1e-4 < found["converted"]["result"] < 0.02

    @pytest.mark.parametrize("isa", ALL_ISAS)
    def test_with_a_type_it_is_that_on_any_machine(self, isa):
        found = facts(isa)
        low, full = (found[f"{dtype} conversion"]["result"] for dtype in ("bfloat16", "float32"))
        assert (low["dtype"], full["dtype"]) == ("bfloat16", "float32")
        assert low["low"] > 0
        assert low["size"] < 0.6 * full["size"]
        because = "float32 was asked for, " if chosen(isa) == "bfloat16" else ""
        assert full["summary"].startswith(f"float32: {because}")
        assert found["float32 converted"]["result"] < 1e-5

    def test_it_warns_where_this_machine_is_slower_or_cannot_run_it(self):
        told = texts(facts("AVX512_CORE_BF16")["bfloat16 conversion"])
        assert bool(told) == (chosen("AVX512_CORE_BF16") == "float32")
        slow, = texts(facts("AVX512_CORE")["bfloat16 conversion"])
        assert slow.startswith("the bfloat16 network will be slower on this machine than one converted in "
                               "float32: this CPU has no BF16")
        never, = texts(facts("AVX2")["bfloat16 conversion"])
        assert never == ("the bfloat16 network cannot run on this machine, where this CPU has no BF16 instructions "
                         "(AVX2): it needs a CPU with AVX512, and is fast with BF16 instructions")

    def test_a_network_that_this_machine_cannot_run_is_refused_when_it_runs(self):
        found = facts("AVX2")["bfloat16 converted"]["result"]
        assert "expected a CPU with AVX512 to run a bfloat16 network, but this CPU has no BF16" in found
        assert "Export the network" in found
        assert 1e-4 < facts("AVX512_CORE")["bfloat16 converted"]["result"] < 0.02


class TestCommandLine:
    def test_convert_says_the_type_and_why(self, lesser, tmp_path, capsys):
        net, data = ready(conv_net(), NETWORKS["conv"][1])
        net(data)
        net.export(str(tmp_path / "net"))
        files = [str(tmp_path / name) for name in ("net-symbol.json", "net-0000.params")]
        shape = ["--data", "data:4,3,16,16"]
        assert main(["convert", *files, "-o", str(tmp_path / "out"), *shape]) == 0
        assert f"float32: this CPU has no BF16 instructions ({lesser})" in " ".join(capsys.readouterr().out.split())


class TestGpus:
    """A GPU beside a good CPU, as far as this package is told."""

    @pytest.fixture
    def beside(self, monkeypatch):
        def beside(capability, isa="AVX512_CORE_BF16"):
            found = {"cpu": cpu_support(isa), "gpu": cuda_support(capability)}
            monkeypatch.setattr(devices, "_warned", set())
            monkeypatch.setattr(sys.modules["gluon_amp.session.init"], "device_supports", lambda: found)
        return beside

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
        with pytest.warns(UserWarning, match="FP32 on the GPU, which MXNet has no bfloat16 kernels for"):
            amp.init("bfloat16")
        assert (amp.active_dtype("cpu"), amp.active_dtype("gpu")) == ("bfloat16", None)

    def test_float16_is_not_imitated_beside_a_gpu_that_cannot_run_it(self, beside):
        beside((9, 0))
        with pytest.raises(amp.DTypeError, match=r"which needs a CUDA GPU of compute capability 5\.0 to 8\.9"):
            amp.init("float16")
