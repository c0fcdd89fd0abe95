"""Samples of reductions, scans, sorting and searching."""
from __future__ import annotations

from typing import Iterable

from .sample import Sample, fixed, low, sample

# Large enough to show accumulation in low precision: 2304 elements a sum over pixels.
_SHAPE = (2, 16, 48, 48)
_SMALL = (2, 16, 3, 4)


def _sums() -> Iterable[Sample]:
    for name in ("sum", "mean", "nansum", "_np_sum", "_npi_mean", "norm"):
        yield sample(name, low(*_SHAPE), axis="(2, 3)", note="2304 elements")
    for name in ("sum", "mean", "norm", "_np_sum", "_npi_mean"):
        yield sample(name, low(*_SHAPE), note="all 73728 elements")
        yield sample(name, low(64, 20), axis="(1,)" if name != "norm" else "1", note="20 elements")
    for name in ("_npi_std", "_npi_var"):
        yield sample(name, low(*_SHAPE), axis="(2, 3)", note="2304 elements")
    yield sample("norm", low(64, 20), axis="1", ord=1)
    yield sample("moments", low(*_SHAPE), axes="(0, 2, 3)", note="4608 elements")
    yield sample("_npi_average", (low(64, 20), low(20, values="positive")), axis="(1,)")
    yield sample("_npi_average", low(64, 20), axis="(1,)", weighted=False)
    yield sample("_npi_norm", low(20, 64))
    for name in ("prod", "nanprod", "_np_prod"):
        yield sample(name, low(*_SMALL, values="above_one"), axis="(2, 3)", tolerance=8)


def _extrema() -> Iterable[Sample]:
    for name in ("max", "min", "_np_max", "_np_min"):
        yield sample(name, low(2, 16, 6, 8, values="distinct"), axis="(2, 3)")
        yield sample(name, low(64, 20, values="distinct"), axis="(1,)")
    for name in ("argmax", "argmin", "_npi_argmax", "_npi_argmin"):
        yield sample(name, low(3, 500, values="distinct"), axis=1, tolerance=0, note="500 elements")
        yield sample(name, low(2, 16, 6, 8, values="distinct"), axis=1, tolerance=0, note="16 elements")
    yield sample("argmax_channel", low(3, 500, values="distinct"), tolerance=0, note="500 elements")
    yield sample("_np_all", low(2, 16, 6, 8, values="few"), axis="(2, 3)")
    yield sample("_np_any", low(2, 16, 6, 8, values="few"), axis="(2, 3)")


_OTHER = (
    sample("_np_cumsum", low(4, 512), axis=1, note="512 elements"),
    sample("sort", low(4, 300, values="distinct"), axis=1),
    sample("argsort", low(4, 300, values="distinct"), axis=1, tolerance=0, note="300 elements"),
    *(sample("topk", low(4, 300, values="distinct"), axis=1, k=5, ret_typ=kind, tolerance=0)
      for kind in ("value", "indices", "both", "mask")),
    sample("all_finite", low(2, 16, 6, 8)),
    sample("multi_all_finite", (low(2, 16, 6, 8), low(7)), num_arrays=2),
    sample("multi_sum_sq", (low(2, 16, 6, 8), low(7)), num_arrays=2),
    sample("_histogram", low(1024), bin_cnt=10, range="(-2.0, 2.0)", gradient=False),
    sample("_npi_bincount", (fixed(100, kind="int32", values="labels:8"), low(100, values="positive")),
           has_weights=True, gradient=False, tolerance=6),
    sample("_npi_percentile", low(64, 20, values="distinct"), q_scalar=50.0, axis="(1,)", gradient=False),
    sample("_npi_unique", low(50, values="few"), gradient=False),
    sample("shape_array", low(2, 3)),
    sample("size_array", low(2, 3)),
)

SAMPLES: tuple[Sample, ...] = (*_sums(), *_extrema(), *_OTHER)
