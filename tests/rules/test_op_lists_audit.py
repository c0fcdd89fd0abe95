"""The operator tables against what was measured: samples that fail in bfloat16, and the types that MXNet infers."""
from __future__ import annotations

from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet.util import np_shape
from operator_samples import SAMPLES, is_backward, reason_of

from gluon_amp import native
from gluon_amp._mxnet.invoke import registered_operators
from gluon_amp._mxnet.symbols import from_graph
from gluon_amp.graph import Entry, Graph, Node
from gluon_amp.machine.dtypes import BFLOAT16, FLOAT16
from gluon_amp.rules import KEEP, LOWER, NEUTRAL, WIDEST, Policy
from gluon_amp.rules.tables import table

RUNS_LOW = (LOWER, NEUTRAL, WIDEST)
# What fails in bfloat16 and not in FP32, on AVX512_CORE_BF16; the operator alone where all of its samples do.
# Measured once, each operator in a process of its own: MXNet 1.9.1 stays as it is.
FAULTY = Path(__file__).with_name("faulty_in_bfloat16.txt").read_text().splitlines()
EVERY = [item for items in SAMPLES.values() for item in items]


def is_faulty(item):
    return item.op in FAULTY or f"{item.op}: {item.condition}" in FAULTY


def test_every_operator_has_samples_or_a_reason():
    forward = {op for op in registered_operators().values() if not is_backward(op)} - native.OPERATORS
    assert [op for op in sorted(forward) if (op in SAMPLES) == (reason_of(op) is not None)] == []
    assert set(SAMPLES) <= forward


def test_conditions_are_unique():
    names = [(item.op, item.condition) for item in EVERY]
    assert len(names) == len(set(names))


def test_what_is_listed_as_faulty_is_a_sample():
    assert set(FAULTY) <= set(SAMPLES) | {f"{item.op}: {item.condition}" for item in EVERY}


# Inference of types is the same on every device, so that a CPU can say whether a GPU's operators take such inputs.
def inferred(item, types):
    variables = [Node("null", f"input{number}") for number in range(len(types))]
    probe = Node(item.op, "probe", dict(item.attrs), [Entry(variable) for variable in variables])
    with np_shape(item.numpy_shape):
        symbol = from_graph(Graph([Entry(probe)], {"mxnet_version": ["int", 10901]}), mx.sym.Variable("x"))
        return symbol.infer_type(**{f"input{number}": kind for number, kind in enumerate(types)})[1]


def planned(item, record, dtype):
    """Return the types of a sample's inputs where as much as the rule allows is in low precision."""
    return [np.dtype(dtype) if (each.kind == "low" or (each.kind == "float32" and not each.aux))
            and position not in record.fp32_inputs else np.dtype("float32" if each.kind == "low" else each.kind)
            for position, each in enumerate(item.inputs)]


def test_mxnet_infers_the_float16_types_that_the_table_plans():
    wrong = []
    for item in EVERY:
        record = Policy(FLOAT16).decide(item.op, dict(item.attrs), (2, 16, 8, 8))
        if record.rule not in RUNS_LOW:
            continue
        full = inferred(item, [np.dtype("float32" if each.kind == "low" else each.kind) for each in item.inputs])
        half = inferred(item, planned(item, record, FLOAT16))
        count = 1 if record.fp32_inputs else len(full)
        expected = [np.float16 if kind == np.float32 and number < count else kind for number, kind in enumerate(full)]
        if half != expected:
            wrong.append((item.op, item.condition, half, expected))
    assert wrong == []


@pytest.fixture(scope="module")
def audited():
    """Return each sample that runs as low as the table may run it, and its rule."""
    decided = [(item, Policy(BFLOAT16).decide(item.op, dict(item.attrs))) for item in EVERY]
    return [(item, record) for item, record in decided
            if all((each.kind == "low") == (position not in record.fp32_inputs)
                   for position, each in enumerate(item.inputs) if each.kind in ("low", "float32"))]


def test_what_fails_in_bfloat16_is_never_low(audited):
    wrong = [(item.op, item.condition) for item, record in audited if is_faulty(item)
             and (record.rule in RUNS_LOW or (record.safe and record.rule != KEEP))]
    assert wrong == []


def test_what_runs_low_has_a_sample_that_is_right(audited):
    right = {item.op for item, record in audited if record.rule in RUNS_LOW and not is_faulty(item)}
    low = {name for name, records in table(BFLOAT16).items() if any(record.rule in RUNS_LOW for record in records)}
    assert sorted(low - right) == []
