"""Which convolutions stay in FP32 for the shape of their data."""
from __future__ import annotations

import pytest
from cpu_kinds import run_on
from native_cases import script

from gluon_amp.rules import ANY_DEVICE, Device, Policy
from gluon_amp.rules.shapes import has_avx2_kernel, has_avx512_kernel, overruns_amx_tiles, pools_out_of_order

# Maps of up to 16x16, not square, on which the kernel wrote into a guard page behind its output; each both ways round.
OVERRUN = {(3, 9), (3, 11), (3, 12), (3, 13), (3, 14), (3, 15), (3, 16), (4, 9), (4, 12), (5, 9), (6, 7), (6, 8)}
POINTWISE = {"kernel": "(1, 1)", "num_filter": "64"}


def test_the_rule_names_the_maps_that_were_found():
    named = {(height, width) for height in range(1, 17) for width in range(1, 17)
             if height != width and overruns_amx_tiles(POINTWISE, (1, 64, height, width))}
    found = OVERRUN | {(width, height) for height, width in OVERRUN}
    assert named - found == {(3, 7), (7, 3)}  # by the same arithmetic, though no write was seen there
    assert found <= named
    assert [size for size in range(1, 34) if overruns_amx_tiles(POINTWISE, (1, 64, size, size))] == [6]
    assert overruns_amx_tiles({"kernel": "(1,)"}, (1, 64, 48))


@pytest.mark.parametrize("attrs", [{"kernel": "(3, 3)", "pad": "(1, 1)"}, {"kernel": "(1, 1)", "stride": "(2, 2)"},
                                   {"kernel": "(1, 1)", "dilate": "(2, 2)"}, {"kernel": "(1, 1)", "num_group": "2"}])
def test_other_convolutions_use_other_kernels(attrs):
    assert not overruns_amx_tiles(attrs, (1, 64, 6, 6))


AMX = Device(32, amx=True)


@pytest.mark.parametrize(("policy", "device", "rule"), [
    (Policy("bfloat16"), AMX, "FP32"), (Policy("bfloat16", training=False), AMX, "LOWER"),
    (Policy("bfloat16"), ANY_DEVICE, "LOWER"), (Policy("float16"), AMX, "LOWER")])
def test_the_policy_heeds_it_where_amx_is_used(policy, device, rule):
    assert policy.decide("Convolution", POINTWISE, (1, 64, 6, 6), device).rule == rule


@pytest.mark.parametrize(("amx", "training", "rule"), [
    (False, True, "FP32"), (False, False, "FP32"), (True, True, "FP32"), (True, False, "LOWER")])
def test_few_channels_pay_in_inference_with_amx_only(amx, training, rule):
    attrs = {"kernel": "(7, 7)", "pad": "(3, 3)", "num_filter": "64"}
    policy = Policy("bfloat16", training=training)
    assert policy.decide("Convolution", attrs, (1, 3, 64, 64), Device(amx=amx)).rule == rule


@pytest.mark.parametrize(("policy", "device", "rule"), [
    (Policy("bfloat16"), ANY_DEVICE, "FP32"), (Policy("bfloat16"), AMX, "LOWER"),
    (Policy("bfloat16", disabled_passes=frozenset({"fold_stride"})), AMX, "FP32")])
def test_few_channels_pay_in_training_where_their_stride_is_folded(policy, device, rule):
    attrs = {"kernel": "(7, 7)", "stride": "(2, 2)", "pad": "(3, 3)", "num_filter": "64"}
    assert policy.decide("Convolution", attrs, (1, 3, 64, 64), device).rule == rule


@pytest.mark.parametrize("op", ["dot", "_np_dot"])
@pytest.mark.parametrize(("shape", "rule"), [((1000,), "FP32"), ((1, 1000), "LOWER"), (None, "LOWER")])
def test_products_of_vectors_are_sums_in_float16(op, shape, rule):
    assert Policy("float16").decide(op, {}, shape).rule == rule
    assert Policy("float16").fixed(op) is None
    assert Policy("bfloat16").decide(op, {}, shape).rule == "FP32"


GLOBAL = {"global_pool": "True"}


# What oneDNN's log showed, with AMX and without.
@pytest.mark.parametrize(("attrs", "shape", "slow_with_amx", "slow_without"), [
    (GLOBAL, (1, 2048, 7, 7), True, False), (GLOBAL, (6, 2048, 7, 7), True, False),
    (GLOBAL, (7, 2048, 7, 7), False, False), (GLOBAL, (8, 256, 14, 14), True, False),
    (GLOBAL, (8, 256, 28, 28), True, True), (GLOBAL, (13, 2048, 7, 14), True, False),
    (GLOBAL, (2, 96, 7, 7), True, True), (GLOBAL, (2, 112, 7, 7), True, False), (GLOBAL, (2, 208, 14, 14), True, True),
    (GLOBAL, (1, 64, 1, 1), False, False), (GLOBAL, (1, 64, 7), False, False), (GLOBAL, (0, 64, 7, 7), False, False),
    ({"kernel": "(7, 7)"}, (1, 64, 7, 7), True, True), ({"kernel": "(7, 7)"}, (1, 64, 8, 8), False, False),
    ({"kernel": "(3, 3)", "stride": "(2, 2)", "pad": "(1, 1)"}, (1, 64, 56, 56), False, False),
    ({"kernel": "(2, 2)", "stride": "(2, 2)"}, (1, 32, 3, 3), True, True)])
