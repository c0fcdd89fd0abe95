"""How PyTorch runs as fast as it can on a CPU: FP32 and bfloat16 autocast, eager and compiled, and Intel's extension.

It runs in an interpreter of its own: GluonCV refuses to be imported where PyTorch 2 is installed.
"""

from __future__ import annotations

import os
from typing import Any, ContextManager

import torch

from . import machine
from .errors import UsageError

_AVX2_BITS = 256


class Float32:
    """PyTorch in FP32, images with channels last: the layout that its CPU kernels are fastest in."""

    autocast = False
    fused = True

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

    def prepared(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """Return the network and the optimizer that train."""
        return net, optimizer


class Autocast(Float32):
    """PyTorch's own mixed precision."""

    autocast = True


class Compiled(Float32):
    """FP32 after `torch.compile`, which needs a C++ compiler."""

    def prepared(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """Return the compiled network; it is compiled in its first steps."""
        import torch._inductor.config as inductor

        if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
            inductor.cpp.simdlen = _AVX2_BITS
        return torch.compile(net), optimizer


class AutocastCompiled(Compiled):
    """Mixed precision after `torch.compile`."""

    autocast = True


class Extension(Float32):
    """Intel's extension for PyTorch, in bfloat16 where the machine has instructions for it."""

    fused = False  # it has updates of its own

    def __init__(self, device: str, dtype: str | None):
        self.autocast = dtype == "bfloat16" or machine.has_bfloat16()
        super().__init__(device, dtype)

    def prepared(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """Return what `ipex.optimize` makes of both.

        Raises
        ------
        UsageError
            If the extension is not installed beside this PyTorch.
        """
        try:
            import intel_extension_for_pytorch as ipex
        except ImportError as error:
            raise UsageError(f"intel-extension-for-pytorch cannot be imported: {error}") from error
        net, optimizer = ipex.optimize(net.train(), optimizer=optimizer,
                                       dtype=torch.bfloat16 if self.autocast else torch.float32)
        return net, optimizer
