"""Plain records of what ran, one per operator, made from a run: see ``report``."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Collection, Sequence

from mxnet.gluon import Block, SymbolBlock

from ..._mxnet.blocks import Owners, block_tree
from ...dtypes import FLOAT32
from ...graph import CAST, Entry, Node, Role
from ...graph.attrs import INT8_CASTS, NOTE
from ...rules import Cause
from .match import Ran

_BYTES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

_CASTS = (CAST, *INT8_CASTS)


@dataclass(frozen=True)
class InputRow:
    """What an operator reads.

    Attributes
    ----------
    name : str
        The operator, parameter or input that it comes from.
    operator : int or None
        That operator's place in the list of operators.
    source_dtype, dtype : str or None
        The type that it has there, and the one in which it is read.
    shape : tuple of int or None
        Its shape.
    is_parameter : bool
        Whether it is a parameter of the network; always False for symbols, which do not tell.
    """

    name: str
    operator: int | None
    source_dtype: str | None
    dtype: str | None
    shape: tuple[int, ...] | None
    is_parameter: bool = False


@dataclass(frozen=True)
class OperatorRow:
    """One operator of the network.

    Attributes
    ----------
    name, op : str
        Its name and its registered kind. Outside of graphs the name is made from its block's and its kind.
    block, path : str
        The innermost block that it belongs to: its name, and the attributes that lead to it (``'features.3'``).
    in_graph : bool
        Whether it ran in the graph of a hybridized block.
    planned, observed : str or None
        The precision that was decided, and the one that the engine reports; None where it reports none.
    rule, reason : str
        Why: see docs/design.md. Empty where AMP decided nothing.
    shape : tuple of int or None
        Of its first output.
    flops : int
        Its arithmetic in the forward pass, two per multiply-add.
    casts, bytes_converted : int
        The casts that were made for it first, and the bytes that they read and write.
    milliseconds : float
        0.0 when no times were taken.
    inputs : tuple of InputRow
        What it reads.
    safe : bool
        Whether user lists may force another precision.
    cause : str
        The kind of reason; empty where AMP decided nothing.
    native : bool
        Whether an operator in C++ of this package ran in its place.
    """

    name: str
    op: str
    block: str
    path: str
    in_graph: bool
    planned: str | None
    observed: str | None
    rule: str
    reason: str
    shape: tuple[int, ...] | None
    flops: int
    casts: int
    bytes_converted: int
    milliseconds: float
    inputs: tuple[InputRow, ...]
    safe: bool = True
    cause: Cause | str = ""
    native: bool = False

    @property
    def precision(self) -> str | None:
        """The precision observed, else the one planned."""
        return self.observed or self.planned


@dataclass(frozen=True)
class InsertedRow:
    """An operator that AMP inserted: a cast, or a helper.

    Attributes
    ----------
    name, op : str
        Its name and its registered kind.
    source : str
        What it reads.
    source_dtype, dtype : str or None
        Types before and after.
    shape : tuple of int or None
        Of its output.
    bytes_converted : int
        The bytes that a cast reads and writes; 0 for helpers.
    milliseconds : float
        0.0 when no times were taken.
    imitation : bool
        Whether it serves to imitate a type, and would not be there on a device with kernels for it.
    """

    name: str
    op: str
    source: str
    source_dtype: str | None
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes_converted: int
    milliseconds: float
    imitation: bool

    @property
    def is_cast(self) -> bool:
        """Whether it is a cast between operators of different precision."""
        return self.op in _CASTS and not self.imitation


def make_rows(ran: Sequence[Ran], net: Block | None) -> tuple[list[OperatorRow], list[InsertedRow]]:
    """Turn what ran into records, naming blocks by their network."""
    blocks = _Blocks(net)
    own = [record for record in ran if not _is_inserted(record.node)]
    index = {id(record.node): position for position, record in enumerate(own)}
    first_readers: dict[int, int] = {}  # of what was inserted, by the node's id
    for position, record in enumerate(own):
        for entry in record.node.inputs:
            node = entry.node
            while _is_inserted(node) and node.inputs:
                first_readers.setdefault(id(node), position)
                node = node.inputs[0].node
    inserted: list[InsertedRow] = []
    casts: dict[int | None, list[InsertedRow]] = defaultdict(list)  # made for what reads them first, or what gives them
    for record in ran:
        if _is_inserted(record.node):
            inserted.append(_inserted_row(record))
            if inserted[-1].is_cast:
                writer = index.get(id(_source(record.node.inputs[0]).node))
                casts[first_readers.get(id(record.node), writer)].append(inserted[-1])
    return [_operator_row(record, blocks, index, casts[position]) for position, record in enumerate(own)], inserted


def _is_inserted(node: Node) -> bool:
    # Graphs that were converted hold their casts themselves.
    return node.role is not Role.OWN or node.op in _CASTS


def _operator_row(record: Ran, blocks: _Blocks, index: dict[int, int], casts: Sequence[InsertedRow]) -> OperatorRow:
    node, decision = record.node, record.node.decision
    block, path = blocks.of(record)
    return OperatorRow(node.name, node.kind, block, path, record.in_graph, record.planned, record.observed,
                       decision.rule if decision else "", decision.note if decision else node.attrs.get(NOTE, ""),
                       record.shape, record.flops, len(casts), sum(row.bytes_converted for row in casts),
                       record.milliseconds, tuple(_input_row(entry, index, blocks.parameters) for entry in node.inputs),
                       decision.safe if decision else True, decision.cause if decision else "", bool(node.replaced))


def _input_row(entry: Entry, index: dict[int, int], parameters: Collection[str]) -> InputRow:
    source, made, read = _source(entry), entry, entry
    while read.node.role is Role.ROUNDING and read.dtype == FLOAT32:
        read = read.node.inputs[0]
    while made.node is not source.node and made.node.inputs[0].node is not source.node:
        made = made.node.inputs[0]
    # What imitates a type rounds it right behind the operator that gives it.
    before = made if made.node.role is Role.ROUNDING else source
    return InputRow(source.node.name, index.get(id(source.node)), before.dtype, read.dtype, source.shape,
                    source.node.is_variable and source.node.name in parameters)


def _source(entry: Entry) -> Entry:
    """Return what a tensor was before AMP's own operators."""
    while _is_inserted(entry.node) and entry.node.inputs:
        entry = entry.node.inputs[0]
    return entry


