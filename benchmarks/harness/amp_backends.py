"""How this project's AMP is switched on, and MXNet's with the CPU features that this project enables."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, ContextManager, Sequence

import gluon_amp  # before mxnet: it lets oneDNN use AMX

# isort: split
import mxnet as mx

from gluon_amp.dtypes import FLOAT32
from gluon_amp.state.devices import choose, device_supports, verdict

from .backends import ContribAmp, ContribConversion, context
from .errors import UsageError


class GluonAmp:
    """This project's AMP."""

    trainer_options: ClassVar[dict[str, Any]] = {"update_on_kvstore": False}

    def __init__(self, device: str, dtype: str | None, disable_passes: Sequence[str] = ()):
        self.context = context(device)
        with self.context, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                gluon_amp.init(target_dtype=dtype, disable_passes=disable_passes)
            except (ValueError, TypeError, RuntimeError) as error:
                raise UsageError(f"gluon_amp cannot start: {error}") from error
        self.notes = [str(item.message) for item in caught]
        active = gluon_amp.active_dtype(self.context.device_type)
        if active is None and dtype not in (None, FLOAT32):
            reasons = "; ".join(self.notes) or "it stays in FP32"
            raise UsageError(f"gluon_amp does not run {dtype} on {device!r}: {reasons}")
        self.dtype: str = active or FLOAT32
        self.notes.append(verdict(choose(dtype, device_supports())))

    def init_trainer(self, trainer: mx.gluon.Trainer) -> None:
        """Attach the loss scaler."""
        gluon_amp.init_trainer(trainer)

    def scale_loss(self, loss: Any, trainer: mx.gluon.Trainer) -> ContextManager[Any]:
        """Return a context that yields the scaled loss."""
        scaled: ContextManager[Any] = gluon_amp.scale_loss(loss, trainer)
        return scaled


class Conversion:
    """This project's conversion for inference."""

    target: ClassVar[str | None] = None

    def __init__(self, device: str, dtype: str | None, disable_passes: Sequence[str] = ()):
        self.context = context(device)
        self.disable_passes = disable_passes
        self.wanted = self.target or dtype
        self.dtype = "unknown"  # before anything is converted
        self.notes: list[str] = []

    def convert(self, net: mx.gluon.HybridBlock, example: Sequence[mx.nd.NDArray]) -> mx.gluon.HybridBlock:
        """Convert the network with all optimisations.

        Raises
        ------
        UsageError
            If the device cannot run the type.
        """
        try:
            converted = self._made(net, list(example))
        except gluon_amp.AmpError as error:
            raise UsageError(f"gluon_amp cannot convert it: {error}") from error
        self.dtype = converted.conversion.types
        self.notes.append(converted.conversion.summary())
        return converted

    def _made(self, net: mx.gluon.HybridBlock, example: list[mx.nd.NDArray]) -> Any:
        return gluon_amp.convert_hybrid_block(net, self.wanted, data_example=example,
                                              disable_passes=self.disable_passes)


class Optimisation(Conversion):
    """The same without lower precision: what the rewritten graph alone gains."""

    target = "float32"


class Int8(Conversion):
    """This project's conversion to INT8 beside the type that the CPU is good at, calibrated on the example."""

    def _made(self, net: mx.gluon.HybridBlock, example: list[mx.nd.NDArray]) -> Any:
        dtypes = None if self.wanted is None else ("int8", self.wanted)
        return gluon_amp.convert_hybrid_block(net, "int8", calib_data=[example], dtypes=dtypes, data_example=example,
                                              progress=False)


class ContribAmpOnAmx(ContribAmp):
    """MXNet's AMP after `import gluon_amp`, which lets oneDNN use AMX: the rest of the difference is the graph's."""


class ContribConversionOnAmx(ContribConversion):
    """MXNet's conversion, with AMX likewise."""