def test_poolings_whose_gradient_is_out_of_order(attrs, shape, slow_with_amx, slow_without):
    def rule(target, amx, **settings):
        return Policy(target, **settings).decide("Pooling", {"pool_type": "avg", **attrs}, shape, Device(amx=amx)).rule

    for amx, slow in ((True, slow_with_amx), (False, slow_without)):
        assert pools_out_of_order(attrs, shape, amx) == slow
        assert rule("bfloat16", amx) == ("FP32" if slow else "NEUTRAL")
        assert rule("bfloat16", amx, training=False) == rule("float16", amx) == "NEUTRAL"


# What oneDNN's log showed in inference: "gemm:jit" for these, "jit_dw:avx512_core_bf16" for whole blocks.
@pytest.mark.parametrize(("groups", "filters", "layout", "stays"), [
    (72, 72, "None", True), (728, 728, "None", True), (96, 96, "None", False), (1, 72, "None", False),
    (4, 72, "None", False), (72, 72, "NHWC", True)])
def test_depthwise_convolutions_of_no_whole_blocks_stay_in_fp32_in_inference(groups, filters, layout, stays):
    attrs = {"kernel": "(3, 3)", "pad": "(1, 1)", "num_group": str(groups), "num_filter": str(filters),
             "layout": layout}

    def rule(device, **settings):
        return Policy("bfloat16", **settings).decide("Convolution", attrs, (4, filters, 14, 14), device).rule

    assert rule(Device(), training=False) == ("FP32" if stays else "LOWER")
    if layout != "NHWC":
        assert rule(Device()) == rule(Device(amx=True), training=False) == "LOWER"  # with AMX nothing was measured


@pytest.mark.parametrize(("shape", "axis", "stays"), [
    ((4, 72, 14, 14), 1, True), ((4, 96, 14, 14), 1, False), ((0, 24), 1, True), ((4, 14, 14, 72), 3, False)])
def test_batch_norm_of_no_whole_blocks_stays_in_fp32_in_inference(shape, axis, stays):
    def rule(device, **settings):
        return Policy("bfloat16", **settings).decide("BatchNorm", {"axis": str(axis)}, shape, device).rule

    lowered = rule(Device())
    assert lowered != "FP32"
    assert rule(Device(), training=False) == ("FP32" if stays else lowered)
    assert rule(Device(amx=True), training=False) == lowered  # nothing was measured with AMX


PROGRAM = """
import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn
net = nn.HybridSequential()
net.add(nn.Conv2D(64, 1, in_channels=64), nn.Activation("relu"), nn.Conv2D(128, 1, in_channels=64))
net.initialize()
data = mx.nd.random.normal(shape=(3, 64, 6, 6))
expected = net(data).asnumpy()
def check(found):
    assert np.abs(found.asnumpy() - expected).max() < 0.03 * np.abs(expected).max()
converted = amp.convert_hybrid_block(net, "bfloat16")
for size in (8, 6, 6):
    out = converted(mx.nd.random.normal(shape=(3, 64, size, size)) if size == 8 else data)
check(out)
amp.init("bfloat16")
for hybridized in (False, True):
    net.hybridize(hybridized)
    for size in (8, 6, 8, 6):
        x = data if size == 6 else mx.nd.ones((3, 64, size, size))
        with autograd.record():
            out = net(x)
            loss = out.sum()
        loss.backward()
    check(out)
mx.nd.waitall()
"""


@pytest.mark.bf16
def test_maps_that_a_kernel_overruns_do_not_corrupt_memory():
    script(PROGRAM, MALLOC_CHECK_="3", GLIBC_TUNABLES="glibc.malloc.check=3")


POOLED = """
import gluon_amp as amp
import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn
amp.init("bfloat16")
for batch, channels in ((2, 64), (2, 128), (8, 64), (8, 128)):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels, 3, padding=1, in_channels=64), nn.BatchNorm(), nn.Activation("relu"),
            nn.GlobalAvgPool2D(), nn.Dense(10))
    net.initialize()
    for hybridized in (False, True):
        net.hybridize(hybridized)
        with autograd.record():
            loss = net(mx.nd.ones((batch, 64, 7, 7))).sum()
        loss.backward()
        mx.nd.waitall()
"""


