"""MXNet's operators: for each some calls.

The fuzzer, and tests of tables and gradients read the same samples. An operator
without one is named in ``WITHOUT``, with the reason.
"""
from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from gluon_amp.machine.dtypes import BFLOAT16, FLOAT16, FLOAT32

LOW = "low"  # the kind of an input that is cast to the type under test; other kinds are types themselves
_INDICES = ("zeros", "length", "labels", "grid_index", "valid")
_WITHOUT_GRADIENT = re.compile(  # in MXNet: tests, comparisons, positions, and what its backward pass does not know
    "_npi_(is|logical_|equal|not_equal|greater|less|arg|r?copysign_scalar)|_np_(all|any)$|(multi_)?all_finite|multi_sum_sq|"
    "(shape|size)_array|argmax_channel|batch_take|_slice_assign|_grad_add")


@dataclass(frozen=True)
class Input:
    """One input of an operator."""

    shape: tuple[int, ...]
    kind: str = LOW
    values: str = "normal"  # a name of VALUES
    aux: bool = False  # a state that the operator changes, which must be a plain variable

    @property
    def differentiable(self) -> bool:
        """Whether a gradient with respect to it is asked for."""
        return not self.aux and self.kind in (LOW, FLOAT32) and self.values.partition(":")[0] not in _INDICES


@dataclass(frozen=True)
class Sample:
    """One call of an operator."""

    op: str
    inputs: tuple[Input, ...]  # auxiliary states last
    attrs: dict[str, str]
    gradient: bool = True  # False where gradients are zero, random or not defined
    note: str = ""  # what attributes do not say
    in_graphs: bool = True  # False for operators without outputs, which are called and are no part of graphs

    @property
    def condition(self) -> str:
        """The sample's name among those of its operator: attributes and note."""
        parts = [f"{key}={value}" for key, value in self.attrs.items()] + ([self.note] if self.note else [])
        return ", ".join(parts) or "default"

    @property
    def numpy_shape(self) -> bool:
        """Whether it runs under NumPy's shape semantics, in which ``()`` is a scalar."""
        return self.op.startswith(("_np_", "_npi_", "_npx_"))

    def attrs_in(self, dtype: str) -> dict[str, str]:
        """Return the operator's parameters where the type under test is this one, which some of them name."""
        return {key: dtype if value == LOW else value for key, value in self.attrs.items()}


def low(*shape: int, values: str = "normal") -> Input:
    """Make an input in the type under test."""
    return Input(shape, LOW, values)


def fixed(*shape: int, kind: str = FLOAT32, values: str = "normal", aux: bool = False) -> Input:
    """Make an input that keeps its type: statistics, indices, lengths, labels."""
    return Input(shape, kind, values, aux)


def sample(op: str, inputs: Input | Sequence[Input], gradient: bool = True, note: str = "", **attrs: object) -> Sample:
    """Make a sample; every further keyword is an operator parameter."""
    every = (inputs,) if isinstance(inputs, Input) else tuple(inputs)
    return Sample(op, every, {key: str(value) for key, value in attrs.items()},
                  gradient and not _WITHOUT_GRADIENT.match(op), note)


# Contents of inputs


