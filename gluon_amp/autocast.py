"""Switch mixed precision on and off: ``init``, ``deinit``, ``is_active``, and the rewriter behind them."""
from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from typing import Mapping, Sequence

import mxnet as mx

from . import passes
from ._mxnet import hooks
from ._mxnet.cached_op import Inputs
from ._mxnet.operators import registered_operators
from ._mxnet.symbols import analyse, from_graph, to_graph
from .dtypes import (
    BFLOAT16,
    FLOAT16,
    LOW_PRECISION,
    Support,
    cpu_support,
    cuda_compute_capability,
    cuda_support,
    normalize,
)
from .errors import DTypeError, StateError
from .policy import ConditionalOp, Policy, make_policy

__all__ = ["active_dtype", "deinit", "init", "is_active"]

_logger = logging.getLogger("gluon_amp")


@dataclass(frozen=True)
class _State:
    """What ``init`` decided.

    ``requested`` is the dtype asked for (None: by device), ``policies`` holds one policy per dtype in use.
    """

    requested: str | None
    policies: Mapping[str, Policy]
    arguments: tuple

    def policy(self, device_type: str) -> Policy | None:
        """Return the policy for arrays on a device, None where they stay in FP32."""
        support = _support(device_type)
        dtype = support.dtype if self.requested in (None, support.dtype) else None
        return self.policies.get(dtype) if dtype else None

    def __call__(self, symbol: mx.sym.Symbol, inputs: Inputs) -> mx.sym.Symbol | None:
        """Rewrite a symbol for its inputs; None when nothing in it runs in low precision."""
        policy = self.policy(inputs.device_type)
        if policy is None:
            return None
        graph = to_graph(symbol)
        dtypes = {name: dtype for name, dtype in zip(inputs.names, inputs.dtypes) if dtype}
        shapes = {name: shape for name, shape in zip(inputs.names, inputs.shapes) if shape}
        analyse(symbol, graph, dtypes, shapes)
        changed = passes.rewrite(graph, policy, inputs.guarded, check=_CHECK)
        return from_graph(graph, symbol) if changed else None


_CHECK = os.environ.get("GLUON_AMP_VERIFY", "0") not in ("", "0")
_state: _State | None = None


def _current() -> _State | None:
    return _state


def _support(device_type: str, device_id: int = 0) -> Support:
    if device_type.startswith("cpu"):
        return cpu_support()
    return cuda_support(cuda_compute_capability(device_id))


def init(target_dtype: object = None, target_precision_ops: Sequence[str] | None = None,
         conditional_fp32_ops: Sequence[ConditionalOp] | None = None, fp32_ops: Sequence[str] | None = None,
         layout_optimization: bool = False) -> None:
    """Switch automatic mixed precision on.

    May come before or after the network is created: networks that are hybridized already are rewritten at
    their next call.

    Parameters
    ----------
    target_dtype : {'float16', 'bfloat16'}, numpy dtype or None
        The low-precision type. None takes bfloat16 for arrays on a CPU and float16 for those on a GPU, where
        the device runs it.
    target_precision_ops : list of str, optional
        The operators that run in ``target_dtype``, in place of the table's own.
    conditional_fp32_ops : list of (str, str, list of str), optional
        Operator, attribute, and the attribute's values that force the operator to FP32.
    fp32_ops : list of str, optional
        Operators forced to FP32, beside those that the table names.
    layout_optimization : bool
        Accepted for MXNet 2's signature. Only False has a meaning on MXNet 1.9.1.

    Raises
    ------
    DTypeError
        The type is unknown, or the machine cannot run it.
    PolicyError
        A list names an unknown operator, or an operator is in two lists.
    StateError
        AMP is on already, with other settings.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.init()
    >>> amp.is_active()
    True
    >>> amp.deinit()
    """
    global _state
    if layout_optimization:
        raise StateError("layout_optimization=True needs MXNet 2: its graph pass does not exist in MXNet 1.9.1. "
                         "Leave it at False")
    requested = None if target_dtype is None else normalize(target_dtype)
    arguments = (requested, repr(target_precision_ops), repr(conditional_fp32_ops), repr(fp32_ops))
    if _state is not None:
        if arguments == _state.arguments:
            return
        raise StateError("AMP is on already with other settings: call amp.deinit() before another amp.init()")
    reason = _explain_choice(requested)
    known = registered_operators()
    policies = {dtype: make_policy(dtype, known, target_precision_ops=target_precision_ops, fp32_ops=fp32_ops,
                                   conditional_fp32_ops=conditional_fp32_ops)
                for dtype in ([requested] if requested else _usable_dtypes())}
    _state = _State(requested, policies, arguments)
    try:
        hooks.install(_current)
    except BaseException:
        _state = None
        raise
    _logger.info("Using AMP: %s", reason)


def deinit() -> None:
    """Switch mixed precision off and restore MXNet exactly; does nothing when AMP is off.

    Networks run in FP32 from their next call on.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.deinit()
    """
    global _state
    hooks.uninstall()
    _state = None


def is_active() -> bool:
    """Whether ``init`` is in force.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.is_active()
    False
    """
    return _state is not None


def active_dtype(device_type: str = "cpu") -> str | None:
    """Name the low-precision type in use for arrays on a kind of device, None for FP32.

    Parameters
    ----------
    device_type : str
        ``'cpu'`` or ``'gpu'``, as in ``Context.device_type``.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.active_dtype('cpu') is None
    True
    """
    policy = _state.policy(device_type) if _state is not None else None
    return policy.target_dtype if policy else None


def _devices() -> dict[str, Support]:
    found = {"cpu": _support("cpu")}
    if mx.context.num_gpus():
        found["gpu"] = _support("gpu")
    return found


def _usable_dtypes() -> Sequence[str]:
    return [support.dtype for support in _devices().values() if support.dtype]


def _explain_choice(requested: str | None) -> str:
    """Say what runs where; warn or raise where nothing can."""
    devices = _devices()
    usable = {name: support for name, support in devices.items()
              if support.dtype and requested in (None, support.dtype)}
    reasons = "; ".join(f"{name}: {support.reason}" for name, support in devices.items())
    if not usable and requested is not None:
        raise DTypeError(f"this machine cannot run {requested} ({reasons}). {_advice(requested, devices)}")
    if not usable:
        warnings.warn(f"AMP stays in FP32: {reasons}", stacklevel=3)
        return f"float32 ({reasons})"
    for name, support in usable.items():
        if not support.native:
            warnings.warn(f"AMP will be slow on the {name}: {support.reason}", stacklevel=3)
    return "; ".join(f"{support.dtype} on the {name}, {support.reason}" for name, support in usable.items())


def _advice(requested: str, devices: Mapping[str, Support]) -> str:
    others = sorted({support.dtype for support in devices.values() if support.dtype} & set(LOW_PRECISION))
    if others:
        return f"Use target_dtype='{others[0]}', or leave it out"
    needs = {BFLOAT16: "a CPU with AVX512", FLOAT16: "a CUDA GPU"}[requested]
    return f"It needs {needs}; without target_dtype, amp.init() stays in FP32"
