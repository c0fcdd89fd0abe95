"""Casts around operators in C++ that run in low precision in converted graphs, which have those of MXNet's already."""
from __future__ import annotations

from typing import MutableMapping

from ..dtypes import BFLOAT16, FLOAT32
from ..graph import CAST, Entry, Graph, Node, Readers, cast, redirect

Made = MutableMapping["tuple[tuple[int, int], str]", Entry]  # casts by tensor and type


def in_type(graph: Graph, entry: Entry, dtype: str, made: Made, readers: Readers) -> Entry:
    """Return a tensor in a type: as it was before it was widened, by a cast that is there, or by a new one."""
    if entry.dtype == dtype:
        return entry
    if dtype == BFLOAT16 and is_widened(entry):
        return entry.node.inputs[0]
    key = (entry.key, dtype)
    if key not in made:
        found = next((node for node in readers.of(entry) if node.op == CAST and node.dtypes == [dtype]), None)
        made[key] = Entry(found) if found is not None else cast(
            entry, dtype, graph.new_name(f"{entry.node.name}_{dtype}"))
    return made[key]


def is_widened(entry: Entry) -> bool:
    """Tell whether a tensor is one in bfloat16, cast to FP32."""
    return entry.node.op == CAST and entry.dtype == FLOAT32 and entry.node.inputs[0].dtype == BFLOAT16


def give_low(graph: Graph, node: Node) -> None:
    """Let a node give its first output in bfloat16; what needs FP32 reads a cast."""
    readers = Readers(graph).of(Entry(node))
    node.dtypes[0] = BFLOAT16
    redirect(graph, {Entry(node).key: cast(Entry(node), FLOAT32, graph.new_name(f"{node.name}_{FLOAT32}"))})
    redirect(graph, {Entry(reader).key: Entry(node) for reader in readers
                     if reader.op == CAST and reader.dtypes == [BFLOAT16]})
