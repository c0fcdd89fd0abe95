"""Symbol graphs, their attributes, and edits of them. No MXNet."""
from __future__ import annotations

from .edit import (
    BODIES,
    CAST,
    MULTICAST,
    Consumers,
    cast,
    cast_nodes,
    edit_bodies,
    has_control_flow,
    identity,
    inline_cached_ops,
    loops_and_branches,
    operator,
    redirect,
    subgraphs_of,
)
from .graph import VARIABLE, WISHES, Cause, Decision, Entry, Graph, Node, Role, unique_name

__all__ = ["BODIES", "CAST", "MULTICAST", "VARIABLE", "WISHES", "Cause", "Consumers", "Decision", "Entry", "Graph",
           "Node", "Role", "cast", "cast_nodes", "edit_bodies", "has_control_flow", "identity", "inline_cached_ops",
           "loops_and_branches", "operator", "redirect", "subgraphs_of", "unique_name"]
