"""Passes of conversions: graphs that are not trained any more, with their parameters at hand.

``drop_training`` drops Dropout in its training mode, and identities. What stops or replaces gradients goes only where
there are none to ask for, because operators are to be fused::

    relu(Dropout(x))   ->   relu(x)

``fold_weights`` computes once what layers read that depends on parameters only, as masked or standardised weights::

    Convolution(x, w * mask)   ->   Convolution(x, masked_w)

``fold_batch_norm`` is exact in inference, up to rounding (https://arxiv.org/abs/1712.05877, section 3.2). With
``s = gamma / sqrt(var + eps)`` the normalised output is ``s * (w x + b - mean) + beta``::

    BatchNorm(Convolution(x, w, b))   ->   Convolution(x, s * w, s * (b - mean) + beta)
    BatchNorm(Concat(Convolution(x, v), Convolution(y, w)))   ->   Concat(Convolution(x, r * v), Convolution(y, s * w))

``cast_params_offline`` computes once what passes put behind parameters: casts, and the zeros of ``align_channels``::

    Convolution(x, amp_cast(w))   ->   Convolution(x, w_bfloat16)

``fuse`` prepares layers, activations and sums for oneDNN's fusion. MXNet takes a layer together with its user, whoever
else reads the layer, counts an operator that reads one tensor twice once, and moves outputs behind identities to where
they do not belong. There ``fuse`` puts operators that the fusion does not know in its way, and ``unshield`` takes them
out of what MXNet made::

    Activation(Convolution(x, w) + y)   ->   _sg_mkldnn_conv(x, w, y)

``prepare_int8`` brings rectifiers and flattened maps into the form that MXNet's INT8 quantizer runs well, and right::

    FullyConnected(relu(x), w)   ->   FullyConnected(Flatten(Activation(x, act_type=relu)), w)
"""
from __future__ import annotations

from math import prod
from typing import Any, Sequence

import numpy as np

from ..graph import BODIES, CAST, VARIABLE, Consumers, Entry, Graph, Node, Role, identity, operator, redirect
from ..graph.attrs import DTYPE, INFERENCE, MADE, TYPE_FLAGS, integer, integers, is_channels_last, is_set, region
from ..machine.dtypes import AVX2_VALUES, FLOAT32, FLOAT64, LOW_PRECISION
from ..rules.shapes import has_avx2_kernel, has_avx512_kernel
from ..rules.tables.groups import CASTS, RELU, SAMPLES
from .context import Context


def drop_training(graph: Graph, context: Context) -> int:
    """Let the users of operators that do nothing read their input; return how many were dropped."""
    idle = ("_copy",) if context.facts.recorded else ("_copy", "BlockGrad", "make_loss")
    heads = {id(head.node) for head in graph.heads}
    dropped = [node for node in graph.operators() if id(node) not in heads and (
        node.op in idle or (node.op == "Dropout" and node.attrs.get("mode", "training") == "training"))]
    redirect(graph, {Entry(node).key: node.inputs[0] for node in dropped})
    dropouts = [node.name for node in dropped if node.op == "Dropout"]
    for node in graph.variables() if dropouts else ():
        if context.weights is not None and node.name in context.weights:
            node.attrs = {**node.attrs, INFERENCE: f"the Dropout {dropouts[0]} is left out"}
    return len(dropped)


LAYERS = ("Convolution", "FullyConnected")  # oneDNN 2.4 adds the bias of a Deconvolution slower than a BatchNorm runs
# Operators that may give other results at another call, and casts, which ``cast_params_offline`` stores.
_NOT_FOLDED = frozenset((*SAMPLES, *CASTS, *BODIES, "_shuffle", "Dropout", "Custom"))


def fold_weights(graph: Graph, context: Context) -> int:
    """Store the weights and biases of layers that operators compute from parameters; return how many."""
    weights, consumers = context.weights, Consumers(graph)
    found: dict[Node, None] = {}
    for layer in graph.operators():
        for entry in layer.inputs[1:] if layer.op in LAYERS else ():
            nodes = Graph([entry]).nodes()
            if _is_constant(nodes, weights, consumers):
                found.update(dict.fromkeys(node for node in nodes if not node.is_variable))
    for node in found:
        node.name = graph.new_name(node.name)  # programs may give several operators one name
    return _store(graph, list(found), weights)


