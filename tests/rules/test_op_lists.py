"""The operator tables: every operator of MXNet 1.9.1 is in them, once, and MXNet can run what they say."""
from __future__ import annotations

from collections import Counter

import mxnet as mx
import numpy as np
import pytest
from operator_samples import is_backward

from gluon_amp import DTypeError
from gluon_amp._mxnet.invoke import registered_operators
from gluon_amp.compat import stand_in as views
from gluon_amp.machine.dtypes import BFLOAT16, FLOAT16
from gluon_amp.rules import FP32, KEEP, LOWER, NEUTRAL, RULES, WIDEST, Policy, make_policy
from gluon_amp.rules.tables import groups
from gluon_amp.rules.tables import table as table_of

# What the CUDA build registers beside those of the CPU one. In no table, they run in FP32; MXNet makes the fused ones
# where no policy is asked any more.
CUDA_ONLY = {"CuDNNBatchNorm", "_contrib_mrcnn_mask_target", "_FusedOp", "_FusedOpHelper", "_FusedOpOutHelper"}
REGISTERED = {name for name in registered_operators().values() if not is_backward(name)}
FORWARD = sorted(REGISTERED - CUDA_ONLY)
DTYPES = [BFLOAT16, FLOAT16]
both_tables = pytest.mark.parametrize("table", list(map(table_of, DTYPES)), ids=DTYPES)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def group_members():
    return [(group, name) for group, names in vars(groups).items() if isinstance(names, tuple) for name in names]


class TestGroups:
    def test_no_operator_is_in_two_groups(self):
        counts = Counter(name for _, name in group_members())
        assert [name for name, count in counts.items() if count > 1] == []

    def test_this_is_the_mxnet_that_the_tables_were_made_for(self):
        assert len(FORWARD) == 611
        assert REGISTERED & CUDA_ONLY in (set(), CUDA_ONLY)


@both_tables
class TestTables:
    def test_every_forward_operator_is_classified(self, table):
        assert sorted(table) == FORWARD

    def test_every_rule_is_one_and_gives_a_reason(self, table):
        assert [name for name, rules in table.items()
                if not rules or any(rule.rule not in RULES or not rule.note for rule in rules)] == []

    def test_no_operator_has_two_rules_under_the_same_condition(self, table):
        counts = Counter((name, rule.when, rule.min_channels) for name, rules in table.items() for rule in rules)
        assert [key for key, count in counts.items() if count > 1] == []

    def test_a_conditional_operator_ends_with_a_rule_for_the_rest(self, table):
        assert [name for name, rules in table.items() if rules[-1].when or rules[-1].min_channels] == []

    def test_what_has_no_sound_kernel_runs_in_fp32_or_is_left_alone(self, table):
        assert [name for name, rules in table.items()
                if any(not rule.safe and rule.rule not in (FP32, KEEP) for rule in rules)] == []

    def test_conditions_name_attributes_of_the_operator(self, table):
        for name, rules in table.items():
            for rule in rules:
                if rule.when:
                    assert rule.when[0] in mx.operator.get_operator_arguments(name).names, name


