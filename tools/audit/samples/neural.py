"""Samples of layers: convolution, pooling, normalisation, activation, recurrent networks."""
from __future__ import annotations

from typing import Any, Iterable

from .sample import Input, Sample, fixed, low, sample


def _convolution(op: str, data: tuple[int, ...], filters: int, kernel: tuple[int, ...], group: int = 1,
                 bias: bool = True, note: str = "", **attrs: Any) -> Sample:
    """Make a sample of a convolution, or of a deconvolution, whose weight has its channels the other way round."""
    last = str(attrs.get("layout", "")).endswith("C")
    channels = data[-1 if last else 1]
    first, second = (channels, filters // group) if op == "Deconvolution" else (filters, channels // group)
    weight = (first, *kernel, second) if last else (first, second, *kernel)
    inputs = [low(*data), low(*weight, values="small")] + ([low(filters)] if bias else [])
    return sample(op, inputs, kernel=kernel, num_filter=filters, num_group=group, no_bias=not bias, note=note,
                  tolerance=6, **attrs)


def _convolutions() -> Iterable[Sample]:
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


def _pooling() -> Iterable[Sample]:
    data = low(2, 16, 10, 12, values="distinct")
    for op in ("Pooling", "Pooling_v1"):
        for kind in ("max", "avg", "sum"):
            yield sample(op, data, pool_type=kind, kernel="(2, 2)", stride="(2, 2)")
            yield sample(op, data, pool_type=kind, kernel="(1, 1)", global_pool=True)
    yield sample("Pooling", data, pool_type="lp", p_value=2, kernel="(2, 2)", stride="(2, 2)")
    for kind in ("max", "avg"):
        yield sample("Pooling", data, pool_type=kind, kernel="(3, 3)", stride="(2, 2)", pad="(1, 1)")
        yield sample("Pooling", data, pool_type=kind, kernel="(3, 3)", stride="(2, 2)", pooling_convention="full")
        yield sample("Pooling", low(2, 16, 12, values="distinct"), pool_type=kind, kernel="(2,)", stride="(2,)")
        yield sample("Pooling", low(1, 16, 4, 6, 6, values="distinct"), pool_type=kind, kernel="(2, 2, 2)",
                     stride="(2, 2, 2)")
        yield sample("Pooling", low(2, 10, 12, 16, values="distinct"), pool_type=kind, kernel="(2, 2)",
                     stride="(2, 2)", layout="NHWC")
    yield sample("Pooling", data, pool_type="avg", kernel="(3, 3)", stride="(2, 2)", pad="(1, 1)",
                 count_include_pad=False)
    for size in (1, 2, 3):
        yield sample("_contrib_AdaptiveAvgPooling2D", low(2, 16, 12, 12), output_size=(size, size))


def _statistics(channels: int) -> tuple[Input, Input]:
    return (fixed(channels, values="zeros", aux=True), fixed(channels, values="ones", aux=True))


def _normalisation() -> Iterable[Sample]:
    data, scale, shift = low(4, 16, 8, 8), fixed(16, values="positive"), fixed(16)
    states = _statistics(16)
    for op in ("BatchNorm", "_contrib_BatchNormWithReLU"):
        inputs = (data, scale, shift, *states)
        yield sample(op, inputs, fix_gamma=False, tolerance=8)
        yield sample(op, inputs, fix_gamma=True, tolerance=8)
        yield sample(op, inputs, fix_gamma=False, use_global_stats=True, tolerance=8)
    yield sample("BatchNorm", (low(4, 8, 8, 16), scale, shift, *states), fix_gamma=False, axis=3, tolerance=8)
    yield sample("BatchNorm", (low(64, 16), scale, shift, *states), fix_gamma=False, tolerance=8, note="a matrix")
    yield sample("BatchNorm", (low(4, 16, 20), scale, shift, *states), fix_gamma=False, tolerance=8,
                 note="a 3D tensor")
    yield sample("BatchNorm", (data, low(16, values="positive"), low(16), *states), fix_gamma=False, tolerance=8,
                 note="scale and shift in low precision")
    yield sample("BatchNorm_v1", (data, scale, shift, *states), fix_gamma=False, tolerance=8)
    yield sample("_contrib_SyncBatchNorm", (data, scale, shift, *states), fix_gamma=False, key="audit", ndev=1,
                 tolerance=8)
    for kind, low_scale in (("FP32 scale and shift", False), ("scale and shift in low precision", True)):
        pair = (low(16, values="positive"), low(16)) if low_scale else (scale, shift)
        yield sample("LayerNorm", (low(24, 16), *pair), tolerance=8, note=kind)
        groups = (low(4, values="positive"), low(4)) if low_scale else (fixed(4, values="positive"), fixed(4))
        yield sample("GroupNorm", (data, *groups), num_groups=4, tolerance=8, note=kind)
        yield sample("InstanceNorm", (data, *pair), tolerance=8, note=kind)
    for mode in ("channel", "instance", "spatial"):
        yield sample("L2Normalization", data, mode=mode)
    yield sample("LRN", data, nsize=5)
    yield sample("IdentityAttachKLSparseReg", (low(4, 16, values="zero_one"), fixed(16, values="zero_one", aux=True)))


def _activations() -> Iterable[Sample]:
    data = low(2, 16, 6, 8)
    for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign"):
        yield sample("Activation", data, act_type=kind)
    for kind in ("leaky", "elu", "selu", "gelu"):
        yield sample("LeakyReLU", data, act_type=kind)
    yield sample("LeakyReLU", data, act_type="rrelu", lower_bound=0.25, upper_bound=0.25)
    yield sample("LeakyReLU", (data, low(16, values="positive")), act_type="prelu")
    yield sample("LeakyReLU", (data, fixed(16, values="positive")), act_type="prelu", note="FP32 gamma")
    for op in ("softmax", "log_softmax", "softmin"):
        yield sample(op, low(24, 40))
        yield sample(op, data, axis=1)
        yield sample(op, low(24, 40), temperature=2.0)
        yield sample(op, low(24, 40), dtype="float32")
    yield sample("softmax", (low(24, 40), fixed(24, kind="int32", values="length:40")), use_length=True)
    yield sample("SoftmaxActivation", low(24, 40), mode="instance")
    yield sample("SoftmaxActivation", data, mode="channel")
    yield sample("Dropout", data, p=0.5)
    yield sample("Dropout", data, p=0.5, mode="always")
    yield sample("Dropout", data, p=0.0)


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent() -> Iterable[Sample]:
    for mode, gates in _GATES.items():
        parameters = low(gates * 16 * (16 + 16 + 2), values="small")
        states = [low(1, 4, 16)] * (2 if mode == "lstm" else 1)
        yield sample("RNN", (low(5, 4, 16), parameters, *states), mode=mode, state_size=16, num_layers=1,
                     state_outputs=True, tolerance=8)
    parameters = fixed(4 * 16 * (16 + 16 + 2), values="small")
    yield sample("RNN", (low(5, 4, 16), parameters, low(1, 4, 16), low(1, 4, 16)), mode="lstm", state_size=16,
                 num_layers=1, tolerance=8, note="FP32 parameters")


def _dense() -> Iterable[Sample]:
    for flatten in (True, False):
        yield sample("FullyConnected", (low(24, 40), low(32, 40, values="small"), low(32)), num_hidden=32,
                     flatten=flatten, tolerance=6)
    yield sample("FullyConnected", (low(24, 40), low(32, 40, values="small")), num_hidden=32, no_bias=True, tolerance=6)
    yield sample("FullyConnected", (low(4, 16, 6, 8), low(10, 768, values="small"), low(10)), num_hidden=10,
                 tolerance=6, note="4D input")
    yield sample("FullyConnected", (low(6, 10, 40), low(32, 40, values="small"), low(32)), num_hidden=32,
                 flatten=False, tolerance=6, note="3D input")
    yield sample("FullyConnected", (low(24, 40), low(32, 40, values="small"), fixed(32)), num_hidden=32,
                 tolerance=6, note="FP32 bias")


SAMPLES: tuple[Sample, ...] = (*_convolutions(), *_dense(), *_pooling(), *_normalisation(), *_activations(),
                               *_recurrent())
