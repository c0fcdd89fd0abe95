"""Symbol graphs: what they are made of, what their attributes say, and how they are edited. No MXNet."""
from __future__ import annotations

from .edit import CAST, Readers, cast, cast_nodes, operator, redirect, unique_name
from .graph import VARIABLE, Entry, Graph, Node, Role

__all__ = ["CAST", "VARIABLE", "Entry", "Graph", "Node", "Readers", "Role", "cast", "cast_nodes", "operator",
           "redirect", "unique_name"]
