"""The kernels that each row of rates.json chooses for networks, recorded: a change for one CPU must not move others.

`python tests/plan/test_recorded_choices.py` writes recorded_choices.json anew: its difference is what others get.
"""
from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import mxnet as mx
import pytest
from gluoncv import model_zoo
from mxnet.gluon.model_zoo import vision

from gluon_amp._mxnet.invoke import registered_operators
from gluon_amp.graph import Entry
from gluon_amp.machine import costs
from gluon_amp.machine.dtypes import FLOAT32, cpu_support
from gluon_amp.machine.host import Cpu
from gluon_amp.passes import Facts
from gluon_amp.plan.planner import Planner
from gluon_amp.rules import Device, Policy, make_policy
from gluon_amp.state.devices import chosen_by
from gluon_amp.state.state import State

RECORDED = Path(__file__).with_name("recorded_choices.json")
RATES = Path(costs.__file__).with_name("rates.json")
NETWORKS = {"resnet18_v1": vision, "mobilenetv2_1.0": vision, "densenet121": vision, "squeezenet1.1": vision,
            "se_resnext50_32x4d": model_zoo, "shufflenet_v2": model_zoo}
KINDS = ("Convolution", "BatchNorm", "broadcast_mul", "elemwise_add", "FullyConnected")


def choices(name):
    """Return how many operators of each kind a network's training runs in each kernel, by the row."""
    symbol = NETWORKS[name].get_model(name, pretrained=False, prefix="")(mx.sym.var("data"))
    arguments, _, states = symbol.infer_shape(data=(8, 3, 224, 224))
    by_name = {**dict(zip(symbol.list_arguments(), arguments)), **dict(zip(symbol.list_auxiliary_states(), states))}
    shapes = [by_name[each] for each in symbol.list_inputs()]
    facts, found = Facts(dtypes=(FLOAT32,) * len(shapes), trains=True), {}
    for row in json.loads(RATES.read_text())["rows"]:
        rates, own = costs.rates_of(Cpu(*row["cpu"]), row["isa"]), cpu_support(row["isa"])
        support = own if own.amx or own.dtype == FLOAT32 else chosen_by(rates, own)
        policy = Policy(FLOAT32) if support.dtype == FLOAT32 else make_policy(support.dtype, registered_operators())
        state = State({"cpu": policy}, {"cpu": Device.of(support, rates)})
        graph = Planner(symbol).plan(state, facts, shapes, lambda: shapes).graph
        counts = Counter(f"{node.op} {Entry(node).dtype}" for node in graph.operators() if node.kind in KINDS)
        found[str(rates)] = ", ".join(f"{count} {each}" for each, count in sorted(counts.items()))
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_choices_are_those_recorded(name):
    assert choices(name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({name: choices(name) for name in NETWORKS}, indent=1) + "\n")
