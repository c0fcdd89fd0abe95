"""Small graphs written by hand, and a readable form of graphs to compare with expectations written by hand."""
from __future__ import annotations

from collections.abc import Set

from gluon_amp import passes
from gluon_amp.graph import Entry, Graph, Node
from gluon_amp.passes import Context, Facts
from gluon_amp.rules import ANY_DEVICE, Policy


def variable(name, shape=None, dtype="float32"):
    return Node("null", name, dtypes=[dtype], shapes=[shape])


def op(kind, name, *inputs, outputs=1, shape=None, dtype="float32", **attrs):
    entries = [item if isinstance(item, Entry) else Entry(item) for item in inputs]
    return Node(kind, name, {key: str(value) for key, value in attrs.items()}, entries, outputs,
                dtypes=[dtype] * outputs, shapes=[shape] * outputs)


def conv(name, data, filters, channels, kernel=3, bias=False, weight=None, **attrs):
    weight = weight or variable(f"{name}_weight", (filters, channels, kernel, kernel))
    inputs = [data, weight] + ([variable(f"{name}_bias", (filters,))] if bias else [])
    return op("Convolution", name, *inputs, num_filter=filters, kernel=(kernel, kernel), no_bias=not bias,
              shape=(2, filters, 8, 8), **attrs)


def batch_norm(name, data):
    parameters = [variable(f"{name}_{part}", (8,)) for part in ("gamma", "beta", "mean", "var")]
    return op("BatchNorm", name, data, *parameters, outputs=3)


def graph(*heads):
    return Graph([head if isinstance(head, Entry) else Entry(head) for head in heads])


def describe(result):
    """List operators as ``name: op(inputs) -> dtype``, in order; outputs other than the first as ``name.1``."""
    def name(entry):
        return entry.node.name + (f".{entry.output}" if entry.output else "")

    lines = [f"{node.name}: {node.op}({', '.join(map(name, node.inputs))}) -> {Entry(node).dtype}"
             for node in result.operators()]
    return [*lines, f"out: {', '.join(map(name, result.heads))}"]


def rewrite(graph, policy, device=ANY_DEVICE, **settings):
    """Run all passes but the last ones; settings are those of Facts and of Context.of."""
    facts = Facts(**{name: settings.pop(name) for name in Facts._fields if name in settings})
    if isinstance(settings.get("native"), Set):
        settings["native"] = settings["native"].__contains__ if settings["native"] else None
    return passes.run(graph, Context.of(graph, policy, device, facts=facts, **settings))


def plans_of(net):
    """Return what was planned for a hybridized network, or for an executor, under all settings."""
    planner = net.binding.planner if hasattr(net, "binding") else net._cached_op.planner
    return [plan for _, plans in planner._made.values() for plan in plans.values()]


def rewritten(target, *heads, accumulated=(), policy=None, device=ANY_DEVICE):
    result = graph(*heads)
    rewrite(result, policy or Policy(target), device, accumulated=frozenset(accumulated), check=True)
    return describe(result)
