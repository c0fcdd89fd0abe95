"""How PyTorch runs as fast as it can on a CPU, in FP32 and with bfloat16 autocast.

It runs in an interpreter of its own: GluonCV refuses to be imported where PyTorch 2 is installed.
"""

from __future__ import annotations

from typing import Any, ContextManager

import torch
from _errors import UsageError


class Float32:
    """PyTorch in FP32, images with channels last: the layout that its CPU kernels are fastest in."""

    autocast = False

    def __init__(self, device: str, dtype: str | None):
        if device != "cpu":
            raise UsageError(f"the PyTorch peers run on the CPU only, received --device {device}")
        if dtype not in (None, "bfloat16"):
            raise UsageError(f"the PyTorch peers know the dtype bfloat16 only, received {dtype!r}")
        self.dtype = "bfloat16" if self.autocast else "float32"
        self.notes: list[str] = []

    def precision(self) -> ContextManager[Any]:
        """Return the context that the forward pass belongs into."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)

    def placed(self, thing: Any) -> Any:
        """Return a network or a batch of images in the fastest layout; anything else as it is."""
        is_image = isinstance(thing, torch.Tensor) and thing.dim() == 4
        return thing.to(memory_format=torch.channels_last) if is_image or hasattr(thing, "modules") else thing


class Autocast(Float32):
    """PyTorch's own mixed precision."""

    autocast = True
