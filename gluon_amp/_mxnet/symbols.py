"""Symbols to graphs and back, what MXNet can infer about every tensor in them."""
from __future__ import annotations

import ctypes
import functools
import threading
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Callable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, SymbolHandle, check_call
from mxnet.symbol.numpy import _Symbol as NumpySymbol

from ..base.context import ContextStack
from ..errors import GraphError
from ..graph import Entry, Graph, inline_cached_ops
from ..graph.attrs import DTYPE, REGION, TYPE_FLAGS, region, region_mark
from ..machine.dtypes import BFLOAT16, BFLOAT16_DTYPE, FLOAT32
from .invoke import handle_of


@lru_cache(maxsize=64)  # asked of every input of a network at every call, and NumPy puts names together anew
def dtype_name(dtype: Any) -> str | None:
    """Name a data type as MXNet's Python side gives it; None for None."""
    if dtype is None:
        return None
    if isinstance(dtype, np.dtype) and dtype == BFLOAT16_DTYPE:
        return BFLOAT16
    return np.dtype(dtype).name


_tojson, _save = mx.sym.Symbol.tojson, mx.sym.Symbol.save


def text_of(symbol: mx.sym.Symbol) -> str:
    """Return all that a symbol holds as JSON text, casts and the marks of regions included."""
    return _tojson(symbol, remove_amp_cast=False)


def to_graph(symbol: mx.sym.Symbol) -> Graph:
    """Read a symbol as a graph, casts of earlier conversions included, and the operators of its subgraphs inlined."""
    return inline_cached_ops(Graph.from_json(text_of(symbol)))


def from_graph(graph: Graph, like: mx.sym.Symbol) -> mx.sym.Symbol:
    """Build a symbol from a graph, of the same kind (legacy or NumPy) as ``like``."""
    symbol = mx.sym.load_json(graph.to_json())
    return symbol.as_np_ndarray() if isinstance(like, NumpySymbol) else symbol


# The settings of the regions that symbols are made in; None where those around do not count.
marks: ContextStack[str | None] = ContextStack("gluon_amp_marks")


def current_mark() -> str | None:
    """Return the setting of the region that symbols are made in here, None outside of all."""
    entered = marks.entries()
    return entered[-1].value if entered else None


def make_symbol_creator(original: Callable) -> Callable:
    """Make the function that replaces MXNet's ``_symbol_creator``: operators get the mark of the region around."""
    # MXNet calls the user's ``CustomOpProp`` with all attributes, and does not survive the ``TypeError``.
    custom = handle_of("Custom")

    @functools.wraps(original)
    def symbol_creator(handle: int, args: Any, kwargs: Any, keys: Sequence[str], values: Sequence[Any],
                       *rest: Any) -> Any:
        setting = current_mark()
        if setting is not None and handle != custom:
            keys, values = [*keys, REGION], [*values, region_mark(setting)[REGION]]
        return original(handle, args, kwargs, keys, values, *rest)
    return symbol_creator


_MARK = f'"{REGION}"'  # in the text of a symbol


def make_written(original: Callable) -> Callable:
    """Make what takes the place of ``Symbol.tojson`` or ``Symbol.save``: marks of this process are nobody else's."""
    @functools.wraps(original)
    def written(symbol: mx.sym.Symbol, *args: Any, **kwargs: Any) -> Any:
        text = text_of(symbol)
        if _MARK in text:
            graph = Graph.from_json(text)
            graph.forget(REGION)
            symbol = from_graph(graph, symbol)
        return original(symbol, *args, **kwargs)
    return written


class _Unmarked:
    """A symbol whose text and files leave the marks of regions out, also after AMP was switched off."""

    __slots__ = ()
    tojson, save = make_written(_tojson), make_written(_save)


def _of_both_kinds(mixin: type, name: str) -> tuple[type, type]:
    """Make a class of legacy symbols and one of NumPy's, which pickles find by their names."""
    legacy, numpy = (type(name.format(kind), (mixin, base), {"__slots__": (), "__module__": __name__})
                     for kind, base in (("", mx.sym.Symbol), ("Numpy", NumpySymbol)))
    return legacy, numpy


_TracedSymbol, _TracedNumpySymbol = _of_both_kinds(_Unmarked, "_Traced{}Symbol")


