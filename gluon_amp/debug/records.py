"""One record for each operator: what was planned for it and why, and what it did when it ran."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Callable, Iterator, Mapping, NamedTuple, Sequence, Tuple

from mxnet.gluon import Block, SymbolBlock
from mxnet.ndarray import NDArray

from .._mxnet.blocks import block_tree, descendants, graph_of
from .._mxnet.symbols import to_graph
from ..graph import CAST, Entry, Graph, Node, Role
from ..graph.attrs import INT8_CASTS, NOTE, is_in_int8, is_set
from ..machine.costs import Kernel
from ..machine.dtypes import FLOAT32, INT8, LOW_PRECISION
from ..passes.kernels import NATIVE
from ..rules import KEEP, Cause, Decision, Policy, precision
from ..rules.tables import as_table, bfloat16, groups

_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_MOVES_DATA = frozenset((*as_table(*bfloat16.SHAPES), *groups.CASTS, *groups.CREATION, *groups.EMBEDDINGS,
                         *groups.SEQUENCES))
Shape = Tuple[int, ...]
# How many values each element of a product's output is the sum of; of Deconvolution, that each input adds to.
# A convolution's weight is (output channels, input channels of a group, kernel...), the last ones in any order.
_LENGTHS: Mapping[str, Callable[[Mapping[str, str], Sequence[Shape]], int]] = {
    **dict.fromkeys(("Convolution", "Deconvolution", "_sg_mkldnn_conv"), lambda attrs, inputs: prod(inputs[1][1:])),
    **dict.fromkeys(("FullyConnected", "_sg_mkldnn_fully_connected", "_sg_mkldnn_selfatt_valatt",
                     "_contrib_interleaved_matmul_selfatt_valatt", "_contrib_interleaved_matmul_encdec_valatt"),
                    lambda attrs, inputs: inputs[1][-1]),
    "dot": lambda attrs, inputs: inputs[0][0 if is_set(attrs, "transpose_a") else -1],
    "batch_dot": lambda attrs, inputs: inputs[0][-2 if is_set(attrs, "transpose_a") else -1],
    **dict.fromkeys(("_np_dot", "_npi_matmul"), lambda attrs, inputs: inputs[0][-1] if inputs[0] else 0),
    # Queries, keys and values are one array, or keys and values apart from queries.
    **dict.fromkeys(("_contrib_interleaved_matmul_selfatt_qk", "_sg_mkldnn_selfatt_qk"),
                    lambda attrs, inputs: inputs[0][-1] // (3 * int(attrs["heads"]))),
    "_contrib_interleaved_matmul_encdec_qk": lambda attrs, inputs: inputs[0][-1] // int(attrs["heads"]),
}
MATRIX_OPERATORS = frozenset((*_LENGTHS, "RNN"))


def flops(kind: str, attrs: Mapping[str, str], inputs: Sequence[Shape | None], output: Shape | None) -> int:
    """Count the floating-point operations of an operator's forward pass, by the shapes of its inputs and output."""
    if kind not in MATRIX_OPERATORS:
        return 0 if kind in _MOVES_DATA else max(prod(shape or (0,)) for shape in (output, *inputs[:1]))
    known = [shape for shape in inputs if shape is not None]
    if output is None or len(known) < len(inputs):
        return 0
    if kind != "RNN":
        return 2 * prod(known[0] if kind == "Deconvolution" else output) * _LENGTHS[kind](attrs, known)
    (length, batch, width), hidden = known[0], int(attrs["state_size"])
    directions = 2 if is_set(attrs, "bidirectional") else 1
    widths = [width] + [hidden * directions] * (int(attrs["num_layers"]) - 1)
    return 2 * length * batch * sum(_GATES[attrs["mode"]] * hidden * (each + hidden) * directions for each in widths)


FLOATS = (FLOAT32, *LOW_PRECISION, "float64")
_BYTES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_CASTS = (CAST, *INT8_CASTS)


class Read(NamedTuple):
    """An input of an operator: data, a parameter, or an output of an earlier operator."""

    name: str  # of the data, the parameter or the operator
    dtype: str | None
    shape: tuple[int, ...] | None
    is_parameter: bool = False
    source: OpRecord | None = None  # the operator that gave it
    output: int = 0  # its number among that operator's outputs

    def upstream(self) -> Iterator[Read]:
        """Yield this input, and the first input of each operator of AMP's that it comes through."""
        read = self
        yield read
        while read.source is not None and read.source.inserted and read.source.reads:
            read = read.source.reads[0]
            yield read


class Input(NamedTuple):
    """An input of an operator as the program made it, without the casts and helpers that AMP put before it."""

    name: str  # of the operator, parameter or data that it comes from
    source_dtype: str | None  # the type that it has there
    dtype: str | None  # the type in which the operator reads it
    is_parameter: bool

    @property
    def is_cast(self) -> bool:
        """Whether it is read in another type than it has."""
        return self.dtype != self.source_dtype