@pytest.mark.bf16
@pytest.mark.parametrize("instructions", [None, "AVX512_CORE_BF16"])
def test_a_pooling_to_one_pixel_sends_nothing_to_reference_kernels(instructions):
    told = script(POOLED, DNNL_VERBOSE="1", **({"DNNL_MAX_CPU_ISA": instructions} if instructions else {}))
    run = [line.split(",")[3:5] for line in told.splitlines() if line.startswith("dnnl_verbose,exec")]
    kernels = [kernel for primitive, kernel in run if primitive in ("batch_normalization", "pooling_v2")]
    # Forward and backward of two, hybridized and not, of four networks; C++ has poolings that are slow in FP32, too.
    assert 28 <= len(kernels) <= 32
    assert not [kernel for kernel in kernels if kernel.startswith(("ref", "bnorm_ref"))]


# Channels before and after, kernel, stride, padding, dilation and size of the map: what oneDNN has kernels for without
# AVX512, and what it has none for.
CONVOLUTIONS = [
    (64, 64, 3, 1, 3, 3, 14), (64, 64, 3, 1, 4, 4, 14), (64, 64, 3, 1, 4, 1, 14), (64, 64, 7, 2, 3, 1, 14),
    (64, 64, 9, 1, 3, 1, 14), (64, 64, 9, 1, 4, 1, 14), (64, 64, 9, 2, 3, 1, 14), (64, 64, 9, 2, 0, 1, 14),
    (3, 64, 11, 4, 2, 1, 32), (3, 64, 11, 4, 0, 1, 32), (3, 64, 7, 2, 3, 1, 32), (3, 60, 3, 1, 1, 1, 14),
    (64, 64, 5, 1, 4, 2, 14), (64, 64, 3, 1, 3, 3, 2), (64, 60, 3, 1, 1, 1, 14), (60, 64, 1, 1, 0, 1, 14)]
RUN = """
from mxnet import nd
for before, after, side, stride, pad, dilate, size in {cases}:
    data, weight = nd.ones((1, before, size, size)), nd.ones((after, before, side, side))
    nd.Convolution(data, weight, num_filter=after, kernel=(side, side), stride=(stride, stride), pad=(pad, pad),
                   dilate=(dilate, dilate), no_bias=True).wait_to_read()
"""


def test_products_of_matrices_are_those_of_onednns_log():
    done = run_on("AVX2", RUN.format(cases=CONVOLUTIONS), DNNL_VERBOSE="1")
    assert done.returncode == 0, done.stderr
    received = ["gemm" not in line for line in done.stdout.splitlines() if ",exec,cpu,convolution," in line]
    assert received == [_has_kernel(*case) for case in CONVOLUTIONS]
    assert {True, False} == set(received)


def _has_kernel(before, after, side, stride, pad, dilate, size):
    attrs = {"kernel": f"({side}, {side})", "stride": f"({stride}, {stride})", "pad": f"({pad}, {pad})",
             "dilate": f"({dilate}, {dilate})"}
    width = (size + 2 * pad - dilate * (side - 1) - 1) // stride + 1
    return has_avx2_kernel(attrs, (1, before, size, size), (1, after, width, width))


# Groups, channels before and after, kernel: with AVX512.
GROUPED = [
    *((channels, channels, channels, 3) for channels in (4, 8, 12, 24, 27, 58, 72)),
    (3, 27, 108, 1), (3, 54, 216, 3), (3, 216, 108, 1), (2, 24, 40, 3), (2, 20, 20, 1), (4, 16, 16, 3), (2, 36, 36, 3),
    (1, 3, 12, 3), (1, 3, 16, 3), (1, 3, 24, 3), (1, 1, 20, 3), (1, 12, 24, 1), (1, 20, 20, 3), (1, 27, 40, 1),
    (1, 58, 58, 1), (1, 20, 64, 3), (1, 24, 24, 3), (1, 64, 120, 1)]
RUN_GROUPED = """
from mxnet import nd
for groups, before, after, side in {cases}:
    data, weight = nd.ones((1, before, 28, 28)), nd.ones((after, before // groups, side, side))
    nd.Convolution(data, weight, num_filter=after, num_group=groups, kernel=(side, side), pad=(side // 2,) * 2,
                   no_bias=True).wait_to_read()
"""


def test_products_of_matrices_with_avx512_are_those_of_onednns_log():
    done = run_on("AVX512_CORE", RUN_GROUPED.format(cases=GROUPED), DNNL_VERBOSE="1")
    assert done.returncode == 0, done.stderr
    received = ["gemm" not in line for line in done.stdout.splitlines() if ",exec,cpu,convolution," in line]
    assert received == [has_avx512_kernel({"num_group": str(groups)}, (after, before // groups, side, side))
                        for groups, before, after, side in GROUPED]
    assert {True, False} == set(received)
