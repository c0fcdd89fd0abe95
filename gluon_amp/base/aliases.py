"""Names and arguments that users bring along from Apex, torch.amp and MXNet, and this package's names for them."""
from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, Mapping, TypeVar

from ..errors import closest

Function = TypeVar("Function", bound=Callable[..., Any])

# Names that mean the same, of Apex.
ALIASES: Mapping[str, str] = {
    "half_function": "low_precision_function", "bfloat16_function": "low_precision_function",
    "float_function": "float32_function", "register_half_function": "register_low_precision_function",
    "register_bfloat16_function": "register_low_precision_function",
    "register_float_function": "register_float32_function",
}

_REGION = "with amp.autocast(): for a region, or amp.init() once for the process"
_OFF = "with amp.autocast(enabled=False):"
_PROMOTED = "the function without it: operators with inputs of two types run in the wider one"
_SCALER = "amp.get_loss_scaler(trainer), which has loss_scale, num_skipped and step_was_skipped"
_BATCH_NORM = "amp.convert_sync_batchnorm(net)"
# Of an argument of ``init`` and of the conversions.
NO_TUNING = "operators are not measured one by one any more: leave it out, or name what stays in FP32 in fp32_ops"
_TUNING = "amp.init() alone, or amp.init(fp32_ops=[...]) for operators that are slower in low precision"
_LISTS = "amp.list_lp16_ops('bfloat16'), amp.list_fp32_ops('bfloat16') and the other amp.list_* functions"

# Names that have no equal, with the text to write in their place.
_ANSWERS: Mapping[str, str] = {
    "Autocast": _REGION, "autocast_mode": _REGION, "disable_casts": _OFF, "disable_autocast": _OFF,
    "is_autocast_enabled": "amp.is_active(), or amp.active_dtype('gpu') for the type",
    "is_autocast_available": "amp.is_active(), or amp.active_dtype('gpu') for the type",
    "get_autocast_dtype": "amp.active_dtype('gpu')", "get_autocast_gpu_dtype": "amp.active_dtype('gpu')",
    "get_autocast_cpu_dtype": "amp.active_dtype('cpu')",
    "set_autocast_enabled": "amp.init() and amp.deinit(), or amp.autocast(enabled=...)",
    "set_autocast_dtype": "amp.init(dtype), or amp.autocast(dtype=...)",
    "promote_function": _PROMOTED, "register_promote_function": _PROMOTED,
    "scaler": _SCALER, "_amp_state": _SCALER, "OptState": "amp.GradScaler",
    "FP16_Optimizer": "amp.initialize(net, trainer, opt_level='O2')",
    "unscale_": "amp.unscale(trainer)", "clip_grad_norm_": "amp.clip_global_norm(trainer, max_norm)",
    "convert_syncbn_model": _BATCH_NORM, "SyncBatchNorm": _BATCH_NORM,
    "DistributedDataParallel": "a gluon.Trainer for several processes, and amp.init_trainer(trainer)",
    "lists": _LISTS, "list_op_lists": _LISTS, "amp_lists": _LISTS,
    "bfloat16": "the name of the type, 'bfloat16'", "float16": "the name of the type, 'float16'",
    "float32": "the name of the type, 'float32'", "tune": _TUNING, "Tuning": _TUNING,
    "advise": "print(amp.report(net, data, time=True).summary)",
    "DriftMonitor": "amp.get_loss_scaler(trainer) and read its loss_scale and num_skipped every few steps",
    "preflight": "print(amp.report(net, data, ranges=True).summary)",
    "suggest_scale": "print(amp.report(net, data, train=True, ranges=True, loss=loss).summary), or "
                     "amp.init_trainer(trainer), which finds a loss scale as it goes",
}


def answer(name: str, known: Iterable[str]) -> str:
    """Word the error for a name that this package does not have."""
    text = f"module 'gluon_amp' has no attribute {name!r}"
    if name in _ANSWERS:
        return f"{text}: write {_ANSWERS[name]}"
    hint = closest(name, known)
    return f"{text}.{hint}" if hint else text


def answers(**texts: str) -> Callable[[Function], Function]:
    """Make a function answer arguments of its counterparts in other packages with what to write here."""
    def decorate(function: Function) -> Function:
        called = function.__qualname__.split(".")[0]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            foreign = next((name for name in kwargs if name in texts), None)
            if foreign is not None:
                raise TypeError(f"amp.{called} has no argument {foreign!r}: {texts[foreign]}")
            return function(*args, **kwargs)
        return checked  # type: ignore[return-value]
    return decorate
