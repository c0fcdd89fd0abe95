"""The policy, and the data types."""
from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest

from gluon_amp import DTypeError, PolicyError
from gluon_amp._mxnet.invoke import registered_operators
from gluon_amp.compat.stand_in import list_lp16_ops
from gluon_amp.machine import dtypes
from gluon_amp.rules import Policy, make_policy

KNOWN = {name: name for name in ("Convolution", "FullyConnected", "Activation", "transpose", "softmax", "sgd_update")}
KNOWN["linalg_gemm2"] = "_linalg_gemm2"


@pytest.mark.parametrize(("arguments", "message"), [
    ({"fp32_ops": ["Convolutin"]}, r"fp32_ops: MXNet has no operator 'Convolutin'\. Did you mean 'Convolution'"),
    ({"target_precision_ops": "Convolution"}, "expected a list of operator names, received target_precision_ops="),
    ({"fp32_ops": ["softmax"], "target_precision_ops": ["softmax"]}, "both target_precision_ops and fp32_ops: softmax"),
    ({"target_precision_ops": ["transpose"]}, "'transpose' cannot run in bfloat16.*corrupts memory"),
    ({"target_precision_ops": ["sgd_update"]}, "'sgd_update' cannot run in bfloat16"),
    ({"conditional_fp32_ops": [("Activation", "act_type")]}, "expected a list of .operator, attribute"),
    ({"conditional_fp32_ops": [("Activatoin", "act_type", ["relu"])]}, "Did you mean 'Activation'")])
def test_wrong_lists_are_refused(arguments, message):
    with pytest.raises(PolicyError, match=message):
        make_policy("bfloat16", KNOWN, **arguments)


def test_a_list_of_low_precision_operators_replaces_the_tables():
    policy = make_policy("bfloat16", KNOWN, target_precision_ops=["Convolution"])
    assert policy.decide("Convolution", {}).rule == "LOWER"
    assert policy.decide("FullyConnected", {}).rule == "FP32"


def test_the_tables_own_list_changes_nothing():
    known = registered_operators()
    policy = make_policy("bfloat16", known, target_precision_ops=list_lp16_ops("bfloat16"))
    for channels in (3, 64):
        shape = (2, channels, 8, 8)
        assert policy.decide("Convolution", {}, shape) == Policy("bfloat16").decide("Convolution", {}, shape)


@pytest.mark.parametrize(("kernel", "stride", "pad", "dilate", "size", "idle"), [
    (3, 1, 1, 1, 1, True), (3, 1, 1, 1, 2, False), (3, 2, 1, 1, 1, True), (3, 2, 1, 1, 2, True), (3, 2, 1, 1, 3, False),
    (5, 1, 2, 1, 2, True), (5, 1, 2, 1, 3, False), (7, 2, 3, 1, 16, False), (1, 1, 0, 1, 1, False),
    (3, 1, 2, 2, 2, True)])