@dataclass(eq=False, repr=False)
class OpRecord:
    """One operator of a network, or one that AMP put between them."""

    name: str  # in the graph; outside of graphs that of its block and the operator
    op: str  # the program's operator
    kernel: str  # the registered operator that runs: another one where C++ of this package takes the program's place
    attrs: Mapping[str, str]
    role: Role  # whether the program or AMP put it there, and what for
    reads: Sequence[Read]
    dtype: str | None  # of its first output
    shape: tuple[int, ...] | None = None  # of its first output, without the channels that AMP appends
    block: str = ""  # the name of the innermost block that it belongs to
    path: str = ""  # the attributes that lead to that block, as in 'features.3'
    in_graph: bool = False  # whether it is part of the graph of a hybridized block
    decision: Decision | None = None  # None where AMP decided nothing
    note: str = ""  # the reason that a converted network's graph holds
    planned: str | None = None  # the precision that was decided for its floating-point data
    observed: str | None = None  # the precision that its data has when it runs; None where it did not run
    flops: int = 0  # arithmetic of the forward pass, two per multiply-add; without the channels that AMP appends
    casts: int = 0  # the casts that were made for it first
    bytes_converted: int = 0  # the bytes that those casts read and write, or that it does where it is a cast
    milliseconds: float = 0.0  # forward and backward; 0.0 where no times were taken
    costed: tuple[Node, Kernel] | None = None  # what rates go by: the program's operator, and its kernel
    largest: float | None = None  # the largest absolute value of its outputs; None where none was looked at
    largest_gradient: float | None = None  # likewise of the gradients of its outputs
    count: int = 0  # how many operators of its name came before
    # Of a run that keeps values, or differentiates:
    arguments: Sequence[NDArray] = ()  # the arrays that it was given
    outputs: Sequence[NDArray] = ()
    marked: Sequence[bool] = ()  # the inputs that gradients are taken of
    leaves: Sequence[NDArray] = ()  # the arguments, each cut off from the operator that made it; until differentiated
    recorded: Sequence[NDArray] = ()  # the outputs in MXNet's own record; until differentiated
    gradients: Sequence[NDArray | None] = ()  # of the outputs
    input_gradients: Sequence[NDArray | None] = ()  # what this operator alone contributes
    training: bool = False
    repeatable: bool = True  # whether it can run once more, alone

    @property
    def precision(self) -> str | None:
        """The precision observed, else the one planned."""
        return self.observed or self.planned

    @property
    def rule(self) -> str:
        """The rule that decided its precision, as docs/design/precision.md lists them; empty without a decision."""
        return self.decision.rule if self.decision else ""

    @property
    def reason(self) -> str:
        """Why it runs in its precision, for people."""
        return self.decision.note if self.decision else self.note

    @property
    def cause(self) -> Cause | str:
        """The kind of reason, for programs; empty without a decision."""
        return self.decision.cause if self.decision else ""

    @property
    def native(self) -> bool:
        """Whether an operator in C++ of this package ran in its place."""
        return self.kernel != self.op

    @property
    def inserted(self) -> bool:
        """Whether AMP put it there."""
        return self.role is not Role.OWN

    @property
    def is_decided(self) -> bool:
        """Whether AMP decided on its precision."""
        return self.decision is not None and self.decision.rule != KEEP

    @property
    def is_cast(self) -> bool:
        """Whether it is a cast of AMP's between operators of different precision."""
        return self.role is not Role.ROUNDING and self.inserted and self.op in _CASTS

    @property
    def imitates(self) -> OpRecord | None:
        """The operator whose result it rounds to a type that is imitated; None for other operators."""
        is_rounding = self.role is Role.ROUNDING and self.dtype != FLOAT32 and self.reads
        return self.reads[0].source if is_rounding else None

    @property
    def rounds(self) -> bool:
        """Whether it is any cast of AMP's."""
        return self.role in (Role.CAST, Role.ROUNDING)

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the same operator in another run."""
        return self.name, self.count

    @property
    def own(self) -> OpRecord | None:
        """The program's operator whose result it gives, or hands on; None for casts of data and parameters."""
        record: OpRecord | None = self
        while record is not None and record.inserted:
            record = record.reads[0].source if record.reads else None
        return record

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The operator's inputs as the program made them."""
        return tuple(map(_input, self.reads))

    @property
    def originals(self) -> list[NDArray]:
        """The arrays of its inputs as they were before AMP's casts."""
        found = []
        for array, read in zip(self.arguments, self.reads):
            while read.source is not None and (read.source.rounds or read.source.role is Role.IDENTITY):
                array, read = read.source.arguments[0], read.source.reads[0]
            found.append(array)
        return found

    def __repr__(self) -> str:
        return f"<{self.op} {self.name!r}: planned {self.planned}, observed {self.observed}>"


def _input(read: Read) -> Input:
    chain = list(read.upstream())
    origin = chain[-1]
    # Where a type is imitated, values are rounded right behind the operator that gives them, and computed with in FP32.
    made = chain[-2] if len(chain) > 1 and _is_rounded(chain[-2]) else origin
    taken = next((each for each in chain if not (_is_rounded(each) and each.dtype == FLOAT32)), origin)
    return Input(origin.name, made.dtype, taken.dtype, origin.is_parameter)


