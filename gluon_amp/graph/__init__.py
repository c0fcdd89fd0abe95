"""Symbol graphs, their attributes, and edits of them. No MXNet."""
from __future__ import annotations

from .edit import CAST, Readers, cast, cast_nodes, connected_parts, named_by, operator, redirect
from .graph import VARIABLE, Entry, Graph, Node, Role, unique_name
from .subgraphs import inline_cached_ops

__all__ = ["CAST", "VARIABLE", "Entry", "Graph", "Node", "Readers", "Role", "cast", "cast_nodes", "connected_parts",
           "inline_cached_ops", "named_by", "operator", "redirect", "unique_name"]
