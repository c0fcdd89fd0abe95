"""A CPU with AMX tiles or BF16 instructions: what follows where oneDNN does not use them, or is slow by them."""
from __future__ import annotations

import os
import subprocess
import sys

import mxnet as mx
import pytest

import gluon_amp as amp
from gluon_amp.machine import host
from gluon_amp.machine.costs import rates_of
from gluon_amp.machine.dtypes import BFLOAT16, FLOAT32, cpu_isa, cpu_support
from gluon_amp.state import devices

pytestmark = pytest.mark.machine

_AVX512 = "avx2 avx512f avx512bw avx512vl avx512dq"
_BF16 = f"{_AVX512} avx512_vnni avx512_bf16"
_AMX = f"{_BF16} amx_bf16 amx_tile"


@pytest.mark.parametrize(("vendor", "family", "model", "flags", "dtype", "said"), [
    # the CPUs that were met
    ("AuthenticAMD", 25, 1, "avx2", FLOAT32, "no BF16 instructions (AVX2)"),
    ("AuthenticAMD", 25, 17, _BF16, BFLOAT16, "1.9 times as fast as FP32, AMD family 25, model 17"),
    ("AuthenticAMD", 26, 2, _BF16, BFLOAT16, "1.9 times as fast as FP32, AMD family 26, model 2"),
    ("GenuineIntel", 6, 85, f"{_AVX512} avx512_vnni", FLOAT32, "no BF16 instructions (AVX512_CORE_VNNI)"),
    ("GenuineIntel", 6, 143, _AMX, BFLOAT16, "BF16 instructions (AVX512_CORE_AMX)"),
    ("GenuineIntel", 6, 207, _AMX, BFLOAT16, "BF16 instructions (AVX512_CORE_AMX)"),
    ("GenuineIntel", 6, 207, _BF16, FLOAT32, "0.6 times as fast as FP32, Intel family 6, model 207"),
    # others of the same makers
    ("AuthenticAMD", 99, 0, _BF16, BFLOAT16, "times as fast as FP32, as on the nearest CPU that was measured, AMD"),
    ("GenuineIntel", 6, 255, _BF16, FLOAT32, "as fast as FP32, as on the nearest CPU that was measured, Intel")])
def test_the_choice_on_each_kind_of_cpu(vendor, family, model, flags, dtype, said, monkeypatch):
    cpuinfo = f"vendor_id : {vendor}\ncpu family : {family}\nmodel : {model}\nflags : {flags}\n\n"
    isa = cpu_isa(cpuinfo, {}, amx="amx" in flags)
    kind = host.cpu_kind(cpuinfo)
    monkeypatch.setattr(host, "cpu_kind", lambda: kind)
    monkeypatch.setattr(host, "_outcome", [host.GRANTED] if "amx" in flags else [])
    for name in ("cpu_isa", "cpu_support"):
        monkeypatch.setattr(devices, name, lambda name=name: {"cpu_isa": isa, "cpu_support": cpu_support(isa)}[name])
    monkeypatch.setattr(devices, "cpu_rates", devices.cpu_rates.__wrapped__)
    chosen = devices.support("cpu")
    assert chosen.dtype == dtype
    assert said in chosen.reason


AMX_CPU = "flags : avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_bf16 amx_tile"


