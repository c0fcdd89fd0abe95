"""Automatic mixed precision for Apache MXNet 1.9.1 Gluon.

Three added lines train in mixed precision::

    import gluon_amp as amp
    amp.init()
    amp.init_trainer(trainer)                                # a gluon.Trainer
    with amp.scale_loss(loss, trainer) as scaled_loss:       # in the training loop
        mx.autograd.backward(scaled_loss)
"""
from .machine.start import prepare as _prepare

_prepare()

from .base import aliases
from .machine import host as _host

_host.prepare()  # before MXNet is imported

from ._mxnet import numpy_2 as _numpy_2
from ._mxnet.invoke import run_onednn_operator as _run_onednn_operator
from .compat.grad_scaler import GradScaler
from .compat.opt_level import initialize
from .compat.stand_in import (
    install,
    list_conditional_fp32_ops,
    list_fp32_ops,
    list_loss_output_functions,
    list_lp16_fp32_ops,
    list_lp16_ops,
    list_lp16_use_fp32_params,
    list_widest_type_cast,
    uninstall,
)
from .convert import (
    Calibration,
    ConversionOptions,
    calibrate,
    convert_bucketing_module,
    convert_hybrid_block,
    convert_model,
    convert_symbol,
)
from .debug.compare import compare
from .debug.explain import explain
from .debug.overflow import trace_overflow
from .debug.report import report
from .debug.search import search_exclusions
from .errors import AmpError, DTypeError, GraphError, PolicyError, StateError
from .export import OnnxExport, export_onnx
from .parallel.sync_batchnorm import convert_sync_batchnorm
from .passes import list_passes
from .rules import Policy
from .session.autocast import (
    autocast,
    custom_bwd,
    custom_fwd,
    float32_function,
    low_precision_function,
    register_float32_function,
    register_low_precision_function,
    register_op,
)
from .session.init import active_dtype, deinit, exclude, init, is_active
from .training import loss_scaler as loss_scaler  # a module of mxnet.contrib.amp, too
from .training.checkpoint import load_state_dict, load_states, save_states, state_dict
from .training.estimator import AmpCheckpointHandler, AmpHandler
from .training.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler
from .training.scaling import clip_global_norm, get_loss_scaler, init_trainer, master_params, scale_loss, unscale

_numpy_2.mend()
_host.settle(_run_onednn_operator)

__version__ = "0.1.0"

__all__ = [
    "AmpCheckpointHandler", "AmpError", "AmpHandler", "Calibration", "ConversionOptions", "DTypeError",
    "DynamicLossScaler", "GradScaler", "GraphError", "LossScaler", "OnnxExport", "Policy", "PolicyError",
    "StateError", "StaticLossScaler", "active_dtype", "autocast", "calibrate",
    "clip_global_norm", "compare", "convert_bucketing_module", "convert_hybrid_block", "convert_model",
    "convert_symbol", "convert_sync_batchnorm", "custom_bwd", "custom_fwd", "deinit", "exclude", "explain",
    "export_onnx", "float32_function", "get_loss_scaler", "init", "init_trainer", "initialize", "install",
    "is_active", "list_conditional_fp32_ops", "list_fp32_ops", "list_loss_output_functions", "list_lp16_fp32_ops",
    "list_lp16_ops", "list_lp16_use_fp32_params", "list_passes", "list_widest_type_cast", "load_state_dict",
    "load_states", "low_precision_function", "master_params", "register_float32_function",
    "register_low_precision_function", "register_op", "report", "save_states", "scale_loss", "search_exclusions",
    "state_dict", "trace_overflow", "uninstall", "unscale",
]


def __getattr__(name: str) -> object:
    """Answer names of other packages with ours."""
    if name in aliases.ALIASES:
        return globals()[aliases.ALIASES[name]]
    if name.startswith("__"):  # what Python asks every module for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(aliases.answer(name, __all__))
