"""How MXNet, its own AMP and gluon_amp are switched on, for training and for inference.

The classes hold the difference between the tutorial's FP32 and mixed-precision scripts, nothing else. MXNet's do not
import gluon_amp, which lets oneDNN use AMX: they measure MXNet as it is published.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any, ClassVar, ContextManager, Iterator, Sequence

from .harness import UsageError


def _prepare_mxnet() -> None:
    """Make MXNet importable as gluon_amp does, by the one module of it that needs nothing else of it."""
    package = importlib.util.find_spec("gluon_amp")
    if package is None or not package.origin:
        raise UsageError("gluon_amp is not installed: python -m pip install -e .")
    spec = importlib.util.spec_from_file_location("_stock_start", Path(package.origin).parent / "machine/start.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    module.prepare()


def context(device: str) -> Any:
    """Return the MXNet context of ``cpu``, ``gpu`` or ``gpu:1``."""
    import mxnet as mx

    kind, _, number = device.partition(":")
    gpus = mx.context.num_gpus() if kind == "gpu" else 0
    if kind == "gpu" and int(number or 0) >= gpus:
        raise UsageError(f"no device {device!r}: MXNet {mx.__version__} sees {gpus} GPUs here")
    return mx.Context(kind, int(number or 0))


class Mxnet:
    """Plain MXNet in FP32, with nothing of any AMP active."""

    trainer_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, device: str, dtype: str | None, training: bool):
        _prepare_mxnet()
        self.context = context(device)
        self.dtype = "float32"
        self.notes: list[str] = []

    def init_trainer(self, trainer: Any) -> None:
        """Prepare a trainer."""

    def scale_loss(self, loss: Any, trainer: Any) -> ContextManager[Any]:
        """Return a context that yields the value to differentiate."""
        return contextlib.nullcontext(loss)

    def convert(self, net: Any, example: Sequence[Any]) -> Any:
        """Return the network to run; `net` has run on the example and is not used afterwards."""
        return net


class MxnetAmp(Mxnet):
    """The AMP that MXNet 1.9.1 ships, used as its documentation says."""

    trainer_options: ClassVar[dict[str, Any]] = {"update_on_kvstore": False}

    def __init__(self, device: str, dtype: str | None, training: bool):
        super().__init__(device, dtype, training)
        from mxnet.contrib import amp

        self.amp, on_cpu = amp, self.context.device_type == "cpu"
        self.dtype = dtype or ("bfloat16" if on_cpu else "float16")
        if self.dtype not in ("bfloat16", "float16") or (on_cpu and self.dtype == "float16"):
            raise UsageError(f"mxnet-amp runs bfloat16, and float16 on GPUs, received {self.dtype!r}")
        if training:
            amp.init(self.dtype)

    def init_trainer(self, trainer: Any) -> None:
        self.amp.init_trainer(trainer)

    def scale_loss(self, loss: Any, trainer: Any) -> ContextManager[Any]:
        scaled: ContextManager[Any] = self.amp.scale_loss(loss, trainer)
        return scaled

    def convert(self, net: Any, example: Sequence[Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.converted(net, example)
            except Exception as error:  # it has no errors of its own
                raise UsageError(f"MXNet cannot convert it: {type(error).__name__}: {error}") from error

    def converted(self, net: Any, example: Sequence[Any]) -> Any:
        return self.amp.convert_hybrid_block(net, self.dtype, ctx=self.context)


class MxnetInt8(MxnetAmp):
    """The INT8 quantizer that MXNet 1.9.1 ships, at its fastest, calibrated on the example."""

    def __init__(self, device: str, dtype: str | None, training: bool):
        super().__init__(device, None, training)
        self.dtype = "int8"

    def converted(self, net: Any, example: Sequence[Any]) -> Any:
        import mxnet as mx
        from mxnet.contrib.quantization import quantize_net_v2

        labels = mx.nd.zeros(len(example[0]))  # it takes data behind which something else comes
        data = mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(*example, labels), len(labels))
        return quantize_net_v2(net, "auto", calib_data=data, calib_mode="naive", ctx=self.context,
                               num_calib_examples=len(labels), logger=None)


class GluonAmp:
    """This project's AMP and conversion, in the type that is asked for, or by default in the type that it chooses."""

    trainer_options: ClassVar[dict[str, Any]] = {"update_on_kvstore": False}

    def __init__(self, device: str, dtype: str | None, training: bool, fixed: str | None = None,
                 disable_passes: Sequence[str] = ()):
        import gluon_amp  # before MXNet: it lets oneDNN use AMX

        self.amp, self.context = gluon_amp, context(device)
        self.wanted, self.disable_passes = fixed or dtype, disable_passes
        self.dtype, self.notes = "float32", []  # type: str, list[str]
        if training:
            self._init()

    def _init(self) -> None:
        kind = self.context.device_type
        with self.context, _noted(self.notes):
            try:
                self.amp.init(target_dtype=self.wanted, disable_passes=self.disable_passes)
            except (ValueError, TypeError, RuntimeError) as error:
                raise UsageError(f"gluon_amp cannot start: {error}") from error
        self.dtype = self.amp.active_dtype(kind) or "float32"
        if self.wanted not in (None, self.dtype):
            raise UsageError(f"gluon_amp does not run {self.wanted} on the {kind}: {'; '.join(self.notes)}")

    def init_trainer(self, trainer: Any) -> None:
        self.amp.init_trainer(trainer)

    def scale_loss(self, loss: Any, trainer: Any) -> ContextManager[Any]:
        scaled: ContextManager[Any] = self.amp.scale_loss(loss, trainer)
        return scaled

    def convert(self, net: Any, example: Sequence[Any]) -> Any:
        int8 = {"calib_data": [list(example)], "max_error": 1e9} if self.wanted == "int8" else {}
        try:
            made = self.amp.convert_hybrid_block(net, self.wanted, data_example=list(example),
                                                 disable_passes=self.disable_passes, **int8)
        except self.amp.AmpError as error:
            raise UsageError(f"gluon_amp cannot convert it: {error}") from error
        self.dtype = made.conversion.types
        self.notes.append(made.conversion.summary())
        return made


@contextlib.contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Keep what `init` says of the type that it chose, and its warnings."""
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    logger, handler = logging.getLogger("gluon_amp"), Handler(logging.INFO)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        notes.extend(str(each.message) for each in caught)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