def _is_constant(nodes: Sequence[Node], weights: Any, consumers: Consumers) -> bool:
    """Tell whether operators read parameters only, and nothing else these: they would be kept twice."""
    inside = set(nodes)
    return (all(node.name in weights if node.is_variable else
                node.inputs and node.num_outputs == 1 and node.op not in _NOT_FOLDED and prod(node.shapes[0] or (0,))
                for node in nodes)
            and not any(consumers.is_head(Entry(node)) for node in nodes)
            and all(inside.issuperset(consumers.of(Entry(node))) for node in nodes[:-1]))


_DEFAULT_EPS = 1e-3  # of MXNet's operator


def fold_batch_norm(graph: Graph, context: Context) -> int:
    """Fold every BatchNorm that is the only consumer of a layer with trained parameters; return how many."""
    # An excluded BatchNorm is folded only into a layer that is excluded as well.
    weights, consumers = context.weights, Consumers(graph)
    moved: dict[tuple[int, int], Entry] = {}
    for norm in graph.operators():
        layers = _layers_before(norm, consumers, weights) if norm.op == "BatchNorm" else []
        settings = {(node.name in context.policy.excluded, region(node.attrs)) for node in (norm, *layers)}
        if layers and len(settings) == 1:
            _fold(graph, weights, norm, layers)
            moved[Entry(norm).key] = norm.inputs[0]
            norm.inputs[0].node.name = norm.name  # users find tensors by their names, and this is BatchNorm's
    redirect(graph, moved)
    return len(moved)


def _layers_before(norm: Node, consumers: Consumers, weights: Any) -> list[Node]:
    """Return the layer that a BatchNorm folds into, or those whose channels are joined before it; none if it cannot."""
    data = norm.inputs[0]
    is_join = data.node.op == "Concat" and integer(data.node.attrs, "dim", 1) == integer(norm.attrs, "axis", 1) == 1
    entries = data.node.inputs if is_join else [data]
    trained = [*norm.inputs[1:], *(entry for each in entries for entry in each.node.inputs[1:])]
    folds = (consumers.is_first_only(norm) and consumers.is_read_once(data)
             and all(each.node.op in LAYERS and consumers.is_read_once(each) and _axis_fits(norm, each.node)
                     for each in entries)
             and all(entry.node.is_variable and entry.node.name in weights for entry in trained))
    return [each.node for each in entries] if folds else []


def _axis_fits(norm: Node, layer: Node) -> bool:
    """Tell whether BatchNorm normalises over the layer's output channels."""
    axis = integer(norm.attrs, "axis", 1)
    if layer.op == "FullyConnected":
        return axis == (1 if is_set(layer.attrs, "flatten", default=True) else -1)
    dimensions = 2 + len(integers(layer.attrs, "kernel"))
    return axis in ((dimensions - 1, -1) if is_channels_last(layer.attrs) else (1,))


@np.errstate(invalid="ignore")  # of values that are not finite the caller has been warned
def _fold(graph: Graph, weights: Any, norm: Node, layers: Sequence[Node]) -> None:
    """Let layers compute what the BatchNorm behind them gives."""
    def values_of(entry: Entry) -> np.ndarray:
        return weights.read(entry.node.name).astype(np.float64)

    def made(name: str, values: np.ndarray, source: Entry) -> Entry:
        """Make a parameter, in the type of the one that it is made of, at least FP32; under a name of its own."""
        name, dtype = graph.new_name(name), FLOAT64 if source.dtype == FLOAT64 else FLOAT32
        weights.write(name, values.astype(dtype))
        return Entry(Node(VARIABLE, name, {MADE: f"{source.node.name} and the BatchNorm {norm.name}"}, dtypes=[dtype],
                          shapes=[values.shape]))

    gamma, beta, mean, variance = map(values_of, norm.inputs[1:])
    if is_set(norm.attrs, "fix_gamma", default=True):
        gamma = np.ones_like(gamma)
    scale = gamma / np.sqrt(variance + float(norm.attrs.get("eps", _DEFAULT_EPS)))
    prefix = norm.inputs[1].node.name.rpartition("gamma")[0] or f"{norm.name}_"
    start = 0
    for layer in layers:
        data, weight, *biases = layer.inputs
        values = values_of(weight)
        own = slice(start, start + len(values))  # the channels that it gives
        along = scale[own].reshape(-1, *[1] * (values.ndim - 1))
        shift = ((values_of(biases[0]) if biases else 0.0) - mean[own]) * scale[own] + beta[own]
        layer.inputs = [data, made(f"{prefix}weight", values * along, weight),
                        made(f"{prefix}bias", shift, (biases or [weight])[0])]
        layer.attrs, start = {**layer.attrs, "no_bias": "False"}, own.stop


