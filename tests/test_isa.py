"""AMX tiles: who asks for them, who does not, and what child processes see."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gluon_amp.machine import host

pytestmark = pytest.mark.machine
AMX_CPU = "flags : avx512f avx512_bf16 amx_bf16 amx_tile"


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(host, "_outcome", [])
    monkeypatch.setattr(host, "_settings", [])


def test_a_cpu_with_amx_gets_it_until_onednn_has_read_the_setting():
    environ, seen = {}, []
    assert host.request_amx(AMX_CPU, environ, lambda: True)
    host.settle(lambda: seen.append(dict(environ)))
    assert (seen, environ) == ([{"DNNL_MAX_CPU_ISA": "AVX512_CORE_AMX"}], {})


def test_the_setting_goes_even_when_the_operator_fails():
    environ = {}
    host.request_amx(AMX_CPU, environ, lambda: True)
    with pytest.raises(ZeroDivisionError):
        host.settle(lambda: 1 / 0)
    assert environ == {}


@pytest.mark.parametrize("limit", ["AVX512_CORE_AMX", "avx512_core_amx", "ALL"])
def test_a_user_who_asks_onednn_for_amx_gets_the_tiles_and_keeps_the_setting(limit):
    environ = {"DNNL_MAX_CPU_ISA": limit}
    assert host.request_amx(AMX_CPU, environ, lambda: True)
    host.settle(lambda: None)
    assert environ == {"DNNL_MAX_CPU_ISA": limit}


PROGRAM = """
import os
import gluon_amp as amp
import mxnet as mx
assert "DNNL_MAX_CPU_ISA" not in os.environ
amp.init("bfloat16")
with amp.autocast():
    out = mx.nd.FullyConnected(mx.nd.ones((64, 64)), mx.nd.ones((64, 64)), num_hidden=64, no_bias=True)
assert out.asnumpy().tolist() == [[64.0] * 64] * 64
"""


@pytest.mark.bf16
def test_low_precision_runs_whatever_the_machine_grants():
    environ = {name: value for name, value in os.environ.items() if name != "DNNL_MAX_CPU_ISA"}
    subprocess.run([sys.executable, "-c", PROGRAM], env={**environ, "DNNL_VERBOSE": "0"}, check=True, timeout=120)
