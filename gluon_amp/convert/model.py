"""Convert symbols: alone, with their parameters, or those of a bucketing module."""
from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence, Tuple

import mxnet as mx
from mxnet.module import BucketingModule

from .._mxnet import blocks
from .._mxnet.arrays import NDArrayWeights, wait_for_statistics
from .._mxnet.invoke import zeros_for
from .._mxnet.symbols import typed_variables
from ..base import checks
from ..errors import DTypeError, GraphError, StateError
from .assignment import converted_network
from .block import ConvertedBlock
from .convert import Made, Network, convert
from .options import Conditions, ConversionOptions, Names
from .parameters import LABEL, Arrays, check_names, check_parameters, split

Converted = Tuple[mx.sym.Symbol, Dict[str, mx.nd.NDArray], Dict[str, mx.nd.NDArray]]


def convert_symbol(sym: mx.sym.Symbol, target_dtype: object = None, target_dtype_ops: Names = None,
                   fp32_ops: Names = None, conditional_fp32_ops: Conditions = None, excluded_sym_names: Names = None,
                   data_names: Names = None, cast_optional_params: bool | None = None,
                   **options: Any) -> mx.sym.Symbol:
    """Convert an FP32 symbol to one for mixed-precision inference.

    It gets casts, and runs wherever MXNet does. With the parameters :func:`convert_model` gives a faster network.

    Parameters
    ----------
    sym : Symbol
        The network, left as it is.
    data_names : list of str, optional
        The inputs that are data, the others being parameters; without it inputs that carry a type are parameters.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names, cast_optional_params
        As in MXNet: see :class:`ConversionOptions`. With ``cast_optional_params`` variables of parameters that are read
        in low precision only carry that type.
    **options
        Those of :class:`ConversionOptions`, but for ``data_example`` and INT8's. No optimisation is on by default. With
        ``optimize='all'`` the symbol runs on CPUs only, and gives no gradients.
    """
    asked = ConversionOptions.of("convert_symbol", locals(), without=["data_example"])
    checks.instance("sym", sym, mx.sym.Symbol, "a Symbol")
    _refuse_int8(asked)
    asked.disable_passes |= {"fold_batch_norm", "align_channels",  # they need values
                             *([] if asked.cast_params_offline else ["cast_params_offline"])}
    names = sym.list_inputs()
    check_names(data_names or (), names, "data_names")
    trained = typed_variables(sym) if data_names is None else set(names).difference(data_names)
    weights = NDArrayWeights({name: mx.nd.zeros(1, mx.cpu()) for name in names if name in trained}, are_known=False)
    devices = asked.device or [mx.context.current_context()]
    return convert(Network.of(sym, {}, [], asked, devices[:1], {}), weights=weights).symbol


def convert_model(sym: mx.sym.Symbol, arg_params: Arrays, aux_params: Arrays, target_dtype: object = None,
                  target_dtype_ops: Names = None, fp32_ops: Names = None, conditional_fp32_ops: Conditions = None,
                  excluded_sym_names: Names = None, cast_optional_params: bool | None = None,
                  **options: Any) -> Converted:
    """Convert an FP32 symbol and its parameters for mixed-precision inference.

    Parameters
    ----------
    sym : Symbol
        The network, left as it is.
    arg_params, aux_params : dict of str to NDArray
        Its parameters and auxiliary states, left as they are. Those that the symbol does not use are dropped.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names, cast_optional_params
        As in MXNet: see :class:`ConversionOptions`.
    **options
        Those of :class:`ConversionOptions`. As in MXNet casts are added, and every operator, name and parameter stays.
        For speed ask for ``optimize=['drop_training', 'fold_batch_norm', 'align_channels', 'cast_params_offline']``;
        behind ``fuse`` there are no gradients: bind with ``for_training=False``. With INT8 all are on. With
        ``data_names`` every other input but labels must be among the parameters.

    Returns
    -------
    (Symbol, dict, dict)
        The converted network, its parameters in the types and shapes that it wants, and auxiliary states.
    """
    asked = ConversionOptions.of("convert_model", locals())
    checks.instance("sym", sym, mx.sym.Symbol, "a Symbol")
    for name, arrays in (("arg_params", arg_params), ("aux_params", aux_params)):
        checks.instance(name, arrays, Mapping, "a dict of name to NDArray")
        for key, array in arrays.items():
            checks.instance(f"{name}[{key!r}]", array, mx.nd.NDArray, "an NDArray")
    if asked.data_example is not None:
        checks.instance("data_example", asked.data_example, Mapping, "a dict of input name to NDArray or shape")
    wait_for_statistics()
    made = _converted_model(sym, {**arg_params, **aux_params}, asked)
    return (made.symbol, *split(made.symbol, made.arrays))


