"""How MXNet as it is published is switched on, in FP32 and with its own AMP, and where that enters a training loop.

The classes here and in `amp_backends` hold what differs between the tutorial's FP32 and mixed-precision scripts,
nothing else.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, ClassVar, ContextManager, Protocol, Sequence

from . import stock  # noqa: F401 - first: see there

# isort: split
import mxnet as mx
from mxnet.contrib import amp as contrib_amp
from mxnet.contrib import quantization

from .errors import UsageError


class Backend(Protocol):
    """An implementation that is switched on for training."""

    context: mx.Context
    dtype: str
    notes: list[str]
    trainer_options: ClassVar[dict[str, Any]]

    def init_trainer(self, trainer: mx.gluon.Trainer) -> None:
        """Prepare a trainer."""

    def scale_loss(self, loss: Any, trainer: mx.gluon.Trainer) -> ContextManager[Any]:
        """Return a context that yields what to differentiate."""

class Converter(Protocol):
    """An implementation that prepares a network for inference."""

    context: mx.Context
    dtype: str
    notes: list[str]

    def convert(self, net: mx.gluon.HybridBlock, example: Sequence[mx.nd.NDArray]) -> mx.gluon.HybridBlock:
        """Return the network to run; `net` has run on the example and is not used afterwards."""


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

    def convert(self, net: mx.gluon.HybridBlock, example: Sequence[mx.nd.NDArray]) -> mx.gluon.HybridBlock:
        """Return the network as it is."""
        return net


def low_precision(device: mx.Context, dtype: str | None) -> str:
    """Return the type that MXNet's own AMP is to use.

    Raises
    ------
    UsageError
        If it cannot.
    """
    on_cpu = device.device_type == "cpu"
    dtype = dtype or ("bfloat16" if on_cpu else "float16")
    if dtype not in ("bfloat16", "float16"):
        raise UsageError(f"mxnet-amp knows the dtypes bfloat16 and float16, received {dtype!r}")
    if on_cpu and dtype == "float16":
        raise UsageError("mxnet-amp cannot run float16 on a CPU: choose another --dtype or leave it out")
    return dtype


class ContribAmp:
    """The AMP that MXNet 1.9.1 ships, used as its documentation says."""

    trainer_options: ClassVar[dict[str, Any]] = {"update_on_kvstore": False}

    def __init__(self, device: str, dtype: str | None):
        self.context = context(device)
        self.dtype = low_precision(self.context, dtype)
        self.notes: list[str] = []
        contrib_amp.init(self.dtype)

    def init_trainer(self, trainer: mx.gluon.Trainer) -> None:
        """Attach the loss scaler."""
        contrib_amp.init_trainer(trainer)

    def scale_loss(self, loss: Any, trainer: mx.gluon.Trainer) -> ContextManager[Any]:
        """Return a context that yields the scaled loss."""
        scaled: ContextManager[Any] = contrib_amp.scale_loss(loss, trainer)
        return scaled


class ContribConversion:
    """The conversion for inference that MXNet 1.9.1 ships."""

    failure: ClassVar[str] = "mxnet.contrib.amp cannot convert it"

    def __init__(self, device: str, dtype: str | None):
        self.context = context(device)
        self.dtype = self._type(dtype)
        self.notes: list[str] = []

    def _type(self, dtype: str | None) -> str:
        return low_precision(self.context, dtype)

    def _made(self, net: mx.gluon.HybridBlock, example: Sequence[mx.nd.NDArray]) -> mx.gluon.HybridBlock:
        return contrib_amp.convert_hybrid_block(net, self.dtype, ctx=self.context)

    def convert(self, net: mx.gluon.HybridBlock, example: Sequence[mx.nd.NDArray]) -> mx.gluon.HybridBlock:
        """Convert the network.

        Raises
        ------
        UsageError
            If MXNet fails to.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._made(net, example)
            except Exception as error:  # it has no errors of its own
                raise UsageError(f"{self.failure}: {type(error).__name__}: {error}") from error


class ContribQuantization(ContribConversion):
    """The INT8 quantizer that MXNet 1.9.1 ships, at its fastest, calibrated on the example."""

    failure: ClassVar[str] = "MXNet cannot quantize it"

    def _type(self, dtype: str | None) -> str:
        return "int8"

    def _made(self, net: mx.gluon.HybridBlock, example: Sequence[mx.nd.NDArray]) -> mx.gluon.HybridBlock:
        labels = mx.nd.zeros(len(example[0]))  # it takes data behind which something else comes
        data = mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(*example, labels), len(labels))
        return quantization.quantize_net_v2(net, "auto", calib_data=data, calib_mode="naive", ctx=self.context,
                                            num_calib_examples=len(labels), logger=None)