def test_convolutions_whose_filters_meet_padding_only_stay_fp32(kernel, stride, pad, dilate, size, idle):
    attrs = {name: f"({value}, {value})" for name, value in
             (("kernel", kernel), ("stride", stride), ("pad", pad), ("dilate", dilate))}
    # By definition: convolve a map of ones with each filter position alone.
    reached = [any(0 <= start * stride - pad + tap * dilate < size for start in
                   range((size + 2 * pad - dilate * (kernel - 1) - 1) // stride + 1)) for tap in range(kernel)]
    assert idle == (not all(reached))
    assert (Policy("bfloat16").decide("Convolution", attrs, (2, 32, size, size)).rule == "FP32") == idle
    assert Policy("float16").decide("Convolution", attrs, (2, 32, size, size)).rule == "LOWER"


def test_conditions_hold_for_their_values_only():
    policy = make_policy("bfloat16", KNOWN, conditional_fp32_ops=[("Activation", "act_type", ["relu"])])
    assert policy.decide("Activation", {"act_type": "relu"}).rule == "FP32"
    assert policy.decide("Activation", {"act_type": "tanh"}).rule == "NEUTRAL"


def test_aliases_mean_the_registered_operator():
    policy = make_policy("float16", KNOWN, fp32_ops=["linalg_gemm2"])
    assert policy.decide("_linalg_gemm2", {}).rule == "FP32"


SPELLINGS = {
    "bfloat16": ["bfloat16", "bf16", "BFloat16", "torch.bfloat16", dtypes.BFLOAT16_DTYPE, type("bfloat16", (), {})],
    "float16": ["float16", "fp16", "half", "FLOAT16", "np.float16", np.float16, np.dtype("float16")],
    "float32": ["float32", "fp32", "FP32", "single", np.float32, np.dtype("float32")]}


@pytest.mark.parametrize(("dtype", "spelling"), [(dtype, each) for dtype in SPELLINGS for each in SPELLINGS[dtype]])
def test_spellings(dtype, spelling):
    assert dtypes.normalize(spelling, or_float32=True) == dtype
    with pytest.raises(DTypeError, match="received target_dtype=") if dtype == "float32" else nullcontext():
        assert dtypes.normalize(spelling) == dtype


@pytest.mark.parametrize("spelling", ["int8", "double", "float", "float16x", "", None, np.float64, float, 16, object()])
def test_other_types_are_refused(spelling):
    with pytest.raises(DTypeError, match=r"expected 'float16', 'bfloat16'.*received target_dtype="):
        dtypes.normalize(spelling)


@pytest.mark.parametrize(("flags", "environ", "isa", "dtype", "on_request"), [
    ("fpu avx avx2", {}, "AVX2", "float32", None),
    ("avx avx2 avx512f avx512bw avx512vl avx512dq", {}, "AVX512_CORE", "float32", "bfloat16"),
    ("avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16", {}, "AVX512_CORE_BF16", "bfloat16", None),
    ("avx512_bf16 amx_bf16 amx_tile", {}, "AVX512_CORE_AMX", "bfloat16", None),
    ("avx512_bf16 amx_bf16 amx_tile", {"DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "AVX512_CORE_BF16", "bfloat16", None),
    ("avx512_bf16", {"DNNL_MAX_CPU_ISA": "AVX2"}, "AVX2", "float32", None),
    ("avx2", {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, "AVX2", "float32", None),
    ("avx512_bf16", {"DNNL_MAX_CPU_ISA": "ALL"}, "AVX512_CORE_BF16", "bfloat16", None),
    ("", {}, "SSE41", "float32", None)])
def test_the_cpu_decides_the_type(flags, environ, isa, dtype, on_request):
    name = dtypes.cpu_isa(f"model name : x\nflags : {flags}\n", environ, amx=True)
    found = dtypes.cpu_support(name)
    assert (name, found.dtype, found.native, found.on_request) == (isa, dtype, True, on_request)


@pytest.mark.parametrize(("capability", "dtype"), [
    (None, "float16"), ((3, 5), "float32"), ((5, 0), "float16"), ((7, 5), "float16"), ((8, 9), "float16"),
    ((9, 0), "float32")])
def test_the_gpu_decides_the_type(capability, dtype):
    assert dtypes.cuda_support(capability).dtype == dtype


class TestFiles:
    """What a policy file says of kernels that are not sound counts for nothing."""

    @staticmethod
    def text(op, **changes):
        rule = {"name": op, "rule": "LOWER", "when": None, "fp32_inputs": [], "rounded_inputs": [], "min_channels": 0,
                "safe": True, "note": "trust me", **changes}
        return json.dumps({**json.loads(Policy("bfloat16").to_json()), "overrides": {op: [rule]}})

    @pytest.mark.parametrize("rule", ["LOWER", "NEUTRAL", "WIDEST", "KEEP"])
    @pytest.mark.parametrize("op", ["transpose", "Deconvolution", "Embedding", "sgd_update"])
    def test_kernels_that_are_not_sound_are_refused(self, op, rule):
        with pytest.raises(PolicyError, match=f"overrides: '{op}' cannot run in bfloat16"):
            Policy.from_json(self.text(op, rule=rule))

    def test_conditions_of_the_table_stay(self):
        policy = Policy.from_json(self.text("Activation"))
        assert policy.decide("Activation", {"act_type": "softsign"}).rule == "FP32"
        assert policy.decide("Activation", {"act_type": "relu"}).rule == "LOWER"
        assert Policy.from_json(policy.to_json()) == policy

    def test_inputs_that_kernels_read_in_fp32_stay(self):
        with pytest.raises(PolicyError, match=r"fp32_inputs of 'BatchNorm' lack \[1, 2, 3, 4\]"):
            Policy.from_json(self.text("BatchNorm"))

    @pytest.mark.parametrize("changes", [{"excluded": "net_dense0"}, {"excluded": [1]}, {"disabled_passes": "fuse"},
                                         {"training": "false"}])
    def test_what_is_no_list_or_no_choice_is_refused(self, changes):
        with pytest.raises(PolicyError, match=f"expected .*, received {next(iter(changes))}="):
            Policy.from_json(json.dumps({**json.loads(Policy("bfloat16").to_json()), **changes}))

    @pytest.mark.parametrize("changes", [{"fp32_inputs": "01"}, {"fp32_inputs": [-1]},
                                         {"when": ["act_type", "relu"]}, {"when": [1, ["relu"]]},
                                         {"when": ["act_type"]}, {"when": {}}, {"min_channels": "16"},
                                         {"min_channels": 1.5}, {"min_channels": -1}, {"min_channels": True},
                                         {"safe": "yes"}, {"note": 1}])
    def test_rules_are_refused_whose_parts_are_of_other_kinds(self, changes):
        with pytest.raises(PolicyError, match=f"expected .*, received {next(iter(changes))}="):
            Policy.from_json(self.text("Activation", **changes))

    def test_a_text_of_countless_brackets_is_refused(self):
        with pytest.raises(PolicyError, match="not the JSON text of a policy"):
            Policy.from_json("[" * 100_000)

    def test_lists_survive(self):
        known = registered_operators()
        for lists in ({"target_precision_ops": ["Convolution", "Activation", "BatchNorm"]}, {"fp32_ops": ["transpose"]},
                      {"conditional_fp32_ops": [("Activation", "act_type", ["tanh"])]}):
            policy = make_policy("bfloat16", known, **lists)
            assert Policy.from_json(policy.to_json()) == policy


def test_files_of_earlier_versions_load():
    measured = {"slow": ["FullyConnected(num_hidden=8) on (4, 32)"], "fast": ["chain of 3 operators: 0"]}
    assert Policy.from_json(json.dumps({**json.loads(Policy("bfloat16").to_json()), **measured})) == Policy("bfloat16")
