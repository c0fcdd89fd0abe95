"""Samples of this package's operators in C++: small, odd and large ones, each in both types."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterable, Iterator, Sequence

from gluon_amp.dtypes import FLOAT32

from .sample import LOW, Input, Sample, fixed, low, sample

_SMALL, _ODD, _LARGE = low(2, 16, 6, 8), low(7, 13), low(4, 16, 40, 40)  # the large one is more than one thread's share
_SIZES = (_SMALL, _ODD, _LARGE)
_BITS = fixed(64, values="doubled")  # of which dropout is made


def _in_both(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield every sample as it is, and in FP32."""
    for item in samples:
        note = ", ".join(filter(None, (item.note, " x ".join(map(str, item.inputs[0].shape)))))
        yield replace(item, note=note)
        inputs = tuple(replace(each, kind=FLOAT32) if each.kind == LOW else each for each in item.inputs)
        yield replace(item, inputs=inputs, attrs=item.attrs_in(FLOAT32), note=f"{note}, FP32")


def _pointwise() -> Iterable[Sample]:
    for data in _SIZES:
        yield sample("_gluon_amp_clip", data, a_min=-0.5, a_max=1.0, reference="clip")
        yield sample("_gluon_amp_gelu", data, act_type="gelu", reference="LeakyReLU")
        yield sample("_gluon_amp_hard_swish", data, shift=3.0, a_min=0.0, a_max=6.0, divisor=6.0)
        yield sample("_gluon_amp_dropout", (data, _BITS), p=0.3)
    yield sample("_gluon_amp_dropout", (_SMALL, fixed(64, values="ones")), p=0.3, note="outside of training")
    for shape, slopes in (((2, 16, 6, 8), 16), ((40, 5000), 1), ((7, 33), 33), ((4, 16, 40, 40), 16)):
        yield sample("_gluon_amp_prelu", (low(*shape), fixed(slopes)), act_type="prelu", tolerance=6,
                     reference="LeakyReLU")
    for shape, rows in (((2, 16, 6, 8), (2, 16, 1, 1)), ((7, 33), (7, 1)), ((4, 16, 48, 48), (4, 16, 1, 1))):
        yield sample("_gluon_amp_scale_rows", (low(*shape), fixed(*rows)), reference="broadcast_mul")
        yield sample("_gluon_amp_scale_rows", (fixed(*rows), low(*shape)), factors_first=True,
                     reference="broadcast_mul")


def _rows() -> Iterable[Sample]:
    for data in (_SMALL, low(3, 5, 33), low(300, 768)):
        width = data.shape[-1]
        yield sample("_gluon_amp_layer_norm", (data, fixed(width, values="positive"), fixed(width)), tolerance=8,
                     axis=-1, eps=1e-5, reference="LayerNorm")
    for name in ("softmax", "log_softmax"):
        for data in (_SMALL, low(3, 7, 33), low(40, 1000)):
            yield sample(f"_gluon_amp_{name}", data, temperature=2.0, reference=name)
    yield sample("_gluon_amp_softmax", (low(24, 40), fixed(24, kind="int32", values="length:40")), use_length=True,
                 reference="softmax")


def _products() -> Iterable[Sample]:
    for a, b in (((4, 24, 40), (4, 40, 32)), ((3, 5, 7), (3, 7, 9)), ((8, 96, 64), (8, 64, 80))):
        yield sample("_gluon_amp_batch_dot", (low(*a), low(*b)), tolerance=6, reference="batch_dot")
    yield sample("_gluon_amp_batch_dot", (low(3, 7, 5), low(3, 9, 7)), transpose_a=True, transpose_b=True, tolerance=6,
                 reference="batch_dot")
    yield sample("_gluon_amp_batch_dot", (low(2, 3, 5, 4), low(2, 3, 4, 6)), alpha=0.125, tolerance=6,
                 reference="_linalg_gemm2")
    yield sample("_gluon_amp_batch_dot", (low(3, 5, 7), low(7, 9)), tolerance=6, note="one matrix behind a pile",
                 reference="_npi_matmul")
    for data, units, flatten in ((_SMALL, 10, True), (low(3, 5, 33), 17, False), (low(1100, 64), 48, True)):
        weight = fixed(units, 768 if data is _SMALL else data.shape[-1], values="small")
        yield sample("_gluon_amp_dense", (data, weight, fixed(units)), num_hidden=units, flatten=flatten, tolerance=6,
                     reference="FullyConnected")
    yield sample("_gluon_amp_dense", (low(24, 40), fixed(32, 40, values="small")), num_hidden=32, no_bias=True,
                 tolerance=6, reference="FullyConnected")


