"""Samples of elementwise operators: unary, with a scalar, of two tensors, broadcasting."""
from __future__ import annotations

from typing import Iterator

from .sample import Input, Sample, low, sample

_SHAPE = (2, 16, 6, 8)

# The gradient follows from the rounded output, or grows steeply.
_TOLERANCE = {"tanh": 6, "_npi_tanh": 6, "erfinv": 6, "_npi_ldexp": 6}

# Operators by the domain of their input.
_UNARY = {
    "normal": "abs arcsinh arctan ceil cos degrees erf fix floor radians relu rint round sigmoid sign sin softsign "
              "square tanh trunc negative cbrt BlockGrad make_loss _copy zeros_like ones_like hard_sigmoid "
              "_contrib_div_sqrt_dim _contrib_round_ste _contrib_sign_ste exp expm1 sinh cosh "
              "_npi_absolute _npi_arcsinh _npi_arctan _npi_ceil _npi_cos _npi_degrees _npi_fix _npi_floor _npi_radians "
              "_npi_rint _npi_sign _npi_sin _npi_square _npi_tanh _npi_trunc _npi_negative _npi_cbrt _npi_exp "
              "_npi_expm1 _npi_sinh _npi_cosh _npx_relu _npx_sigmoid _np_copy _npi_isfinite _npi_isinf _npi_isnan "
              "_npi_isneginf _npi_isposinf _npi_around _npi_nan_to_num",
    "positive": "gamma gammaln log log10 log1p log2 rcbrt reciprocal rsqrt sqrt "
                "_npi_log _npi_log10 _npi_log1p _npi_log2 _npi_reciprocal _npi_sqrt",
    "unit": "arccos arcsin arctanh erfinv tan _npi_arccos _npi_arcsin _npi_arctanh _npi_tan",
    "above_one": "arccosh _npi_arccosh",
    "few": "logical_not _npi_logical_not",
}
_SCALAR = {
    "normal": "_plus_scalar _minus_scalar _rminus_scalar _mul_scalar _div_scalar _maximum_scalar _minimum_scalar "
              "_hypot_scalar _scatter_plus_scalar _scatter_minus_scalar "
              "_npi_add_scalar _npi_subtract_scalar _npi_rsubtract_scalar _npi_multiply_scalar "
              "_npi_true_divide_scalar _npi_arctan2_scalar _npi_rarctan2_scalar _npi_copysign_scalar "
              "_npi_rcopysign_scalar _npi_ldexp_scalar _npi_rldexp_scalar",
    "positive": "_rdiv_scalar _mod_scalar _rmod_scalar _power_scalar _rpower_scalar _npi_rtrue_divide_scalar "
                "_npi_mod_scalar _npi_rmod_scalar _npi_power_scalar _npi_rpower_scalar",
    "few": "_equal_scalar _not_equal_scalar _greater_scalar _greater_equal_scalar _lesser_scalar _lesser_equal_scalar "
           "_logical_and_scalar _logical_or_scalar _logical_xor_scalar _npi_equal_scalar _npi_not_equal_scalar "
           "_npi_greater_scalar _npi_greater_equal_scalar _npi_less_scalar _npi_less_equal_scalar",
}
_BINARY = {
    "normal": "elemwise_add elemwise_sub elemwise_mul _grad_add _maximum _minimum _hypot _identity_with_attr_like_rhs",
    "positive": "elemwise_div _power _mod _scatter_elemwise_div",
    "few": "_equal _not_equal _greater _greater_equal _lesser _lesser_equal _logical_and _logical_or _logical_xor",
}
_BROADCAST = {
    "normal": "broadcast_add broadcast_sub broadcast_mul broadcast_maximum broadcast_minimum broadcast_hypot "
              "_npi_add _npi_subtract _npi_multiply _npi_hypot _npi_arctan2 _npi_copysign _npi_ldexp",
    "positive": "broadcast_div broadcast_mod broadcast_power _npi_true_divide _npi_mod _npi_power",
    "few": "broadcast_equal broadcast_not_equal broadcast_greater broadcast_greater_equal broadcast_lesser "
           "broadcast_lesser_equal broadcast_logical_and broadcast_logical_or broadcast_logical_xor _npi_equal "
           "_npi_not_equal _npi_greater _npi_greater_equal _npi_less _npi_less_equal",
}


def _each(table: dict[str, str]) -> Iterator[tuple[str, Input, float]]:
    for values, names in table.items():
        for name in names.split():
            yield name, low(*_SHAPE, values=values), _TOLERANCE.get(name, 4)


def _tables() -> Iterator[Sample]:
    for name, data, tolerance in _each(_UNARY):
        yield sample(name, data, tolerance=tolerance)
    for name, data, _ in _each(_SCALAR):
        yield sample(name, data, scalar=1.0 if data.values == "few" else 0.75, is_int=False)
    for name, data, _ in _each(_BINARY):
        yield sample(name, (data, data))
    for name, data, tolerance in _each(_BROADCAST):
        large, small = low(8, 16, 16, 16, values=data.values), low(1, 16, 1, 1, values=data.values)
        yield sample(name, (data, data), note="same shape")
        yield sample(name, (large, small), note="over 2048 elements each", tolerance=tolerance)


_OTHER = (
    sample("MakeLoss", low(*_SHAPE), grad_scale=2.0),
    sample("clip", low(*_SHAPE), a_min=-0.5, a_max=1.0),
    sample("smooth_l1", low(*_SHAPE), scalar=1.0),
    sample("_contrib_gradientmultiplier", low(*_SHAPE), scalar=0.5, is_int=False),
    sample("_contrib_quadratic", low(*_SHAPE), a=0.5, b=1.0, c=2.0),
    sample("amp_cast", low(*_SHAPE), dtype="float32"),
    sample("Cast", low(*_SHAPE), dtype="float32"),
    sample("amp_multicast", (low(*_SHAPE), low(*_SHAPE)), num_outputs=2),
    sample("add_n", (low(*_SHAPE), low(*_SHAPE), low(*_SHAPE)), num_args=3),
    sample("_npi_full_like", low(*_SHAPE), fill_value=0.5, gradient=False),
    sample("_contrib_arange_like", low(4, 600), gradient=False, tolerance=0, note="2400 elements"),
    sample("_npi_share_memory", (low(*_SHAPE), low(*_SHAPE)), gradient=False),
    sample("_contrib_allclose", (low(*_SHAPE), low(*_SHAPE)), gradient=False),
)

SAMPLES: tuple[Sample, ...] = (*_tables(), *_OTHER)
