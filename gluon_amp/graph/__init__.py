"""Symbol graphs, their attributes, and edits of them. No MXNet."""
from __future__ import annotations

from .decision import Cause, Decision
from .edit import CAST, MULTICAST, Readers, cast, cast_nodes, connected_parts, identity, named_by, operator, redirect
from .graph import VARIABLE, Entry, Graph, Node, Role, unique_name
from .subgraphs import BODIES, has_control_flow, inline_cached_ops, set_subgraphs, subgraphs_of

__all__ = ["BODIES", "CAST", "MULTICAST", "VARIABLE", "Cause", "Decision", "Entry", "Graph", "Node", "Readers", "Role",
           "cast", "cast_nodes", "connected_parts", "has_control_flow", "identity", "inline_cached_ops",
           "named_by", "operator", "redirect", "set_subgraphs", "subgraphs_of", "unique_name"]
