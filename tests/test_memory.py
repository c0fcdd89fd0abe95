"""Memory that MXNet frees stays in the process for the next step, and graphs take little, unless the user objects."""
from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from gluon_amp import native

# Without static memory a step's arrays are made anew. Prints the page faults of a step, the median of the
# last five of twelve (a heap may still grow once), and how many of eight arrays glibc maps that are as large as the
# largest that it is to keep.
PROGRAM = """
import ctypes
libc = ctypes.CDLL(None)
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: every page is one of 4 KB, and a fault of its own
from resource import RUSAGE_SELF, getrusage
from statistics import median
import mxnet as mx
from mxnet import autograd, gluon
import gluon_amp as amp

libc.malloc.restype = ctypes.c_void_p

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
faults = []
for _ in range(12):
    before = getrusage(RUSAGE_SELF).ru_minflt
    step()
    faults.append(getrusage(RUSAGE_SELF).ru_minflt - before)
arrays = [libc.malloc(ctypes.c_size_t((1 << 25) - (1 << 16))) for _ in range(8)]  # several: there may be room for one
mapped = [ctypes.c_size_t.from_address(array - 8).value & 2 for array in arrays]  # a flag of glibc's before the array
print(int(median(faults[7:])), sum(map(bool, mapped)))
"""
# MXNet's first plan gives the small array in the middle the memory of the large one before it, and makes another large.
LARGE_SMALL_LARGE = """
import mxnet as mx
import gluon_amp as amp

class Net(mx.gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        small = F.sum(F.tile(x, reps=(8, 1)), axis=0, keepdims=True)
        return F.sum(F.tile(F.reverse(small, axis=1), reps=(8, 1)), axis=0)

def peak():  # of this process alone: that of getrusage begins with its parent's
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

{start}
net = Net()
net.hybridize()
x = mx.nd.ones((1, 1 << 21))
before = peak()
net(x).wait_to_read()
print(peak() - before)
"""
# Every call asks for as much temporary memory, twice the array. Prints how many times that much the calls took.
SORTS = """
import mxnet as mx
import gluon_amp as amp

def used():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

{start}
x, order = mx.nd.ones(1 << 23), mx.nd.ones(1 << 23)
mx.nd.waitall()
before = used()
for _ in range(8):
    mx.nd.argsort(x, out=order)
mx.nd.waitall()
print(round((used() - before) / 64))
"""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES",
             "GLUON_AMP_KEEP_MEMORY", "NNVM_AUTO_SEARCH_MATCH_RANGE", "NNVM_EXEC_MATCH_RANGE", "MXNET_CPU_TEMP_COPY",
             "MXNET_CPU_WORKER_NTHREADS", "MXNET_MKLDNN_CACHE_NUM")
# Prints how many megabytes 600 shapes take, and twice 600 more. Of the last ones oneDNN keeps no more kernels, either.
SHAPES = """
import gluon_amp as amp
import mxnet as mx

def used():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024

weight = mx.nd.ones((16, 16, 3, 3))
taken = []
for part in range(3):
    before = used()
    for number in range(600 * part, 600 * part + 600):
        data = mx.nd.ones((1, 16, 8 + number % 40, 8 + number // 40))
        mx.nd.Convolution(data, weight, no_bias=True, kernel=(3, 3), num_filter=16).wait_to_read()
    taken.append(used() - before)
print(*taken)
"""

# Prints how many megabytes are in use after a step of a network with 38 MB of weights.
A_STEP = """
import ctypes
import gluon_amp as amp
import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

class Info(ctypes.Structure):  # glibc's, of which the last but two are the bytes in use
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks "
                "fordblks keepcost".split()]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info

def used():
    mx.nd.waitall()
    found = info()
    return (found.uordblks + found.hblkhd) >> 20

amp.init('float32')
net = nn.HybridSequential()
net.add(nn.Conv2D(512, 1, in_channels=3))
for _ in range(4):
    net.add(nn.Conv2D(512, 3, padding=1, use_bias=False, in_channels=512), nn.BatchNorm(in_channels=512),
            nn.HybridLambda(lambda F, x: F.clip(x, 0, 6)))
net.initialize()
net.hybridize(static_alloc=True, static_shape=True)
x = mx.nd.ones((1, 3, 4, 4))
{call}
with autograd.record():
    loss = net(x).sum()
loss.backward()
print(used())
"""