def keep_marks(symbol: mx.sym.Symbol) -> bool:
    """Keep the marks of regions in a block's symbol, and out of what is written of it; tell whether there are any."""
    if _MARK not in text_of(symbol):
        return False
    traced = {mx.sym.Symbol: _TracedSymbol, NumpySymbol: _TracedNumpySymbol}
    symbol.__class__ = traced.get(type(symbol), type(symbol))
    return True


class _LastingCasts:
    """A symbol whose files keep their casts: ``save_checkpoint`` and ``Symbol.save`` remove casts by default."""

    __slots__ = ()

    def save(self, fname: Any, remove_amp_cast: bool = False) -> None:
        """Write the symbol to a file, casts included."""
        super().save(fname, remove_amp_cast=False)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, str]:
        return {"handle": self.tojson(remove_amp_cast=False)}  # type: ignore[attr-defined]

    def __getitem__(self, index: Any) -> mx.sym.Symbol:
        return self._alike(super().__getitem__(index))  # type: ignore[misc]

    def get_internals(self) -> mx.sym.Symbol:
        """Return all tensors of the graph."""
        return self._alike(super().get_internals())  # type: ignore[misc]

    def _alike(self, made: mx.sym.Symbol) -> mx.sym.Symbol:
        # Some of what comes from a NumPy-style symbol is a plain one, as in MXNet.
        return with_lasting_casts(made, isinstance(self, _NeededCasts))

    def __copy__(self) -> mx.sym.Symbol:
        return self.__deepcopy__(None)

    def __deepcopy__(self, memo: Any) -> mx.sym.Symbol:
        return self._alike(super().__deepcopy__(memo))  # type: ignore[misc]


class _NeededCasts(_LastingCasts):
    """A symbol that was converted with its parameters: without its casts it would not run as it was converted."""

    __slots__ = ()

    def tojson(self, remove_amp_cast: bool = False) -> str:
        """Return the symbol as JSON text, casts included. ``Block.save`` reads it."""
        return super().tojson(remove_amp_cast=False)  # type: ignore[misc]


_ConvertedSymbol, _ConvertedNumpySymbol = _of_both_kinds(_LastingCasts, "_Converted{}Symbol")
_ConvertedModelSymbol, _ConvertedNumpyModelSymbol = _of_both_kinds(_NeededCasts, "_Converted{}ModelSymbol")


def with_lasting_casts(symbol: mx.sym.Symbol, needed: bool) -> mx.sym.Symbol:
    """Return a symbol that keeps its casts in files, and in all text where it needs them."""
    legacy, numpy = ((_ConvertedModelSymbol, _ConvertedNumpyModelSymbol) if needed
                     else (_ConvertedSymbol, _ConvertedNumpySymbol))
    handle = SymbolHandle()
    check_call(_LIB.MXShallowCopySymbol(symbol.handle, ctypes.byref(handle)))
    return (numpy if isinstance(symbol, NumpySymbol) else legacy)(handle)


def marked(symbol: mx.sym.Symbol, setting: str) -> mx.sym.Symbol:
    """Return a copy of a symbol whose operators carry the mark of a region, unless they carry another already."""
    graph = to_graph(symbol)
    for node in graph.operators():
        if node.op != "Custom" and region(node.attrs) is None:  # see make_symbol_creator
            node.attrs = {**node.attrs, **region_mark(setting)}
    return from_graph(graph, symbol)


_tracing = threading.local()  # whether the current thread traces a block


@contextmanager
def outermost_trace() -> Iterator[None]:
    """Trace a block in the body: regions around it leave no marks, regions that its code enters do."""
    is_inside = vars(_tracing).get("under_way", False)
    _tracing.under_way = True
    try:
        with nullcontext() if is_inside else marks.entered(None):
            yield
    finally:
        _tracing.under_way = is_inside


