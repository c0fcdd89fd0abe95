"""Networks whose operators run in C++, and what they and their gradients give for batches of several sizes."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import HybridBlock, nn, rnn

from gluon_amp import native

BATCH, LENGTH, HEADS, UNITS = 4, 32, 4, 128
FLAGS = [{"static_alloc": False}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]
requires_onednn = pytest.mark.skipif(not native.is_available("_gluon_amp_attention"), reason="oneDNN is missing")


class Everything(HybridBlock):
    """LayerNorm, clip, recurrent layers and products of matrices; tensors with several readers."""

    def __init__(self, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.dense = nn.Dense(64, flatten=False, in_units=16)
            self.first, self.second = nn.LayerNorm(in_channels=64), nn.LayerNorm(in_channels=64)
            self.lstm = rnn.LSTM(32, 2, input_size=64, dropout=dropout, bidirectional=True)

    def hybrid_forward(self, F, x):
        y = self.first(self.dense(x))
        y = F.clip(y + self.second(y), -0.5, 1.5)
        z = self.lstm(y)
        return F.batch_dot(F.clip(z, -0.1, 0.1), F.batch_dot(y, y, transpose_b=True), transpose_a=True)


class Encoder(HybridBlock):
    """A layer of an encoder, with projections that are joined up to attention or not."""

    def __init__(self, joint, **kwargs):
        super().__init__(**kwargs)
        self.joint = joint
        with self.name_scope():
            self.projections = nn.Dense(3 * UNITS, flatten=False, in_units=UNITS)
            self.out = nn.Dense(UNITS, flatten=False, in_units=UNITS)
            self.wide = nn.Dense(16 * UNITS, flatten=False, in_units=UNITS)
            self.narrow = nn.Dense(UNITS, flatten=False, in_units=16 * UNITS)
            self.norm1, self.norm2 = nn.LayerNorm(in_channels=UNITS), nn.LayerNorm(in_channels=UNITS)

    def hybrid_forward(self, F, x, bias):
        split = F.split(self.projections(x), num_outputs=3, axis=2)
        if not self.joint:
            split = [F.relu(each) for each in split]
        queries, keys, values = (_by_head(F, each) for each in split)
        scores = F.batch_dot(queries, keys, transpose_b=True) * 0.125
        scores = F.broadcast_add(scores, F.repeat(bias, repeats=HEADS, axis=0)) if self.joint else scores
        x = self.norm1(x + self.out(_from_heads(F, F.batch_dot(F.softmax(scores), values))))
        return self.norm2(x + self.narrow(F.LeakyReLU(self.wide(x), act_type="gelu")))


class Cell(HybridBlock):
    """Attention in one of the forms of GluonNLP, between dense layers."""

    def __init__(self, kind, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.mix = {"lengths": self._of_lengths, "mask": self._of_mask, "memory": self._of_memory}[kind]
        with self.name_scope():
            self.projections = nn.Dense(3 * UNITS, flatten=False, in_units=UNITS)
            self.out = nn.Dense(UNITS, flatten=False, in_units=UNITS)
            self.memory = nn.Dense(2 * UNITS, flatten=False, in_units=UNITS)
            self.dropout = nn.Dropout(dropout)

    def hybrid_forward(self, F, x, extra):
        return self.out(self.mix(F, x, extra))

    def _of_memory(self, F, x, memory):
        queries = F.slice_axis(self.projections(F.swapaxes(x, 0, 1)), axis=2, begin=0, end=UNITS)
        keys_values = self.memory(F.swapaxes(memory, 0, 1))
        scores = F.contrib.interleaved_matmul_encdec_qk(queries, keys_values, heads=HEADS)
        weights = self.dropout(F.softmax(scores, axis=-1))
        return F.swapaxes(F.contrib.interleaved_matmul_encdec_valatt(keys_values, weights, heads=HEADS), 0, 1)

    def _of_lengths(self, F, x, lengths):
        joined = self.projections(F.swapaxes(x, 0, 1))
        scores = F.contrib.interleaved_matmul_selfatt_qk(joined, heads=HEADS)
        lengths = F.broadcast_axis(F.expand_dims(F.cast(lengths, "int32"), axis=1), axis=1, size=HEADS)
        weights = F.softmax(scores, length=F.reshape(lengths, (-1, 0), reverse=True), use_length=True, axis=-1)
        mixed = F.contrib.interleaved_matmul_selfatt_valatt(joined, self.dropout(weights), heads=HEADS)
        return F.swapaxes(mixed, 0, 1)

    def _of_mask(self, F, x, mask):
        queries, keys, values = (_by_head(F, F.relu(each))
                                 for each in F.split(self.projections(x), num_outputs=3, axis=2))
        mask = F.reshape(F.broadcast_axis(F.expand_dims(mask, axis=1), axis=1, size=HEADS), (-1, 0, 0), reverse=True)
        scores = F.batch_dot(F.contrib.div_sqrt_dim(queries), keys, transpose_b=True)
        weights = F.softmax(F.where(mask, scores, -1e4 * F.ones_like(scores)), axis=-1) * mask
        weights = F.reshape(self.dropout(weights), (-1, HEADS, 0, 0), reverse=True)
        return _from_heads(F, F.batch_dot(F.reshape(weights, (-1, 0, 0), reverse=True), values))


class Softmax(HybridBlock):
    """Softmax with lengths and a temperature of what reads an input twice."""

    def hybrid_forward(self, F, x, lengths):
        shares = F.softmax(F.broadcast_mul(x, x), F.cast(lengths, "int32"), use_length=True, temperature=3.0)
        return shares * F.log_softmax(x, temperature=0.5)


def _by_head(F, x):
    return F.reshape(F.transpose(F.reshape(x, (0, 0, HEADS, -1)), (0, 2, 1, 3)), (-1, 0, 0), reverse=True)


def _from_heads(F, x):
    return F.reshape(F.transpose(F.reshape(x, (-1, HEADS, 0, 0), reverse=True), (0, 2, 1, 3)), (0, 0, -1))


_MADE = {"everything": Everything, "joint": lambda **kwargs: Encoder(True, **kwargs),
         "apart": lambda **kwargs: Encoder(False, **kwargs), "softmax": lambda prefix: Softmax(prefix),
         **{kind: lambda kind=kind, **kwargs: Cell(kind, **kwargs) for kind in ("lengths", "mask", "memory")}}
_BATCHES = {"everything": (40, 24), "joint": (32, 28), "apart": (32, 28), "softmax": (8,)}


def network(kind="everything", grad_req="write", flags=None, **options):
    """Return an initialized network; flags hybridize it."""
    mx.random.seed(3)
    net = _MADE[kind](prefix="net_", **options)
    net.initialize(mx.init.Xavier())
    net.collect_params().setattr("grad_req", grad_req)
    if flags is not None:
        net.hybridize(**flags)
    return net


def inputs(kind="everything", batch=40, seed=None):
    """Return a batch for a network."""
    random = np.random.RandomState(batch if seed is None else seed)
    if kind == "everything":
        return [nd.array(random.normal(size=(16, batch, 16)))]
    if kind == "softmax":
        return [nd.array(random.normal(size=(batch, 64, 64))), nd.array(random.randint(65, size=(batch, 64)))]
    x = nd.array(random.normal(size=(batch, LENGTH, UNITS)))
    if kind in ("joint", "apart"):
        extra = nd.zeros((batch, 1, LENGTH))
        extra[:, :, LENGTH // 2:] = -1e4
        return [x, extra]
    extra = random.randint(LENGTH + 1, size=(batch, LENGTH))
    if kind == "mask":
        extra = random.uniform(size=(batch, LENGTH, LENGTH)) < 0.6
        extra[0, 3] = False  # all positions off
    elif kind == "memory":
        extra = random.normal(size=(batch, LENGTH + 9, UNITS))
    return [x, nd.array(extra)]


def train(net, kind="everything", grad_req="write", seed=None):
    """Return values and gradients for batches of several sizes, each of which runs twice."""
    found = []
    for batch in _BATCHES.get(kind, (8, 6)):
        arrays, parameters = inputs(kind, batch), net.collect_params()
        for array in arrays:
            array.attach_grad(grad_req)
        parameters.zero_grad()
        if seed is not None:
            mx.random.seed(seed)
        for _ in range(2):
            with autograd.record():
                out = net(*arrays)
            out.backward(nd.array(np.random.RandomState(batch).normal(size=out.shape)))
        found += [out.asnumpy(), *(array.grad.asnumpy() for array in arrays),
                  *(parameter.grad().asnumpy() for parameter in parameters.values())]
    return found


def distance(received, expected):
    """Return how far the arrays of a list are from those of another one, at most and relatively."""
    return max(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-30)
               for one, other in zip(received, expected))