def _attention() -> Iterable[Sample]:
    def made(layout: str, heads: int, inputs: Sequence[Input], operands: str, **attrs: Any) -> Sample:
        return sample("_gluon_amp_attention", inputs, layout=layout, heads=heads, scale=0.25, operands=operands,
                      tolerance=6, **attrs)

    yield made("joined", 2, [low(2, 10, 96)], "projections")
    yield made("interleaved", 3, [low(7, 2, 45)], "projections")
    yield made("joined", 2, [low(1, 130, 192)], "projections")
    separate = [low(2, 4, 10), low(2, 7, 10), low(2, 7, 10)]
    yield made("separate", 2, [*separate, fixed(2, 4, 7)], "queries,keys,values,bias")
    yield made("separate", 2, [*separate, fixed(2, 1, 7, values="valid")], "queries,keys,values,mask", masked=-1e4)
    yield made("separate", 2, [*separate, fixed(2, 4, kind="int32", values="length:7")], "queries,keys,values,lengths")
    yield made("joined", 2, [low(2, 10, 96), _BITS], "projections,bits", p=0.3)


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent() -> Iterable[Sample]:
    def made(mode: str, steps: int, batch: int, inputs: int, states: int, layers: int = 1,
             directions: int = 1) -> Sample:
        widths = [inputs, *[directions * states] * (layers - 1)]
        parameters = sum(directions * _GATES[mode] * states * (width + states + 2) for width in widths)
        first = [fixed(layers * directions, batch, states)] * (2 if mode == "lstm" else 1)
        return sample("_gluon_amp_rnn", (low(steps, batch, inputs), fixed(parameters, values="small"), *first),
                      mode=mode, state_size=states, num_layers=layers, bidirectional=directions == 2,
                      state_outputs=True, training=True, dtype=LOW, tolerance=8, reference="RNN")

    for mode in _GATES:
        yield made(mode, 5, 4, 16, 16)
    yield made("lstm", 3, 5, 7, 9, layers=2, directions=2)
    yield made("gru", 3, 5, 7, 9, layers=2, directions=2)
    yield made("lstm", 12, 8, 100, 130)


