"""``install``: stand in for ``mxnet.contrib.amp``, for code that imports it, and for names of MXNet 2."""
from __future__ import annotations

import functools
import importlib
import sys
import weakref
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable

import mxnet as mx
from mxnet import gluon

from .._mxnet.arrays import map_arrays
from ..base.context import Replaced
from ..convert import flat
from ..errors import warn
from ..machine.dtypes import BFLOAT16, BFLOAT16_DTYPE, FLOAT16, normalize
from ..rules.decision import FP32, KEEP, LOWER, NEUTRAL, WIDEST, Rule
from ..rules.tables import table
from ..rules.tables.groups import LOSS_OUTPUTS
from ..session.init import is_active
from ..state.blocks import block_settings
from ..state.in_force import in_force
from ..training import loss_scaler
from ..training.trainer_scaler import scalers_in_use

_CONDITIONAL = "CONDITIONAL"  # FP32 for some attributes only
# The inputs of operators some of whose inputs stay FP32 in bfloat16.
INPUT_NAMES = {
    **dict.fromkeys(("BatchNorm", "_contrib_BatchNormWithReLU"), ("data", "gamma", "beta", "moving_mean",
                                                                   "moving_var")),
    **dict.fromkeys(("SequenceLast", "SequenceMask", "SequenceReverse"), ("data", "sequence_length")),
    "where": ("condition", "x", "y"),
}


def list_lp16_ops(target_dtype: object = FLOAT16) -> list[str]:
    """List the operators that run in ``'float16'`` or ``'bfloat16'``, by their registered names."""
    return _names(target_dtype, LOWER)


def list_fp32_ops(target_dtype: object = FLOAT16) -> list[str]:
    """List the operators that run in FP32."""
    return _names(target_dtype, FP32)


def list_lp16_fp32_ops(target_dtype: object = FLOAT16) -> list[str]:
    """List the operators that run in the precision of their data, or take inputs as they come."""
    return _names(target_dtype, NEUTRAL, KEEP)


def list_conditional_fp32_ops(target_dtype: object = FLOAT16) -> list[tuple[str, str, list[str]]]:
    """List the operators that run in FP32 for some values of an attribute, each with the first such, and the values."""
    known = table(normalize(target_dtype))
    conditions = {name: next(record.when for record in known[name] if record.rule == FP32 and record.when)
                  for name in _names(target_dtype, _CONDITIONAL)}
    return [(name, attribute, list(values)) for name, (attribute, values) in conditions.items()]


def list_widest_type_cast(target_dtype: object = FLOAT16) -> list[str]:
    """List the operators whose floating-point inputs are all cast to the widest type among them."""
    return _names(target_dtype, WIDEST)


def list_loss_output_functions(target_dtype: object = FLOAT16) -> list[str]:
    """List the output layers whose backward makes its own gradient, times ``grad_scale``; alike for all types."""
    normalize(target_dtype)
    return list(LOSS_OUTPUTS)


def list_lp16_use_fp32_params(target_dtype: object = FLOAT16) -> dict[str, list[str]] | None:
    """Map operators to the names of inputs that stay FP32 in bfloat16, '' for others; None for float16, as in MXNet."""
    dtype = normalize(target_dtype)
    if dtype == FLOAT16:
        return None
    return {name: [known if index in records[-1].fp32_inputs else "" for index, known in enumerate(INPUT_NAMES[name])]
            for name, records in sorted(table(dtype).items()) if records[-1].fp32_inputs}


def _names(target_dtype: object, *kinds: str) -> list[str]:
    def kind(records: tuple[Rule, ...]) -> str:  # LOWER where it may hold, else the rule without a condition
        rules = [record.rule for record in records]
        return LOWER if LOWER in rules else _CONDITIONAL if FP32 in rules and rules[-1] != FP32 else rules[-1]

    return sorted(name for name, records in table(normalize(target_dtype)).items() if kind(records) in kinds)


_OURS = __name__.partition(".")[0]
_NAME = "mxnet.contrib.amp"
_NEWER_NAME = "mxnet.amp"  # MXNet 2's
_replaced = Replaced()
_live: list[tuple[ModuleType, type]] = []  # modules whose class was changed, and which it was
_originals: dict[str, ModuleType] = {}  # MXNet's own, by their names in sys.modules