def _is_rounded(read: Read) -> bool:
    return read.source is not None and read.source.role is Role.ROUNDING


class Places:
    """Tells which block an operator belongs to: in a graph by the beginning of its name."""

    def __init__(self, net: Block):
        self._paths = {id(block): path for path, block in block_tree(net)}
        self._members = {node.name: block for block in descendants(net) if isinstance(block, SymbolBlock)
                         for node in to_graph(graph_of(block)[1]).operators()}
        self._prefixed = sorted(filter(lambda each: each.prefix, descendants(net)), key=lambda each: -len(each.prefix))

    def of(self, name: str, around: Block | None) -> tuple[str, str]:
        """Return the name of the block of an operator in a graph, or around one without a name, and the path to it."""
        named = (block for block in self._prefixed if name.startswith(block.prefix))
        block = (name and (self._members.get(name) or next(named, None))) or around
        if isinstance(block, SymbolBlock) and self._paths.get(id(block)) == "":
            # From files: the operators' names begin with those that the blocks had when they were exported.
            return name.rpartition("_")[0] or block.name, ""
        return (block.name, self._paths.get(id(block), "")) if block is not None else ("", "")


def of_graph(graph: Graph, traced: Graph, around: Block | None, places: Places,
             variable: Callable[[Entry], Read]) -> dict[int, OpRecord]:
    """Return a record for every operator of a graph, by the id of its node; none has run yet."""
    as_traced: dict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in reversed(traced.operators()):
        as_traced[node.op, node.name].append(node)
    made: dict[int, OpRecord] = {}
    for node in graph.operators():
        reads = [variable(entry) if entry.node.is_variable else
                 Read(entry.node.name, entry.dtype, entry.shape, False, made[id(entry.node)], entry.output)
                 for entry in node.inputs]
        # Graphs that were converted hold their casts themselves.
        role = Role.CAST if node.role is Role.OWN and node.op in _CASTS else node.role
        record = made[id(node)] = OpRecord(
            node.name, node.kind, node.op, node.attrs, role, reads, node.dtypes[0] if node.dtypes else None,
            node.shapes[0] if node.shapes else None, *places.of(node.name, around), True, node.decision,
            node.attrs.get(NOTE, ""), _of_data(node.op, node.attrs, reads, Entry(node).dtype),
            repeatable=not node.extra)
        own = as_traced[node.kind, node.name].pop() if as_traced[node.kind, node.name] else None
        if own is not None:
            record.flops = flops(own.kind, own.attrs, [entry.shape for entry in own.inputs], own.shapes[0])
            record.shape = own.shapes[0]
        nhwc = node.op in NATIVE or record.shape != (node.shapes[0] if node.shapes else None)
        record.costed = own or node, Kernel(record.planned in LOW_PRECISION, nhwc)
        if record.imitates is not None:
            record.imitates.planned = record.dtype
    return made


def observe(record: OpRecord, dtype: str | None) -> None:
    """Note the type that an operator's first output has."""
    record.observed = _of_data(record.kernel, record.attrs, record.reads, dtype)
    if record.imitates is not None and record.imitates.planned == dtype:
        record.imitates.observed = dtype


def observe_call(record: OpRecord, dtype: str | None, shape: tuple[int, ...], policy: Policy | None) -> None:
    """Note what an operator gave that was called outside of graphs, and what was planned for it."""
    record.dtype, record.shape = dtype, shape
    record.planned = _of_data(record.kernel, record.attrs, record.reads, dtype)
    if not record.inserted:
        record.flops = flops(record.kernel, record.attrs, [read.shape for read in record.reads], shape)
    if policy is not None and not record.inserted and record.decision is not None and record.is_decided:
        # An input that was cast up for this call alone stands for the imitated type.
        types = [(read.source.reads[0] if _is_rounded(read) and read.source else read).dtype for read in record.reads]
        record.planned = precision(record.decision, types, FLOAT32, policy.target_dtype) or record.planned
    observe(record, record.dtype)


def _of_data(op: str, attrs: Mapping[str, str], reads: Sequence[Read], dtype: str | None) -> str | None:
    """Return the type of an operator's data: of its output, or of an input where the output is an integer."""
    if is_in_int8(op, attrs):
        return INT8
    if dtype in FLOATS:
        return dtype
    return next((read.dtype for read in reads if read.dtype in FLOATS), dtype)


def count_casts(records: Sequence[OpRecord]) -> None:
    """Count each cast for the operator that reads it first, or that gives what it casts where none does."""
    readers: dict[int, OpRecord] = {}  # the first one of each inserted operator
    for record in records:
        for read in () if record.inserted else record.reads:
            for each in read.upstream():
                readers.setdefault(id(each.source), record)
    for cast in records:
        if cast.inserted and cast.op in _CASTS and cast.shape:
            cast.bytes_converted = prod(cast.shape) * (_BYTES.get(str(cast.reads[0].dtype), 0)
                                                       + _BYTES.get(str(cast.dtype), 0))
        if cast.is_cast:
            owner = readers.get(id(cast), cast.own)
            if owner is not None:
                owner.casts += 1
                owner.bytes_converted += cast.bytes_converted
