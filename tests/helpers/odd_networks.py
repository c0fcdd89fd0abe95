"""Small networks whose graphs are unusual: control flow, custom operators, shared weights, odd layouts and sizes."""
from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
from mxnet.gluon import HybridBlock, nn, rnn

__all__ = ["CASES", "Case"]


class Case(HybridBlock):
    """A function of arrays and named weights as a block.

    Parameters
    ----------
    function : callable
        Takes ``F``, the arguments, and a dict of weights.
    shapes : dict
        Name of each weight to its shape.
    blocks : dict
        Name of each inner block to the block; they are handed over among the weights.
    """

    def __init__(self, function: Callable, shapes: dict[str, tuple[int, ...]], blocks: dict[str, Any]):
        super().__init__(prefix="odd_")
        self.function = function
        self.blocks = blocks
        with self.name_scope():
            for name, shape in shapes.items():
                setattr(self, name, self.params.get(name, shape=shape))
        for name, block in blocks.items():
            setattr(self, name, block)

    def hybrid_forward(self, F, *args, **weights):
        return self.function(F, *args, **weights, **self.blocks)


@mx.operator.register("odd_square")
class _SquareProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return _Square()


class _Square(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 2 * in_data[0] * out_grad[0])


def _conv(F, x, w, **attrs):
    kernel = attrs.pop("kernel", (3, 3))
    filters = attrs.pop("num_filter", w.shape[0] if hasattr(w, "shape") else 32)
    return F.Convolution(x, w, kernel=kernel, num_filter=filters, no_bias=True, **attrs)


def _dense(F, x, w, units=32, **attrs):
    return F.FullyConnected(x, w, num_hidden=units, no_bias=True, **attrs)


def several_outputs(F, x, w):
    y = _dense(F, x, w)
    parts = F.split(y, num_outputs=4, axis=1)
    return parts[0], parts[2] * 2, y, F.relu(y), parts[3] + parts[1]


def top_k(F, x, w):
    values, indices = F.topk(x, k=3, axis=1, ret_typ="both")  # of data: rounding would decide between close values
    chosen, ordered = F.sum(F.one_hot(indices, depth=32), axis=1), F.sort(x, axis=1)
    return _dense(F, chosen, w), F.broadcast_mul(_dense(F, ordered, w), F.sum(values, axis=1, keepdims=True))


def foreach(F, x, w):
    def step(data, states):
        state = F.tanh(_dense(F, F.concat(data, states[0], dim=1), w))
        return state, [state]
    outputs, states = F.contrib.foreach(step, F.transpose(F.reshape(x, (0, 2, -1)), (1, 0, 2)), [F.zeros((4, 32))])
    return outputs, states[0]


def foreach_outside(F, x, w):
    y = F.relu(_dense(F, x, w))
    total, _ = F.contrib.foreach(lambda row, state: (row + state, row * 0.5 + state), y, F.zeros((32,)))
    return _dense(F, total, w)


def while_loop(F, x, w):
    _, states = F.contrib.while_loop(lambda i, y: i < 3, lambda i, y: ([], [i + 1, F.tanh(_dense(F, y, w))]),
                                     [F.zeros((1,)), x], max_iterations=5)
    return states[1]


def cond(F, x, w):
    y = _dense(F, x, w)
    return F.contrib.cond(F.sum(x) > -1e6, lambda: F.relu(y), lambda: y * 2)


def custom(F, x, w):
    y = _dense(F, x, w)
    return _dense(F, F.Custom(y, op_type="odd_square") * 0.1, w) + F.Custom(x, op_type="odd_square")


def read_twice(F, x, w):
    y = _dense(F, x, w)
    return y + y, y * y, F.concat(y, y, dim=1), F.batch_dot(F.expand_dims(y, 2), F.expand_dims(y, 1))


def itself(F, x, w):
    return x, _dense(F, x, w), w, x + 0


def no_weights_used(F, x, w):
    return F.broadcast_add(x * 2, F.sum(w, axis=1, keepdims=False))


def weight_shared_by_kinds(F, x, w):
    y = _dense(F, x, w)
    z = F.Convolution(F.reshape(y, (0, 0, 1, 1)), F.reshape(w, (32, 32, 1, 1)), kernel=(1, 1), num_filter=32,
                      no_bias=True)
    return F.dot(F.Flatten(z), w, transpose_b=True) + F.dot(y, F.transpose(w))


def weight_times_weight(F, x, w, v):
    return _dense(F, x, w * v + F.dot(w, v) * 0.1)


def normalized_weight(F, x, w):
    return _dense(F, x, F.L2Normalization(w)) + _dense(F, x, F.broadcast_div(w, F.norm(w, axis=1, keepdims=True)))


def grouped(F, x, w, v):
    y = _conv(F, x, w, num_filter=32, num_group=4, pad=(1, 1))
    return _conv(F, y, v, num_filter=32, num_group=32, kernel=(3, 3), pad=(2, 2), dilate=(2, 2))


