"""Convert symbols: alone, with their parameters, or those of a bucketing module."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, Iterable, Mapping, Sequence, Tuple

import mxnet as mx
from mxnet.module import BucketingModule

from .. import checks
from .._mxnet import blocks
from .._mxnet.arrays import NamesOnly, wait_for_statistics
from .._mxnet.invoke import zeros_for
from .._mxnet.symbols import to_graph, typed_variables
from ..aliases import NO_TUNING, also, answers
from ..errors import DTypeError, GraphError, StateError
from ..rules import ConditionalOp
from ..state.state import State
from .assignment import Made, Network, converted_network
from .block import ConvertedBlock, memory_flags
from .convert import Conversion, convert
from .inputs import check_names, check_parameters
from .model_files import split
from .options import Names, Options

Arrays = Mapping[str, mx.nd.NDArray]
Converted = Tuple[mx.sym.Symbol, Dict[str, mx.nd.NDArray], Dict[str, mx.nd.NDArray]]
_NEED_VALUES = frozenset({"fold_batch_norm", "align_channels"})


@also(dtype="target_dtype", ctx="device")
@answers(tuning=NO_TUNING)
def convert_symbol(sym: mx.sym.Symbol, target_dtype: object = None, target_dtype_ops: Sequence[str] | None = None,
                   fp32_ops: Sequence[str] | None = None, conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                   excluded_sym_names: Sequence[str] | None = None, data_names: Sequence[str] | None = None,
                   cast_optional_params: bool | None = None, *, exclude: Any = None,
                   optimize: str | Iterable[str] = "none", device: mx.Context | None = None,
                   cast_params_offline: bool | None = None, cast_outputs: bool = True,
                   disable_passes: Names = None) -> mx.sym.Symbol:
    """Convert an FP32 symbol to one for mixed-precision inference.

    The symbol gets casts, and runs wherever MXNet does. Without the parameters' values BatchNorm cannot be folded:
    :func:`convert_model` gives a faster network.

    Parameters
    ----------
    sym : Symbol
        The network, left as it is.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names
        As in :func:`convert_hybrid_block`.
    data_names : list of str, optional
        The inputs that are data. The others are parameters; with None those are whose variables carry a type, as in
        files of ``HybridBlock.export``.
    cast_optional_params, cast_params_offline : bool, optional
        Whether parameters that are read in low precision only are expected in it, rather than cast in the graph: their
        variables carry the type. False by default.
    optimize : 'none', 'all' or sequence of str
        As in :func:`convert_hybrid_block`, but for those that need the parameters' values. With ``'all'`` the symbol
        runs on CPUs only, and gives no gradients.
    exclude, cast_outputs, disable_passes
        As in :func:`convert_hybrid_block`.
    device : Context, optional
        Where the symbol will run: the current context by default.

    Returns
    -------
    Symbol

    Raises
    ------
    DTypeError, PolicyError, GraphError, TypeError
        As in :func:`convert_hybrid_block`.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.sym.FullyConnected(mx.sym.var('data'), num_hidden=8, name='fc')
    >>> amp.convert_symbol(net, 'float16', device=mx.gpu(0)).list_outputs()
    ['fc_output']
    """
    checks.instance("sym", sym, mx.sym.Symbol, "a Symbol")
    options = Options.read(target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names,
                           cast_optional_params, exclude=exclude, optimize=optimize, device=device,
                           cast_params_offline=cast_params_offline, cast_outputs=cast_outputs,
                           disable_passes=disable_passes)
    _refuse_int8(options)
    off = _NEED_VALUES if cast_params_offline or cast_optional_params else {*_NEED_VALUES, "cast_params_offline"}
    options = replace(options, disabled_passes=options.disabled_passes | off)
    names = sym.list_inputs()
    check_names(data_names or (), names, "data_names")
    typed = typed_variables(sym)
    weights = NamesOnly([name for name in names if (name in typed if data_names is None else name not in data_names)])
    device = options.devices[0] if options.devices else mx.context.current_context()
    return convert(sym, weights, *options.policy(to_graph(sym), [device]), {}, on_cpu=device.device_type != "gpu",
                   cast_outputs=options.cast_outputs)[0]


@also(dtype="target_dtype", ctx="device")
@answers(tuning=NO_TUNING)
def convert_model(sym: mx.sym.Symbol, arg_params: Arrays, aux_params: Arrays, target_dtype: object = None,
                  target_dtype_ops: Sequence[str] | None = None, fp32_ops: Sequence[str] | None = None,
                  conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                  excluded_sym_names: Sequence[str] | None = None, cast_optional_params: bool | None = None, *,
                  exclude: Any = None, optimize: str | Iterable[str] | None = None, device: mx.Context | None = None,
                  cast_params_offline: bool | None = None, cast_outputs: bool = True,
                  data_names: Sequence[str] | None = None, data_example: Mapping[str, Any] | None = None,
                  disable_passes: Names = None, calib_data: Any = None,
                  calib_mode: str | None = None, calib_batches: int | None = None, metric: Any = None,
                  budget: float | None = None, max_error: float | None = None, greater_is_better: bool | None = None,
                  dtypes: Iterable[object] | None = None, time_limit: float | None = None,
                  progress: bool | None = None) -> Converted:
    """Convert an FP32 symbol and its parameters for mixed-precision inference.

    Parameters
    ----------
    sym : Symbol
        The network, left as it is.
    arg_params, aux_params : dict of str to NDArray
        Its parameters and auxiliary states, left as they are. Those that the symbol does not use are dropped.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names, cast_optional_params
        As in :func:`convert_hybrid_block`.
    exclude, cast_params_offline, cast_outputs, disable_passes
        As in :func:`convert_hybrid_block`.
    optimize : 'all', 'none' or sequence of str, optional
        As in :func:`convert_hybrid_block`. By default none: as in MXNet every operator, name and parameter stays, and
        casts are added, so that layers can be taken by name and the checkpoint's own parameters set. For speed ask for
        ``['drop_training', 'fold_batch_norm', 'align_channels', 'cast_params_offline']``: all but ``fuse``, behind
        which there are no gradients. ``Module.bind`` asks for some unless it is told ``for_training=False``. With INT8
        all of them by default.
    device : Context, optional
        Where the network will run: the current context by default.
    data_names : list of str, optional
        The inputs that are data. Given, every other input must be among the parameters; without it those must be that
        layers read as weights.
    data_example : dict of str to NDArray or shape, optional
        Data by input name; lets passes know shapes and types.
    calib_data, calib_mode, calib_batches, metric, budget, max_error, greater_is_better, dtypes, time_limit, progress
        As in :func:`convert_hybrid_block`: they are for ``'int8'``. A metric takes a block.

    Returns
    -------
    (Symbol, dict, dict)
        The converted network, its parameters and auxiliary states. Parameters take the types and shapes that the
        converted network wants.

    Raises
    ------
    DTypeError, PolicyError, GraphError, TypeError
        As in :func:`convert_hybrid_block`.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.sym.FullyConnected(mx.sym.var('data'), num_hidden=8, name='fc')
    >>> weights = {'fc_weight': mx.nd.ones((8, 4)), 'fc_bias': mx.nd.zeros(8)}
    >>> sym, args, aux = amp.convert_model(net, weights, {}, 'float16', cast_optional_params=True, device=mx.gpu(0))
    >>> args['fc_weight'].dtype
    <class 'numpy.float16'>
    """
    checks.instance("sym", sym, mx.sym.Symbol, "a Symbol")
    for name, arrays in (("arg_params", arg_params), ("aux_params", aux_params)):
        checks.instance(name, arrays, Mapping, "a dict of name to NDArray")
        for key, array in arrays.items():
            checks.instance(f"{name}[{key!r}]", array, mx.nd.NDArray, "an NDArray")
    if data_example is not None:
        checks.instance("data_example", data_example, Mapping, "a dict of input name to NDArray or shape")
    options = Options.read(target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names,
                           cast_optional_params, exclude=exclude, optimize=optimize, device=device,
                           cast_params_offline=cast_params_offline, cast_outputs=cast_outputs,
                           disable_passes=disable_passes, int8={
                               "calib_data": calib_data, "mode": calib_mode, "batches": calib_batches, "metric": metric,
                               "budget": budget, "max_error": max_error, "greater_is_better": greater_is_better,
                               "dtypes": dtypes, "time_limit": time_limit, "progress": progress})
    wait_for_statistics()
    return _converted_model(sym, {**arg_params, **aux_params}, options, data_names, data_example or {})[0]


def _refuse_int8(options: Options) -> None:
    if options.int8 is not None:
        raise DTypeError("INT8 needs a network's parameters, and data of one shape: expected convert_hybrid_block or "
                         "convert_model for it")


class _Unlabelled(ConvertedBlock):
    """A converted model that is called without labels: what reads them needs their shapes only."""

    def forward(self, x: Any, *args: Any) -> Any:
        given = dict(zip(self._inputs, (x, *args)))
        labels = zeros_for(blocks.graph_of(self)[1], self._inputs[len(given):], given)
        return super().forward(x, *args, *labels.values())


def _converted_model(sym: mx.sym.Symbol, arrays: Arrays, options: Options, data_names: Sequence[str] | None = None,
                     example: Mapping[str, Any] | None = None) -> tuple[Converted, Conversion]:
    names = sym.list_inputs()
    check_names(data_names or (), names, "data_names")
    check_parameters(sym, arrays, data_names)
    check_names(example or {}, names, "data_example")
    device = options.devices[0] if options.devices else mx.context.current_context()
    graph, on_cpu = to_graph(sym), device.device_type != "gpu"
    policy, runs = options.policy(graph, [device])
    used = {name: array for name, array in arrays.items() if name in set(names)}
    data = data_names or [name for name in names if name not in used and not name.endswith("_label")]
    labels = [name for name in names if name not in used and name not in data]

    def build(made: Made) -> ConvertedBlock:
        block = _Unlabelled(made.symbol, list(map(mx.sym.var, [*data, *labels])), made.record,
                            State({"cpu": policy}, {"cpu": runs}) if on_cpu else None)
        blocks.load_parameters(block, made.arrays, [device])
        block.hybridize(**memory_flags(graph))
        return block

    made = converted_network(Network(sym, used, data, policy, runs, example or {}, options.cast_outputs, on_cpu),
                             options.int8, build)
    return (made.symbol, *split(made.symbol, made.arrays)), made.record


@also(dtype="target_dtype", ctx="device")
@answers(tuning=NO_TUNING)
def convert_bucketing_module(bucketing_mod: BucketingModule, target_dtype: object = None,
                             target_dtype_ops: Sequence[str] | None = None, fp32_ops: Sequence[str] | None = None,
                             conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                             excluded_sym_names: Sequence[str] | None = None,
                             cast_optional_params: bool | None = None, *, exclude: Any = None,
                             optimize: str | Iterable[str] = "none", device: mx.Context | None = None,
                             cast_params_offline: bool | None = None, cast_outputs: bool = True,
                             disable_passes: Names = None) -> BucketingModule:
    """Convert a trained bucketing module; buckets that it meets later are converted when they are made.

    Parameters
    ----------
    bucketing_mod : BucketingModule
        With initialised parameters and at least one bucket. It is left as it is.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names, cast_optional_params
        As in :func:`convert_hybrid_block`.
    exclude, optimize, device, cast_params_offline, cast_outputs, disable_passes
        As in :func:`convert_model`.

    Returns
    -------
    BucketingModule
        To be bound with ``for_training=False``.

    Raises
    ------
    StateError
        The module has no buckets or no parameters yet.
    DTypeError, PolicyError, GraphError
        As in :func:`convert_hybrid_block`.

    Examples
    --------
    ::

        converted = amp.convert_bucketing_module(module)
        converted.bind(iterator.provide_data, iterator.provide_label, for_training=False)
    """
    checks.instance("bucketing_mod", bucketing_mod, BucketingModule, "a BucketingModule")
    options = Options.read(target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names,
                           cast_optional_params, exclude=exclude, optimize=optimize, device=device,
                           cast_params_offline=cast_params_offline, cast_outputs=cast_outputs,
                           disable_passes=disable_passes)
    _refuse_int8(options)
    symbols = blocks.bucket_symbols(bucketing_mod)
    if not symbols or not bucketing_mod.params_initialized:
        raise StateError("the bucketing module has no buckets or no parameters yet: bind it and initialise or load its "
                         "parameters before converting it")
    wait_for_statistics()
    arg_params, aux_params = bucketing_mod.get_params()
    arrays = {**arg_params, **aux_params}
    results = {key: _converted_model(symbol, arrays, options) for key, symbol in symbols.items()}
    args, aux = (_merged([model[part] for model, _ in results.values()]) for part in (1, 2))
    sym_gen = blocks.sym_gen_of(bucketing_mod)

    def converted_sym_gen(key: Any) -> tuple[mx.sym.Symbol, Any, Any]:
        symbol, data_names, label_names = sym_gen(key)
        return _converted_model(symbol, arrays, options)[0][0], data_names, label_names

    made = blocks.rebuilt(bucketing_mod, {key: model[0] for key, (model, _) in results.items()}, converted_sym_gen,
                           args, aux)
    made.conversion = next(record for _, record in results.values())
    return made


def _merged(parameters: Sequence[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for arrays in parameters:
        for name, array in arrays.items():
            earlier = merged.setdefault(name, array)
            if (earlier.dtype, earlier.shape) != (array.dtype, array.shape):
                raise GraphError(f"the buckets do not agree on the parameter {name!r}. Convert with "
                                 "cast_params_offline=False and without 'align_channels' in optimize")
    return merged