def analyse(symbol: mx.sym.Symbol, graph: Graph, dtypes: Mapping[str, str],
            shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Write the data type and shape of every tensor into the nodes of ``symbol``'s graph."""
    nodes = graph.nodes()
    # Symbol.get_internals leaves out hidden outputs: make a symbol whose outputs are all tensors.
    entries = [Entry(node, index) for node in nodes for index in range(node.num_outputs)]
    # infer_type does not take bfloat16: for as long as the symbol is made it is written on the variables.
    before = [(node, node.attrs) for node in nodes if node.is_variable and dtypes.get(node.name) == BFLOAT16]
    try:
        for node, attrs in before:
            node.attrs = {**attrs, DTYPE: str(TYPE_FLAGS[BFLOAT16])}
        everything = from_graph(Graph(entries, graph.attrs), symbol)
    finally:
        for node, attrs in before:
            node.attrs = attrs
    _, types, _ = everything.infer_type_partial(**{name: dtype for name, dtype in dtypes.items() if dtype != BFLOAT16})
    given = dict(shapes or {})
    try:
        _, inferred, _ = everything.infer_shape_partial(**given)
    except mx.MXNetError:
        if all(node.name in given for node in nodes if node.is_variable):
            raise
        # Some operators refuse inputs of unknown shape: what is left is what was given.
        inferred = [given.get(node.name) for node in nodes for _ in range(node.num_outputs)]
    known_types, known_shapes = iter(types or [None] * len(entries)), iter(inferred or [None] * len(entries))
    for node in nodes:
        node.dtypes = [dtype_name(next(known_types)) for _ in range(node.num_outputs)]
        node.shapes = [known_shape(next(known_shapes)) for _ in range(node.num_outputs)]


def of_inputs(symbol: mx.sym.Symbol, inferred: Sequence[Any]) -> dict[str, Any]:
    """Return what ``infer_shape`` or ``infer_type`` gave for a symbol's inputs, by name; nothing where it failed."""
    arguments, _, auxiliary = inferred
    names = symbol.list_arguments() + symbol.list_auxiliary_states()
    return dict(zip(names, [*(arguments or []), *(auxiliary or [])]))


def typed_variables(symbol: mx.sym.Symbol) -> set[str]:
    """Name the variables that carry a type."""
    return {name for name, attrs in symbol.attr_dict().items() if attrs.get(DTYPE, "-1") != "-1"}


def input_dtypes(symbol: mx.sym.Symbol, known: Mapping[str, Any]) -> dict[str, str]:
    """Return the data type of every input, FP32 where nothing tells: the default of ``simple_bind``."""
    names = symbol.list_inputs()
    try:
        inferred = of_inputs(symbol, symbol.infer_type_partial(**known))
    except mx.MXNetError:  # some operators, such as Embedding, insist on knowing the types of their inputs
        types = {**dict.fromkeys(set(names) - typed_variables(symbol), FLOAT32), **known}
        inferred = of_inputs(symbol, symbol.infer_type_partial(**types))
    return {name: dtype_name(inferred.get(name)) or FLOAT32 for name in names}


def infer_shapes(symbol: mx.sym.Symbol, shapes: Mapping[str, Sequence[int]]) -> list[tuple[int, ...] | None]:
    """Return the shapes of a symbol's outputs for shapes of its inputs, None where they are unknown."""
    inputs = set(symbol.list_inputs())
    known = {name: tuple(shape) for name, shape in shapes.items() if name in inputs and shape}
    _, inferred, _ = symbol.infer_shape_partial(**known)
    return list(map(known_shape, inferred or [None] * len(symbol.list_outputs())))


def known_shape(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return a shape that was inferred, None where a part of it is not known."""
    unknown = -1 if mx.util.is_np_shape() else 0
    return None if shape is None or len(shape) == 0 or unknown in shape else tuple(shape)


def load_symbol(text: str) -> mx.sym.Symbol:
    """Make a symbol of JSON text."""
    # MXNet's own reader trusts the numbers in the text, down to reading beyond its arrays: check them first.
    graph = inline_cached_ops(Graph.from_json(text))
    try:
        return mx.sym.load_json(graph.to_json())
    except mx.MXNetError as error:
        raise GraphError(f"MXNet cannot make a symbol of the text: {first_line(error)}") from error


def first_line(error: mx.MXNetError) -> str:
    """Return the message of an MXNet error without its stack trace."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("Traceback", "File ", "Stack trace", "["))]
    return (told or lines or [""])[0]


def fuse(symbol: mx.sym.Symbol, with_int8: bool = False) -> mx.sym.Symbol:
    """Let oneDNN fuse neighbouring operators, for inference on the CPU: in FP32, or in FP32 and INT8."""
    fused = symbol.get_backend_symbol("MKLDNN_QUANTIZE" if with_int8 else "MKLDNN")
    return fused.as_np_ndarray() if isinstance(symbol, NumpySymbol) else fused
