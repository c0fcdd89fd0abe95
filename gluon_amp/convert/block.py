"""Convert a block, and the block that this gives."""
from __future__ import annotations

import os
import warnings
from contextlib import nullcontext, suppress
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, SymbolBlock

from .._mxnet import blocks
from .._mxnet.arrays import cast_arrays, first_array, needs_gradient
from .._mxnet.symbols import NumpySymbol, from_graph, to_graph
from ..base import checks
from ..errors import GraphError, StateError, some_of
from ..graph import Entry, cast, redirect, unique_name
from ..graph.attrs import DTYPE, TYPE_FLAGS
from ..machine.dtypes import BFLOAT16, FLOAT32, INT8, LOW_PRECISION
from ..plan.cached_op import RewritingCachedOp
from ..plan.executors import refuse_trained
from ..plan.planner import spoilt_gradients
from ..session.hooks import kept_in_place
from ..state.blocks import is_target
from ..state.devices import require_bfloat16
from ..state.state import State
from .assignment import calibrated, converted_network, prepared
from .calibration import Calibration
from .convert import Conversion, Network
from .options import Conditions, ConversionOptions, Names
from .parameters import flat, save_model, split


class ConvertedBlock(SymbolBlock):
    """A converted network, for inference, with what it takes and returns; ``conversion`` is the record of it."""

    def __init__(self, outputs: mx.sym.Symbol, inputs: Sequence[mx.sym.Symbol], conversion: Conversion,
                 state: State | None = None):
        with warnings.catch_warnings():
            # MXNet asks for the type of the data, which any call may bring in another.
            warnings.simplefilter("ignore", UserWarning)
            super().__init__(outputs, inputs)
        self.conversion = conversion
        self._state = state  # that it runs under; None where MXNet runs it as it is
        self._spoilt = spoilt_gradients(outputs)
        self._inputs = [variable.name for variable in inputs]

    def forward(self, x: Any, *args: Any) -> Any:
        """Run the network; arrays in low precision, as from a block around under AMP, are taken as FP32."""
        gives_none = not self._spoilt.keys().isdisjoint(self._inputs)  # no gradients of the data
        if autograd.is_recording():
            if gives_none and any(map(needs_gradient, flat([x, *args]))):
                raise StateError("expected data that needs no gradient: MXNet gives zeros behind the fused operators "
                                 "of a converted network. Convert it with disable_passes=['fuse'], or call it in "
                                 "autograd.pause() where its gradient is not needed")
            refuse_trained(self.collect_params(), self._spoilt, is_frozen=True)
        array = first_array((x, *args))  # None in another block's trace
        if self.conversion.target_dtype == BFLOAT16 and array is not None and array.context.device_type != "gpu":
            require_bfloat16()
        arguments = cast_arrays((x, *args), FLOAT32)
        with autograd.pause() if gives_none else nullcontext():  # fused operators fail in training mode
            return blocks.call_symbol_block(self, arguments)

    def _build_cache(self, *args: Any) -> None:
        """Let what runs, and no file, hold operators in C++."""
        super()._build_cache(*args)
        if self._state is not None:
            operation = RewritingCachedOp(blocks.graph_of(self)[1], blocks.cache_flags(self), self._state)
            operation.accumulating = frozenset(self.collect_params())  # as they may
            self._cached_op = operation

    def export(self, path: str | os.PathLike, epoch: int = 0, remove_amp_cast: bool = False) -> tuple[str, str]:
        """Write ``path-symbol.json`` and ``path-NNNN.params``, which MXNet runs by itself; return their names."""
        if remove_amp_cast:
            raise ValueError("expected remove_amp_cast=False: without its casts a converted network does not run. "
                             "Export the FP32 network it was made from instead")
        inputs, symbol = blocks.graph_of(self)
        names = {variable.name for variable in inputs}
        arrays = blocks.parameters_of(self, [name for name in symbol.list_inputs() if name not in names])
        if isinstance(symbol, NumpySymbol):
            # MXNet cannot make a gradient buffer for a bfloat16 parameter of a NumPy-style network when it loads one.
            symbol, arrays = _with_fp32_parameters(symbol, arrays)
        return save_model(path, epoch, symbol, *split(symbol, arrays))


def _with_fp32_parameters(symbol: mx.sym.Symbol, arrays: Mapping[str, Any]) -> tuple[mx.sym.Symbol, dict[str, Any]]:
    """Undo ``cast_params_offline``: parameters are FP32 again and cast in the graph, to the same values."""
    graph = to_graph(symbol)
    names = {node.name for node in graph.nodes()}
    low, moved = {str(TYPE_FLAGS[dtype]): dtype for dtype in LOW_PRECISION}, {}
    for node in graph.variables():
        dtype = low.get(node.attrs.get(DTYPE, ""))
        if dtype is not None and node.name in arrays:
            moved[Entry(node).key] = cast(Entry(node), dtype, unique_name(f"{node.name}_{dtype}", names))
            node.attrs = {key: value for key, value in node.attrs.items() if key != DTYPE}
    redirect(graph, moved)
    return from_graph(graph, symbol), {name: cast_arrays(array, FLOAT32) for name, array in arrays.items()}


