"""MXNet's own INT8 quantizer: it fuses layers, puts INT8 operators in their place, and finds the ranges of tensors."""
from __future__ import annotations

from typing import Collection, Mapping, Sequence

import mxnet as mx
from mxnet.contrib import quantization

_FUSION = "MKLDNN_QUANTIZE"
_TYPE = "auto"  # unsigned where the range of a tensor has no negative values


def fused(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """Let oneDNN fuse layers with what comes behind them, in FP32 or in INT8."""
    return symbol.get_backend_symbol(_FUSION)


def quantized(symbol: mx.sym.Symbol, kept: Sequence[str], parameters: Sequence[str]) -> mx.sym.Symbol:
    """Put INT8 operators in the place of all that have one but those kept, where neighbours are layers in INT8."""
    return quantization._quantize_symbol(symbol, mx.cpu(), list(kept), [], list(parameters), _TYPE, "smart",
                                         "channel-wise")[0]


def quantized_parameters(symbol: mx.sym.Symbol, arrays: Mapping[str, mx.nd.NDArray]) -> dict[str, mx.nd.NDArray]:
    """Return the parameters that a quantized symbol reads."""
    made = quantization._quantize_params(symbol, arrays, {})
    return {**made, **{name: arrays[name] for name in symbol.list_auxiliary_states()}}


class Collector:
    """Notes the ranges of tensors, by MXNet's names."""

    def __init__(self, mode: str, names: Collection[str]):
        self._by_entropy = mode == "entropy"
        self._seen = (quantization._LayerHistogramCollector(include_layer=names) if self._by_entropy
                      else quantization._LayerOutputMinMaxCollector(_TYPE, include_layer=names))

    def see(self, name: bytes, handle: int) -> None:
        """Note the values of a tensor."""
        self._seen.collect(name, handle)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the ranges that INT8 is to hold."""
        if not self._by_entropy:
            return {name: (float(least), float(most)) for name, (least, most) in self._seen.min_max_dict.items()}
        found = {}
        for name, histogram in self._seen.hist_dict.items():
            least, _, threshold, _ = quantization._get_optimal_threshold(histogram, _TYPE)
            found[name] = (0.0 if least >= 0 else -float(threshold.item()), float(threshold.item()))
        return found
