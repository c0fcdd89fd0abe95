"""The conversions: of a symbol, a model, a block, a bucketing module."""
from __future__ import annotations

import os
from typing import Any, Iterable, Mapping, Sequence, Union

import mxnet as mx
from mxnet.gluon import HybridBlock
from mxnet.module import BucketingModule

from .._mxnet import blocks, modules
from .._mxnet.symbols import dtype_name
from .._mxnet.weights import NamesOnly, NDArrayWeights
from ..errors import GraphError, StateError
from ..rules import ConditionalOp
from ..rules.tuning import Tuning
from .arguments import (
    as_example,
    check_names,
    devices_of,
    flat,
    given,
    require,
    require_block,
    require_no_example,
    traced_block,
)
from .block import ConvertedBlock
from .exclusions import Exclusions, excluded
from .graphs import convert
from .inputs import check_parameters
from .requests import make_request
from .settings import disabled_passes

__all__ = ["convert_bucketing_module", "convert_hybrid_block", "convert_model", "convert_symbol"]

Arrays = Mapping[str, mx.nd.NDArray]
Tuned = Union[Tuning, str, "os.PathLike[str]", bool, None]
Names = Union[Iterable[str], None]
_NEED_VALUES = frozenset({"fold_batch_norm", "align_channels"})


def convert_symbol(sym: mx.sym.Symbol, target_dtype: object = None, target_dtype_ops: Sequence[str] | None = None,
                   fp32_ops: Sequence[str] | None = None, conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                   excluded_sym_names: Sequence[str] | None = None, data_names: Sequence[str] | None = None,
                   cast_optional_params: bool | None = None, *, exclude: Any = None,
                   optimize: str | Iterable[str] = "all", device: mx.Context | None = None,
                   cast_params_offline: bool | None = None, cast_outputs: bool = True,
                   tuning: Tuned = None, disable_passes: Names = None) -> mx.sym.Symbol:
    """Convert an FP32 symbol to one for mixed-precision inference.

    Without the parameters' values BatchNorm cannot be folded: prefer :func:`convert_model`.

    Parameters
    ----------
    sym : Symbol
        The network, left as it is.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names
        As in :func:`convert_hybrid_block`.
    data_names : list of str, optional
        The inputs that are data. The others are parameters; with None nothing is known to be one.
    cast_optional_params, cast_params_offline : bool, optional
        Whether parameters that are read in low precision only are expected in it, rather than cast in the graph. False
        by default.
    exclude, optimize, cast_outputs, tuning, disable_passes
        As in :func:`convert_hybrid_block`.
    device : Context, optional
        Where the symbol will run: the current context by default.

    Returns
    -------
    Symbol

    Raises
    ------
    DTypeError, PolicyError, GraphError
        As in :func:`convert_hybrid_block`.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.sym.FullyConnected(mx.sym.var('data'), num_hidden=8, name='fc')
    >>> amp.convert_symbol(net, 'float16', device=mx.gpu(0)).list_outputs()
    ['fc_output']
    """
    require(sym, mx.sym.Symbol, "sym", "a Symbol")
    offline = bool(given(cast_optional_params, cast_params_offline))
    wanted = excluded(exclude, excluded_sym_names)
    device = mx.context.current_context() if device is None else device
    names = sym.list_inputs()
    check_names(data_names or (), names, "data_names")
    weights = NamesOnly([name for name in names if name not in data_names] if data_names is not None else [])
    request = make_request(sym, target_dtype, (target_dtype_ops, fp32_ops, conditional_fp32_ops), wanted, device,
                           disabled_passes(optimize, offline, disable_passes) | _NEED_VALUES, cast_outputs, tuning)
    return convert(sym, weights, request, {}, {})[0]