@pytest.mark.parametrize(("operator", "attributes", "channels", "low", "half"), [
    ("Convolution", {}, 16, LOWER, LOWER), ("Convolution", {}, 3, FP32, LOWER),
    ("Convolution", {"layout": "NHWC"}, 16, FP32, LOWER), ("FullyConnected", {}, None, LOWER, LOWER),
    ("batch_dot", {}, None, FP32, FP32), ("_npi_matmul", {}, None, FP32, FP32), ("RNN", {}, None, FP32, FP32),
    ("dot", {}, None, FP32, LOWER), ("_npi_tensordot", {}, None, FP32, LOWER), ("_npi_einsum", {}, None, FP32, FP32),
    ("_contrib_interleaved_matmul_selfatt_qk", {}, None, FP32, LOWER), ("Embedding", {}, None, FP32, NEUTRAL),
    ("_contrib_SparseEmbedding", {}, None, FP32, FP32),
    ("_linalg_gemm2", {}, None, FP32, FP32), ("LayerNorm", {}, None, FP32, FP32), ("exp", {}, None, FP32, FP32),
    ("softmax", {}, None, FP32, FP32), ("sum", {}, None, FP32, FP32), ("_contrib_box_nms", {}, None, FP32, FP32),
    ("BatchNorm", {}, 16, NEUTRAL, NEUTRAL), ("transpose", {}, None, FP32, NEUTRAL),
    ("clip", {}, None, NEUTRAL, NEUTRAL),
    ("_npx_relu", {}, None, NEUTRAL, NEUTRAL), ("_npi_concatenate", {}, None, WIDEST, WIDEST),
    ("broadcast_add", {}, None, FP32, WIDEST), ("Activation", {"act_type": "softrelu"}, None, NEUTRAL, FP32),
    ("LeakyReLU", {"act_type": "prelu"}, None, FP32, WIDEST), ("mp_sgd_update", {}, None, KEEP, KEEP),
    ("Deconvolution", {}, None, FP32, LOWER), ("Reshape", {}, None, FP32, NEUTRAL), ("mine", {}, None, FP32, FP32),
    ("Cast", {}, None, KEEP, KEEP), ("_random_uniform", {}, None, KEEP, KEEP), ("Custom", {}, None, FP32, FP32)])
def test_decisions_that_matter(operator, attributes, channels, low, half):
    decisions = [Policy(dtype).decide(operator, attributes, (2, channels, 8, 8)).rule for dtype in DTYPES]
    assert decisions == [low, half]


@both_dtypes
class TestViews:
    LISTS = (views.list_lp16_ops, views.list_fp32_ops, views.list_lp16_fp32_ops, views.list_widest_type_cast)

    def test_every_operator_is_in_one_list(self, dtype):
        conditional = {name for name, _, _ in views.list_conditional_fp32_ops(dtype)}
        counts = Counter([name for view in self.LISTS for name in view(dtype)] + sorted(conditional))
        assert sorted(counts) == FORWARD
        assert set(counts.values()) == {1}

    def test_lists_are_accepted_as_the_users_own(self, dtype):
        policy = make_policy(dtype, registered_operators(), target_precision_ops=views.list_lp16_ops(dtype),
                             fp32_ops=views.list_fp32_ops(dtype),
                             conditional_fp32_ops=views.list_conditional_fp32_ops(dtype))
        assert policy.decide("FullyConnected", {}).rule == LOWER
        assert policy.decide("exp", {}).rule == FP32

    def test_conditions_have_mxnets_form(self, dtype):
        for name, attribute, values in views.list_conditional_fp32_ops(dtype):
            for value in values:
                assert Policy(dtype).decide(name, {attribute: value}).rule == FP32

    def test_callers_may_change_what_they_get(self, dtype):
        views.list_loss_output_functions(dtype).clear()
        views.list_lp16_ops(dtype).clear()
        assert views.list_loss_output_functions(dtype)
        assert views.list_lp16_ops(dtype)

    def test_loss_outputs_are_those_with_a_gradient_scale(self, dtype):
        found = [name for name in FORWARD if "grad_scale" in mx.operator.get_operator_arguments(name).names]
        assert sorted(views.list_loss_output_functions(dtype)) == found


@pytest.mark.parametrize("arguments", [(), ("float16",), (np.float16,), (np.dtype("float16"),)])
def test_lists_are_for_float16_when_not_told(arguments):
    assert "dot" in views.list_lp16_ops(*arguments)


@pytest.mark.parametrize("view", [each for name, each in vars(views).items() if name.startswith("list_")])
def test_lists_refuse_other_types(view):
    with pytest.raises(DTypeError, match="received target_dtype='int8'"):
        view("int8")


def test_inputs_that_stay_fp32_have_mxnets_names():
    assert views.list_lp16_use_fp32_params("float16") is None
    found = views.list_lp16_use_fp32_params("bfloat16")
    assert found["SequenceMask"] == ["", "sequence_length"]
    for name in found:
        variables = mx.operator.get_operator_arguments(name)
        inputs = [each for each, kind in zip(variables.names, variables.types) if "NDArray" in kind]
        assert list(views.INPUT_NAMES[name]) == inputs
