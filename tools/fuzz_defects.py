#!/usr/bin/env python
"""Plant defects in AMP, and count the programs of the fuzzer that find each.

    python tools/fuzz_defects.py --count 30
    python tools/fuzz_defects.py --defects output_order stale_weights --count 5
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Callable, ContextManager, Iterator
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import fuzz
import mxnet as mx
from fuzz_apart import ended
from fuzz_checks import CHECKS
from fuzz_programs import Program
from fuzz_stock import Wrong, check_stock
from mxnet import autograd

from gluon_amp import passes
from gluon_amp._mxnet import symbols
from gluon_amp.eager import casts, gradient_fixes, loss_scale, running_stats
from gluon_amp.graph import CAST, Entry, Graph, Node, Role, operator, redirect
from gluon_amp.graph.attrs import REGION
from gluon_amp.passes import identities, inference, precisions
from gluon_amp.plan import cached_op, executors, traced
from gluon_amp.rules import policy
from gluon_amp.session import block_calls
from gluon_amp.state import exclusions

__all__ = ["DEFECTS", "finds"]

Edit = Callable[[Graph], bool]


def _floats(graph: Graph, op: str = "") -> list[Node]:
    """Return the program's own operators that give floating-point tensors."""
    return [node for node in graph.operators() if node.role is Role.OWN and op in ("", node.op)
            and node.dtypes[0] in ("float32", "bfloat16", "float16")]


def _behind(graph: Graph, entry: Entry, op: str, **attrs: object) -> bool:
    """Put an operator behind a tensor, for all its readers."""
    node = operator(op, f"{entry.node.name}_planted", [], entry, **attrs)
    redirect(graph, {entry.key: Entry(node)})
    node.inputs = [entry]
    return True