def convert_model(sym: mx.sym.Symbol, arg_params: Arrays, aux_params: Arrays, target_dtype: object = None,
                  target_dtype_ops: Sequence[str] | None = None, fp32_ops: Sequence[str] | None = None,
                  conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                  excluded_sym_names: Sequence[str] | None = None, cast_optional_params: bool | None = None, *,
                  exclude: Any = None, optimize: str | Iterable[str] = "all", device: mx.Context | None = None,
                  cast_params_offline: bool | None = None, cast_outputs: bool = True,
                  data_names: Sequence[str] | None = None, data_example: Mapping[str, Any] | None = None,
                  tuning: Tuned = None, disable_passes: Names = None
                  ) -> tuple[mx.sym.Symbol, dict[str, mx.nd.NDArray], dict[str, mx.nd.NDArray]]:
    """Convert an FP32 symbol and its parameters for mixed-precision inference.

    Parameters
    ----------
    sym : Symbol
        The network, left as it is.
    arg_params, aux_params : dict of str to NDArray
        Its parameters and auxiliary states, left as they are. Those that the symbol does not use are dropped.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names, cast_optional_params
        As in :func:`convert_hybrid_block`.
    exclude, optimize, cast_params_offline, cast_outputs, tuning, disable_passes
        As in :func:`convert_hybrid_block`.
    device : Context, optional
        Where the network will run: the current context by default.
    data_names : list of str, optional
        The inputs that are data. Given, every other input must be among the parameters; without it those must be that
        layers read as weights.
    data_example : dict of str to NDArray or shape, optional
        Data by input name; lets passes know shapes and types.

    Returns
    -------
    (Symbol, dict, dict)
        The converted network, its parameters and auxiliary states. Parameters take the types and shapes that the
        converted network wants.

    Raises
    ------
    DTypeError, PolicyError, GraphError
        As in :func:`convert_hybrid_block`.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.sym.FullyConnected(mx.sym.var('data'), num_hidden=8, name='fc')
    >>> weights = {'fc_weight': mx.nd.ones((8, 4)), 'fc_bias': mx.nd.zeros(8)}
    >>> sym, args, aux = amp.convert_model(net, weights, {}, 'float16', device=mx.gpu(0))
    >>> args['fc_weight'].dtype
    <class 'numpy.float16'>
    """
    require(sym, mx.sym.Symbol, "sym", "a Symbol")
    require(arg_params, Mapping, "arg_params", "a dict of name to NDArray")
    require(aux_params, Mapping, "aux_params", "a dict of name to NDArray")
    wanted = excluded(exclude, excluded_sym_names)
    device = mx.context.current_context() if device is None else device
    arrays = {**arg_params, **aux_params}
    check_names(data_names or (), sym.list_inputs(), "data_names")
    check_parameters(sym, arrays, data_names)
    disabled = disabled_passes(optimize, given(cast_optional_params, cast_params_offline), disable_passes)
    request = make_request(sym, target_dtype, (target_dtype_ops, fp32_ops, conditional_fp32_ops), wanted, device,
                           disabled, cast_outputs, tuning)
    weights = NDArrayWeights({name: array for name, array in arrays.items() if name in set(sym.list_inputs())})
    example = data_example or {}
    check_names(example, sym.list_inputs(), "data_example")
    dtypes = {name: dtype_name(value.dtype) for name, value in example.items() if hasattr(value, "dtype")}
    shapes = {name: tuple(getattr(value, "shape", value)) for name, value in example.items()}
    symbol, _ = convert(sym, weights, request, dtypes, shapes)  # type: ignore[arg-type]
    auxiliary = set(symbol.list_auxiliary_states())
    return (symbol, {name: array for name, array in weights.arrays.items() if name not in auxiliary},
            {name: array for name, array in weights.arrays.items() if name in auxiliary})


