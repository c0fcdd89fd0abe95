"""Arithmetic: elementwise functions, reductions, matrix products, linear algebra."""
from __future__ import annotations

# Products of two matrices.
PLAIN_PRODUCTS = ("dot", "_np_dot", "_npi_tensordot", "_npi_tensordot_int_axes")
# Products of two stacks of matrices.
BATCHED_PRODUCTS = ("batch_dot", "_npi_matmul")
# Matrix products of the linear algebra package.
GEMM = ("_linalg_gemm", "_linalg_gemm2")
# Factorisations, inverses, triangular products and what goes with them.
LINEAR_ALGEBRA = (
    "_linalg_potrf", "_linalg_potri", "_linalg_trmm", "_linalg_trsm", "_linalg_syrk", "_linalg_gelqf",
    "_linalg_syevd", "_linalg_sumlogdiag", "_linalg_extractdiag", "_linalg_makediag", "_linalg_extracttrian",
    "_linalg_maketrian", "_linalg_inverse", "_linalg_det", "_linalg_slogdet", "_npi_cholesky", "_npi_eig",
    "_npi_eigh", "_npi_eigvals", "_npi_eigvalsh", "_npi_svd", "_npi_solve", "_npi_pinv",
    "_npi_pinv_scalar_rcond", "_npi_tensorinv", "_npi_tensorsolve",
)
# Absolute values.
ABSOLUTE = ("abs", "_npi_absolute")
# Values with the other sign.
NEGATION = ("negative", "_npi_negative")
# The sign of values.
SIGNS = ("sign", "_npi_sign", "_contrib_sign_ste")
# Rounding to whole numbers.
ROUNDING = (
    "ceil", "_npi_ceil", "floor", "_npi_floor", "rint", "_npi_rint", "round", "trunc", "_npi_trunc", "fix",
    "_npi_fix", "_contrib_round_ste",
)
# Functions whose values and slopes stay small.
BOUNDED = ("sin", "_npi_sin", "cos", "_npi_cos", "arctan", "_npi_arctan", "arcsinh", "_npi_arcsinh", "erf")
# Exponentials, logarithms, and functions built on them.
EXPONENTIALS = (
    "exp", "_npi_exp", "expm1", "_npi_expm1", "log", "_npi_log", "log1p", "_npi_log1p", "log2", "_npi_log2",
    "log10", "_npi_log10", "cosh", "_npi_cosh", "sinh", "_npi_sinh", "gamma", "gammaln", "_npi_ldexp",
    "_npi_ldexp_scalar", "_npi_rldexp_scalar",
)
# Powers, roots and reciprocals.
POWERS = (
    "square", "_npi_square", "sqrt", "_npi_sqrt", "rsqrt", "cbrt", "_npi_cbrt", "rcbrt", "reciprocal",
    "_npi_reciprocal", "_power", "_power_scalar", "_rpower_scalar", "broadcast_power", "_npi_power",
    "_npi_power_scalar", "_npi_rpower_scalar", "_hypot", "_hypot_scalar", "broadcast_hypot",
    "_contrib_quadratic",
)
# Functions with poles or infinite slopes, and angles.
STEEP = (
    "tan", "_npi_tan", "arcsin", "_npi_arcsin", "arccos", "_npi_arccos", "arctanh", "_npi_arctanh", "arccosh",
    "_npi_arccosh", "erfinv", "degrees", "_npi_degrees", "radians", "_npi_radians", "_npi_arctan2_scalar",
    "_npi_rarctan2_scalar",
)
# Quotients of tensors, and of a scalar by a tensor.
DIVISIONS = ("elemwise_div", "broadcast_div", "_rdiv_scalar")
# Quotients of tensors, and of a scalar by a tensor, NumPy's way.
NUMPY_DIVISIONS = ("_npi_true_divide", "_npi_rtrue_divide_scalar")
# Remainders.
REMAINDERS = (
    "_mod", "broadcast_mod", "_npi_mod", "_mod_scalar", "_rmod_scalar", "_npi_mod_scalar", "_npi_rmod_scalar",
)
# Arithmetic with one scalar.
SCALAR_ARITHMETIC = (
    "_plus_scalar", "_minus_scalar", "_rminus_scalar", "_mul_scalar", "_div_scalar", "_npi_add_scalar",
    "_npi_subtract_scalar", "_npi_rsubtract_scalar", "_npi_multiply_scalar", "_contrib_div_sqrt_dim",
)
# The larger or smaller of tensor and scalar.
SCALAR_SELECTION = ("_maximum_scalar", "_minimum_scalar")
# Signs copied between tensor and scalar.
SCALAR_COPYSIGN = ("_npi_copysign_scalar", "_npi_rcopysign_scalar")
# Comparisons and logic with one scalar.
SCALAR_COMPARISONS = (
    "_equal_scalar", "_not_equal_scalar", "_greater_scalar", "_greater_equal_scalar", "_lesser_scalar",
    "_lesser_equal_scalar", "_logical_and_scalar", "_logical_or_scalar", "_logical_xor_scalar",
    "_npi_equal_scalar", "_npi_not_equal_scalar", "_npi_greater_scalar", "_npi_greater_equal_scalar",
    "_npi_less_scalar", "_npi_less_equal_scalar",
)
# Sums of tensors of one shape.
ELEMWISE_ADDITIONS = ("elemwise_add", "add_n")
# Sums, differences and products of tensors.
ADDITIONS = (
    "elemwise_sub", "elemwise_mul", "broadcast_add", "broadcast_sub", "broadcast_mul", "_npi_add",
    "_npi_subtract", "_npi_multiply",
)
# The larger or smaller of two tensors, and signs copied.
SELECTION = ("_maximum", "_minimum", "broadcast_maximum", "broadcast_minimum", "_npi_copysign")
# Comparisons and logic of two tensors.
COMPARISONS = (
    "_equal", "_not_equal", "_greater", "_greater_equal", "_lesser", "_lesser_equal", "_logical_and",
    "_logical_or", "_logical_xor", "broadcast_equal", "broadcast_not_equal", "broadcast_greater",
    "broadcast_greater_equal", "broadcast_lesser", "broadcast_lesser_equal", "broadcast_logical_and",
    "broadcast_logical_or", "broadcast_logical_xor", "_npi_equal", "_npi_not_equal", "_npi_greater",
    "_npi_greater_equal", "_npi_less", "_npi_less_equal",
)
# Yes or no for each element, or for all of them.
PREDICATES = (
    "logical_not", "_npi_logical_not", "_npi_isnan", "_npi_isinf", "_npi_isfinite", "_npi_isneginf",
    "_npi_isposinf", "_np_all", "_np_any",
)
# For integers only.
INTEGER_ARITHMETIC = (
    "_npi_bitwise_and", "_npi_bitwise_and_scalar", "_npi_bitwise_not", "_npi_bitwise_or",
    "_npi_bitwise_or_scalar", "_npi_bitwise_xor", "_npi_bitwise_xor_scalar", "_npi_lcm", "_npi_lcm_scalar",
)
# Sums and means.
SUMS = ("sum", "mean")
# Sums and means, NumPy's way.
NUMPY_SUMS = ("_np_sum", "_npi_mean")
# Norms.
NORMS_OF_TENSORS = ("norm", "_npi_norm")
# Products, moments, and other statistics over an axis.
OTHER_REDUCTIONS = (
    "nansum", "nanprod", "prod", "_np_prod", "moments", "_npi_std", "_npi_var", "_npi_average", "_np_trace",
    "_square_sum", "_npi_percentile", "_npi_polyval", "_npi_diff", "_npi_ediff1d",
)
# Largest and smallest values over an axis.
EXTREMES = ("max", "min", "_np_max", "_np_min")
# Counts of values.
HISTOGRAMS = ("_histogram", "_npi_bincount")
# Fourier transforms, sketches, point-process likelihoods.
TRANSFORMS = ("_contrib_fft", "_contrib_ifft", "_contrib_count_sketch", "_contrib_hawkesll")
# Arithmetic on the stored values of sparse tensors.
SPARSE_ARITHMETIC = ("_scatter_elemwise_div", "_scatter_plus_scalar", "_scatter_minus_scalar")