def _inserted_row(record: Ran) -> InsertedRow:
    node = record.node
    source = node.inputs[0] if node.inputs else None
    before = source.dtype if source else None
    dtype = node.dtypes[0] if node.dtypes else None
    converted = 0
    if node.op in _CASTS and record.shape:
        converted = prod(record.shape) * (_BYTES.get(str(before), 0) + _BYTES.get(str(dtype), 0))
    return InsertedRow(node.name, node.op, source.node.name if source else "", before, dtype, record.shape, converted,
                       record.milliseconds, record.imitation)


class _Blocks:
    """Tells which block an operator belongs to: in a graph by the beginning of its name."""

    def __init__(self, net: Block | None):
        self.parameters = set(net.collect_params().keys()) if net is not None else set()
        self._paths = {id(block): path for path, block in block_tree(net)} if net is not None else {}
        self._owners = Owners(net)

    def of(self, record: Ran) -> tuple[str, str]:
        """Return the name of an operator's block, and the path to it."""
        block = self._owners.of(record.node.name) if record.in_graph else record.block
        block = block or record.block
        if isinstance(block, SymbolBlock) and id(block) in self._paths and not self._paths[id(block)]:
            # From files: the operators' names begin with those that the blocks had when they were exported.
            return record.node.name.rpartition("_")[0] or block.name, ""
        return (block.name, self._paths.get(id(block), "")) if block is not None else ("", "")