def install() -> None:
    """Make ``mxnet.contrib.amp``, all of its submodules, and ``mxnet.amp`` mean this package, until :func:`uninstall`.

    Libraries that imported MXNet's modules before are covered, but not functions that they imported out of them by
    name. Names of MXNet 2 are understood, too: ``device`` is a context.
    """
    if _live:
        return
    ours = sys.modules[_OURS]
    lists = _list_modules()
    stand_ins = {"": ours, ".amp": ours, ".loss_scaler": loss_scaler, **lists}
    for suffix in stand_ins:
        _originals[_NAME + suffix] = importlib.import_module(_NAME + suffix)
    modules = {"lists": lists[".lists"], "loss_scaler": loss_scaler}
    public = {name: getattr(ours, name) for name in ours.__all__}
    for module, names in ((ours, {}), (_originals[_NAME], public), (_originals[f"{_NAME}.amp"], public)):
        for name, value in {**names, **modules}.items():
            _replaced.put(module, name, value)
        _live.append((module, type(module)))
        module.__class__ = _Live
    sys.modules.update({_NAME + suffix: module for suffix, module in stand_ins.items()})
    sys.modules[_NEWER_NAME] = ours
    _replaced.put(mx.contrib, "amp", ours)
    _replaced.put(mx, "amp", ours)
    _add_newer_names()


def uninstall() -> None:
    """Give ``mxnet.contrib.amp`` back to MXNet; does nothing when it is."""
    if not _live:
        return
    while _live:
        module, kind = _live.pop()
        module.__class__ = kind
    _replaced.restore()
    sys.modules.pop(_NEWER_NAME, None)
    sys.modules.update(_originals)
    _originals.clear()


class _Live(ModuleType):
    """A module with the variables of ``mxnet.contrib.amp.amp`` that change, which scripts read."""

    amp = property(lambda self: sys.modules[_OURS])  # which ``from mxnet.contrib.amp import amp`` names
    bfloat16 = property(lambda self: BFLOAT16_DTYPE)
    _amp_loss_scale_initialized = property(lambda self: bool(scalers_in_use()))
    _amp_initialized = property(lambda self: in_force.state is not None or block_settings.level is not None
                                or is_active())

    @property
    def _loss_scaler(self) -> loss_scaler.LossScaler | None:
        """The scaler of the first trainer."""
        return next(iter(scalers_in_use()), loss_scaler.LossScaler() if self._amp_initialized else None)


class _View(list):
    """A list of operators as the tables have them; changes warn, because nothing reads them."""


def _warning(name: str) -> Callable[..., Any]:
    def change(self: _View, *args: Any) -> Any:
        warn("the lists of mxnet.contrib.amp.lists show gluon_amp's tables, and changing them does nothing: "
             "pass amp.init(target_precision_ops=..., fp32_ops=..., conditional_fp32_ops=...)")
        return getattr(list, name)(self, *args)
    return change


for _name in ("append", "extend", "insert", "remove", "pop", "clear", "__setitem__", "__delitem__", "__iadd__"):
    setattr(_View, _name, _warning(_name))


def _list_modules() -> dict[str, ModuleType]:
    """Return the stand-ins for ``mxnet.contrib.amp.lists`` and its modules, by the ends of their names."""
    parent = ModuleType(f"{_NAME}.lists", "The operator tables as the lists of mxnet.contrib.amp.")
    modules = {".lists": parent}
    for dtype, name, prefix in ((FLOAT16, "symbol_fp16", "FP16"), (BFLOAT16, "symbol_bf16", "BF16")):
        module = modules[f".lists.{name}"] = ModuleType(f"{_NAME}.lists.{name}", f"The operator table of {dtype}.")
        for title, function in ((f"{prefix}_FUNCS", list_lp16_ops),
                                (f"{prefix}_FP32_FUNCS", list_lp16_fp32_ops),
                                ("FP32_FUNCS", list_fp32_ops),
                                ("CONDITIONAL_FP32_FUNCS", list_conditional_fp32_ops),
                                ("WIDEST_TYPE_CASTS", list_widest_type_cast),
                                ("LOSS_OUTPUT_FUNCTIONS", list_loss_output_functions)):
            setattr(module, title, _View(function(dtype)))  # type: ignore[operator]
        inputs = list_lp16_use_fp32_params(dtype)
        if inputs is not None:
            setattr(module, f"{prefix}_USE_FP32_PARAMS", inputs)
        setattr(parent, name, module)
    parent.__path__ = []  # it has submodules, none of them in a file
    for suffix, module in modules.items():
        module.__spec__ = ModuleSpec(_NAME + suffix, None, is_package=module is parent)
    return modules


