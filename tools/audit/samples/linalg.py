"""Samples of linear algebra other than plain products."""
from __future__ import annotations

from .sample import Sample, low, sample

_A = low(2, 8, 8)
_SPD = low(2, 8, 8, values="positive_definite")
_LOWER = low(2, 8, 8, values="lower")

SAMPLES: tuple[Sample, ...] = (
    *(sample(f"_linalg_{name}", _SPD, tolerance=16)
      for name in ("det", "inverse", "potrf", "slogdet", "sumlogdiag")),
    *(sample(f"_linalg_{name}", _SPD, tolerance=16, gradient=False) for name in ("syevd",)),
    sample("_linalg_potri", _LOWER, tolerance=16),
    sample("_linalg_gelqf", low(2, 4, 8), tolerance=16, gradient=False),
    sample("_linalg_extractdiag", _A),
    sample("_linalg_extracttrian", _A),
    sample("_linalg_makediag", low(2, 8)),
    sample("_linalg_maketrian", low(2, 36)),
    sample("_linalg_syrk", _A),
    sample("_linalg_trmm", (_LOWER, _A)),
    sample("_linalg_trsm", (_LOWER, _A), tolerance=16),
    sample("_npi_cholesky", _SPD, tolerance=16),
    *(sample(f"_npi_{name}", _SPD, tolerance=16, gradient=False)
      for name in ("eig", "eigh", "eigvals", "eigvalsh", "svd")),
    sample("_npi_pinv", (_SPD, low(2, values="constant:0.001")), tolerance=16, gradient=False),
    sample("_npi_pinv_scalar_rcond", _SPD, tolerance=16, gradient=False),
    sample("_npi_solve", (_SPD, low(2, 8, 3)), tolerance=16),
    sample("_npi_tensorinv", low(8, 8, values="positive_definite"), ind=1, tolerance=16),
    sample("_npi_tensorsolve", (low(8, 8, values="positive_definite"), low(8)), tolerance=16),
    sample("_contrib_fft", low(4, 16), gradient=False),
    sample("_contrib_ifft", low(4, 32), gradient=False),
)