def convert_hybrid_block(block: HybridBlock, target_dtype: object = None,
                         target_dtype_ops: Sequence[str] | None = None, fp32_ops: Sequence[str] | None = None,
                         conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                         excluded_sym_names: Sequence[str] | None = None,
                         ctx: mx.Context | Sequence[mx.Context] | None = None,
                         cast_optional_params: bool | None = None, *, data_example: Any = None, exclude: Any = None,
                         optimize: str | Iterable[str] = "all",
                         device: mx.Context | Sequence[mx.Context] | None = None,
                         cast_params_offline: bool | None = None, cast_outputs: bool = True,
                         tuning: Tuned = None, disable_passes: Names = None) -> ConvertedBlock:
    """Convert a trained FP32 network to one for mixed-precision inference.

    Parameters
    ----------
    block : HybridBlock
        The network: hybridized or not, run before or not, a SymbolBlock too. It is left as it is.
    target_dtype : {'float16', 'bfloat16', 'float32'}, numpy dtype or None
        The low-precision type. None takes what the device runs; ``'float32'`` optimises without lowering precision.
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
        The optimisations: ``drop_training``, ``fold_batch_norm``, ``align_channels``, ``cast_params_offline`` and
        ``fuse``. Each is exact up to rounding. ``'none'`` inserts casts only.
    cast_outputs : bool
        Whether outputs are FP32. They are left in the type that they are computed in otherwise.
    tuning : Tuning, path or True, optional
        Measurements of :func:`tune`, as for :func:`init`; they need ``data_example`` to tell shapes from.
    disable_passes : list of str, optional
        Graph passes to switch off, by their names in :func:`list_passes`; those that ``optimize`` names are among them.

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
        ``block`` is no HybridBlock.

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
    require_block(block)
    require_no_example(target_dtype)
    wanted = excluded(exclude, excluded_sym_names)
    example = as_example(data_example)
    traced = traced_block(block, example, wanted)
    names = [name for name in traced.symbol.list_inputs() if name not in {data.name for data in traced.inputs}]
    devices = devices_of(given(ctx, device), block)
    disabled = disabled_passes(optimize, given(cast_optional_params, cast_params_offline), disable_passes)
    request = make_request(traced.symbol, target_dtype, (target_dtype_ops, fp32_ops, conditional_fp32_ops), wanted,
                           devices[0], disabled, cast_outputs, tuning)
    weights = NDArrayWeights(blocks.parameters_of(block, names))
    known = dict(zip([data.name for data in traced.inputs], flat(example)))
    symbol, record = convert(traced.symbol, weights, request,
                             {name: dtype_name(array.dtype) for name, array in known.items()},  # type: ignore[misc]
                             {name: array.shape for name, array in known.items()})
    made = ConvertedBlock(symbol, traced.inputs, record)
    blocks.set_formats(made, traced.formats)
    blocks.load_parameters(made, weights.arrays, devices)
    made.hybridize(**{"static_alloc": True, "static_shape": True, **blocks.flags_of(block)})
    return made


def convert_bucketing_module(bucketing_mod: BucketingModule, target_dtype: object = None,
                             target_dtype_ops: Sequence[str] | None = None, fp32_ops: Sequence[str] | None = None,
                             conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                             excluded_sym_names: Sequence[str] | None = None,
                             cast_optional_params: bool | None = None, *, exclude: Any = None,
                             optimize: str | Iterable[str] = "all", device: mx.Context | None = None,
                             cast_params_offline: bool | None = None, cast_outputs: bool = True,
                             tuning: Tuned = None, disable_passes: Names = None) -> BucketingModule:
    """Convert a trained bucketing module; buckets that it meets later are converted when they are made.

    Parameters
    ----------
    bucketing_mod : BucketingModule
        With initialised parameters and at least one bucket. It is left as it is.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names, cast_optional_params
        As in :func:`convert_hybrid_block`.
    exclude, optimize, device, cast_params_offline, cast_outputs, tuning, disable_passes
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
    require(bucketing_mod, BucketingModule, "bucketing_mod", "a BucketingModule")
    symbols = modules.bucket_symbols(bucketing_mod)
    if not symbols or not bucketing_mod.params_initialized:
        raise StateError("the bucketing module has no buckets or no parameters yet: bind it and initialise or load its "
                         "parameters before converting it")
    arg_params, aux_params = modules.parameters(bucketing_mod)
    settings = {"exclude": [*Exclusions(exclude, excluded_sym_names).names], "optimize": optimize, "device": device,
                "cast_params_offline": given(cast_optional_params, cast_params_offline),
                "cast_outputs": cast_outputs, "tuning": tuning, "disable_passes": disable_passes}

    def converted(symbol: mx.sym.Symbol) -> tuple[mx.sym.Symbol, dict, dict]:
        return convert_model(symbol, arg_params, aux_params, target_dtype, target_dtype_ops, fp32_ops,
                             conditional_fp32_ops, **settings)

    results = {key: converted(symbol) for key, symbol in symbols.items()}
    args, aux = _merged([result[1] for result in results.values()]), _merged([result[2] for result in results.values()])
    sym_gen = modules.sym_gen_of(bucketing_mod)

    def converted_sym_gen(key: Any) -> tuple[mx.sym.Symbol, Any, Any]:
        symbol, data_names, label_names = sym_gen(key)
        return converted(symbol)[0], data_names, label_names

    return modules.rebuilt(bucketing_mod, {key: result[0] for key, result in results.items()}, converted_sym_gen, args,
                           aux)


def _merged(parameters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arrays in parameters:
        for name, array in arrays.items():
            earlier = found.setdefault(name, array)
            if (earlier.dtype, earlier.shape) != (array.dtype, array.shape):
                raise GraphError(f"the buckets do not agree on the parameter {name!r}. Convert with "
                                 "cast_params_offline=False and without 'align_channels' in optimize")
    return found
