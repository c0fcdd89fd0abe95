"""Memory that MXNet frees stays in the process for the next step, unless the user says otherwise."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gluon_amp._memory import obstacle

# Without static memory a step's arrays are made anew. Prints the page faults of the last four of twelve steps.
PROGRAM = """
import ctypes
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: every page is one of 4 KB, and a fault of its own
from resource import RUSAGE_SELF, getrusage
import mxnet as mx
from mxnet import autograd, gluon
import gluon_amp as amp

def step():
    with autograd.record():
        loss = net(x).square().mean()
    loss.backward()
    mx.nd.waitall()

net = gluon.model_zoo.vision.mobilenet_v2_0_5()
net.initialize()
net.hybridize()
x = mx.nd.ones((4, 3, 224, 224))
step()
{start}
for _ in range(7):
    step()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES",
             "GLUON_AMP_KEEP_MEMORY")


def _faults(start, **environ):
    environ = {**{name: value for name, value in os.environ.items() if name not in VARIABLES}, **environ}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM.format(start=start)], capture_output=True,
                          text=True, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.machine
@pytest.mark.parametrize("start", ["amp.init()", "amp.init(target_dtype='float32')", "amp.init(target_dtype='float16')",
                                   "amp.init(); amp.deinit()", "amp.initialize(net, opt_level='O1')",
                                   "amp.convert_hybrid_block(net)"])
def test_steps_take_no_fresh_memory(start):
    assert _faults(start) < 1000


@pytest.mark.parametrize(("start", "environ"), [
    ("", {}), ("amp.init(target_dtype='float32')", {"GLUON_AMP_KEEP_MEMORY": "0"}),
    ("amp.init(target_dtype='float32')", {"MALLOC_MMAP_THRESHOLD_": "65536"}),
    ("amp.init(target_dtype='float32')", {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"})])
def test_the_user_can_have_memory_given_back(start, environ):
    assert _faults(start, **environ) > 5000


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, ""), ({"GLUON_AMP_KEEP_MEMORY": "1", "MALLOC_ARENA_MAX": "2"}, ""),
    ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, ""),
    ({"GLUON_AMP_KEEP_MEMORY": "0"}, "GLUON_AMP_KEEP_MEMORY=0"),
    ({"MALLOC_TOP_PAD_": "0"}, "MALLOC_TOP_PAD_ is set, and wins"),
    ({"GLIBC_TUNABLES": "glibc.malloc.top_pad=1:glibc.malloc.check=3"}, "glibc.malloc.top_pad is set, and wins")])
def test_what_speaks_against_it_is_named(environ, expected):
    assert obstacle(environ) == expected