def _refuse_int8(options: ConversionOptions) -> None:
    if options.is_int8:
        raise DTypeError("INT8 needs a network's parameters, and data of one shape: expected convert_hybrid_block or "
                         "convert_model for it")


class _Unlabelled(ConvertedBlock):
    """A converted model that is called without labels: what reads them needs their shapes only."""

    def forward(self, x: Any, *args: Any) -> Any:
        given = dict(zip(self._inputs, (x, *args)))
        labels = zeros_for(blocks.graph_of(self)[1], self._inputs[len(given):], given)
        return super().forward(x, *args, *labels.values())


def _converted_model(sym: mx.sym.Symbol, arrays: Arrays, options: ConversionOptions) -> Made:
    names, example = sym.list_inputs(), options.data_example or {}
    check_names(options.data_names or (), names, "data_names")
    check_parameters(sym, arrays, options.data_names)
    check_names(example, names, "data_example")
    used = {name: array for name, array in arrays.items() if name in set(names)}
    data = options.data_names or [name for name in names if name not in used and not name.endswith(LABEL)]
    labels = [name for name in names if name not in used and name not in data]
    devices = options.device or [mx.context.current_context()]
    return converted_network(Network.of(sym, used, data, options, devices[:1], example, kind=_Unlabelled,
                                        variables=list(map(mx.sym.var, [*data, *labels]))), options)


def convert_bucketing_module(bucketing_mod: BucketingModule, target_dtype: object = None,
                             target_dtype_ops: Names = None, fp32_ops: Names = None,
                             conditional_fp32_ops: Conditions = None, excluded_sym_names: Names = None,
                             cast_optional_params: bool | None = None, **options: Any) -> BucketingModule:
    """Convert a trained bucketing module; buckets that it meets later are converted when they are made.

    Parameters
    ----------
    bucketing_mod : BucketingModule
        With initialised parameters and at least one bucket. It is left as it is.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, excluded_sym_names, cast_optional_params
        As in MXNet: see :class:`ConversionOptions`.
    **options
        Those of :class:`ConversionOptions`, but for those of data and INT8. No optimisation is on by default.

    Returns
    -------
    BucketingModule
        To be bound with ``for_training=False``.
    """
    asked = ConversionOptions.of("convert_bucketing_module", locals(), without=["data_example", "data_names"])
    checks.instance("bucketing_mod", bucketing_mod, BucketingModule, "a BucketingModule")
    _refuse_int8(asked)
    symbols, sym_gen = blocks.buckets_of(bucketing_mod)
    if not symbols or not bucketing_mod.params_initialized:
        raise StateError("the bucketing module has no buckets or no parameters yet: bind it and initialise or load its "
                         "parameters before converting it")
    wait_for_statistics()
    arg_params, aux_params = bucketing_mod.get_params()
    arrays = {**arg_params, **aux_params}
    results = {key: _converted_model(symbol, arrays, asked) for key, symbol in symbols.items()}
    args, aux = map(_merged, zip(*(split(each.symbol, each.arrays) for each in results.values())))

    def converted_sym_gen(key: Any) -> tuple[mx.sym.Symbol, Any, Any]:
        symbol, data_names, label_names = sym_gen(key)
        return _converted_model(symbol, arrays, asked).symbol, data_names, label_names

    made = blocks.rebuilt(bucketing_mod, {key: each.symbol for key, each in results.items()}, converted_sym_gen,
                          args, aux)
    made.conversion = next(iter(results.values())).record
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