class TestAmx:
    """A CPU with AMX that oneDNN does not use."""

    @pytest.fixture(autouse=True)
    def _with_amx(self, monkeypatch):
        for name in ("_outcome", "_settings"):
            monkeypatch.setattr(host, name, [])
        monkeypatch.setattr(devices, "_warned", set())
        devices._measured_gain.cache_clear()
        yield
        devices._measured_gain.cache_clear()

    @pytest.fixture
    def timings(self, monkeypatch):
        """Let the probe of an unknown CPU find milliseconds in FP32 and bfloat16; return the list of its questions."""
        asked = []

        def pretend(fp32, low, isa="AVX512_CORE_AMX"):
            monkeypatch.setattr(devices, "time_in_both", lambda *args, **options: asked.append(args) or (fp32, low))
            monkeypatch.setattr(host, "cpu_kind", lambda: host.Cpu("GenuineIntel", 6, 1))
            monkeypatch.setattr(devices, "cpu_support", lambda: cpu_support(isa))
            monkeypatch.setattr(devices, "cpu_rates", lambda: rates_of(host.cpu_kind(), isa))
            return asked
        return pretend

    def test_a_request_that_simply_succeeds(self, monkeypatch, timings):
        asked = timings(5.0, 1.0)
        monkeypatch.delitem(sys.modules, "mxnet")
        assert host.request_amx(AMX_CPU, {}, lambda: True)
        assert host.amx_outcome() == host.GRANTED
        assert devices.lost_amx() is None
        assert asked == []
        assert devices.support("cpu").amx

    def test_a_refusal_is_not_blamed_on_the_order_of_imports(self, timings):
        timings(1.0, 2.0, "AVX512_CORE_BF16")
        assert not host.request_amx(AMX_CPU, {}, lambda: False)
        assert host.amx_outcome() == host.REFUSED
        with pytest.warns(UserWarning, match=r"does not let this process use \(Linux from") as caught:
            amp.init()
        assert "import gluon_amp first" not in str(caught[0].message)
        assert caught[0].filename == __file__

    def test_a_cpu_without_amx_has_nothing_to_lose(self):
        assert not host.request_amx("flags : avx512_bf16", {}, lambda: False)
        assert host.amx_outcome() is None
        assert devices.lost_amx() is None

    def test_a_user_who_limits_onednn_has_lost_nothing(self):
        assert not host.request_amx(AMX_CPU, {"DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16"}, lambda: True)
        assert devices.lost_amx() is None

    @pytest.mark.parametrize(("fp32", "low", "runs"), [(5.0, 1.0, True), (1.0, 1.5, False), (1.9, 1.0, False)])
    def test_a_late_request_is_measured_once(self, timings, fp32, low, runs):
        asked = timings(fp32, low)
        assert host.request_amx(AMX_CPU, {}, lambda: True)
        assert host.amx_outcome() == host.GRANTED_LATE
        for _ in range(3):
            assert (devices.lost_amx() is None) == runs
        # a gain is measured again before it is believed
        assert len(asked) == len(devices._PROBED) * (2 if fp32 > 2.5 * low else 1)
        assert devices.support("cpu").dtype == (BFLOAT16 if runs else FLOAT32)

    def test_the_choice_follows_and_a_warning_says_what_to_do(self, timings):
        timings(1.0, 1.5)
        host.request_amx(AMX_CPU, {}, lambda: True)
        with pytest.warns(UserWarning, match=r"although bfloat16 could be several times as fast: .*before "
                                             r"gluon_amp was imported \(import gluon_amp first\)") as caught:
            amp.init()
        assert caught[0].filename == __file__
        assert amp.active_dtype() is None
        amp.deinit()
        amp.init()  # it has been said

    def test_a_named_bfloat16_runs_without_the_tiles(self, timings):
        timings(1.0, 1.5)
        host.request_amx(AMX_CPU, {}, lambda: True)
        found = devices.support("cpu").requested(BFLOAT16)
        assert (found.dtype, found.native, found.amx) == (BFLOAT16, False, False)
        assert found.reason.endswith("(import gluon_amp first): bfloat16 is slower than FP32")

    def test_a_busy_machine_does_not_make_tiles_run(self, monkeypatch):
        found = iter([(5.0, 1.0)] * 3 + [(0.5, 1.2)] * 3)
        monkeypatch.setattr(devices, "time_in_both", lambda *args, **options: next(found))
        assert devices._measured_gain() == 0.5

    def test_they_run_where_they_are_asked_for_and_a_warning_says_that_they_are_slow(self, timings):
        timings(1.0, 1.0, "AVX512_CORE_BF16")
        with pytest.warns(UserWarning, match=r"will be slow on the cpu: this CPU has BF16 instructions \(.*\) "
                                             r"that are no faster than its FP32 ones \(bfloat16: 0\.6 times as fast as "
                                             r"FP32, as on .*\): bfloat16 is slower than FP32"):
            amp.init("bfloat16")
        assert amp.active_dtype() == BFLOAT16

    @pytest.mark.bf16
    def test_the_probe_runs_and_leaves_the_random_numbers_of_the_program_alone(self):
        mx.random.seed(7)
        expected = mx.nd.random.normal(shape=(3,)).asnumpy()
        mx.random.seed(7)
        assert devices._measured_gain() > 0
        assert (mx.nd.random.normal(shape=(3,)).asnumpy() == expected).all()

    def test_an_operator_before_the_import_is_found_out(self):
        """MXNet first: the request comes late; what follows depends on the CPU, and says so."""
        code = ("import numpy as np\n"
                "for name in ('bool', 'object', 'int', 'float', 'complex', 'str'):\n"
                "    np.__dict__.setdefault(name, eval(name))\n"
                "import mxnet as mx\nmx.nd.ones((2, 2)).wait_to_read()\nimport gluon_amp as amp\n"
                "from gluon_amp.machine import host\nfrom gluon_amp.state import devices\namp.init()\n"
                "print(host.amx_outcome(), devices.lost_amx(), amp.active_dtype())")
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120,
                              env={name: value for name, value in os.environ.items() if name != "DNNL_MAX_CPU_ISA"})
        assert done.returncode == 0, done.stderr
        has_amx = host.cpu_flags() >= {"amx_bf16", "amx_tile"}
        assert done.stdout.startswith("None None") != has_amx
