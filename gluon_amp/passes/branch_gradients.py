"""Give every tensor that a branch or the condition of a loop reads a gradient.

MXNet writes the gradients of what the branch reads that was taken, and of what the body of a ``while_loop`` reads. What
only the other branch reads, or only the condition, gets whatever is in memory as its gradient; and a tensor that both
branches read counts as two, unless it is a variable. Here what is not read is added times zero.
"""
from __future__ import annotations

from ..graph import Entry, Graph, Node, operator, set_subgraphs, subgraphs_of
from ..graph.attrs import integers
from .context import Context

# The attributes that say which inputs those graphs of an operator read that have a backward pass, and where these are.
_READS = {"_cond": {"then_input_locs": 1, "else_input_locs": 2}, "_while_loop": {"func_input_locs": 1}}


def run(graph: Graph, context: Context) -> int:
    """Complete what branches and loops read; return how many inputs were missing."""
    return sum(_complete(node) for node in graph.operators() if node.op in _READS)


def _complete(node: Node) -> int:
    parts = subgraphs_of(node)
    added = sum(_read_all(node, parts[part], name) for name, part in _READS[node.op].items())
    if added:
        set_subgraphs(node, parts)
    return added


def _read_all(node: Node, part: Graph, name: str) -> int:
    """Let a graph of an operator read all of its inputs; return how many it did not."""
    reads, dtype = integers(node.attrs, name), node.dtypes[-1] if node.dtypes else None
    missing = [location for location, entry in enumerate(node.inputs)
               if location not in reads and entry.dtype is not None and dtype is not None]
    for location in missing:  # behind the last output, so that the variables are the last ones as well
        head, zero = part.heads[-1], _zero(part, node.inputs[location], str(dtype))
        part.heads[-1] = Entry(operator("broadcast_add", part.new_name(f"{head.node.name}_read"), [head, zero],
                                        head))
    node.attrs = {**node.attrs, name: str([*reads, *missing])}
    return len(missing)


def _zero(part: Graph, entry: Entry, dtype: str) -> Entry:
    """Make a variable that stands for a tensor, and a zero that depends on it."""
    made = Entry(Node("null", part.new_name(f"{entry.node.name}_unread")))
    for op in ("zeros_like", "sum"):
        made = Entry(operator(op, part.new_name(f"{entry.node.name}_{op}"), [made], entry))
    if entry.dtype == dtype:
        return made
    return Entry(operator("Cast", part.new_name(f"{entry.node.name}_cast"), [made], entry, dtype=dtype))
