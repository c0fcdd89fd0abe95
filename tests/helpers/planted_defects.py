"""Defects that are planted in AMP: the fuzzer has to find each."""
from __future__ import annotations

import os
import signal
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, Callable, ContextManager, Iterator, Sequence
from unittest import mock

from mxnet import autograd

from gluon_amp import passes
from gluon_amp._mxnet import symbols
from gluon_amp.eager import applier, gradient_fixes, loss_scale, running_stats
from gluon_amp.graph import CAST, Entry, Graph, Node, Role, operator, redirect
from gluon_amp.graph.attrs import REGION
from gluon_amp.passes import identities, inference, precisions
from gluon_amp.plan import cached_op, executors, planner
from gluon_amp.rules import policy
from gluon_amp.session import block_calls
from gluon_amp.state import blocks

Edit = Callable[[Graph], bool]


def _floats(graph: Graph, *ops: str) -> list[Node]:
    """Return the program's own operators that give floating-point tensors."""
    return [node for node in graph.operators() if node.role is Role.OWN and (not ops or node.op in ops)
            and node.dtypes[0] in ("float32", "bfloat16", "float16")]


def _behind(graph: Graph, nodes: list[Node], op: str, **attrs: object) -> bool:
    """Put an operator behind one of some nodes, for all its readers."""
    for one in nodes[len(nodes) // 2:][:1]:
        node = operator(op, f"{one.name}_planted", [], Entry(one), **attrs)
        redirect(graph, {Entry(one).key: Entry(node)})
        node.inputs = [Entry(one)]
    return bool(nodes)


def _scaled(by: float) -> Edit:
    return lambda graph: _behind(graph, _floats(graph), "_mul_scalar", scalar=by)


def _without_gradient(of_variables: bool) -> Edit:
    return lambda graph: _behind(graph, [
        node for node in graph.operators() if node.op == CAST and node.role is Role.CAST
        and node.inputs[0].node.is_variable is of_variables], "BlockGrad")


def _outputs_in_another_order(graph: Graph) -> bool:
    graph.heads[:2] = graph.heads[1::-1]
    return len(graph.heads) > 1


def _with_attrs(nodes: Callable[[Graph], list[Node]], changed: Callable[[Node], dict[str, str]]) -> Edit:
    def edit(graph: Graph) -> bool:
        found = nodes(graph)
        for node in found:
            node.attrs = {**node.attrs, **changed(node)}
        return bool(found)
    return edit


_a_channel_late = _with_attrs(
    lambda graph: [node for node in graph.operators() if node.op == "slice_axis" and node.stands_for],
    lambda node: {"begin": "1", "end": str(int(node.attrs["end"]) + 1)})


def _rewritten(edit: Edit, converts: bool) -> Callable[[], ContextManager]:
    """Plant a defect in what conversions make of graphs, or in what graphs become in training."""
    original = passes.run

    def run(graph: Graph, context: Any) -> dict[str, int]:
        counts = original(graph, context)
        return {**counts, "planted": (context.weights is not None) == converts and edit(graph)}
    return lambda: mock.patch.object(passes, "run", run)


def _patched(*targets: tuple[Any, str, Any], wraps: bool = False) -> Callable[[], ContextManager]:
    """Plant a defect by other attributes of modules and classes, which are made of the original ones with ``wraps``."""
    for owner, name, _ in targets:
        attrgetter(name)(owner)  # one that is gone is said when this module is imported

    @contextmanager
    def plant() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, other in targets:
                stack.enter_context(mock.patch.object(owner, name, other(getattr(owner, name)) if wraps else other))
            yield
    return plant


def _decide_without_regions(original: Callable) -> Callable:
    def decide(node: Node, context: Any) -> Any:
        attrs = {name: value for name, value in node.attrs.items() if name != REGION}
        return original(replace(node, attrs=attrs), context)
    return decide


def _call_with_first_weights(original: Callable) -> Callable:
    def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
        if not autograd.is_recording() and operation._current() is not None:
            data = set(operation._data_positions)
            kept = operation.__dict__.setdefault("_planted", {i: one.copy() for i, one in enumerate(args)
                                                              if i not in data})
            args = tuple(kept.get(i, one) for i, one in enumerate(args))
        return original(operation, *args, **kwargs)
    return call


def _stale_casts(original: Callable) -> Callable:
    kept: dict[tuple[int, int], Any] = {}

    def input_cast(call: Any, array: Any, flag: int, fragile: bool) -> Any:
        if autograd.is_recording() or not flag or array.grad is None:
            return original(call, array, flag, fragile)
        key = array.handle.value, flag
        if key not in kept:
            kept[key] = array, original(call, array, flag, fragile)
        return kept[key][1]
    return input_cast


def _fold_without_bias(original: Callable) -> Callable:
    def fold(graph: Any, weights: Any, norm: Node, layers: Sequence[Node]) -> None:
        for layer in layers:
            layer.inputs = layer.inputs[:2]
        original(graph, weights, norm, layers)
    return fold


def _first_plan(binding: Any, shapes: Any = None) -> Any:
    return binding.planner.plan(binding.state, binding.facts, binding.shapes, lambda: binding.shapes)


_PLANNED: dict[str, Edit] = {
    "weight_without_gradient": _without_gradient(of_variables=True),
    "cast_without_gradient": _without_gradient(of_variables=False),
    "scaled": _scaled(1.05), "scaled_by_a_hundredth": _scaled(1.01), "output_order": _outputs_in_another_order,
    "channel_late": _a_channel_late,
    "still_statistics": _with_attrs(lambda graph: _floats(graph, "BatchNorm"), lambda _: {"momentum": "1.0"}),
    "other_eps": _with_attrs(lambda graph: _floats(graph, "LayerNorm", "_gluon_amp_layer_norm"),
                             lambda _: {"eps": "0.05"})}
DEFECTS: dict[str, Callable[[], ContextManager]] = {
    **{name: _rewritten(edit, converts=False) for name, edit in _PLANNED.items()},
    **{f"converted_{name}": _rewritten(_PLANNED[name], converts=True)
       for name in ("scaled", "scaled_by_a_hundredth", "output_order")},
    "added_is_written": _patched((identities, "_put_between", lambda *_: 0)),
    "added_is_written_eager": _patched((applier._Applier, "_behind_identity", lambda call, array: array)),
    "bias_unwritten": _patched((planner.Traced, "concerned", lambda *_: frozenset())),
    "bias_unwritten_eager": _patched((gradient_fixes, "_fixed", lambda *_: None)),
    "stale_weights": _patched((cached_op.RewritingCachedOp, "__call__", _call_with_first_weights), wraps=True),
    "stale_weights_eager": _patched((applier._Applier, "_input_cast", _stale_casts), wraps=True),
    "exclusions_ignored": _patched((blocks._BlockSettings, "_is_excluded", lambda *_: False)),
    "regions_ignored": _patched((precisions, "decide", _decide_without_regions), wraps=True),
    "first_call_stays": _patched((block_calls, "outermost_trace", nullcontext)),
    "first_variant_stays": _patched((planner.Traced, "shaped", lambda *_: frozenset())),
    "first_plan_stays": _patched((executors.Binding, "plan", _first_plan)),
    "output_fused_away": _patched((inference, "_is_read_elsewhere", lambda *_: False)),
    "folded_without_bias": _patched((inference, "_fold", _fold_without_bias), wraps=True),
    "statistics_of_skipped_steps": _patched((running_stats._RunningStats, "decided", lambda *_, **__: None)),
    "scale_not_carried": _patched((loss_scale._LossScale, "_fill", lambda *_: None)),
    "constants_lost": _patched((policy, "within_range", lambda decision, *_: decision)),
    "ends_the_process": _patched((passes, "run", lambda *_: os.kill(os.getpid(), signal.SIGKILL))),
    "marks_in_files": _patched((symbols.Graph, "forget", lambda *_: None))}