def cast_params_offline(graph: Graph, context: Context) -> int:
    """Replace inserted operators that depend on parameters only by their results; return how many were stored."""
    inserted = [node for node in graph.operators() if node.role is not Role.OWN]
    return _store(graph, inserted, context.weights) + _store_what_the_program_casts(graph, context)


def _store(graph: Graph, nodes: Sequence[Node], weights: Any) -> int:
    """Replace those of some operators that depend on parameters only by their results; return how many were stored."""
    # A parameter that is cast, and is read nowhere else, keeps its name; every other result gets one of its own.
    consumers = Consumers(graph)
    moved: dict[tuple[int, int], Entry] = {}
    constant = {node for node in graph.variables() if node.name in weights}  # under their names ``weights`` has values
    for node in nodes:
        if constant.issuperset(entry.node for entry in node.inputs):
            weights.compute(node.name, node.op, node.attrs, [entry.node.name for entry in node.inputs])
            constant.add(node)
    for node in nodes:
        if node in constant and not constant.issuperset(consumers.of(Entry(node))):
            variable = _variable(node, consumers)
            weights.rename(node.name, variable.name)
            moved[Entry(node).key] = Entry(variable)
    redirect(graph, moved)
    return len(moved)


def _store_what_the_program_casts(graph: Graph, context: Context) -> int:
    """Store parameters in low precision where only the program's own casts to it read them; return how many."""
    # The casts stay, and do nothing: they may be outputs.
    consumers, weights, target, count = Consumers(graph), context.weights, context.target, 0
    for node in graph.variables() if context.policy.lowers else ():
        reading = consumers.of(Entry(node))
        if (node.name in weights and node.dtypes == [FLOAT32] and reading and not consumers.is_head(Entry(node))
                and all(consumer.op == CAST and consumer.dtypes == [target] for consumer in reading)):
            weights.compute(reading[0].name, CAST, {"dtype": target}, [node.name])
            weights.rename(reading[0].name, node.name)
            node.dtypes, node.attrs = [target], {**node.attrs, DTYPE: str(TYPE_FLAGS[target])}
            count += 1
    return count


def _variable(node: Node, consumers: Consumers) -> Node:
    """Make the variable that stands for a result."""
    source, dtype = node, node.dtypes[0]
    while source.inputs:  # the parameter that it depends on; zeros may be joined to it
        source = source.inputs[0].node
    # Behind a cast MXNet cannot infer the type of a variable: say it.
    attrs = {DTYPE: str(TYPE_FLAGS[dtype])} if dtype in LOW_PRECISION else {}
    variable = Node(VARIABLE, node.name, attrs, dtypes=list(node.dtypes), shapes=list(node.shapes))
    if node.shapes == source.shapes and consumers.is_read_once(Entry(source)):
        variable.name, variable.attrs = source.name, {**source.attrs, **attrs}
    else:
        variable.attrs[MADE] = source.attrs.get(MADE, source.name)
    return variable


_FUSED = "_sg_mkldnn"  # the names of fused operators begin so
# Their input must not be fused with them: MXNet folds BatchNorm in bfloat16 arithmetic, a percent off per layer, and
# loses which output of an operator an identity read.
_KEPT_APART = ("BatchNorm", "_copy", "Dropout")
_SHIELD = "__gluon_amp_shield__"


def fuse(graph: Graph, context: Context) -> int:
    """Insert identities that stop the fusion where it must not happen, or does not gain; return how many."""
    # Each user gets one of its own, so that no fused operator has the same input twice.
    consumers = Consumers(graph)
    places = [(node, position) for node in graph.operators() for position, entry in enumerate(node.inputs)
              if ((position == 0 and node.op in _KEPT_APART)
                  or _is_read_elsewhere(entry, node, consumers)
                  or _is_product(entry.node, context) or _stays_apart(node, context))]
    for node, position in places:
        node.inputs[position] = shield(graph, node.inputs[position])
    return len(places)


