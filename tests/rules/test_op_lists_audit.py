"""The operator tables against what was measured: the audit of this engine, and the types that MXNet infers."""
from __future__ import annotations

import json
import re
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from audit.samples import sampled_operators, samples_of
from mxnet.util import np_shape

import gluon_amp
from gluon_amp._mxnet.symbols import from_graph
from gluon_amp.dtypes import BFLOAT16, FLOAT16
from gluon_amp.graph import Entry, Graph, Node
from gluon_amp.rules import KEEP, LOWER, NEUTRAL, WIDEST, Policy
from gluon_amp.rules.tables import table

RUNS_LOW = (LOWER, NEUTRAL, WIDEST)


# Inference of types is the same on every device, so that a CPU can say whether a GPU's operators take such inputs.
def inferred(sample, types):
    variables = [Node("null", f"input{number}") for number in range(len(types))]
    probe = Node(sample.op, "probe", dict(sample.attrs), [Entry(variable) for variable in variables])
    with np_shape(sample.numpy_shape):
        symbol = from_graph(Graph([Entry(probe)], {"mxnet_version": ["int", 10901]}), mx.sym.Variable("x"))
        return symbol.infer_type(**{f"input{number}": kind for number, kind in enumerate(types)})[1]


def planned(sample, record, dtype):
    """Return the types of a sample's inputs where as much as the rule allows is in low precision."""
    return [np.dtype(dtype) if is_lowered(each.kind, each.aux, position, record)
            else np.dtype("float32" if each.kind == "low" else each.kind)
            for position, each in enumerate(sample.inputs)]


def is_lowered(kind, aux, position, record):
    return (kind == "low" or (kind == "float32" and not aux)) and position not in record.fp32_inputs


def low_samples(dtype):
    for name in sampled_operators():
        for sample in samples_of(name):
            record = Policy(dtype).decide(name, dict(sample.attrs), (2, 16, 8, 8))
            if record.rule in RUNS_LOW:
                yield sample, record


def test_mxnet_infers_the_float16_types_that_the_table_plans():
    wrong = []
    for sample, record in low_samples(FLOAT16):
        full = inferred(sample, [np.dtype("float32" if each.kind == "low" else each.kind) for each in sample.inputs])
        half = inferred(sample, planned(sample, record, FLOAT16))
        count = 1 if record.fp32_inputs else len(full)
        expected = [np.float16 if kind == np.float32 and number < count else kind for number, kind in enumerate(full)]
        if half != expected:
            wrong.append((sample.op, sample.condition, half, expected))
    assert wrong == []


@pytest.fixture(scope="module")
def audit():
    path = Path(gluon_amp.__file__).parents[1] / "docs" / "operator_audit.json"
    return json.loads(path.read_text())["operators"]


def conditions(audit):
    """Yield operator, condition, result and record of what the audit ran as low as the table may run it."""
    for name, entry in audit.items():
        for condition, result in entry.get("conditions", {}).items():
            record = Policy(BFLOAT16).decide(name, {key: str(value) for key, value in result["attrs"].items()})
            kinds = re.findall(r"(\w+)\(", result["inputs"])
            if all((kind == "low") == (position not in record.fp32_inputs)
                   for position, kind in enumerate(kinds) if kind in ("low", "float32")):
                yield name, condition, result, record


def faults(result):
    """Name the modes in which bfloat16 fails where FP32 does not.

    Gradients added up in bfloat16 are left out: masters and their gradients are FP32, and inside a graph such sums
    came out right.
    """
    return [mode for mode, verdict in result["modes"].items() if verdict != "ok" and not mode.endswith("/addlow")
            and (verdict == "crash" or mode not in result.get("fp32", {}))]


def test_what_the_audit_found_faulty_is_never_low(audit):
    wrong = [(name, condition, faults(result)[:3]) for name, condition, result, record in conditions(audit)
             if faults(result) and (record.rule in RUNS_LOW or (record.safe and record.rule != KEEP))]
    assert wrong == []


def test_what_runs_low_was_audited_and_found_right(audit):
    right = {name for name, _, result, record in conditions(audit) if record.rule in RUNS_LOW and not faults(result)}
    low = {name for name, records in table(BFLOAT16).items()
           if any(record.rule in RUNS_LOW for record in records)}
    assert sorted(low - right) == []
