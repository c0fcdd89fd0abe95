"""Samples of NumPy-style operators that are neither elementwise nor reductions nor products."""
from __future__ import annotations

from typing import Iterable

from .sample import Sample, fixed, low, sample

_DATA = low(2, 16, 6, 8)
_MATRIX = low(24, 40)


def _shapes() -> Iterable[Sample]:
    yield sample("_np_reshape", _DATA, newshape="(2, -1)")
    yield sample("_npx_reshape", _DATA, newshape="(-2, -1)")
    yield sample("_np_transpose", _DATA, axes="(0, 2, 3, 1)")
    yield sample("_np_transpose", _MATRIX, note="a matrix")
    yield sample("_np_transpose", low(2, 16, 3, 4, 5), axes="(0, 2, 3, 4, 1)")
    yield sample("_np_moveaxis", _DATA, source="(1,)", destination="(3,)")
    yield sample("_np_squeeze", low(2, 16, 1, 8), axis="(2,)")
    yield sample("_np_roll", _MATRIX, shift="(3,)", axis="(1,)")
    yield sample("_npi_rot90", _MATRIX, k=1, axes="(0, 1)")
    yield sample("_npi_flip", _DATA, axis="(2,)")
    yield sample("_npi_broadcast_to", low(1, 16, 1, 1), shape="(8, 16, 16, 16)")
    for number in (1, 2, 3):
        yield sample(f"_np_atleast_{number}d", low(16), num_args=1)
    yield sample("_np_diag", low(20, 20))
    yield sample("_np_diagflat", low(20))
    yield sample("_np_diagonal", low(20, 20))
    yield sample("_np_trace", low(20, 20))
    yield sample("_npi_tril", low(20, 20))
    yield sample("_npi_diag_indices_from", low(20, 20), gradient=False)
    yield sample("_npi_pad", _DATA, pad_width="((0, 0), (0, 0), (1, 1), (2, 2))")


def _joins() -> Iterable[Sample]:
    yield sample("_npi_concatenate", (_DATA, _DATA), num_args=2, axis=1)
    yield sample("_npi_concatenate", (_MATRIX, _MATRIX), num_args=2, axis=0)
    yield sample("_npi_stack", (_DATA, _DATA), num_args=2, axis=0)
    for name in ("_npi_vstack", "_npi_hstack", "_npi_dstack", "_npi_column_stack"):
        yield sample(name, (_MATRIX, _MATRIX), num_args=2)
    for name in ("_npi_hsplit", "_npi_dsplit"):
        yield sample(name, low(4, 6, 8), indices="()", axis=1 if "h" in name else 2, sections=2)


def _indexing() -> Iterable[Sample]:
    yield sample("_npi_where", (fixed(24, 40, kind="bool", values="valid"), _MATRIX, _MATRIX))
    yield sample("_npi_where_lscalar", (fixed(24, 40, kind="bool", values="valid"), _MATRIX), scalar=0.5)
    yield sample("_npi_where_rscalar", (fixed(24, 40, kind="bool", values="valid"), _MATRIX), scalar=0.5)
    yield sample("_npi_delete", _MATRIX, int_ind=3, axis=0, gradient=False)
    yield sample("_npi_insert_scalar", (_MATRIX, low(40)), int_ind=3, axis=0, gradient=False)
    yield sample("_npi_insert_slice", (_MATRIX, low(2, 40)), start=0, stop=2, step=1, axis=0, gradient=False)
    yield sample("_npi_insert_tensor", (_MATRIX, low(2, 40), fixed(2, kind="int64", values="grid_index:20")), axis=0,
                 gradient=False)
    yield sample("_npx_nonzero", low(24, 40, values="few"), gradient=False)


_OTHER = (
    sample("_npi_diff", _MATRIX, n=1, axis=1),
    sample("_npi_ediff1d", low(40)),
    sample("_npi_polyval", (low(4), low(40))),
)

SAMPLES: tuple[Sample, ...] = (*_shapes(), *_joins(), *_indexing(), *_OTHER)
