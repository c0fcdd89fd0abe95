"""How each MXNet implementation is switched on, and where it enters a training loop.

The three classes hold what differs between the tutorial's FP32 and mixed-precision scripts, nothing else.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, ClassVar, ContextManager

# first, in every process: it lets MXNet 1.9.1 import under newer NumPy, and changes nothing else
import gluon_amp

# isort: split
import mxnet as mx
from _errors import UsageError
from mxnet.contrib import amp as contrib_amp


def context(device: str) -> mx.Context:
    """Return the MXNet context of ``cpu``, ``gpu`` or ``gpu:1``.

    Raises
    ------
    UsageError
        If the machine has no such device.
    """
    kind, _, number = device.partition(":")
    index = int(number or 0)
    gpus = mx.context.num_gpus() if kind == "gpu" else 0
    if kind == "gpu" and index >= gpus:
        raise UsageError(f"no device {device!r}: MXNet {mx.__version__} sees {gpus} GPUs here")
    return mx.Context(kind, index)


class Float32:
    """Plain MXNet, with nothing of any AMP active."""

    trainer_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, device: str, dtype: str | None):
        self.context = context(device)
        self.dtype = "float32"
        self.notes: list[str] = []

    def init_trainer(self, trainer: mx.gluon.Trainer) -> None:
        """Prepare a trainer: nothing to do."""

    def scale_loss(self, loss: Any, trainer: mx.gluon.Trainer) -> ContextManager[Any]:
        """Return a context that yields the loss as it is."""
        return contextlib.nullcontext(loss)


class GluonAmp:
    """This project's AMP."""

    trainer_options: ClassVar[dict[str, Any]] = {"update_on_kvstore": False}

    def __init__(self, device: str, dtype: str | None):
        self.context = context(device)
        with self.context, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                gluon_amp.init(target_dtype=dtype)
            except (ValueError, TypeError, RuntimeError) as error:
                raise UsageError(f"gluon_amp cannot start: {error}") from error
        self.notes = [str(item.message) for item in caught]
        active = gluon_amp.active_dtype(self.context.device_type)
        if active is None:
            reasons = "; ".join(self.notes) or "it stays in FP32"
            raise UsageError(f"gluon_amp does nothing on {device!r}: {reasons}")
        self.dtype: str = active

    def init_trainer(self, trainer: mx.gluon.Trainer) -> None:
        """Attach the loss scaler."""
        gluon_amp.init_trainer(trainer)

    def scale_loss(self, loss: Any, trainer: mx.gluon.Trainer) -> ContextManager[Any]:
        """Return a context that yields the scaled loss."""
        scaled: ContextManager[Any] = gluon_amp.scale_loss(loss, trainer)
        return scaled


class ContribAmp:
    """The AMP that MXNet 1.9.1 ships, used as its documentation says."""

    trainer_options: ClassVar[dict[str, Any]] = {"update_on_kvstore": False}

    def __init__(self, device: str, dtype: str | None):
        self.context = context(device)
        on_cpu = self.context.device_type == "cpu"
        self.dtype = dtype or ("bfloat16" if on_cpu else "float16")
        if self.dtype not in ("bfloat16", "float16"):
            raise UsageError(f"mxnet-amp knows the dtypes bfloat16 and float16, received {self.dtype!r}")
        if on_cpu and self.dtype == "float16":
            raise UsageError("mxnet-amp cannot run float16 on a CPU: choose another --dtype or leave it out")
        self.notes: list[str] = []
        contrib_amp.init(self.dtype)

    def init_trainer(self, trainer: mx.gluon.Trainer) -> None:
        """Attach the loss scaler."""
        contrib_amp.init_trainer(trainer)

    def scale_loss(self, loss: Any, trainer: mx.gluon.Trainer) -> ContextManager[Any]:
        """Return a context that yields the scaled loss."""
        scaled: ContextManager[Any] = contrib_amp.scale_loss(loss, trainer)
        return scaled
