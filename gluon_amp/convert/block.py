"""Convert a block, and the block that this gives."""
from __future__ import annotations

import os
import warnings
from typing import Any, Iterable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, SymbolBlock

from .. import checks
from .._mxnet import blocks
from .._mxnet.arrays import cast_arrays, first_array, needs_gradient
from .._mxnet.symbols import NumpySymbol, to_graph
from ..aliases import NO_TUNING, also, answers
from ..dtypes import BFLOAT16, FLOAT32
from ..errors import StateError
from ..graph import Graph, has_control_flow
from ..plan.cached_op import RewritingCachedOp
from ..plan.converted_symbols import refuse_foreign, refuse_trained, spoilt_gradients
from ..rules import ConditionalOp
from ..state.devices import require_bfloat16
from ..state.state import State
from .assignment import Made, Network, Request, calibrated, converted_network, readied
from .calibration import Calibration
from .convert import Conversion, with_fp32_parameters
from .inputs import as_example, flat, traced_block
from .model_files import save_model, split
from .options import Names, Options, data_may_come_second


class ConvertedBlock(SymbolBlock):
    """A converted network, for inference.

    Made by :func:`gluon_amp.convert_hybrid_block`. It takes and returns what the network that it was made from does.

    Attributes
    ----------
    conversion : Conversion
        What was done.
    """

    def __init__(self, outputs: mx.sym.Symbol, inputs: Sequence[mx.sym.Symbol], conversion: Conversion,
                 state: State | None = None):
        with warnings.catch_warnings():
            # MXNet asks for the type of the data, which any call may bring in another.
            warnings.simplefilter("ignore", UserWarning)
            super().__init__(outputs, inputs)
        blocks.save_under_full_names(self)
        self.conversion = conversion
        self._state = state  # that it runs under; None where MXNet runs it as it is
        self._spoilt = spoilt_gradients(outputs)
        self._inputs = [variable.name for variable in inputs]

    def forward(self, x: Any, *args: Any) -> Any:
        """Run the network; arrays in low precision, as from a block around under AMP, are taken as FP32.

        Raises
        ------
        DTypeError
            The network was converted to a type that this machine's CPU cannot run.
        StateError
            A gradient of the data is asked for, which fused operators do not have, or the parameters are to be trained.
        """
        if autograd.is_recording():
            self._refuse_gradients([x, *args])
        array = first_array((x, *args))  # None in another block's trace
        if self.conversion.target_dtype == BFLOAT16 and array is not None and array.context.device_type != "gpu":
            require_bfloat16()
        arguments = cast_arrays((x, *args), FLOAT32)
        if isinstance(x, mx.nd.NDArray):  # MXNet's own way knows no other first argument
            return super().forward(*arguments)
        return blocks.call_symbol_block(self, arguments)

    def _refuse_gradients(self, arguments: Sequence[Any]) -> None:
        if not self._spoilt.keys().isdisjoint(self._inputs) and any(map(needs_gradient, flat(arguments))):
            raise StateError("expected data that needs no gradient: MXNet gives zeros behind the fused operators of a "
                             "converted network. Convert it with disable_passes=['fuse'], or call it in "
                             "autograd.pause() where its gradient is not needed")
        refuse_trained(self.collect_params(), self._spoilt, is_frozen=True)

    def _build_cache(self, *args: Any) -> None:
        """Let what runs, and no file, hold operators in C++."""
        super()._build_cache(*args)
        if self._state is not None:
            operation = RewritingCachedOp(blocks.graph_of(self)[1], blocks.cache_flags(self), self._state)
            operation.accumulating = frozenset(self.collect_params())  # as they may
            self._cached_op = operation

    def load_parameters(self, filename: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Read parameters of a converted network, as MXNet does.

        Raises
        ------
        StateError
            The file holds those of the network that this one was made from.
        """
        given = {name.split(":", 1)[-1] for name in mx.nd.load(os.fspath(filename))}
        refuse_foreign(blocks.graph_of(self)[1], given)
        super().load_parameters(os.fspath(filename), *args, **kwargs)

    def export(self, path: str | os.PathLike, epoch: int = 0, remove_amp_cast: bool = False) -> tuple[str, str]:
        """Write ``path-symbol.json`` and ``path-NNNN.params``, which MXNet loads and runs without this package.

        Parameters
        ----------
        path : path
            Beginning of both names, in a directory that exists.
        epoch : int
            The number in the second name.
        remove_amp_cast : bool
            Accepted for MXNet's signature. The casts belong to the network: only False has a meaning.

        Returns
        -------
        (str, str)
            The files.

        Raises
        ------
        ValueError
            ``remove_amp_cast=True``.
        OSError
            The directory does not exist or cannot be written to; no file is left behind.
        """
        if remove_amp_cast:
            raise ValueError("expected remove_amp_cast=False: without its casts a converted network does not run. "
                             "Export the FP32 network it was made from instead")
        inputs, symbol = blocks.graph_of(self)
        names = {variable.name for variable in inputs}
        arrays = blocks.parameters_of(self, [name for name in symbol.list_inputs() if name not in names])
        if isinstance(symbol, NumpySymbol):
            # MXNet cannot make a gradient buffer for a bfloat16 parameter of a NumPy-style network when it loads one.
            symbol, arrays = with_fp32_parameters(symbol, arrays)
        return save_model(path, epoch, symbol, *split(symbol, arrays))


@also(dtype="target_dtype")
@answers(tuning=NO_TUNING)
@data_may_come_second
def convert_hybrid_block(block: HybridBlock, target_dtype: object = None,
                         target_dtype_ops: Sequence[str] | None = None, fp32_ops: Sequence[str] | None = None,
                         conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                         excluded_sym_names: Sequence[str] | None = None,
                         ctx: mx.Context | Sequence[mx.Context] | None = None,
                         cast_optional_params: bool | None = None, *, data_example: Any = None, exclude: Any = None,
                         optimize: str | Iterable[str] = "all",
                         device: mx.Context | Sequence[mx.Context] | None = None,
                         cast_params_offline: bool | None = None, cast_outputs: bool = True,
                         disable_passes: Names = None, calib_data: Any = None,
                         calib_mode: str | None = None, calib_batches: int | None = None, metric: Any = None,
                         budget: float | None = None, max_error: float | None = None,
                         greater_is_better: bool | None = None, dtypes: Iterable[object] | None = None,
                         time_limit: float | None = None, progress: bool | None = None) -> ConvertedBlock:
    """Convert a trained FP32 network to one for mixed-precision inference.

    Parameters
    ----------
    block : HybridBlock
        The network: hybridized or not, run before or not, a SymbolBlock too. It is left as it is.
    target_dtype : {'float16', 'bfloat16', 'float32', 'int8'}, numpy dtype or None
        The low-precision type. None takes what the device runs; ``'float32'`` optimises without lowering precision.
        ``'int8'`` lets convolutions and dense layers run in INT8, and the rest in what None takes; it needs
        ``calib_data``.
    target_dtype_ops : list of str, optional
        The operators that run in ``target_dtype``, in place of the table's own.
    fp32_ops : list of str, optional
        Operators forced to FP32, beside those that the table names.
    conditional_fp32_ops : list of (str, str, list of str), optional
        Operator, attribute, and the attribute's values that force the operator to FP32.
    excluded_sym_names : list of str, optional
        As ``exclude``.
    ctx, device : Context or list of Context, optional
        Where the converted network is to live: where ``block`` does by default.
    cast_optional_params, cast_params_offline : bool, optional
        Whether parameters that are read in low precision only are stored in it; part of ``optimize`` by default.
    data_example : NDArray or sequence of NDArray, optional
        Arguments of a call. Needed where parameters still wait for their shape, or where the number of arguments
        cannot be read from the network's signature.
    exclude : str, Block, class of blocks, or a sequence of them, optional
        What stays in FP32: names of operator nodes or blocks, which may hold wildcards, blocks with all that is inside
        them, and classes of blocks.
    optimize : 'all', 'none' or sequence of str
        The optimisations: ``drop_training``, ``fold_batch_norm``, ``fold_padding``, ``shape_operands``,
        ``align_channels``, ``cast_params_offline`` and ``fuse``. Each is exact up to rounding. ``'none'`` inserts casts
        only.
    cast_outputs : bool
        Whether outputs are FP32. They are left in the type that they are computed in otherwise.
    disable_passes : list of str, optional
        Graph passes to switch off, by their names in :func:`list_passes`; those that ``optimize`` names are among them.
    calib_data : DataLoader, DataIter, NDArray, sequence, path or Calibration, optional
        Data to learn the ranges of values from, which INT8 needs: a hundred examples of what the network is to see.
        Labels behind the data are left out. A path is that of an ``.npz`` file, or of a directory of them; what
        :func:`calibrate` returned needs ``data_example`` with arrays beside it.
    calib_mode : {'naive', 'entropy'}, optional
        Whether INT8 holds all values that were seen (the default), or the range that loses least information.
    calib_batches : int, optional
        How many batches to take; all of them by default.
    metric : callable, or (EvalMetric, loader), optional
        Measures a network: it takes one and returns a number, such as its accuracy on validation data. The fastest
        assignment of types to layers within ``budget`` of FP32 is searched then.
    budget : float, optional
        How much worse than in FP32 the metric may be.
    max_error : float, optional
        In place of ``metric``: the most that an output may differ from FP32, as the 2-norm of the difference over that
        of FP32, on the first batch of ``calib_data``.
    greater_is_better : bool, optional
        False for metrics that are to be small, such as a loss.
    dtypes : sequence of str, optional
        Restricts the types: ``('int8', 'float32')`` leaves bfloat16 out. With ``('int8',)`` all layers that MXNet runs
        right in INT8 do, also where that is slower.
    time_limit : float, optional
        Seconds after which the search ends with what it has found.
    progress : bool, optional
        Whether to show progress bars, as by default.

    Returns
    -------
    ConvertedBlock
        A SymbolBlock for inference, hybridized. ``conversion`` tells what was done; ``export`` writes files that MXNet
        runs without this package.

    Raises
    ------
    DTypeError
        The type is unknown, or the device cannot run it.
    PolicyError
        The operator lists contradict each other, or something named is not in the network.
    StateError
        Parameters have no values yet.
    GraphError
        The network cannot be traced, or it is converted to another type already.
    TypeError
        ``block`` is not a HybridBlock, or ``ctx`` or ``device`` no Context.
    ValueError
        ``ctx`` and ``device``, or ``cast_optional_params`` and ``cast_params_offline``, contradict each other.

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
    if isinstance(block, Block) and not isinstance(block, HybridBlock):
        raise TypeError(f"expected a HybridBlock, received {type(block).__name__}, a Block that runs Python code at "
                        "every call and cannot be traced: make it a HybridBlock, or convert the hybrid blocks in it")
    checks.instance("block", block, HybridBlock, "a HybridBlock")
    options = Options.read(target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names,
                           cast_optional_params, exclude=exclude, optimize=optimize, device=device,
                           cast_params_offline=cast_params_offline, cast_outputs=cast_outputs,
                           disable_passes=disable_passes, ctx=ctx, int8={
                               "calib_data": calib_data, "mode": calib_mode, "batches": calib_batches, "metric": metric,
                               "budget": budget, "max_error": max_error, "greater_is_better": greater_is_better,
                               "dtypes": dtypes, "time_limit": time_limit, "progress": progress})
    network, traced, devices = _network(block, options, data_example)
    graph = to_graph(traced.symbol)

    def build(made: Made) -> ConvertedBlock:
        state = State({"cpu": network.policy}, {"cpu": network.device}) if network.on_cpu else None
        converted = ConvertedBlock(made.symbol, traced.inputs, made.record, state)
        blocks.set_formats(converted, traced.formats)
        blocks.load_parameters(converted, made.arrays, devices)
        converted.hybridize(**memory_flags(graph))
        return converted

    return build(converted_network(network, options.int8, build))


def _network(block: HybridBlock, options: Options, data_example: Any) -> tuple[Network, blocks.Trace, Any]:
    """Trace a block; return what is to be converted, and the devices that it lives on."""
    example = as_example(data_example)
    traced = traced_block(block, example, options.exclude.match)
    inputs = [data.name for data in traced.inputs]
    parameter = next(iter(block.collect_params().values()), None)
    devices = options.devices or ([mx.context.current_context()] if parameter is None else parameter.list_ctx())
    arrays = blocks.parameters_of(block, [name for name in traced.symbol.list_inputs() if name not in inputs])
    network = Network(traced.symbol, arrays, inputs, *options.policy(to_graph(traced.symbol), devices, block),
                      dict(zip(inputs, flat(example))), options.cast_outputs, devices[0].device_type != "gpu")
    return network, traced, devices


def calibrate(block: HybridBlock, calib_data: Any, calib_mode: str = "naive", calib_batches: int | None = None, *,
              exclude: Any = None, data_example: Any = None, progress: bool = True) -> Calibration:
    """Collect the ranges of a network's tensors once, for several conversions to INT8.

    Parameters
    ----------
    block : HybridBlock
        The FP32 network, with parameters.
    calib_data, calib_mode, calib_batches
        As in :func:`convert_hybrid_block`.
    exclude
        As in :func:`convert_hybrid_block`, where the conversions exclude something.
    data_example : NDArray or sequence of NDArray, optional
        Arguments of a call, where parameters still wait for their shape.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    Calibration
        ``save`` and ``Calibration.load`` keep it in a file; conversions take it as ``calib_data``.

    Raises
    ------
    StateError
        There is no data, or parameters have no values yet.
    GraphError
        The network cannot be traced, or does not run on the data.
    PolicyError
        There is no such mode.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(2, in_units=3, prefix='fc_')
    >>> net.initialize(mx.init.One())
    >>> amp.calibrate(net, mx.nd.ones((2, 3)), progress=False).ranges['fc_fwd']
    (3.0, 3.0)
    """
    checks.instance("block", block, HybridBlock, "a HybridBlock")
    request = Request(calib_data, mode=calib_mode, batches=calib_batches, progress=progress)
    options = Options.read(None, None, None, None, None, None, exclude=exclude, optimize="all", device=mx.cpu(),
                           cast_params_offline=None, cast_outputs=True, disable_passes=None)
    return calibrated(request, *readied(_network(block, options, data_example)[0]))[0]


def memory_flags(graph: Graph) -> dict[str, bool]:
    """Return the flags that a network for inference is hybridized with: it has memory of its own if it has no loops."""
    # Without, fused layers bring their weights into oneDNN's layout, or INT8, in every call: AlexNet takes four times
    # as long. In loops MXNet's _foreach would give what was in that memory before.
    return dict.fromkeys(("static_alloc", "static_shape"), not has_control_flow(graph))
