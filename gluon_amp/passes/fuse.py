"""Let oneDNN fuse convolutions and dense layers with activations and sums, for inference on the CPU.

MXNet's own fusion folds BatchNorms too, in bfloat16 arithmetic, a percent off per layer. Those that are left are
shielded from it by an operator that it does not know.
"""
from __future__ import annotations

from ..graph import Entry, Graph, Role, operator, redirect, unique_name
from .context import Context

__all__ = ["run"]

_FUSED = "_sg_mkldnn"


def run(graph: Graph, context: Context) -> int:
    """Replace the graph by what the engine makes of it; return how many fused operators that has."""
    if context.engine is None:
        return 0
    shields = _shield_batch_norms(graph)
    fused = context.engine(graph)
    redirect(fused, {Entry(node).key: node.inputs[0] for node in fused.operators() if node.name in shields})
    graph.heads, graph.attrs = fused.heads, fused.attrs
    return sum(node.op.startswith(_FUSED) for node in fused.operators())


def _shield_batch_norms(graph: Graph) -> set[str]:
    names = {node.name for node in graph.nodes()}
    shields = set()
    for node in graph.operators():
        if node.op == "BatchNorm":
            shield = operator("_mul_scalar", unique_name(f"{node.name}_shield", names), [node.inputs[0]],
                              node.inputs[0], Role.GUARD, scalar=1.0)
            node.inputs[0] = Entry(shield)
            shields.add(shield.name)
    return shields