def _printed(program, environ):
    environ = {**{name: value for name, value in os.environ.items() if name not in VARIABLES}, **environ}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300,
                          env=environ)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.splitlines()[-1].split()]


@pytest.mark.machine
@pytest.mark.parametrize("start", ["amp.init()", "amp.init(target_dtype='float32')", "amp.init(target_dtype='float16')",
                                   "amp.initialize(net, opt_level='O1')", "amp.convert_hybrid_block(net)"])
def test_steps_take_no_fresh_memory(start):
    faults, mapped = _printed(PROGRAM.format(start=start), {})
    assert faults < 250
    assert not mapped


@pytest.mark.parametrize(("start", "environ"), [
    ("", {}), ("amp.init(); amp.deinit()", {}),
    ("amp.init(target_dtype='float32')", {"GLUON_AMP_KEEP_MEMORY": "0"}),
    ("amp.init(target_dtype='float32')", {"MALLOC_MMAP_THRESHOLD_": "65536"}),
    ("amp.init(target_dtype='float32')", {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"})])
def test_the_user_can_have_memory_given_back(start, environ):
    # Not the faults: by chance of its heaps glibc may keep a step's arrays of its own accord.
    *_, mapped = _printed(PROGRAM.format(start=start), environ)
    assert mapped


@pytest.mark.parametrize(("start", "environ", "large"), [
    ("amp.init(target_dtype='float32')", {}, 1), ("", {}, 2),
    ("amp.init(target_dtype='float32')", {"NNVM_AUTO_SEARCH_MATCH_RANGE": "0"}, 2),
    ("amp.init(target_dtype='float32')", {"NNVM_EXEC_MATCH_RANGE": "16"}, 2)])
def test_graphs_take_the_smallest_of_mxnets_plans(start, environ, large):
    megabytes, = _printed(LARGE_SMALL_LARGE.format(start=start), environ)
    assert 64 * large < megabytes < 64 * large + 40


@pytest.mark.parametrize(("start", "environ", "spaces"), [
    ("amp.init(target_dtype='float32')", {}, 2), ("", {}, 4),
    ("amp.init(target_dtype='float32')", {"MXNET_CPU_TEMP_COPY": "3"}, 3),
    ("amp.init(target_dtype='float32')", {"MXNET_CPU_WORKER_NTHREADS": "2"}, 4)])
def test_operators_share_two_spaces_of_temporary_memory(start, environ, spaces):
    assert _printed(SORTS.format(start=start), environ) == [spaces]


def test_new_shapes_take_memory_up_to_a_bound_unless_the_user_says_otherwise():
    # The first shapes take what is taken once, too: the later ones are compared.
    first, _, bounded = _printed(SHAPES, {})
    _, _, all_kept = _printed(SHAPES, {"MXNET_MKLDNN_CACHE_NUM": "-1"})
    _, _, few_kept = _printed(SHAPES, {"MXNET_MKLDNN_CACHE_NUM": "16"})
    assert bounded < 0.75 * first  # the rest is oneDNN's own memory of kernels
    assert bounded < 0.75 * all_kept
    assert few_kept < 0.75 * all_kept


@pytest.mark.machine
@pytest.mark.skipif(not native.any_is_available(), reason="the operators in C++ are missing")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc does not tell what is in use")
def test_a_step_after_inference_keeps_no_copies_of_weights():
    (alone,), (after,) = (_printed(A_STEP.replace("{call}", call), {}) for call in ("", "net(x).wait_to_read()"))
    assert after < alone + 57  # what inference itself takes, and not 76 MB of copies for either pass
