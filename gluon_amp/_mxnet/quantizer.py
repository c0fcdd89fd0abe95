"""MXNet's own INT8 quantizer: it puts INT8 operators in the place of layers, and finds the ranges of tensors."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.contrib import quantization
from mxnet.ndarray import NDArray

from .arrays import values_of

_TYPE = "auto"  # unsigned where the range of a tensor has no negative values
_BINS = 8001


def quantized(symbol: mx.sym.Symbol, kept: Sequence[str], parameters: Sequence[str]) -> mx.sym.Symbol:
    """Put INT8 operators in the place of all that have one but those kept, where neighbours are layers in INT8."""
    return quantization._quantize_symbol(symbol, mx.cpu(), list(kept), [], list(parameters), _TYPE, "smart",
                                         "channel-wise")[0]


def quantized_parameters(symbol: mx.sym.Symbol, arrays: Mapping[str, mx.nd.NDArray]) -> dict[str, mx.nd.NDArray]:
    """Return the parameters that a quantized symbol reads."""
    made = quantization._quantize_params(symbol, arrays, {})
    return {**made, **{name: arrays[name] for name in symbol.list_auxiliary_states()}}


class Collector:
    """Notes the ranges of tensors: of all values, or those that lose least information."""

    def __init__(self, by_entropy: bool):
        self._by_entropy = by_entropy
        self._spans: dict[str, tuple[float, float]] = {}
        self._histograms: dict[str, Any] = {}

    def see(self, name: str, array: NDArray) -> None:
        """Note the values of a tensor."""
        least, most = (float(mx.nd.min(array).asscalar()), float(mx.nd.max(array).asscalar()))
        before = self._spans.get(name, (least, most))
        self._spans[name] = float(np.minimum(least, before[0])), float(np.maximum(most, before[1]))  # which keep NaN
        largest = max(abs(least), abs(most))
        if not self._by_entropy or not 0 < largest < np.inf:
            return
        values, known = values_of(array), self._histograms.get(name)
        if known is None or largest * len(known[0]) > 2 * _BINS * known[-1]:
            counts, edges = np.histogram(values, bins=_BINS, range=(-largest, largest))
            if known is not None:  # MXNet keeps the width of bins: for values 1e5 times as large that takes 12 GB
                counts += np.histogram((known[1][:-1] + known[1][1:]) / 2, bins=edges, weights=known[0])[0].astype(int)
            known = counts, edges, *self._spans[name], largest
        else:
            known = quantization.combine_histogram(known, values, least, most, largest)
        self._histograms[name] = known

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the ranges that INT8 is to hold."""
        return {name: self._narrowed(name, *span) for name, span in self._spans.items()}

    def _narrowed(self, name: str, least: float, most: float) -> tuple[float, float]:
        """Return the range that loses least information, where a network loses less by it than by the whole range."""
        if name not in self._histograms or not np.isfinite([least, most]).all():
            return least, most
        counts, edges, *_ = histogram = self._histograms[name]
        threshold = float(quantization._get_optimal_threshold(histogram, _TYPE)[2].item())
        # MXNet's choice compares distributions: of few values, or equal ones, it cuts off nearly all.
        sizes = np.abs(edges[:-1] + edges[1:]) / 2
        counts = np.where(np.arange(len(counts)) == len(counts) // 2, 0, counts)  # zeros are exact in any range
        levels, largest = (255 if least >= 0 else 127), max(abs(least), abs(most))
        lost = (counts * np.maximum(sizes - threshold, 0) ** 2).sum()
        gained = counts.sum() * (largest ** 2 - threshold ** 2) / (12 * levels ** 2)  # by smaller steps
        return (0.0 if least >= 0 else -threshold, threshold) if lost < gained else (least, most)