_WANTS_NUMPY = "can only accept MXNet numpy ndarrays"  # MXNet, of a NumPy operator that was given another array
# Functions that take a context, and are to take ``device`` as well.
_TAKES_DEVICE: tuple[tuple[Any, str], ...] = (
    (gluon.Block, "initialize load_parameters"), (gluon.ParameterDict, "initialize load"),
    (gluon.Parameter, "initialize data grad"), (mx.nd, "array zeros ones full empty arange eye linspace"),
    (mx.np, "array zeros ones full empty arange eye identity linspace logspace indices hanning hamming blackman"),
    (mx.np.random, "uniform normal randint rand gamma beta exponential choice lognormal logistic gumbel rayleigh "
                   "weibull pareto power"),
)
# Newer names, and the older ones.
_RENAMED: tuple[tuple[Any, str, str], ...] = (
    (mx, "Device", "Context"), (mx, "current_device", "current_context"), (mx, "device", "context"),
    (mx.context, "Device", "Context"), (mx.context, "current_device", "current_context"),
    *((owner, "reset_device", "reset_ctx") for owner in (gluon.ParameterDict, gluon.Parameter)),
    *((owner, "list_device", "list_ctx") for owner in (gluon.ParameterDict, gluon.Parameter)),
    (mx.nd.NDArray, "device", "context"), (mx.nd.NDArray, "to_device", "as_in_context"),
)


def _add_newer_names() -> None:
    """Add names of MXNet 2."""
    for owner, names in _TAKES_DEVICE:
        for name in names.split():
            _replaced.put(owner, name, _taking_device(getattr(owner, name)))
    for owner, newer, older in _RENAMED:
        _replaced.put(owner, newer, getattr(owner, older))
    _replaced.put(gluon.Block, "reset_device", lambda block, ctx: block.collect_params().reset_ctx(ctx))
    _replaced.put(gluon, "metric", mx.metric)
    _replaced.put(gluon.utils, "split_and_load", _split_and_load(gluon.utils.split_and_load))
    _replaced.put(gluon.HybridBlock, "forward", _taking_numpys(gluon.HybridBlock.forward))


def _taking_device(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            if kwargs.get("ctx") is not None:
                raise TypeError(f"{function.__name__}: expected device or ctx, which are the same, received both")
            kwargs["ctx"] = kwargs.pop("device")
        return function(*args, **kwargs)
    return call


def _split_and_load(function: Callable) -> Callable:
    @functools.wraps(function)
    def split_and_load(data: Any, ctx_list: Any = None, batch_axis: int = 0, even_split: bool = True,
                       device_list: Any = None) -> Any:
        if isinstance(data, mx.np.ndarray) and not mx.util.is_np_array():  # networks and losses of 1.9.1 expect those
            data = data.as_nd_ndarray()
        return function(data, device_list if ctx_list is None else ctx_list, batch_axis, even_split)
    return split_and_load


def _taking_numpys(function: Callable) -> Callable:
    """Let a network of MXNet 1's operators take ``mx.np`` arrays, and give ``mx.np`` arrays: MXNet 2 has no others."""
    of_numpy: weakref.WeakSet[gluon.HybridBlock] = weakref.WeakSet()  # blocks whose code calls NumPy's operators

    @functools.wraps(function)
    def forward(block: gluon.HybridBlock, *args: Any) -> Any:
        if (mx.util.is_np_array() or block in of_numpy
                or not any(isinstance(each, mx.np.ndarray) for each in flat(args))):
            return function(block, *args)
        try:
            outputs = function(block, *map_arrays(lambda array: array.as_nd_ndarray(), args))
        except TypeError as error:
            if _WANTS_NUMPY not in str(error):
                raise
            of_numpy.add(block)
            return function(block, *args)
        return map_arrays(lambda array: array.as_np_ndarray(), outputs)
    return forward
