"""Stand in for ``mxnet.contrib.amp``, for libraries and scripts that import it themselves."""
from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Mapping

import mxnet.contrib

from ..dtypes import BFLOAT16, BFLOAT16_DTYPE, FLOAT16
from ..errors import warn
from ..replaced import Replaced
from ..session.autocast import is_active
from ..state.blocks import block_settings
from ..state.in_force import in_force
from ..training import loss_scaler
from ..training.trainer_scaler import attached_scalers
from . import newer_names, views

_OURS = __name__.partition(".")[0]
_NAME = "mxnet.contrib.amp"
_NEWER_NAME = "mxnet.amp"  # MXNet 2's
_LISTS = {FLOAT16: ("symbol_fp16", "FP16"), BFLOAT16: ("symbol_bf16", "BF16")}
_replaced = Replaced()
_live: list[tuple[ModuleType, type]] = []  # modules whose class was changed, and which it was
_originals: dict[str, ModuleType] = {}  # MXNet's own, by their names in sys.modules


def install() -> None:
    """Make ``mxnet.contrib.amp``, all of its submodules, and ``mxnet.amp`` mean this package, until :func:`uninstall`.

    GluonCV's R-CNN tasks import it inside their functions, GluonNLP imports ``mxnet.contrib.amp.amp``. Libraries that
    imported MXNet's modules before are covered, but not functions that they imported out of those by name. MXNet 2's
    tutorials say ``from mxnet import amp``, and ``device`` for what MXNet 1.9.1 calls a context: both are understood.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.install()
    >>> from mxnet.contrib import amp as theirs
    >>> theirs is amp
    True
    >>> theirs.amp._amp_initialized
    False
    >>> amp.uninstall()
    """
    if _live:
        return
    ours = sys.modules[_OURS]
    lists = _list_modules()
    stand_ins = {"": ours, ".amp": ours, ".loss_scaler": loss_scaler, **lists}
    for suffix in stand_ins:
        _originals[_NAME + suffix] = importlib.import_module(_NAME + suffix)
    public = {name: getattr(ours, name) for name in ours.__all__}
    _change(ours, {"lists": lists[".lists"], "loss_scaler": loss_scaler})
    for suffix in ("", ".amp"):
        _change(_originals[_NAME + suffix], {**public, "lists": lists[".lists"], "loss_scaler": loss_scaler})
    sys.modules.update({_NAME + suffix: module for suffix, module in stand_ins.items()})
    mxnet.contrib.amp = ours
    sys.modules[_NEWER_NAME] = ours
    _replaced.put(mxnet, "amp", ours)
    newer_names.add(_replaced)


def uninstall() -> None:
    """Give ``mxnet.contrib.amp`` back to MXNet; does nothing when it is.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.uninstall()
    """
    if not _live:
        return
    while _live:
        module, kind = _live.pop()
        module.__class__ = kind
    _replaced.restore()
    sys.modules.pop(_NEWER_NAME, None)
    sys.modules.update(_originals)
    mxnet.contrib.amp = _originals[_NAME]
    _originals.clear()


class _Live(ModuleType):
    """A module with the variables of ``mxnet.contrib.amp.amp`` that change, which scripts read."""

    @property
    def amp(self) -> ModuleType:
        """The module of the functions, which ``from mxnet.contrib.amp import amp`` names."""
        return sys.modules[_OURS]

    @property
    def bfloat16(self) -> Any:
        """NumPy's name of bfloat16."""
        return BFLOAT16_DTYPE

    @property
    def _amp_initialized(self) -> bool:
        return in_force.state is not None or block_settings.level is not None or is_active()

    @property
    def _amp_loss_scale_initialized(self) -> bool:
        return bool(attached_scalers())

    @property
    def _loss_scaler(self) -> loss_scaler.LossScaler | None:
        """The scaler of the first trainer."""
        trainers = attached_scalers()
        return trainers[0].scaler if trainers else loss_scaler.LossScaler() if self._amp_initialized else None


def _change(module: ModuleType, names: Mapping[str, Any]) -> None:
    """Give a module other names, and those that are live, until :func:`uninstall`."""
    for name, value in names.items():
        _replaced.put(module, name, value)
    _live.append((module, type(module)))
    module.__class__ = _Live


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
    for dtype, (name, prefix) in _LISTS.items():
        module = modules[f".lists.{name}"] = ModuleType(f"{_NAME}.lists.{name}", f"The operator table of {dtype}.")
        vars(module).update(_lists_of(dtype, prefix))
        setattr(parent, name, module)
    parent.__path__ = []  # it has submodules, none of them in a file
    for suffix, module in modules.items():
        module.__spec__ = ModuleSpec(_NAME + suffix, None, is_package=module is parent)
    return modules


def _lists_of(dtype: str, prefix: str) -> dict[str, Any]:
    tables: dict[str, Any] = {
        f"{prefix}_FUNCS": views.list_lp16_ops(dtype),
        f"{prefix}_FP32_FUNCS": views.list_lp16_fp32_ops(dtype),
        "FP32_FUNCS": views.list_fp32_ops(dtype),
        "CONDITIONAL_FP32_FUNCS": views.list_conditional_fp32_ops(dtype),
        "WIDEST_TYPE_CASTS": views.list_widest_type_cast(dtype),
        "LOSS_OUTPUT_FUNCTIONS": views.list_loss_output_functions(dtype),
    }
    inputs = views.list_lp16_use_fp32_params(dtype)
    lists = {name: _View(value) for name, value in tables.items()}
    return lists if inputs is None else {**lists, f"{prefix}_USE_FP32_PARAMS": inputs}