def deconvolution(F, x, w, v):
    y = F.Deconvolution(x, w, kernel=(4, 4), stride=(2, 2), pad=(1, 1), num_filter=32, no_bias=True)
    return F.Deconvolution(y, v, kernel=(3, 3), num_filter=32, num_group=2, no_bias=True), y


def asymmetric(F, x, w, v):
    y = _conv(F, x, w, kernel=(1, 3), pad=(0, 1), num_filter=32, stride=(2, 1))
    return _conv(F, y, v, kernel=(3, 1), dilate=(1, 1), pad=(1, 0), num_filter=24)


def one_dimension(F, x, w):
    return F.Pooling(F.Convolution(F.reshape(x, (0, 0, -1)), w, kernel=(3,), num_filter=32, pad=(1,)
                                   , no_bias=True), kernel=(2,), stride=(2,), pool_type="max")


def three_dimensions(F, x, w):
    y = F.Convolution(F.expand_dims(x, 2), w, kernel=(1, 3, 3), num_filter=32, pad=(0, 1, 1), no_bias=True)
    return F.Pooling(y, kernel=(1, 2, 2), stride=(1, 2, 2), pool_type="avg")


def channels_last(F, x, w):
    y = F.transpose(x, (0, 2, 3, 1))
    y = F.broadcast_add(F.dot(y, w), F.mean(y, axis=(1, 2), keepdims=True))
    return F.transpose(F.LayerNorm(y, F.ones((32,)), F.zeros((32,))), (0, 3, 1, 2))


def squeeze_and_excite(F, x, w, v):
    y = _conv(F, x, w, num_filter=32, pad=(1, 1))
    gate = F.sigmoid(_conv(F, F.Pooling(y, global_pool=True, pool_type="avg", kernel=(1, 1)), v, kernel=(1, 1),
                           num_filter=32))
    return F.broadcast_mul(y, gate), gate


def pixel_shuffle(F, x, w):
    y = _conv(F, x, w, num_filter=32, pad=(1, 1))
    y = F.reshape(y, (0, -4, -1, 4, 0, 0))
    y = F.reshape(y, (0, 0, -4, 2, 2, 0, 0))
    return F.reshape(F.transpose(y, (0, 1, 4, 2, 5, 3)), (0, 0, -3, -3))


def slices(F, x, w):
    y = _conv(F, x, w, num_filter=32, pad=(1, 1))
    return (F.slice(y, begin=(None, 3, 0, 1), end=(None, 30, None, None), step=(1, 2, 1, 3)),
            F.slice_like(y, F.zeros((1, 32, 3, 3)), axes=(2, 3)), F.reverse(y, axis=2), F.tile(y, (1, 2, 1, 1)),
            F.pad(y, mode="constant", pad_width=(0, 0, 0, 0, 1, 2, 3, 0), constant_value=0.5))


def where_and_masks(F, x, w):
    y = _dense(F, x, w)
    mask = y > 0
    return F.where(mask, y, -y), F.broadcast_mul(y, mask), F.SequenceMask(F.expand_dims(y, 0), F.ones((4,)),
                                                                          use_sequence_length=True)


def integers(F, x, w, table):
    index = F.cast(F.clip(F.abs(F.BlockGrad(x)) * 3, 0, 9), "int32")
    embedded = F.Embedding(index, table, input_dim=10, output_dim=32)
    return _dense(F, F.sum(embedded, axis=1), w), F.take(table, index), F.gather_nd(table, F.slice_axis(
        F.transpose(index), axis=0, begin=0, end=1)), index


def ctc(F, x, w):
    y = F.transpose(F.reshape(_dense(F, x, w), (0, 8, 4)), (1, 0, 2))
    return F.CTCLoss(y, F.ones((4, 2)))


def losses(F, x, w):
    y = _dense(F, x, w)
    label = F.argmax(x, axis=1)
    return (F.softmax_cross_entropy(y, label), -F.pick(F.log_softmax(y), label), F.smooth_l1(y, scalar=2.0),
            F.Activation(y, "softrelu") - y, F.make_loss(F.mean(F.square(y))))


def softmax_output(F, x, w):
    return F.SoftmaxOutput(_dense(F, x, w), F.argmax(x, axis=1))


def attention(F, x, w):
    qkv = F.reshape(F.FullyConnected(F.reshape(x, (2, 2, 32)), w, num_hidden=96, no_bias=True, flatten=False),
                    (2, 2, 96))
    scores = F.contrib.interleaved_matmul_selfatt_qk(qkv, heads=4)
    return F.contrib.interleaved_matmul_selfatt_valatt(qkv, F.softmax(scores), heads=4)


def einsum_like(F, x, w):
    y = F.reshape(_dense(F, x, w), (4, 4, 8))
    return F.linalg_gemm2(y, y, transpose_b=True), F.linalg.syrk(y)


def float64_inside(F, x, w):
    y = F.cast(_dense(F, x, w), "float64")
    return F.cast(F.sum(y * y, axis=1), "float32"), y


