"""Graph rewrites: one module per pass, and the pipeline that runs them in order.

A pass is a function of a :class:`~gluon_amp.graph.Graph` and a :class:`Context` that edits the graph in
place and says whether it changed anything. Passes read the data types and shapes that an analysis wrote into
the nodes, and keep them up to date for the nodes they add.
"""
from __future__ import annotations

from typing import Sequence

from ..graph import Graph
from ..policy import Policy
from . import emulate, verify
from .context import Context
from .registry import PASSES, GraphPass, Run, checked, list_passes, pipeline_of, steps_of

__all__ = ["PASSES", "Context", "GraphPass", "checked", "list_passes", "pipeline_of", "rewrite", "steps_of"]


def rewrite(graph: Graph, policy: Policy, guarded: frozenset[str] = frozenset(), check: bool = False,
            everywhere: bool = True, pipeline: Sequence[Run] | None = None, keep_outputs: bool = True) -> bool:
    """Rewrite an analysed FP32 graph for mixed precision, in place.

    Parameters
    ----------
    graph : Graph
        Its nodes carry data types, and shapes where known.
    policy : Policy
        Decides the precision of each operator, and which passes are off.
    guarded : frozenset of str
        Variables whose gradient is accumulated (``grad_req='add'``): MXNet's ``amp_cast`` loses it.
    check : bool
        Verify the result, for tests and debugging.
    everywhere : bool
        False to rewrite only what was traced inside autocast regions.
    pipeline : sequence of callable, optional
        What to run, in place of :func:`pipeline_of` the policy.
    keep_outputs : bool
        Whether the graph's outputs keep their types; they are left in low precision otherwise.

    Returns
    -------
    bool
        False when nothing runs in low precision: the graph is then untouched up to exact simplifications.

    Raises
    ------
    GraphError
        When the verifier finds a broken invariant.
    """
    outputs = tuple(head.node.dtypes[head.output] if keep_outputs else None for head in graph.heads)
    context = Context(policy, guarded, outputs, everywhere)
    before = [node.name for node in graph.variables()]
    changed = False
    for run in pipeline_of(policy) if pipeline is None else pipeline:
        changed |= run(graph, context)
    if check:
        verify.run(graph, context, before)
    if policy.emulated:
        changed |= emulate.run(graph, context)
    return changed