def _scaled(graph: Graph) -> bool:
    nodes = _floats(graph)
    return bool(nodes) and _behind(graph, Entry(nodes[len(nodes) // 2]), "_mul_scalar", scalar=1.05)


def _scaled_by_a_hundredth(graph: Graph) -> bool:
    nodes = _floats(graph)
    return bool(nodes) and _behind(graph, Entry(nodes[len(nodes) // 2]), "_mul_scalar", scalar=1.01)


def _casts(graph: Graph, of_variables: bool) -> list[Node]:
    return [node for node in graph.operators() if node.op == CAST and node.role is Role.CAST
            and node.inputs[0].node.is_variable is of_variables]


def _without_gradient(of_variables: bool) -> Edit:
    def edit(graph: Graph) -> bool:
        found = _casts(graph, of_variables)
        return bool(found) and _behind(graph, Entry(found[len(found) // 2]), "BlockGrad")
    return edit


def _outputs_in_another_order(graph: Graph) -> bool:
    graph.heads[:2] = graph.heads[1::-1]
    return len(graph.heads) > 1


def _a_channel_late(graph: Graph) -> bool:
    found = [node for node in graph.operators() if node.op == "slice_axis" and node.stands_for]
    for node in found:
        node.attrs = {**node.attrs, "begin": "1", "end": str(int(node.attrs["end"]) + 1)}
    return bool(found)


def _still_statistics(graph: Graph) -> bool:
    found = _floats(graph, "BatchNorm")
    for node in found:
        node.attrs = {**node.attrs, "momentum": "1.0"}
    return bool(found)


def _other_eps(graph: Graph) -> bool:
    found = [node for node in graph.operators() if "layer_norm" in node.op.lower() or node.op == "LayerNorm"]
    for node in found:
        node.attrs = {**node.attrs, "eps": "0.05"}
    return bool(found)


def _planned(edit: Edit) -> Callable[[], ContextManager]:
    """Plant a defect in what graphs become in training."""
    return _rewritten(lambda graph, context: context.weights is None and edit(graph))


def _converted(edit: Edit) -> Callable[[], ContextManager]:
    """Plant a defect in what conversions make."""
    return _rewritten(lambda graph, context: context.weights is not None and edit(graph))


def _rewritten(edit: Callable[[Graph, Any], bool]) -> Callable[[], ContextManager]:
    original = passes.run

    def run(graph: Graph, context: Any) -> dict[str, int]:
        counts = original(graph, context)
        return {**counts, "planted": edit(graph, context)}
    return lambda: mock.patch.object(passes, "run", run)


def _patched(*targets: tuple[Any, str, Any]) -> Callable[[], ContextManager]:
    """Plant a defect by other attributes of modules and classes."""
    for owner, name, _ in targets:
        getattr(owner, name)  # one that is gone is said when this module is imported

    @contextmanager
    def plant() -> Iterator[None]:
        patches = [mock.patch.object(*target) for target in targets]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()
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
    def fold(self: Any, norm: Node, layer: Node) -> None:
        layer.inputs = layer.inputs[:2]
        original(self, norm, layer)
    return fold


def _first_plan(binding: Any, shapes: Any = None) -> Any:
    return binding.planner.plan(binding.state, binding.facts, lambda: binding.shapes if shapes is None else shapes)


_Caster, _CachedOp = casts.Caster, cached_op.RewritingCachedOp
DEFECTS: dict[str, Callable[[], ContextManager]] = {
    "weight_without_gradient": _planned(_without_gradient(of_variables=True)),
    "cast_without_gradient": _planned(_without_gradient(of_variables=False)),
    "scaled": _planned(_scaled),
    "scaled_by_a_hundredth": _planned(_scaled_by_a_hundredth),
    "output_order": _planned(_outputs_in_another_order),
    "channel_late": _planned(_a_channel_late),
    "still_statistics": _planned(_still_statistics),
    "other_eps": _planned(_other_eps),
    "added_is_written": _patched((identities.SharedIdentities, "before", lambda shared, entry: entry)),
    "added_is_written_eager": _patched((_Caster, "_behind_identity", lambda call, array: array)),
    "bias_unwritten": _patched((traced.Traced, "concerned", lambda *_: frozenset())),
    "bias_unwritten_eager": _patched((gradient_fixes, "_fixed", lambda *_: None)),
    "stale_weights": _patched((_CachedOp, "__call__", _call_with_first_weights(_CachedOp.__call__))),
    "stale_weights_eager": lambda: mock.patch.object(_Caster, "input_cast", _stale_casts(_Caster.input_cast)),
    "exclusions_ignored": _patched((exclusions.Exclusions, "inside", lambda *_: set()),
                                   (exclusions.Exclusions, "match", lambda *_: False)),
    "regions_ignored": _patched((precisions, "decide", _decide_without_regions(precisions.decide))),
    "first_call_stays": _patched((block_calls, "outermost_trace", nullcontext)),
    "first_variant_stays": _patched((traced.Traced, "shaped", lambda *_: frozenset())),
    "first_plan_stays": _patched((executors.Binding, "plan", _first_plan)),
    "output_fused_away": _patched((inference, "_is_read_elsewhere", lambda *_: False)),
    "folded_without_bias": _patched(
        (inference._Folding, "fold", _fold_without_bias(inference._Folding.fold))),
    "statistics_of_skipped_steps": _patched((running_stats._RunningStats, "decided", lambda *_, **__: None)),
    "scale_not_carried": _patched((loss_scale._LossScale, "_fill", lambda *_: None)),
    "constants_lost": _patched((policy, "within_range", lambda decision, *_: decision)),
    "marks_in_files": _patched((symbols, "unmarked", lambda symbol: symbol)),
    "converted_output_order": _converted(_outputs_in_another_order),
    "converted_scaled": _converted(_scaled),
    "converted_scaled_by_a_hundredth": _converted(_scaled_by_a_hundredth),
}


def finds(program: Program, defect: str, checks: dict[str, list[str]]) -> str | None:
    """Return what the checks say of a program while AMP has a defect; None where they see nothing."""
    for check, dtypes in checks.items():
        for dtype in dtypes:
            with DEFECTS[defect]():
                message = fuzz.failure(program, check, dtype)
            if message is not None:
                return f"{check}, {dtype}: {message}"
    return None


def tell(program: Program, defects: list[str], checks: dict[str, list[str]]) -> Iterator[str | None]:
    """Say of one defect after the other what finds it, in a process that a crash may end: such a crash is a finding."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            try:
                check_stock(program)
                print(json.dumps("stock"), file=pipe, flush=True)
                for defect in defects:
                    print(json.dumps(finds(program, defect, checks)), file=pipe, flush=True)
            except (Wrong, mx.MXNetError):
                pass
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = [json.loads(line) for line in pipe]
    status = os.waitpid(child, 0)[1]
    if not told:  # stock MXNet alone fails
        return
    yield from told[1:]
    left = defects[len(told) - 1:]
    if left and status:
        yield ended(status)
        yield from tell(program, left[1:], checks)


def main() -> int:
    """Print a line for each defect: how many programs find it, and the first finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defects", nargs="+", choices=sorted(DEFECTS), default=list(DEFECTS))
    parser.add_argument("--checks", nargs="+", choices=sorted(CHECKS), default=list(CHECKS))
    parser.add_argument("--dtypes", nargs="+", help="instead of those that suit each check")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=30, help="how many seeds")
    parser.add_argument("--steps", type=int, default=30, help="operators in a program")
    arguments = parser.parse_args()
    checks = {check: arguments.dtypes or fuzz.dtypes_of(check) for check in arguments.checks}
    found: dict[str, list[str]] = {defect: [] for defect in arguments.defects}
    tried = 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        told = dict(zip(found, tell(fuzz.program_of(seed, arguments), list(found), checks)))
        tried += bool(told)
        for defect, message in told.items():
            found[defect] += [f"seed {seed}, {message}"] if message else []
    for defect, messages in found.items():
        print(f"{defect}: {len(messages)} of {tried} programs; {messages[0] if messages else 'never found'}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