def stop_gradient(F, x, w):
    y = _dense(F, x, w)
    return F.broadcast_add(F.BlockGrad(y) * y, F.stop_gradient(F.sum(w, axis=0, keepdims=True)))


def long_chain(F, x, w):
    for _ in range(12):
        x = F.tanh(_dense(F, x, w)) + 0.5 * x
    return x


def densely_connected(F, x, w):
    maps = [x]
    for _ in range(4):
        maps.append(F.relu(_dense(F, F.add_n(*maps) / len(maps), w)))
    return F.concat(*maps, dim=1)


def shared_block(F, x, inner):
    y = inner(x)
    return inner(y), y, inner(inner(x * 0.5))


def batch_norm_twice(F, x, norm, w):
    y = _conv(F, x, w, num_filter=32, pad=(1, 1))
    return norm(y) + norm(y * 2)


def cells(F, x, cell):
    steps = F.split(F.reshape(x, (0, 4, 8)), num_outputs=4, axis=1, squeeze_axis=True)
    states = [F.zeros((4, 16)), F.zeros((4, 16))]
    outputs = []
    for one in steps:
        output, states = cell(one, states)
        outputs.append(output)
    return F.stack(*outputs, axis=1), states[1]


def layers_of_rnn(F, x, layer):
    return layer(F.reshape(x, (0, 4, 8)))


def _both(layer):
    return lambda F, x, inner: (inner(x), F.relu(inner(x * 2)))


FLAT, MAP = (4, 32), (2, 32, 8, 8)
W = {"w": (32, 32)}
W3 = {"w": (32, 32, 3, 3)}
# Name to the function, the shape of the data, weights, and a function that makes inner blocks.
CASES: dict[str, tuple[Callable, tuple[int, ...], dict, Callable]] = {
    **{function.__name__: (function, FLAT, W, dict) for function in (
        several_outputs, top_k, while_loop, cond, custom, read_twice, itself, no_weights_used, weight_shared_by_kinds,
        normalized_weight, where_and_masks, ctc, losses, softmax_output, einsum_like, float64_inside, stop_gradient,
        long_chain, densely_connected, foreach_outside)},
    "foreach": (foreach, FLAT, {"w": (32, 48)}, dict),
    "weight_times_weight": (weight_times_weight, FLAT, {"w": (32, 32), "v": (32, 32)}, dict),
    "integers": (integers, FLAT, {"w": (32, 32), "table": (10, 32)}, dict),
    "attention": (attention, FLAT, {"w": (96, 32)}, dict),
    "one_dimension": (one_dimension, MAP, {"w": (32, 32, 3)}, dict),
    "three_dimensions": (three_dimensions, MAP, {"w": (32, 32, 1, 3, 3)}, dict),
    "channels_last": (channels_last, MAP, W, dict),
    "grouped": (grouped, MAP, {"w": (32, 8, 3, 3), "v": (32, 1, 3, 3)}, dict),
    "deconvolution": (deconvolution, MAP, {"w": (32, 32, 4, 4), "v": (32, 16, 3, 3)}, dict),
    "asymmetric": (asymmetric, MAP, {"w": (32, 32, 1, 3), "v": (24, 32, 3, 1)}, dict),
    "squeeze_and_excite": (squeeze_and_excite, MAP, {"w": (32, 32, 3, 3), "v": (32, 32, 1, 1)}, dict),
    "pixel_shuffle": (pixel_shuffle, MAP, W3, dict),
    "slices": (slices, MAP, W3, dict),
    "batch_norm_twice": (batch_norm_twice, MAP, W3, lambda: {"norm": nn.BatchNorm(in_channels=32, prefix="norm_")}),
    "shared_block": (shared_block, FLAT, {}, lambda: {"inner": nn.Dense(32, in_units=32, activation="tanh",
                                                                         prefix="inner_")}),
    "cells": (cells, FLAT, {}, lambda: {"cell": rnn.LSTMCell(16, input_size=8, prefix="cell_")}),
    "lstm": (layers_of_rnn, FLAT, {}, lambda: {"layer": rnn.LSTM(16, layout="NTC", input_size=8, bidirectional=True,
                                                                  prefix="layer_")}),
    "gru": (layers_of_rnn, FLAT, {}, lambda: {"layer": rnn.GRU(16, 2, layout="NTC", input_size=8, prefix="layer_")}),
    "prelu": (_both(0), FLAT, {}, lambda: {"inner": nn.PReLU(prefix="inner_")}),
    "instance_norm": (_both(0), MAP, {}, lambda: {"inner": nn.InstanceNorm(in_channels=32, prefix="inner_")}),
    "group_norm": (_both(0), MAP, {}, lambda: {"inner": nn.GroupNorm(4, prefix="inner_")}),
    "reflection": (_both(0), MAP, {}, lambda: {"inner": nn.ReflectionPad2D(2)}),
}