def round_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """Round FP32 numbers to the nearest of ``dtype``, ties to even; the result is FP32."""
    array = np.asarray(array, np.float32)
    if dtype == FLOAT16:
        return array.astype(np.float16).astype(np.float32)
    if dtype == BFLOAT16:
        bits = np.ascontiguousarray(array).view(np.uint32).astype(np.int64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return rounded.astype(np.uint32).view(np.float32).reshape(array.shape)
    return array


def fill(item: Input, dtype: str, seed: str) -> np.ndarray:
    """Make an input's contents, rounded to ``dtype`` where it runs in that; the same seed gives the same numbers."""
    name, _, argument = item.values.partition(":")
    array = np.asarray(VALUES[name](np.random.RandomState(zlib.crc32(seed.encode())), item.shape, argument))
    return (round_to(array, dtype) if item.kind == LOW else array.astype(item.kind)).reshape(item.shape)


def _distinct(random: Any, shape: tuple, _: str) -> np.ndarray:
    """Draw numbers without repetition from those that bfloat16 and float16 both hold."""
    mantissas, exponents, signs = np.meshgrid(1 + np.arange(128) / 128, 2.0 ** np.arange(-3, 3), (-1, 1))
    return random.choice((mantissas * exponents * signs).ravel(), size=shape, replace=int(np.prod(shape)) > 1536)


def _positive_definite(random: Any, shape: tuple, _: str) -> np.ndarray:
    factor = random.normal(size=shape)
    return factor @ np.swapaxes(factor, -1, -2) / shape[-1] + np.eye(shape[-1])


def _boxes(random: Any, shape: tuple, side: str) -> np.ndarray:
    """Draw corner boxes (x0, y0, x1, y1) within a square of the given side."""
    start = random.uniform(0, 0.6, size=(*shape[:-1], 2))
    return np.concatenate([start, start + random.uniform(0.1, 0.4, size=start.shape)], axis=-1) * float(side or 1)


def _rois(random: Any, shape: tuple, _: str) -> np.ndarray:
    """Draw regions of interest: image number and box."""
    return np.concatenate([random.randint(0, 2, size=(shape[0], 1)), np.round(_boxes(random, (shape[0], 4), "12"))], 1)


def _rotated_rois(random: Any, shape: tuple, _: str) -> np.ndarray:
    """Draw rotated regions: image number, centre, size, angle in degrees."""
    limits = [(4, 8), (4, 8), (3, 6), (3, 6), (0, 45)]
    return np.stack([random.randint(0, 2, shape[0]), *(random.uniform(*pair, shape[0]) for pair in limits)], axis=1)


def _labelled_boxes(random: Any, shape: tuple, with_scores: str) -> np.ndarray:
    """Draw rows of class, distinct scores where asked for, and box."""
    columns = [random.randint(0, 2, size=(*shape[:-1], 1)).astype(np.float64)]
    if with_scores:
        columns.append((random.permutation(int(np.prod(shape[:-1]))) + 1).reshape(*shape[:-1], 1) / 256.0)
    return np.concatenate([*columns, _boxes(random, (*shape[:-1], 4), "")], axis=-1)


# By name; a number behind a colon in an input's `values` is the last argument.
VALUES: dict[str, Callable[[Any, tuple, str], np.ndarray]] = {
    "normal": lambda random, shape, _: random.normal(size=shape),
    "small": lambda random, shape, _: random.normal(size=shape) * 0.1,
    "positive": lambda random, shape, _: random.uniform(0.25, 3.0, size=shape),
    "unit": lambda random, shape, _: random.uniform(-0.9, 0.9, size=shape),
    "zero_one": lambda random, shape, _: random.uniform(0.05, 0.95, size=shape),
    "above_one": lambda random, shape, _: random.uniform(1.25, 3.0, size=shape),
    "few": lambda random, shape, _: random.randint(-2, 3, size=shape),
    "distinct": _distinct,
    "zeros": lambda random, shape, _: np.zeros(shape),
    "ones": lambda random, shape, _: np.ones(shape),
    "constant": lambda random, shape, argument: np.full(shape, float(argument)),
    "doubled": lambda random, shape, _: 2.0 * random.randint(0, 2, size=shape),  # what dropout by a half makes of ones
    # Indices, labels, lengths and masks
    "labels": lambda random, shape, argument: random.randint(0, int(argument), size=shape),
    "valid": lambda random, shape, _: random.permutation(np.arange(int(np.prod(shape))) % 2),
    "length": lambda random, shape, argument: random.randint(1, int(argument) + 1, size=shape),
    "grid_index": lambda random, shape, argument: np.arange(int(np.prod(shape))) % int(argument),
    # Linear algebra and detection
    "positive_definite": _positive_definite,
    "lower": lambda random, shape, _: np.tril(random.normal(size=shape) * 0.5) + 2 * np.eye(shape[-1]),
    "softmax": lambda random, shape, _: random.dirichlet(np.ones(shape[-1]), size=shape[:-1]),
    "boxes": _boxes, "rois": _rois, "rotated_rois": _rotated_rois, "box_labels": _labelled_boxes,
    "detections": lambda random, shape, _: _labelled_boxes(random, shape, "scores")}

# Elementwise operators, by the domain of their inputs

UNARY = {
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
    "above_one": "arccosh _npi_arccosh", "few": "logical_not _npi_logical_not"}
WITH_SCALAR = {
    "normal": "_plus_scalar _minus_scalar _rminus_scalar _mul_scalar _div_scalar _maximum_scalar _minimum_scalar "
              "_hypot_scalar _scatter_plus_scalar _scatter_minus_scalar "
              "_npi_add_scalar _npi_subtract_scalar _npi_rsubtract_scalar _npi_multiply_scalar "
              "_npi_true_divide_scalar _npi_arctan2_scalar _npi_rarctan2_scalar _npi_copysign_scalar "
              "_npi_rcopysign_scalar _npi_ldexp_scalar _npi_rldexp_scalar",
    "positive": "_rdiv_scalar _mod_scalar _rmod_scalar _power_scalar _rpower_scalar _npi_rtrue_divide_scalar "
                "_npi_mod_scalar _npi_rmod_scalar _npi_power_scalar _npi_rpower_scalar",
    "few": "_equal_scalar _not_equal_scalar _greater_scalar _greater_equal_scalar _lesser_scalar _lesser_equal_scalar "
           "_logical_and_scalar _logical_or_scalar _logical_xor_scalar _npi_equal_scalar _npi_not_equal_scalar "
           "_npi_greater_scalar _npi_greater_equal_scalar _npi_less_scalar _npi_less_equal_scalar"}
BINARY = {
    "normal": "elemwise_add elemwise_sub elemwise_mul _grad_add _maximum _minimum _hypot _identity_with_attr_like_rhs",
    "positive": "elemwise_div _power _mod _scatter_elemwise_div",
    "few": "_equal _not_equal _greater _greater_equal _lesser _lesser_equal _logical_and _logical_or _logical_xor"}
BROADCAST = {
    "normal": "broadcast_add broadcast_sub broadcast_mul broadcast_maximum broadcast_minimum broadcast_hypot "
              "_npi_add _npi_subtract _npi_multiply _npi_hypot _npi_arctan2 _npi_copysign _npi_ldexp",
    "positive": "broadcast_div broadcast_mod broadcast_power _npi_true_divide _npi_mod _npi_power",
    "few": "broadcast_equal broadcast_not_equal broadcast_greater broadcast_greater_equal broadcast_lesser "
           "broadcast_lesser_equal broadcast_logical_and broadcast_logical_or broadcast_logical_xor _npi_equal "
           "_npi_not_equal _npi_greater _npi_greater_equal _npi_less _npi_less_equal"}
_MAP, _MATRIX, _IMAGES = low(2, 16, 6, 8), low(24, 40), low(2, 16, 12, 12)


def _each(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    for values, names in table.items():
        for name in names.split():
            yield name, values


def _elementwise() -> Iterator[Sample]:
    for name, values in _each(UNARY):
        yield sample(name, replace(_MAP, values=values))
    for name, values in _each(WITH_SCALAR):
        yield sample(name, replace(_MAP, values=values), scalar=1.0 if values == "few" else 0.75, is_int=False)
    for name, values in _each(BINARY):
        yield sample(name, [replace(_MAP, values=values)] * 2)
    for name, values in _each(BROADCAST):
        yield sample(name, [replace(_MAP, values=values)] * 2, note="same shape")
        yield sample(name, (low(8, 16, 16, 16, values=values), low(1, 16, 1, 1, values=values)),
                     note="over 2048 elements each")
    yield from (
        sample("MakeLoss", _MAP, grad_scale=2.0), sample("clip", _MAP, a_min=-0.5, a_max=1.0),
        sample("smooth_l1", _MAP, scalar=1.0), sample("_contrib_quadratic", _MAP, a=0.5, b=1.0, c=2.0),
        sample("_contrib_gradientmultiplier", _MAP, scalar=0.5, is_int=False),
        sample("amp_cast", _MAP, dtype="float32"), sample("Cast", _MAP, dtype="float32"),
        sample("amp_multicast", (_MAP, _MAP), num_outputs=2), sample("add_n", (_MAP, _MAP, _MAP), num_args=3),
        sample("_npi_full_like", _MAP, fill_value=0.5, gradient=False),
        sample("_contrib_arange_like", low(4, 600), gradient=False, note="2400 elements"),
        sample("_npi_share_memory", (_MAP, _MAP), gradient=False),
        sample("_contrib_allclose", (_MAP, _MAP), gradient=False))


# Layers


def _convolution(op: str, data: tuple[int, ...], filters: int, kernel: tuple[int, ...], group: int = 1,
                 bias: bool = True, note: str = "", **attrs: Any) -> Sample:
    """Make a sample of a convolution, or of a deconvolution, whose weight has its channels the other way round."""
    last = attrs.get("layout") == "NHWC"
    channels = data[-1 if last else 1]
    first, second = (channels, filters // group) if op == "Deconvolution" else (filters, channels // group)
    weight = (first, *kernel, second) if last else (first, second, *kernel)
    inputs = [low(*data), low(*weight, values="small")] + ([low(filters)] if bias else [])
    return sample(op, inputs, kernel=kernel, num_filter=filters, num_group=group, no_bias=not bias, note=note, **attrs)


def _convolutions() -> Iterator[Sample]:
    yield _convolution("Convolution", (2, 32, 10), 16, (3,), pad=(1,))
    for group in (1, 2, 32):
        yield _convolution("Convolution", (2, 32, 10, 12), 32, (3, 3), group, pad=(1, 1))
    yield _convolution("Convolution", (2, 16, 10, 12), 32, (1, 1), bias=False)
    yield _convolution("Convolution", (2, 3, 20, 20), 16, (7, 7), bias=False, stride=(2, 2), pad=(3, 3))
    yield _convolution("Convolution", (2, 16, 10, 12), 20, (3, 3), stride=(2, 2))
    yield _convolution("Convolution", (2, 16, 10, 12), 16, (3, 3), dilate=(2, 2), pad=(2, 2))
    yield _convolution("Convolution", (2, 5, 10, 12), 7, (3, 3), note="5 channels")
    yield _convolution("Convolution", (1, 16, 6, 6, 6), 16, (3, 3, 3), pad=(1, 1, 1))
    yield _convolution("Convolution", (2, 10, 12, 16), 16, (3, 3), layout="NHWC")
    yield _convolution("Convolution_v1", (2, 16, 10, 12), 16, (3, 3), pad=(1, 1))
    yield _convolution("Deconvolution", (2, 16, 8, 8), 16, (4, 4), stride=(2, 2), pad=(1, 1), bias=False)
    yield _convolution("Deconvolution", (2, 16, 8, 8), 16, (2, 2), stride=(2, 2))
    yield _convolution("Deconvolution", (2, 16, 8), 16, (4,), stride=(2,), pad=(1,), bias=False)
    yield _convolution("Deconvolution", (2, 16, 8, 8), 16, (4, 4), 16, stride=(2, 2), pad=(1, 1), bias=False)


def _pooling() -> Iterator[Sample]:
    data = low(2, 16, 10, 12, values="distinct")
    for op in ("Pooling", "Pooling_v1"):
        for kind in ("max", "avg", "sum"):
            yield sample(op, data, pool_type=kind, kernel="(2, 2)", stride="(2, 2)")
            yield sample(op, data, pool_type=kind, kernel="(1, 1)", global_pool=True)
    yield sample("Pooling", data, pool_type="lp", p_value=2, kernel="(2, 2)", stride="(2, 2)")
    for kind in ("max", "avg"):
        for attrs in ({"pad": "(1, 1)"}, {"pooling_convention": "full"}):
            yield sample("Pooling", data, pool_type=kind, kernel="(3, 3)", stride="(2, 2)", **attrs)
        for shape in ((2, 16, 12), (1, 16, 4, 6, 6), (2, 10, 12, 16)):
            window = {3: "(2,)", 4: "(2, 2)", 5: "(2, 2, 2)"}[len(shape)]
            yield sample("Pooling", low(*shape, values="distinct"), pool_type=kind, kernel=window, stride=window,
                         **({"layout": "NHWC"} if len(shape) == 4 else {}))
    yield sample("Pooling", data, pool_type="avg", kernel="(3, 3)", stride="(2, 2)", pad="(1, 1)",
                 count_include_pad=False)
    for size in (1, 2, 3):
        yield sample("_contrib_AdaptiveAvgPooling2D", _IMAGES, output_size=(size, size))


def _normalisation() -> Iterator[Sample]:
    data, scale, shift = low(4, 16, 8, 8), fixed(16, values="positive"), fixed(16)
    states = fixed(16, values="zeros", aux=True), fixed(16, values="ones", aux=True)
    for op in ("BatchNorm", "_contrib_BatchNormWithReLU"):
        for attrs in ({"fix_gamma": False}, {"fix_gamma": True}, {"fix_gamma": False, "use_global_stats": True}):
            yield sample(op, (data, scale, shift, *states), **attrs)
    yield sample("BatchNorm", (low(4, 8, 8, 16), scale, shift, *states), fix_gamma=False, axis=3)
    for shape, note in (((64, 16), "a matrix"), ((4, 16, 20), "a 3D tensor")):
        yield sample("BatchNorm", (low(*shape), scale, shift, *states), fix_gamma=False, note=note)
    yield sample("BatchNorm", (data, low(16, values="positive"), low(16), *states), fix_gamma=False,
                 note="scale and shift in low precision")
    yield sample("BatchNorm_v1", (data, scale, shift, *states), fix_gamma=False)
    yield sample("_contrib_SyncBatchNorm", (data, scale, shift, *states), fix_gamma=False, key="audit", ndev=1)
    for note, make in (("FP32 scale and shift", fixed), ("scale and shift in low precision", low)):
        pair = make(16, values="positive"), make(16)
        yield sample("LayerNorm", (low(24, 16), *pair), note=note)
        yield sample("GroupNorm", (data, make(4, values="positive"), make(4)), num_groups=4, note=note)
        yield sample("InstanceNorm", (data, *pair), note=note)
    for mode in ("channel", "instance", "spatial"):
        yield sample("L2Normalization", data, mode=mode)
    yield sample("LRN", data, nsize=5)
    yield sample("IdentityAttachKLSparseReg", (low(4, 16, values="zero_one"), fixed(16, values="zero_one", aux=True)))


def _activations() -> Iterator[Sample]:
    for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign"):
        yield sample("Activation", _MAP, act_type=kind)
    for kind in ("leaky", "elu", "selu", "gelu"):
        yield sample("LeakyReLU", _MAP, act_type=kind)
    yield sample("LeakyReLU", _MAP, act_type="rrelu", lower_bound=0.25, upper_bound=0.25)
    yield sample("LeakyReLU", (_MAP, low(16, values="positive")), act_type="prelu")
    yield sample("LeakyReLU", (_MAP, fixed(16, values="positive")), act_type="prelu", note="FP32 gamma")
    for op in ("softmax", "log_softmax", "softmin"):
        yield sample(op, _MATRIX)
        yield sample(op, _MAP, axis=1)
        yield sample(op, _MATRIX, temperature=2.0)
        yield sample(op, _MATRIX, dtype="float32")
    yield sample("softmax", (_MATRIX, fixed(24, kind="int32", values="length:40")), use_length=True)
    yield sample("SoftmaxActivation", _MATRIX, mode="instance")
    yield sample("SoftmaxActivation", _MAP, mode="channel")
    yield sample("Dropout", _MAP, p=0.5)
    yield sample("Dropout", _MAP, p=0.5, mode="always")
    yield sample("Dropout", _MAP, p=0.0)


GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _dense_and_recurrent() -> Iterator[Sample]:
    for mode, gates in GATES.items():
        states = [low(1, 4, 16)] * (2 if mode == "lstm" else 1)
        yield sample("RNN", (low(5, 4, 16), low(gates * 16 * 34, values="small"), *states), mode=mode,
                     state_size=16, num_layers=1, state_outputs=True)
    yield sample("RNN", (low(5, 4, 16), fixed(4 * 16 * 34, values="small"), low(1, 4, 16), low(1, 4, 16)),
                 mode="lstm", state_size=16, num_layers=1, note="FP32 parameters")
    weight = low(32, 40, values="small")
    for flatten in (True, False):
        yield sample("FullyConnected", (_MATRIX, weight, low(32)), num_hidden=32, flatten=flatten)
    yield sample("FullyConnected", (_MATRIX, weight), num_hidden=32, no_bias=True)
    yield sample("FullyConnected", (_MAP, low(10, 768, values="small"), low(10)), num_hidden=10, note="4D input")
    yield sample("FullyConnected", (low(6, 10, 40), weight, low(32)), num_hidden=32, flatten=False, note="3D input")
    yield sample("FullyConnected", (_MATRIX, weight, fixed(32)), num_hidden=32, note="FP32 bias")


def _products() -> Iterator[Sample]:
    piles = low(4, 24, 40), low(4, 40, 32)
    for op, (first, second) in (("dot", (_MATRIX, (40, 32))), ("batch_dot", (piles[0], (4, 40, 32)))):
        yield sample(op, (first, low(*second)))
        yield sample(op, (first, low(*second[:-2], second[-1], second[-2])), transpose_b=True)
    yield sample("_linalg_gemm", (*piles, low(4, 24, 32)))
    yield sample("_linalg_gemm2", piles)
    yield sample("khatri_rao", (low(4, 8), low(6, 8)), num_args=2)
    joined, weights = low(10, 2, 3 * 32), low(4, 10, 10, values="zero_one")  # length, batch, heads x (q, k, v)
    for prefix in ("_contrib_interleaved_matmul", "_sg_mkldnn"):
        yield sample(f"{prefix}_selfatt_qk", joined, heads=2)
        yield sample(f"{prefix}_selfatt_valatt", (joined, weights), heads=2)
    yield sample("_contrib_interleaved_matmul_encdec_qk", (low(10, 2, 32), low(10, 2, 64)), heads=2)
    yield sample("_contrib_interleaved_matmul_encdec_valatt", (low(10, 2, 64), weights), heads=2)
    yield sample("_np_dot", (_MATRIX, low(40, 32)))
    yield sample("_np_dot", (low(40), low(40)), note="vectors")
    yield sample("_npi_matmul", piles)
    yield sample("_npi_tensordot", (piles[0], low(40, 32)), a_axes_summed="(2,)", b_axes_summed="(0,)")
    yield sample("_npi_tensordot_int_axes", (piles[0], low(40, 32)), axes=1)
    yield sample("_npi_einsum", piles, num_args=2, subscripts="bij,bjk->bik")


# Reductions, scans, sorting and searching; sums large enough to show accumulation in low precision


def _reductions() -> Iterator[Sample]:
    large = low(2, 16, 48, 48)
    for name in ("sum", "mean", "nansum", "_np_sum", "_npi_mean", "norm", "_npi_std", "_npi_var"):
        yield sample(name, large, axis="(2, 3)", note="2304 elements")
    for name in ("sum", "mean", "norm", "_np_sum", "_npi_mean"):
        yield sample(name, large, note="all 73728 elements")
        yield sample(name, low(64, 20), axis="(1,)" if name != "norm" else "1", note="20 elements")
    yield sample("norm", low(64, 20), axis="1", ord=1)
    yield sample("moments", large, axes="(0, 2, 3)", note="4608 elements")
    yield sample("_npi_average", (low(64, 20), low(20, values="positive")), axis="(1,)")
    yield sample("_npi_average", low(64, 20), axis="(1,)", weighted=False)
    yield sample("_npi_norm", low(20, 64))
    for name in ("prod", "nanprod", "_np_prod"):
        yield sample(name, low(2, 16, 3, 4, values="above_one"), axis="(2, 3)")
    few = low(2, 16, 6, 8, values="distinct")
    for name in ("max", "min", "_np_max", "_np_min"):
        yield sample(name, few, axis="(2, 3)")
        yield sample(name, low(64, 20, values="distinct"), axis="(1,)")
    for name in ("argmax", "argmin", "_npi_argmax", "_npi_argmin"):
        yield sample(name, low(3, 500, values="distinct"), axis=1, note="500 elements")
        yield sample(name, few, axis=1, note="16 elements")
    yield sample("argmax_channel", low(3, 500, values="distinct"), note="500 elements")
    for name in ("_np_all", "_np_any"):
        yield sample(name, low(2, 16, 6, 8, values="few"), axis="(2, 3)")
    many = low(4, 300, values="distinct")
    yield sample("_np_cumsum", low(4, 512), axis=1, note="512 elements")
    yield sample("sort", many, axis=1)
    yield sample("argsort", many, axis=1, note="300 elements")
    for kind in ("value", "indices", "both", "mask"):
        yield sample("topk", many, axis=1, k=5, ret_typ=kind)
    yield sample("all_finite", _MAP)
    yield sample("multi_all_finite", (_MAP, low(7)), num_arrays=2)
    yield sample("multi_sum_sq", (_MAP, low(7)), num_arrays=2)
    yield sample("_histogram", low(1024), bin_cnt=10, range="(-2.0, 2.0)", gradient=False)
    yield sample("_npi_bincount", (fixed(100, kind="int32", values="labels:8"), low(100, values="positive")),
                 gradient=False, has_weights=True)
    yield sample("_npi_percentile", low(64, 20, values="distinct"), q_scalar=50.0, axis="(1,)", gradient=False)
    yield sample("_npi_unique", low(50, values="few"), gradient=False)
    yield sample("shape_array", low(2, 3))
    yield sample("size_array", low(2, 3))


# Shapes, slices, joins, indexing


def _shapes() -> Iterator[Sample]:
    five, turned = low(2, 16, 3, 4, 5), "(0, 2, 3, 4, 1)"
    for shape in ("(0, -1)", "(0, 0, -1)"):
        yield sample("Reshape", _MAP, shape=shape)
    yield sample("Reshape", _MAP, shape="(-1, 4, 4)", note="channels split up")
    yield sample("Reshape", _MATRIX, shape="(-1, 8)", note="a matrix")
    yield sample("Flatten", _MAP)
    yield sample("reshape_like", (_MAP, low(2, 768)))
    for axis in (0, 1, 2, -1):
        yield sample("expand_dims", _MAP, axis=axis)
    yield sample("expand_dims", low(2, 16, 6), axis=3, note="a 3D tensor")
    yield sample("squeeze", low(2, 16, 1, 8), axis=2)
    yield sample("squeeze", low(2, 16, 1, 1))
    for axes in ("(0, 2, 3, 1)", "(0, 2, 1, 3)", "(0, 1, 3, 2)"):
        yield sample("transpose", _MAP, axes=axes)
    yield sample("transpose", _MATRIX, note="a matrix")
    yield sample("transpose", low(8, 16, 12), axes="(1, 0, 2)")
    yield sample("transpose", five, axes=turned)
    yield sample("transpose", low(2, 2, 3, 4, 3, 2), axes="(0, 2, 1, 4, 3, 5)")
    yield sample("SwapAxis", _MAP, dim1=1, dim2=2)
    yield sample("SwapAxis", _MATRIX, dim1=0, dim2=1)
    yield sample("depth_to_space", _MAP, block_size=2)
    yield sample("space_to_depth", _MAP, block_size=2)
    yield sample("diag", low(20, 20), k=1)
    yield sample("im2col", _MAP, kernel="(3, 3)", pad="(1, 1)")
    yield sample("col2im", low(2, 144, 48), output_size="(6, 8)", kernel="(3, 3)", pad="(1, 1)")
    yield sample("_np_reshape", _MAP, newshape="(2, -1)")
    yield sample("_npx_reshape", _MAP, newshape="(-2, -1)")
    yield sample("_np_transpose", _MAP, axes="(0, 2, 3, 1)")
    yield sample("_np_transpose", _MATRIX, note="a matrix")
    yield sample("_np_transpose", five, axes=turned)
    yield sample("_np_moveaxis", _MAP, source="(1,)", destination="(3,)")
    yield sample("_np_squeeze", low(2, 16, 1, 8), axis="(2,)")
    yield sample("_np_roll", _MATRIX, shift="(3,)", axis="(1,)")
    yield sample("_npi_rot90", _MATRIX, k=1, axes="(0, 1)")
    yield sample("_npi_flip", _MAP, axis="(2,)")
    yield sample("_npi_broadcast_to", low(1, 16, 1, 1), shape="(8, 16, 16, 16)")
    for number in (1, 2, 3):
        yield sample(f"_np_atleast_{number}d", low(16), num_args=1)
    for name in ("_np_diag", "_np_diagonal", "_np_trace", "_npi_tril"):
        yield sample(name, low(20, 20))
    yield sample("_np_diagflat", low(20))
    yield sample("_npi_diag_indices_from", low(20, 20), gradient=False)
    yield sample("_npi_pad", _MAP, pad_width="((0, 0), (0, 0), (1, 1), (2, 2))")


def _slices() -> Iterator[Sample]:
    yield sample("slice", _MAP, begin="(0, 0, 1, 2)", end="(2, 16, 5, 8)")
    yield sample("slice", _MAP, begin="(None, 2)", end="(None, 9)", step="(None, 2)")
    yield sample("slice", _MATRIX, begin="(2, 3)", end="(20, 33)")
    for axis in (0, 1, 3):
        yield sample("slice_axis", _MAP, axis=axis, begin=0, end=1)
    yield sample("slice_axis", low(2, 32, 6, 8), axis=1, begin=0, end=16, note="16 of 32 channels")
    yield sample("slice_like", (_MAP, low(2, 16, 3, 4)), axes="(2, 3)")
    yield sample("Crop", _MAP, num_args=1, offset="(1, 1)", h_w="(4, 4)")
    yield sample("SliceChannel", low(2, 32, 6, 8), num_outputs=2, axis=1)
    yield sample("SliceChannel", _MATRIX, num_outputs=4, axis=1, note="a matrix")
    yield sample("SliceChannel", _MAP, num_outputs=2, axis=0, squeeze_axis=True)
    yield sample("_split_v2", low(2, 32, 6, 8), indices="(0, 16)", axis=1)
    yield sample("_slice_assign", (_MAP, low(1, 16, 6, 8)), begin="(0,)", end="(1,)")
    yield sample("_slice_assign_scalar", _MAP, scalar=0.5, begin="(0, 2)", end="(2, 5)")
    yield sample("reverse", _MAP, axis="(2,)")
    for mode in ("constant", "edge", "reflect"):
        yield sample("Pad", _MAP, mode=mode, pad_width="(0, 0, 0, 0, 1, 1, 2, 2)")
    for axis, sections, name in ((1, 2, "_npi_hsplit"), (2, 2, "_npi_dsplit")):
        yield sample(name, low(4, 6, 8), indices="()", axis=axis, sections=sections)
    yield sample("_npi_delete", _MATRIX, int_ind=3, axis=0, gradient=False)
    yield sample("_npi_insert_scalar", (_MATRIX, low(40)), int_ind=3, axis=0, gradient=False)
    yield sample("_npi_insert_slice", (_MATRIX, low(2, 40)), start=0, stop=2, step=1, axis=0, gradient=False)
    yield sample("_npi_insert_tensor", (_MATRIX, low(2, 40), fixed(2, kind="int64", values="grid_index:20")), axis=0,
                 gradient=False)


def _joins() -> Iterator[Sample]:
    yield sample("Concat", (_MAP, _MAP), num_args=2, dim=1)
    yield sample("Concat", (_MAP, low(2, 8, 6, 8)), num_args=2, dim=1, note="16 and 8 channels")
    yield sample("Concat", (_MAP, _MAP), num_args=2, dim=0)
    yield sample("Concat", (_MAP, _MAP), num_args=2, dim=3)
    yield sample("Concat", (_MATRIX, low(24, 8)), num_args=2, dim=1, note="matrices")
    yield sample("stack", (_MAP, _MAP), num_args=2, axis=0)
    yield sample("stack", (_MAP, _MAP), num_args=2, axis=2)
    yield sample("_rnn_param_concat", (low(200), low(56)), num_args=2, dim=0)
    yield sample("tile", low(2, 16, 3, 4), reps="(1, 1, 2, 2)")
    yield sample("repeat", low(2, 16, 3, 4), repeats=2, axis=2)
    yield sample("broadcast_to", low(1, 16, 1, 1), shape="(8, 16, 16, 16)")
    yield sample("broadcast_axis", low(2, 16, 1, 1), axis="(2, 3)", size="(16, 16)")
    yield sample("broadcast_like", (low(1, 16, 1, 1), low(4, 16, 8, 8)))
    yield sample("_npi_concatenate", (_MAP, _MAP), num_args=2, axis=1)
    yield sample("_npi_concatenate", (_MATRIX, _MATRIX), num_args=2, axis=0)
    yield sample("_npi_stack", (_MAP, _MAP), num_args=2, axis=0)
    for name in ("_npi_vstack", "_npi_hstack", "_npi_dstack", "_npi_column_stack"):
        yield sample(name, (_MATRIX, _MATRIX), num_args=2)


def _indexing() -> Iterator[Sample]:
    few, many = fixed(12, values="grid_index:40"), fixed(512, values="labels:40")
    for name in ("Embedding", "_contrib_SparseEmbedding"):
        for rows, note in ((few, "12 different rows"), (many, "512 of 40 rows")):
            yield sample(name, (rows, low(40, 16)), input_dim=40, output_dim=16, note=note)
    for mode in ("clip", "wrap", "raise"):
        yield sample("take", (low(40, 16), few), axis=0, mode=mode, note="12 different rows")
    yield sample("take", (low(40, 16), many), axis=0, note="512 of 40 rows")
    yield sample("take", (low(4, 40, 16), fixed(12, kind="int32", values="grid_index:40")), axis=1)
    yield sample("batch_take", (_MATRIX, fixed(24, kind="int32", values="labels:40")))
    yield sample("pick", (_MATRIX, fixed(24, values="labels:40")), axis=1)
    yield sample("pick", (low(4, 400), low(4, values="labels:400")), axis=1, gradient=False,
                 note="index in low precision, above 256")
    yield sample("gather_nd", (_MATRIX, fixed(2, 16, kind="int32", values="labels:24")))
    yield sample("scatter_nd", (low(16), fixed(1, 16, kind="int32", values="grid_index:24")), shape="(24,)")
    yield sample("one_hot", low(24, values="labels:40"), depth=40, gradient=False, note="index in low precision")
    yield sample("where", (fixed(2, 16, 6, 8, values="valid"), _MAP, _MAP), note="FP32 condition")
    yield sample("where", (low(2, 16, 6, 8, values="valid"), _MAP, _MAP), note="condition in low precision")
    yield sample("_contrib_boolean_mask", (_MATRIX, fixed(24, values="valid")), axis=0)
    yield sample("_contrib_index_copy", (low(24, 8), fixed(4, kind="int64", values="grid_index:24"), low(4, 8)))
    yield sample("_contrib_index_array", low(4, 300), gradient=False)
    yield sample("_unravel_index", low(20, values="labels:200"), shape="(20, 10)", gradient=False)
    yield sample("_ravel_multi_index", low(2, 20, values="labels:10"), shape="(40, 10)", gradient=False)
    yield sample("fill_element_0index", (_MATRIX, low(24), fixed(24, values="labels:40")), gradient=False)
    mask = fixed(24, 40, kind="bool", values="valid")
    yield sample("_npi_where", (mask, _MATRIX, _MATRIX))
    for name in ("_npi_where_lscalar", "_npi_where_rscalar"):
        yield sample(name, (mask, _MATRIX), scalar=0.5)
    yield sample("_npx_nonzero", low(24, 40, values="few"), gradient=False)
    yield sample("_npi_diff", _MATRIX, n=1, axis=1)
    yield sample("_npi_ediff1d", low(40))
    yield sample("_npi_polyval", (low(4), low(40)))
    length = fixed(4, values="length:10")
    for name in ("SequenceLast", "SequenceMask", "SequenceReverse"):
        yield sample(name, (low(10, 4, 16), length), use_sequence_length=True)
        yield sample(name, low(10, 4, 16))
    yield sample("SequenceMask", (low(4, 16, 6), length), use_sequence_length=True, axis=1)


# Losses and densities, detection and vision, linear algebra


def _losses() -> Iterator[Sample]:
    labels, of_rows = fixed(24, values="labels:40"), low(24, values="labels:40")
    yield sample("SoftmaxOutput", (low(2, 16, 6, 8), fixed(2, 6, 8, values="labels:16")), multi_output=True)
    for op in ("SoftmaxOutput", "softmax_cross_entropy", "SVMOutput"):
        yield sample(op, (_MATRIX, labels))
        yield sample(op, (_MATRIX, of_rows), note="label in low precision")
    for op in ("LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput"):
        yield sample(op, (low(24, 8), fixed(24, 8, values="labels:2")), note="FP32 label")
        yield sample(op, (low(24, 8), low(24, 8, values="zero_one")), gradient=op != "MAERegressionOutput",
                     note="label in low precision")
    yield sample("CTCLoss", (low(20, 4, 12), fixed(4, 5, values="length:11")))
    positive, zero_one, counts = (low(4, 30, values="positive"), low(4, 30, values="zero_one"),
                                  low(4, 30, values="labels:6"))
    some, part = low(4, values="positive"), low(4, values="zero_one")
    for name, inputs in (("normal", (low(4, 30), low(4), some)), ("gamma", (positive, some, some)),
                         ("uniform", (zero_one, low(4, values="constant:-1"), low(4, values="constant:2"))),
                         ("exponential", (positive, some)), ("poisson", (counts, some)),
                         ("negative_binomial", (counts, some, part)),
                         ("generalized_negative_binomial", (counts, some, part)),
                         ("dirichlet", (low(4, 30, 3, values="softmax"), low(4, 3, values="positive")))):
        yield sample(f"_random_pdf_{name}", inputs)


def _detection() -> Iterator[Sample]:
    corners, boxes = low(1, 30, 4, values="boxes"), low(10, 4, values="boxes")
    yield sample("_contrib_box_nms", low(1, 20, 6, values="detections"), id_index=0, score_index=1, coord_start=2)
    for kind in ("corner", "center"):
        yield sample("_contrib_box_iou", (boxes, low(12, 4, values="boxes")), format=kind)
    yield sample("_contrib_box_decode", (low(1, 30, 4), corners), format="corner")
    yield sample("_contrib_box_encode", (
        fixed(1, 30, values="valid"), fixed(1, 30, values="grid_index:5"), corners, low(1, 5, 4, values="boxes"),
        fixed(4, values="zeros"), fixed(4, values="ones")), gradient=False)
    yield sample("_contrib_bipartite_matching", low(1, 8, 10, values="distinct"), threshold=0.1, gradient=False)
    yield sample("_contrib_MultiBoxPrior", _IMAGES, sizes="(0.2, 0.4)", ratios="(1, 2)", gradient=False)
    for make, note in ((low, ""), (fixed, "FP32 anchors and labels")):
        yield sample("_contrib_MultiBoxTarget", (make(1, 30, 4, values="boxes"), make(1, 3, 5, values="box_labels"),
                                                 low(1, 3, 30)), gradient=False, note=note)
    yield sample("_contrib_MultiBoxDetection", (low(1, 3, 30, values="zero_one"), low(1, 120), corners), gradient=False)
    for op in ("_contrib_Proposal", "_contrib_MultiProposal"):
        yield sample(op, (low(1, 24, 6, 6, values="zero_one"), low(1, 48, 6, 6, values="small"),
                          fixed(1, 3, values="constant:96")), rpn_pre_nms_top_n=50, rpn_post_nms_top_n=10,
                     gradient=False)
    rois, pooled = low(5, 5, values="rois"), {"pooled_size": "(2, 2)", "spatial_scale": 1.0}
    yield sample("ROIPooling", (_IMAGES, rois), **pooled)
    yield sample("_contrib_ROIAlign", (_IMAGES, rois), **pooled, sample_ratio=2)
    yield sample("_contrib_ROIAlign", (_IMAGES, fixed(5, 5, values="rois")), **pooled, sample_ratio=2,
                 note="FP32 regions")
    yield sample("_contrib_RROIAlign", (_IMAGES, low(5, 6, values="rotated_rois")), gradient=False, **pooled,
                 sampling_ratio=2)
    yield sample("_contrib_PSROIPooling", (_IMAGES, rois), spatial_scale=1.0, output_dim=4, pooled_size=2, group_size=2)
    yield sample("_contrib_DeformablePSROIPooling", (_IMAGES, rois, low(5, 2, 2, 2)), spatial_scale=1.0, output_dim=4,
                 group_size=2, pooled_size=2, part_size=2, sample_per_part=2)
    offsets, masks = low(2, 18, 12, 12, values="small"), low(2, 9, 12, 12, values="zero_one")
    weights = low(16, 16, 3, 3, values="small"), low(16)
    for op, inputs in (("Deformable", (offsets,)), ("ModulatedDeformable", (offsets, masks))):
        yield sample(f"_contrib_{op}Convolution", (_IMAGES, *inputs, *weights), kernel="(3, 3)", num_filter=16,
                     pad="(1, 1)")


def _vision() -> Iterator[Sample]:
    yield sample("UpSampling", _IMAGES, scale=2, sample_type="nearest", num_args=1)
    yield sample("UpSampling", (_IMAGES, low(16, 1, 4, 4, values="positive")), scale=2, sample_type="bilinear",
                 num_filter=16, num_args=2)
    yield sample("_contrib_BilinearResize2D", _IMAGES, height=24, width=24)
    yield sample("_contrib_BilinearResize2D", (_IMAGES, low(2, 16, 20, 20)), mode="like")
    yield sample("BilinearSampler", (_IMAGES, low(2, 2, 12, 12, values="unit")))
    yield sample("GridGenerator", low(2, 6), transform_type="affine", target_shape="(8, 8)")
    yield sample("GridGenerator", low(2, 2, 8, 8), transform_type="warp", target_shape="(8, 8)")
    yield sample("SpatialTransformer", (_IMAGES, low(2, 6, values="unit")), target_shape="(8, 8)",
                 transform_type="affine", sampler_type="bilinear")
    yield sample("Correlation", (_IMAGES, _IMAGES), kernel_size=1, max_displacement=2, pad_size=2)
    yield sample("_contrib_count_sketch", (low(4, 16), fixed(1, 16, values="labels:8"), fixed(1, 16, values="ones")),
                 out_dim=8)
    image = low(16, 8, 3, values="zero_one")
    yield sample("_image_normalize", low(3, 16, 8, values="zero_one"), mean="(0.5, 0.5, 0.5)", std="(0.5, 0.5, 0.5)")
    for name in ("to_tensor", "flip_left_right", "flip_top_bottom"):
        yield sample(f"_image_{name}", image, gradient=False)
    yield sample("_image_adjust_lighting", image, alpha="(0.1, 0.1, 0.1)", gradient=False)
    yield sample("_image_crop", image, x=1, y=2, width=4, height=5)
    yield sample("_image_resize", image, size="(8, 8)", gradient=False)


def _linear_algebra() -> Iterator[Sample]:
    square, lower, definite = low(2, 8, 8), low(2, 8, 8, values="lower"), low(2, 8, 8, values="positive_definite")
    for name in ("_linalg_det", "_linalg_inverse", "_linalg_potrf", "_linalg_slogdet", "_linalg_sumlogdiag",
                 "_npi_cholesky"):
        yield sample(name, definite)
    for name in ("_linalg_syevd", "_npi_eig", "_npi_eigh", "_npi_eigvals", "_npi_eigvalsh", "_npi_svd",
                 "_npi_pinv_scalar_rcond"):
        yield sample(name, definite, gradient=False)
    for name in ("extractdiag", "extracttrian", "syrk"):
        yield sample(f"_linalg_{name}", square)
    yield sample("_linalg_potri", lower)
    yield sample("_linalg_gelqf", low(2, 4, 8), gradient=False)
    yield sample("_linalg_makediag", low(2, 8))
    yield sample("_linalg_maketrian", low(2, 36))
    yield sample("_linalg_trmm", (lower, square))
    yield sample("_linalg_trsm", (lower, square))
    yield sample("_npi_pinv", (definite, low(2, values="constant:0.001")), gradient=False)
    yield sample("_npi_solve", (definite, low(2, 8, 3)))
    one = low(8, 8, values="positive_definite")
    yield sample("_npi_tensorinv", one, ind=1)
    yield sample("_npi_tensorsolve", (one, low(8)))
    yield sample("_contrib_fft", low(4, 16), gradient=False)
    yield sample("_contrib_ifft", low(4, 32), gradient=False)


MXNET = tuple(each for make in (
    _convolutions, _dense_and_recurrent, _pooling, _normalisation, _activations, _products, _elementwise, _reductions,
    _shapes, _slices, _joins, _indexing, _losses, _detection, _vision, _linear_algebra) for each in make())
SAMPLES: dict[str, tuple[Sample, ...]] = {}  # by operator
for _each_sample in MXNET:
    SAMPLES[_each_sample.op] = (*SAMPLES.get(_each_sample.op, ()), _each_sample)

# Patterns of the operators that have no sample, and why
WITHOUT = {
    r"_(CrossDeviceCopy|CustomFunction|NDArray|Native|NoGradient)$": "internal: made by the engine, not callable",
    r"_npi_boolean_mask_assign_(scalar|tensor)$|_scatter_set_nd$":
        "writes into its first input in place: called by indexed assignment only",
    r"(_square_sum|cast_storage|_sparse_retain)$": "sparse storage: bfloat16 has none",
    r"Custom$": "runs the user's Python code, in the types that code declares",
    r"_sg_mkldnn_(conv|fully_connected)$": "made by MXNet's oneDNN graph partitioning, needs a subgraph attribute",
    r"_copyto$": "a copy between arrays of the same type, called by NDArray.copyto only",
    r"_set_value$": "fills an array: no data input",
    r"_onehot_encode$": "deprecated function that writes into its second argument",
    r"_npx_constraint_check$": "takes a boolean",
    r"_npi_where_scalar2$": "takes a boolean condition and two numbers",
    r"reset_arrays$": "writes zeros into its inputs",
    r"_contrib_hawkesll$": "event sequences with integer marks, for point processes: not used in networks",
    r"(multi_|preloaded_|mp_|_multi_|_contrib_group_|_sparse_|_mp_)*(mp_)?(adam|adamw|ftml|ftrl|lamb|nag_mom|rmsprop|"
    r"rmspropalex|sgd|sgd_mom|signsgd|signum|adagrad|_adamw)_update(_phase[12])?$|multi_lars$":
        "optimizer update: weights and gradients have the types the optimizer gives them",
    r"_random_(?!pdf)|_sample_|_npi_(bernoulli|choice|exponential|gamma|gumbel|logistic|multinomial|normal|normal_n|"
    r"pareto|powerd|rayleigh|uniform|uniform_n|weibull)$|_shuffle$":
        "draws random numbers: results of different types are not comparable",
    r"_image_random_": "image augmentation with random numbers, before the network",
    r"_cv|_imdecode$": "reads or resizes images on the host, of 8-bit integers",
    r"_contrib_(quantize|quantized|dequantize|requantize|calibrate)": "8-bit quantisation",
    r"_contrib_dgl_|_contrib_edge_id$|_contrib_getnnz$": "takes sparse graphs (CSR)",
    r"_(foreach|while_loop|cond)$": "control flow: runs the operators of its subgraphs, by their own rules",
    r"(_npi_)?(_?)(arange|eye|full|linspace|logspace|ones|zeros|zeros_without_dtype|identity|indices|blackman|hamming|"
    r"hanning)$": "creates an array: no data input",
    r"_npi_(bitwise|lcm)": "integers only",
    r"_CachedOp": "runs a graph: each operator in it by its own rules",
    r"(CuDNNBatchNorm|_FusedOp|_FusedOpHelper|_FusedOpOutHelper|_contrib_mrcnn_mask_target)$":
        "in the CUDA build of MXNet only"}


def is_backward(op: str) -> bool:
    """Tell whether an operator exists only as the gradient of another one, with which it runs."""
    return "backward" in op


def reason_of(op: str) -> str | None:
    """Say why an operator has no sample; None for those that should have one."""
    return next((reason for pattern, reason in WITHOUT.items() if re.match(pattern, op)), None)