def convert_hybrid_block(block: HybridBlock, target_dtype: object = None, target_dtype_ops: Names = None,
                         fp32_ops: Names = None, conditional_fp32_ops: Conditions = None,
                         excluded_sym_names: Names = None, ctx: mx.Context | Sequence[mx.Context] | None = None,
                         cast_optional_params: bool | None = None, **options: Any) -> ConvertedBlock:
    """Convert a trained FP32 network to one for mixed-precision inference.

    Parameters
    ----------
    block : HybridBlock
        The network: hybridized or not, run before or not, a SymbolBlock too. It is left as it is.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names, ctx, cast_optional_params
        As in MXNet: see :class:`ConversionOptions`.
    **options
        Those of :class:`ConversionOptions`, but for ``data_names``. All optimisations are on by default.

    Returns
    -------
    ConvertedBlock
        A SymbolBlock for inference, hybridized. ``conversion`` tells what was done; ``export`` writes files that MXNet
        runs without this package.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(4, in_units=8)
    >>> net.initialize()
    >>> fast = amp.convert_hybrid_block(net)
    >>> fast(mx.nd.ones((2, 8))).dtype
    <class 'numpy.float32'>
    """
    asked = ConversionOptions.of("convert_hybrid_block", locals(), without=["data_names"], optimize="all")
    if isinstance(block, Block) and not isinstance(block, HybridBlock):
        raise TypeError(f"expected a HybridBlock, received {type(block).__name__}, a Block that runs Python code at "
                        "every call and cannot be traced: make it a HybridBlock, or convert the hybrid blocks in it")
    checks.instance("block", block, HybridBlock, "a HybridBlock")
    network = traced_network(block, asked)
    return network.built(converted_network(network, asked))


def calibrate(block: HybridBlock, calib_data: Any, calib_mode: str = "naive", calib_batches: int | None = None, *,
              exclude: Any = None, data_example: Any = None) -> Calibration:
    """Collect the ranges of a network's tensors once, for several conversions to INT8.

    Parameters
    ----------
    block : HybridBlock
        The FP32 network, with parameters.
    calib_data, calib_mode, calib_batches, exclude, data_example
        As in :class:`ConversionOptions`; what conversions exclude is excluded here, too.

    Returns
    -------
    Calibration
        ``save`` and ``Calibration.load`` keep it in a file; conversions take it as ``calib_data``.
    """
    checks.instance("block", block, HybridBlock, "a HybridBlock")
    options = ConversionOptions(INT8, exclude=exclude, device=mx.cpu(), data_example=data_example,
                                calib_data=calib_data, calib_mode=calib_mode, calib_batches=calib_batches)
    network = traced_network(block, options)
    return calibrated(options, network, prepared(network))[0]


def traced_network(block: HybridBlock, options: ConversionOptions) -> Network:
    """Trace a block; return what is to be converted."""
    example = options.data_example
    if example is not None:
        example = list(example) if isinstance(example, (list, tuple)) else [example]
    traced = _traced(block, example, lambda inner: any(is_target(inner, target) for target in options.exclude))
    inputs = [data.name for data in traced.inputs]
    parameter = next(iter(block.collect_params().values()), None)
    devices = options.device or ([mx.context.current_context()] if parameter is None else parameter.list_ctx())
    arrays = blocks.parameters_of(block, [name for name in traced.symbol.list_inputs() if name not in inputs])
    return Network.of(traced.symbol, arrays, inputs, options, devices, dict(zip(inputs, flat(example))), block,
                      kind=ConvertedBlock, variables=traced.inputs, formats=traced.formats)


def _traced(block: HybridBlock, example: Sequence[Any] | None, is_excluded: Callable[[Block], bool]) -> blocks.Trace:
    """Trace a block, and check that its parameters have values."""
    try:
        with kept_in_place():  # for the marks of symbol blocks
            traced = blocks.trace(block, example, is_excluded)
    except Exception as error:
        told = ": ".join(text for text in (type(error).__name__, str(error)) if text)
        own = next((type(each).__name__ for each in blocks.descendants(block) if blocks.has_own_forward(each)), None)
        advice = (f" {own} overrides forward, which MXNet runs in Python and does not trace: give it "
                  "hybrid_forward(self, F, x, ...) in its place, with F.name for mx.nd.name, or convert the blocks "
                  "inside it one by one" if own else
                  " If it takes other arguments than was assumed, pass data_example" if example is None else "")
        raise GraphError(f"the network cannot be traced to a symbol ({told}).{advice}") from error
    waiting = blocks.untouched_parameters(block, traced.symbol.list_inputs())
    if waiting and example is not None:
        with suppress(RuntimeError):  # where they were never initialized
            block(*example)  # as the user's first call would: parameters take their shapes
        waiting = blocks.untouched_parameters(block, waiting)
    if waiting:
        raise StateError(f"parameters have no values yet: {some_of(waiting, 3)}. Call initialize() or "
                         "load_parameters(), and pass data_example, or run the network once, so that their shapes are "
                         "known")
    return traced