def _maps() -> Iterable[Sample]:
    """Yield what takes maps with the channels last."""
    for data in (low(2, 6, 8, 16), low(3, 5, 7, 33), low(4, 40, 40, 32)):
        channels = data.shape[-1]
        statistics = (fixed(channels, aux=True), fixed(channels, values="positive", aux=True))
        yield sample("_gluon_amp_batch_norm", (data, fixed(channels, values="positive"), fixed(channels), *statistics),
                     fix_gamma=False, a_min=-0.5, a_max=1.0, tolerance=6)
        other = low(*data.shape)
        inputs = (data, fixed(channels, values="positive"), fixed(channels), *statistics, other)
        yield sample("_gluon_amp_batch_norm", inputs, fix_gamma=False, adds=True, a_min=0.0, rectifies=True,
                     tolerance=6)
        yield sample("_gluon_amp_channel_means", data)
        yield sample("_gluon_amp_scale_channels", (data, fixed(data.shape[0], channels, 1, 1)))
    for data, filters, kernel, stride, groups in ((low(2, 6, 8, 16), 32, 1, 1, 1), (low(3, 9, 7, 33), 17, 3, 1, 1),
                                                  (low(2, 14, 14, 48), 48, 3, 1, 48),
                                                  (low(2, 15, 14, 48), 48, 3, 2, 48)):
        weight = fixed(filters, data.shape[-1] // groups, kernel, kernel, values="small")
        yield sample("_gluon_amp_convolution", (data, weight), num_filter=filters, kernel=(kernel, kernel),
                     stride=(stride, stride), pad=(kernel // 2, kernel // 2), num_group=groups, no_bias=True,
                     tolerance=6)


def _means() -> Iterable[Sample]:
    """Yield what takes maps in FP32 only."""
    for data, axis in ((fixed(2, 3, 6, 8), 1), (fixed(300, 17), 0), (fixed(4, 2, 16, 12, 12), -4)):
        yield sample("_gluon_amp_sum", data, axis=axis, note=" x ".join(map(str, data.shape)), reference="sum")
    for data in (fixed(2, 16, 6, 8), fixed(3, 5, 7, 33), fixed(4, 24, 40, 40)):
        yield sample("_gluon_amp_pooling", data, global_pool=True, pool_type="avg", kernel=(1, 1),
                     note=" x ".join(map(str, data.shape)), reference="Pooling")
        for kind, side, stride in (("max", 3, 2), ("avg", 3, 1)):
            yield sample("_gluon_amp_pooling", data, pool_type=kind, kernel=(side, side), stride=(stride, stride),
                         pad=(1, 1), note=" x ".join(map(str, data.shape)), reference="Pooling")
    # In bfloat16 resizing is compared by tests/native/test_native_resize.py.
    for data, height, width, aligns in ((fixed(2, 16, 6, 8), 11, 5, True), (fixed(3, 5, 7, 33), 20, 66, False),
                                        (fixed(4, 16, 40, 40), 13, 80, True)):
        yield sample("_gluon_amp_resize", data, height=height, width=width, align_corners=aligns,
                     note=" x ".join(map(str, data.shape)), reference="_contrib_BilinearResize2D")


_STATES = {"sgd": 0, "sgd_momentum": 1, "nag": 1, "adam": 2, "adamw": 2, "lamb": 2}


def _updates() -> Iterable[Sample]:
    for name, states in _STATES.items():
        inputs: list[Input] = []
        for shape in ((7,), (33, 5), (40, 1000)):
            inputs += [fixed(*shape, aux=True), low(*shape)]
            inputs += [fixed(*shape, values="positive", aux=True)] * states
        attrs: dict[str, Any] = {"steps": [3, 3, 3]} if name == "lamb" else {}
        attrs.update({"momentum": 0.9} if states == 1 else {})
        yield sample(f"_gluon_amp_{name}", inputs, num_weights=3, lrs=[0.1, 0.01, 0.02], wds=[0.01, 0.0, 0.1],
                     gradient=False, in_graphs=False, **attrs)


def _checks() -> Iterable[Sample]:
    """Yield what takes gradients of FP32 weights."""
    for shapes in (((7,),), ((33, 5), (1,)), ((40, 5000), (7,), (33, 5))):
        yield sample("_gluon_amp_all_finite", [fixed(*shape) for shape in shapes], num_arrays=len(shapes),
                     note=", ".join(" x ".join(map(str, shape)) for shape in shapes), gradient=False, in_graphs=False,
                     reference="multi_all_finite")


def _boxes() -> Iterable[Sample]:
    """Yield rows of scores and boxes."""
    for data in (fixed(1, 30, 6), fixed(2, 64, 6)):
        yield sample("_gluon_amp_box_nms", data, note=" x ".join(map(str, data.shape)), overlap_thresh=0.3,
                     reference="_contrib_box_nms")


SAMPLES: tuple[Sample, ...] = (*_in_both((*_pointwise(), *_rows(), *_products(), *_attention(), *_recurrent(), *_maps(),
                                          *_updates())), *_means(), *_checks(), *_boxes())