def _is_read_elsewhere(entry: Entry, consumer: Node, consumers: Consumers) -> bool:
    """Tell whether a tensor has several consumers; of variables only sums matter, the fusion begins behind them."""
    return not consumers.is_read_once(entry) and (not entry.node.is_variable or consumer.op == "elemwise_add")


def shield(graph: Graph, entry: Entry) -> Entry:
    """Return a tensor behind an identity, at which what MXNet does to graphs ends."""
    made = identity(entry, graph.new_name(f"{entry.node.name}_shield"))
    made.node.attrs[_SHIELD] = entry.node.name
    return made


def unshield(graph: Graph) -> int:
    """Remove the identities of ``shield`` from a fused graph; return how many fused operators it has."""
    operators = graph.operators()
    redirect(graph, {Entry(node).key: node.inputs[0] for node in operators if _SHIELD in node.attrs})
    return sum(node.op.startswith(_FUSED) for node in operators)


def is_fusible(graph: Graph) -> bool:
    """Tell whether there is a layer in a graph that the fusion begins with."""
    return any(node.op in LAYERS for node in graph.operators())


def _is_product(node: Node, context: Context) -> bool:
    """Tell whether oneDNN computes an FP32 convolution as a product of matrices."""
    # A sum or rectifier that it fuses with one takes 4 to 10 ns for each value, 10 to 25 times its own operator's.
    if node.op != "Convolution" or Entry(node).dtype != FLOAT32 or context.int8 is not None:
        return False
    if context.device.channel_multiple == AVX2_VALUES:
        return not has_avx2_kernel(node.attrs, node.inputs[0].shape, node.shapes[0])
    return not has_avx512_kernel(node.attrs, node.inputs[1].shape)


FLATTEN = "Flatten"
# The operators that may run in INT8 between layers: MXNet computes these right, and others wrong.
_BETWEEN = ("Pooling", "Concat", FLATTEN, "elemwise_add", "Activation", "BatchNorm")
_WITH_RECTIFIER = (*LAYERS, "BatchNorm", "elemwise_add")  # a rectifier behind them is fused


def prepare_int8(graph: Graph, context: Context) -> int:
    """Rename rectifiers, and flatten maps before dense layers; return how many nodes changed."""
    relus = [node for node in graph.operators()
             if node.op in RELU and node.inputs[0].node.op in _WITH_RECTIFIER and Entry(node).dtype == FLOAT32]
    for node in relus:  # MXNet fuses Activation with what is before it, and not relu, which differs for NaN only
        node.op, node.attrs = "Activation", {**node.attrs, "act_type": "relu"}
    dense = [node for node in graph.operators()
             if context.int8 is not None and node.name in context.int8.layers and node.op == "FullyConnected"
             and is_set(node.attrs, "flatten", default=True) and len(node.inputs[0].shape or ()) != 2
             and node.inputs[0].node.op != FLATTEN]
    for node in dense:  # in INT8 MXNet fails on what lies in oneDNN's layout (mkldnn_fc.cc)
        data = node.inputs[0]
        flat = operator(FLATTEN, graph.new_name(f"{node.name}_flat"), [data], data,
                        shapes=[None if data.shape is None else (data.shape[0], prod(data.shape[1:]))])
        node.inputs = [Entry(flat), *node.inputs[1:]]
    return len(relus) + len(dense)


def between(graph: Graph) -> frozenset[str]:
    """Name the FP32 operators that may run in INT8 between layers."""
    return frozenset(
        node.name for node in graph.operators() if node.op in _BETWEEN
        and not (node.op == "Concat" and integer(node.attrs, "dim", 1) < 1)  # axes that MXNet does not know in INT8
        and all(entry.dtype == FLOAT32 for entry in (Entry(node), *node.inputs)))


def _stays_apart(node: Node, context: Context) -> bool:
    """Tell whether an operator must not be fused with a layer that runs in INT8."""
    excluded = context.policy.excluded
    return context.int8 is not None and (node.name in context.int8.wide or (node.name in excluded and any(
        entry.node.name not in excluded for entry in node.inputs if not entry.node.is_variable)))
