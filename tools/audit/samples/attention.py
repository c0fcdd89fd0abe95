"""Samples of matrix products and of attention."""
from __future__ import annotations

from .sample import Sample, low, sample

_INTERLEAVED = low(10, 2, 3 * 32)  # length, batch, heads x (query, key, value)
_ATTENTION = low(2 * 2, 10, 10, values="zero_one")

SAMPLES: tuple[Sample, ...] = (
    sample("dot", (low(24, 40), low(40, 32)), tolerance=6),
    sample("dot", (low(24, 40), low(32, 40)), transpose_b=True, tolerance=6),
    sample("batch_dot", (low(4, 24, 40), low(4, 40, 32)), tolerance=6),
    sample("batch_dot", (low(4, 24, 40), low(4, 32, 40)), transpose_b=True, tolerance=6),
    sample("_linalg_gemm", (low(4, 24, 40), low(4, 40, 32), low(4, 24, 32)), tolerance=6),
    sample("_linalg_gemm2", (low(4, 24, 40), low(4, 40, 32)), tolerance=6),
    sample("khatri_rao", (low(4, 8), low(6, 8)), num_args=2),
    sample("_contrib_interleaved_matmul_selfatt_qk", _INTERLEAVED, heads=2, tolerance=6),
    sample("_contrib_interleaved_matmul_selfatt_valatt", (_INTERLEAVED, _ATTENTION), heads=2, tolerance=6),
    sample("_contrib_interleaved_matmul_encdec_qk", (low(10, 2, 32), low(10, 2, 64)), heads=2, tolerance=6),
    sample("_contrib_interleaved_matmul_encdec_valatt", (low(10, 2, 64), _ATTENTION), heads=2, tolerance=6),
    sample("_sg_mkldnn_selfatt_qk", _INTERLEAVED, heads=2, tolerance=6),
    sample("_sg_mkldnn_selfatt_valatt", (_INTERLEAVED, _ATTENTION), heads=2, tolerance=6),
    sample("_np_dot", (low(24, 40), low(40, 32)), tolerance=6),
    sample("_np_dot", (low(40), low(40)), tolerance=6, note="vectors"),
    sample("_npi_matmul", (low(4, 24, 40), low(4, 40, 32)), tolerance=6),
    sample("_npi_tensordot", (low(4, 24, 40), low(40, 32)), a_axes_summed="(2,)", b_axes_summed="(0,)", tolerance=6),
    sample("_npi_tensordot_int_axes", (low(4, 24, 40), low(40, 32)), axes=1, tolerance=6),
    sample("_npi_einsum", (low(4, 24, 40), low(4, 40, 32)), num_args=2, subscripts="bij,bjk->bik", tolerance=6),
)
