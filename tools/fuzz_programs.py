"""Random networks: a case names templates of operators and what is tried with them; Hypothesis draws cases."""
from __future__ import annotations

import random
import re
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Callable, Mapping, NamedTuple, Sequence, Tuple

import apart  # noqa: F401  isort: skip  finds the package
import gluon_amp as amp  # isort: skip
import mxnet as mx
import numpy as np
from hypothesis import strategies as st
from mxnet import gluon
from operator_samples import LOW, MXNET, UNARY, Input, Sample, fill

Shape = Tuple[int, int, int]  # images in a batch, rows, columns
SHAPES: tuple[Shape, ...] = ((2, 8, 8), (2, 12, 8), (2, 4, 4), (3, 12, 8), (1, 16, 12), (6, 8, 4))
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"active": False}, "hybridized": {}, "static": {"static_alloc": True},
    "static shape": {"static_alloc": True, "static_shape": True}, "parts": {}}
KINDS = ("operators", "layers", "loops", "numpy")
# data: it has gradients; frozen: some parameters have none; native: C++ at every size; inference: gradients outside of
# training; hook: on every operator; copy: deeply; again: hybridized twice; file: parameters from one; bind: own arrays
SWITCHES = ("data", "frozen", "native", "inference", "hook", "copy", "again", "file", "bind")


class Kind(NamedTuple):
    """What a tensor is: a map (N, C, H, W), halved so many times, a sequence (N, T, C), flat (N, C), a scalar ()."""

    name: str
    channels: int = 1
    halved: int = 0


class Row(NamedTuple):
    """A template of a step.

    In the text ``{0}`` and ``{1}`` are tensors, ``$c`` is a number (see ``_letters``), ``<w:o,c>`` a parameter with its
    shape in such letters, ``<gluon.nn.GELU:>`` a layer with its arguments, and ``[[a|b]]`` one of two.
    """

    kinds: str  # of the first tensor; behind a plus sign that of the second, which has the first one's otherwise
    result: str  # how the kind of the result differs: another name, letters of its channels, 'up', 'down'
    text: str


BLOCK = Row("", "", "")  # where the next block begins
INPUTS = (Kind("map", 16), Kind("map", 16))


@dataclass(frozen=True)
class Case:
    """A network, and what is tried with it."""

    kind: str = "operators"
    genes: tuple[tuple[Row, int], ...] = ()  # templates, and numbers that decide what they leave open
    check: str = "ways"
    dtype: str = "float32"
    way: str = "eager"
    switches: frozenset[str] = frozenset()
    shapes: tuple[Shape, ...] = SHAPES[:2]
    exact: bool = False  # whether all operators are exact on small integers, which the values are then
    seed: int = 0  # of values

    @property
    def numpy(self) -> bool:
        """Whether it is made of NumPy-style operators and arrays."""
        return self.kind == "numpy"


def _rows(*table: Sequence[str]) -> list[Row]:
    return [Row(kinds, result, text) for kinds, result, *texts in table for text in texts]


_ANY = "map flat seq"
_PIXELS = "kernel=($k, $k), pad=($p, $p), num_filter=$o"
_DEPTHWISE = "F.Convolution({0}, <w:c,1,3,3>, kernel=(3, 3), num_filter=$c, num_group=$c, no_bias=True, "
_STATE = "F.slice_axis(F.slice_axis(F.swapaxes({0}, 0, 1), axis=0, begin=0, end=1), axis=2, begin=0, end=8)"
_HEADS = "F.contrib.interleaved_matmul_selfatt_"
_OUT = "({0} * 1e6 * 1e-6)"  # behind numbers that float16 cannot hold
# Operators by the name that they have in mx.nd, which NumPy-style networks replace; exact on integers
SHARED = _rows(
    ("map", "o", f"F.Convolution({{0}}, <w:o,c,k,k>, <b:o>, {_PIXELS})",
     f"F.Convolution({{0}}, <w:o,c,k,k>, {_PIXELS}, no_bias=True)",
     f"F.Convolution({{0}}, <w:o,c//8,k,k>, {_PIXELS}, num_group=8, no_bias=True)"),
    ("map", "o down", f"F.Convolution({{0}}, <w:o,c,k,k>, <b:o>, {_PIXELS}, stride=(2, 2))"),
    ("map", "", f"{_DEPTHWISE}pad=(1, 1))", f"{_DEPTHWISE}pad=(2, 2), dilate=(2, 2))"),
    ("map", "o up", "F.Deconvolution({0}, <w:c,o,2,2>, kernel=(2, 2), stride=(2, 2), num_filter=$o, no_bias=True)"),
    ("seq", "o", "F.swapaxes(F.Convolution(F.swapaxes({0}, 1, 2), <w:o,c,k>, kernel=($k,), pad=($p,), num_filter=$o, "
                 "no_bias=True), 1, 2)"),
    ("flat seq", "o", "F.FullyConnected({0}, <w:o,c>, <b:o>, num_hidden=$o, flatten=False)",
     "F.FullyConnected({0}, <w:o,c>, num_hidden=$o, flatten=False, no_bias=True)"),
    ("map", "down", "F.Pooling({0}, pool_type='$m', kernel=(2, 2), stride=(2, 2))"),
    ("map", "", "F.Pooling({0}, pool_type='$m', kernel=(3, 3), pad=(1, 1), stride=(1, 1))"),
    (_ANY, "", "F.Activation({0}, act_type='relu')", "{0} + {1}", "{0} - {1}", "-{0}", "F.clip({0}, [[0|-2]], 2)"))
SHARED_ON_FLOATS = _rows(
    ("map", "", "F.BatchNorm({0}, <gamma:c>, <beta:c>, <mean:c>, <var:c>, fix_gamma=False, eps=1e-3)"),
    ("flat seq", "", "F.BatchNorm({0}, <gamma:c>, <beta:c>, <mean:c>, <var:c>, fix_gamma=False, axis=-1)",
     # MXNet overwrites a gamma that is fixed: no other operator may read it.
     "F.BatchNorm({0}, <fixed:c>, <beta:c>, <mean:c>, <var:c>, fix_gamma=True, axis=-1)",
     "F.LayerNorm({0}, <gamma:c>, <beta:c>, axis=-1)"),
    ("seq", "", "F.batch_dot(F.softmax(F.batch_dot({0} * $s, {1}, transpose_b=True)), {1})"),
    (_ANY, "", "F.Activation({0}, act_type='[[sigmoid|tanh|softrelu|softsign]]')", "F.Dropout({0}, p=$d)",
     "F.softmax({0}, axis=1)", "{0} * 0.5", "{0} / (F.abs({1}) + 1)", "{0} * F.tanh({1})"))
OPERATORS = _rows(
    ("map", "seq", "F.transpose(F.reshape({0}, (0, 0, -1)), (0, 2, 1))"), (_ANY, "2*c", "F.concat({0}, {1}, dim=$a)"),
    # Both outputs are read: MXNet does not write the gradient of one that is not, with static_alloc=True.
    (_ANY, "h", "F.add_n(*F.SliceChannel({0}, num_outputs=2, axis=$a))", "F.slice_axis({0}, axis=$a, begin=0, end=$h)"),
    ("map", "up", "F.UpSampling({0}, scale=2, sample_type='nearest')"),
    ("flat", "o", "F.dot({0}, <w:o,c>, transpose_b=True)"),
    ("seq", "o", "F.squeeze(F.linalg_gemm2(F.expand_dims({0}, axis=1), F.broadcast_like(<w:1,1,c,o>, "
                 "F.expand_dims({0}, axis=1), lhs_axes=(0,), rhs_axes=(0,))), axis=1)"),
    (_ANY, "", "F.[[elemwise_add|broadcast_add|add_n|broadcast_sub|maximum|slice_like]]({0}, {1})",
     "F.where({0} > {1}, {0}, {1})", "F.reshape_like({0}, F.BlockGrad({1}))", "F.flip({0}, axis=1)",
     "F.squeeze(F.slice_axis(F.stack({0}, {1}, axis=0), axis=0, begin=1, end=2), axis=0)",
     "F.BlockGrad(F.slice_axis({0}, axis=0, begin=0, end=None))",
     "F.cast(F.cast({0}, dtype='[[float64|float16]]') * 0.5, dtype='float32') * 2"),
    ("map1", "", "F.depth_to_space(F.space_to_depth({0}, block_size=2), block_size=2)",
     "F.slice({0}, begin=(None, None, 1, 1), end=(None, None, None, None)).pad(mode='constant', "
     "pad_width=(0, 0, 0, 0, 1, 0, 1, 0))", "F.broadcast_sub({0}, F.max({0}, axis=1, keepdims=True))"),
    ("seq", "", "F.SequenceReverse({0})", "F.slice(F.repeat({0}, repeats=2, axis=1), begin=(None, 1, None), "
                                          "end=(None, None, None), step=(1, 2, 1))",
     "F.broadcast_add(F.sum(F.tile({0}, reps=(1, 1, 2)), axis=2, keepdims=True) * 0, {0})"))
OPERATORS_ON_FLOATS = _rows(
    ("map", "", "F.broadcast_mul({0}, <gamma:1,c,1,1>)", "F.GroupNorm({0}, <gamma:4>, <beta:4>, num_groups=4)",
     "F.InstanceNorm({0}, <gamma:c>, <beta:c>)", "F.L2Normalization({0} + 1, mode='channel')",
     "F.contrib.BilinearResize2D({0}, like=F.BlockGrad({0}), mode='like')", "prelu(F, {0}, <alpha:c>, (1, -1, 1, 1))",
     "F.broadcast_mul({0}, F.contrib.AdaptiveAvgPooling2D({0}, output_size=1))"),
    ("map+flat", "", "F.broadcast_mul({0}, F.sigmoid(F.reshape({1}, (0, -1, 1, 1))))"),
    ("seq", "8", "F.swapaxes(F.broadcast_add((r := F.RNN(F.swapaxes({0}, 0, 1), F._internal._rnn_param_concat("
                 "F.reshape(<w:32,c>, (-1,)), F.reshape(<w:32,8>, (-1,)), <b:32>, <b:32>, dim=0), "
                 f"{_STATE}, F.tanh({_STATE}), "
                 "state_size=8, num_layers=1, mode='lstm', state_outputs=True))[0], r[1]), 0, 1)"),
    ("seq", "", "F.broadcast_add({0}, F.expand_dims(F.take(<e:200,c>, F.contrib.arange_like({0}, axis=1)), axis=0))",
     "F.broadcast_add({0}, F.expand_dims(F.Embedding(F.contrib.arange_like({0}, axis=1), <e:200,c>, input_dim=200, "
     "output_dim=$c), axis=0))",
     f"F.swapaxes({_HEADS}valatt((q := F.FullyConnected(F.swapaxes({{0}}, 0, 1), <w:3*c,c>, num_hidden=3 * $c, "
     f"flatten=False, no_bias=True)), F.softmax({_HEADS}qk(q, heads=4), axis=-1), heads=4), 0, 1)"),
    (_ANY, "", "F.LeakyReLU({0}, act_type='[[leaky|elu|gelu|selu]]', slope=0.1)", "F.smooth_l1({0}, scalar=1)",
     "F.broadcast_hypot({0}, F.abs({1}) + 1) * 0.5", "F.broadcast_sub({0}, F.mean({0}, axis=1, keepdims=True))",
     "F.broadcast_div({0}, F.norm(F.abs({0}) + 0.1, axis=1, keepdims=True) + 1) * 4"),
    # Operators that make their own gradient, which nothing else reads
    ("flat", "end", f"F.[[LinearRegression|MAERegression]]Output({_OUT}, F.BlockGrad({_OUT} * 0.5), grad_scale=30)",
     f"F.SoftmaxOutput({_OUT}, F.argmax({_OUT}, axis=1), grad_scale=30)",
     f"F.MakeLoss(F.square({_OUT}), grad_scale=5)"))
_SPLIT = ("F.np.transpose(F.npx.reshape(F.npx.fully_connected({0}, <w:c,c>, num_hidden=$c, flatten=False, "
          "no_bias=True), (-2, -2, 4, -1)), (0, 2, 1, 3))")
_CENTRED = "({0} - F.np.mean({0}, axis=$a, keepdims=True))"
NUMPY = _rows(
    ("map", "seq", "F.np.swapaxes(F.npx.reshape({0}, (-2, -2, -5)), 1, 2)",
     "F.np.transpose(F.npx.reshape({0}, (-2, -2, -1)), (0, 2, 1))"),
    ("flat seq", "o", "F.np.tensordot({0}, <w:o,c>, axes=(($a,), (1,)))", "F.np.[[dot|matmul]]({0}, <w:c,o>)"),
    ("map", "o", "F.np.einsum('nchw,dc->ndhw', {0}, <w:o,c>)"), (_ANY, "2*c", "F.np.concatenate([{0}, {1}], axis=$a)"),
    (_ANY, "h", "F.np.add(*F.np.split({0}, 2, axis=$a))",
     "F.npx.slice({0}, begin=(None,) * $a + ($h,), end=(None,) * ($a + 1))"),
    (_ANY, "", "<beta:1> - {0}", "F.np.[[add|subtract|maximum|minimum]]({0}, {1})", "F.np.where({0} > {1}, {0}, {1})",
     "F.np.sum(F.np.stack([{0}, {1}], axis=1), axis=1)", "F.np.flip({0}, 1)", "F.np.roll({0}, shift=1, axis=0)",
     "({0}.astype('[[float64|float16]]') * 0.5).astype('float32') * 2"),
    (_ANY, "scalar", "F.np.max({0})"), ("map+scalar", "", "{0} + {1}", "{0} - {1}"),
    ("map", "", "F.npx.reshape(F.npx.reshape({0}, (-2, -6, 4, -1, -4)), (-2, -5, -4))"))
NUMPY_ON_FLOATS = _rows(
    ("map", "", "{0} * <gamma:c,1,1>"), ("map+flat", "", "{0} * F.npx.sigmoid(F.npx.reshape({1}, (-2, -2, 1, 1)))"),
    (_ANY, "scalar", "F.np.mean(F.np.square({0}))", "F.np.sum({0}) * 0.01"),
    ("flat+scalar", "", "{0} * F.np.tanh({1})"),
    ("seq", "", "F.npx.reshape(F.np.transpose(F.np.matmul(F.npx.softmax(F.np.matmul("
                f"{_SPLIT} * $s, F.np.swapaxes({_SPLIT}, 2, 3)), axis=-1), {_SPLIT}), (0, 2, 1, 3)), (-2, -2, -5))",
     "{0} + F.npx.embedding(F.npx.arange_like({0}, axis=1), <e:200,c>, input_dim=200, output_dim=$c)"),
    (_ANY, "", f"{_CENTRED} / F.np.sqrt(F.np.mean({_CENTRED} ** 2, axis=$a, keepdims=True) + 0.1)",
     "F.np.hypot({0}, F.np.abs({1}) + 1) * 0.5", "F.npx.leaky_relu({0}, act_type='[[leaky|gelu|elu]]', slope=0.1)",
     "F.np.where({0} > 0, {0}, {0} * 0.1)", "1 / (F.np.abs({0}) + 1)",
     "F.np.exp({0} * 0.2) / F.np.sum(F.np.exp({0} * 0.2), axis=1, keepdims=True)"))
# Elementwise operators of the samples, without those that jump or grow steeply
_LEFT_OUT = ("ceil fix floor rint round sign trunc around isfinite isinf isnan isneginf isposinf zeros_like ones_like "
             "degrees gamma gammaln BlockGrad make_loss exp expm1 sinh cosh square absolute _contrib_round_ste "
             "_contrib_sign_ste")
for _values, _data in {"normal": "{0}", "positive": "F.abs({0}) + 0.5", "unit": "F.tanh({0}) * 0.9"}.items():
    for _name in UNARY[_values].split():
        if _name.replace("_npi_", "") not in _LEFT_OUT.split() and _name[:5] not in ("_npx_", "_np_c"):
            _family = NUMPY_ON_FLOATS if _name.startswith("_npi_") else OPERATORS_ON_FLOATS
            _family.append(Row(_ANY, "", f"call(F, '{_name}', {_data})"))
LAYERS = _rows(
    ("map", "o", "<gluon.nn.Conv2D: $o, $k, padding=$p, in_channels=$c, activation=[[None|'relu']]>({0})"),
    ("flat seq", "o", "<gluon.nn.Dense: $o, in_units=$c, flatten=False, activation=[[None|'relu']]>({0})"),
    ("map1", "down", "<gluon.nn.MaxPool2D: 2, 2>({0})"))
LAYERS_ON_FLOATS = _rows(
    ("map", "", "<gluon.nn.BatchNorm: axis=1, in_channels=$c>({0})"),
    ("map1", "down", "<gluon.nn.AvgPool2D: 2, 2>({0})"),
    ("seq flat", "", "<gluon.nn.BatchNorm: axis=-1, in_channels=$c>({0})", "<gluon.nn.LayerNorm: in_channels=$c>({0})"),
    (_ANY, "", "<gluon.nn.[[GELU: |Swish: |ELU: 0.5|LeakyReLU: 0.1|Activation: 'softrelu']]>({0})"),
    ("seq", "8", "<gluon.rnn.[[LSTM|GRU|RNN]]: 8, [[1|2]], layout='NTC', input_size=$c>({0})"),
    ("seq", "16", "<gluon.rnn.LSTM: 8, layout='NTC', bidirectional=True, input_size=$c>({0})"))
# Loops and branches, whose bodies are attributes of one operator in a graph. Not F.tanh and its like: MXNet cannot
# infer the storage of their gradients in loops over arrays. Both results are read: it fails where one has no gradient.
_CELLS = [f"F.{act}" for layer in ("F.FullyConnected(one, <w:c,c>, <b:c>, num_hidden=$c, flatten=False)",
                                   "<gluon.nn.Dense: $c, in_units=$c, flatten=False>(one)")
          for act in (f"Activation({layer} + state * 0.5, act_type='[[tanh|relu]]')",
                      f"LeakyReLU({layer} - state, act_type='gelu')")]
_FILTER = ("F.Activation(F.Convolution(one, <w:c,c,k,k>, kernel=($k, $k), pad=($p, $p), num_filter=$c, no_bias=True), "
           "act_type='relu')")
_NOTHING = "F.zeros(shape=($n, $c))"  # a state that comes out of nothing, beside those with and without a gradient
LOOPS = _rows(
    ("seq", "", *("(lambda made: F.swapaxes(F.broadcast_add(made[0], F.expand_dims(made[1], axis=0)), 0, 1))(F.contrib."
                  f"foreach(lambda one, state: (lambda new: (new, new))({cell}), F.swapaxes({{0}}, 0, 1), {state}))"
                  for cell in _CELLS for state in ("F.sum({0}, axis=1) * 0", "F.BlockGrad(F.sum({0}, axis=1))",
                                                   _NOTHING))),
    ("flat", "", *("(lambda made: F.broadcast_add(F.sum(F.slice_axis(made[0], axis=0, begin=0, end=2), axis=0), "
                   "made[1][1]))(F.contrib.while_loop(lambda i, state, one: i < 2, lambda i, state, one: (lambda new: "
                   f"(new, [i + 1, new, one]))({cell}), [F.zeros(shape=(1,)), {state}, {{0}}], max_iterations=$w))"
                   for cell in _CELLS for state in ("{0} * 0.5", "F.BlockGrad({0})", _NOTHING))),
    ("map", "", *(f"F.contrib.while_loop(lambda i, one: i < 2, lambda i, one: (one, [i + 1, {_FILTER} + one]), "
                  f"[F.zeros(shape=(1,)), {state}], max_iterations=$w)[1][1]"
                  for state in ("{0}", "F.BlockGrad({0})"))),
    *((kinds, "", f"F.contrib.cond(F.max({{0}}) > [[-1|1]]0000, lambda: {cell}, lambda: {cell} * 0.5)".replace(
        "one", "{0}").replace("state", "{0}")) for kinds, cell in (("map", _FILTER), ("flat seq", _CELLS[0]))))
# Right in FP32 only: nothing but noise is left behind the bias otherwise
_TELLTALES = _rows(("map", "16", "F.Convolution({0}, <w:16,c,1,1>, <big:16>, kernel=(1, 1), num_filter=16) - 1024"),
                   ("flat", "16", "F.FullyConnected({0}, <w:16,c>, <big:16>, num_hidden=16, flatten=False) - 1024"))
_FIRST = Row("map", "", "F.Convolution({0} - {1}, <w:c,c,1,1>, kernel=(1, 1), num_filter=$c, no_bias=True)")
_CONVERSIONS = {"flat": Row("map", "flat", "F.$r({0}, axis=(2, 3))"), "scalar": Row("map", "scalar", "F.max({0})"),
                "seq": Row("map", "seq", "F.swapaxes(F.$r({0}, axis=3), 1, 2)")}
_NUMPY_NAMES = {
    "Activation": "npx.activation", "BatchNorm": "npx.batch_norm", "Convolution": "npx.convolution",
    "Deconvolution": "npx.deconvolution", "Dropout": "npx.dropout", "FullyConnected": "npx.fully_connected",
    "LayerNorm": "npx.layer_norm", "Pooling": "npx.pooling", "batch_dot": "npx.batch_dot", "softmax": "npx.softmax",
    **{name: f"np.{name}" for name in ("abs", "clip", "max", "mean", "swapaxes", "tanh")}}


def _row_of(item: Sample) -> Row:
    """Return the template of an operator's sample, whose inputs are parameters."""
    inputs = [f"<{each.values.replace(':', '_')}__{each.kind}:{str(each.shape)[1:-1]}>" for each in item.inputs]
    attrs = "".join(f", {name}={value!r}" for name, value in item.attrs_in("float32").items())
    return Row("map", "end", f"first(call(F, '{item.op}', {', '.join(inputs)}{attrs}))")


SAMPLES: dict[bool, list[Row]] = {False: [], True: []}  # whether they are NumPy-style
for _item in MXNET:
    if _item.gradient and _item.in_graphs and _item.op != "Dropout" and "rrelu" not in _item.condition and not any(
            each.aux or each.kind == "bool" or "constant" in each.values for each in _item.inputs):
        SAMPLES[_item.numpy_shape].append(_row_of(_item))
FAMILIES = {  # by kind of network: what is exact on integers, and what is not, each drawn as often as the others
    "operators": ([*SHARED, *OPERATORS], SHARED_ON_FLOATS, OPERATORS_ON_FLOATS, SAMPLES[False]),
    "layers": ([*SHARED, *LAYERS], SHARED_ON_FLOATS, LAYERS_ON_FLOATS), "loops": (SHARED, SHARED_ON_FLOATS, LOOPS),
    "numpy": ([*SHARED, *NUMPY], SHARED_ON_FLOATS, NUMPY_ON_FLOATS, SAMPLES[True])}


# The program that a case stands for


class Step(NamedTuple):
    """A tensor computed from earlier ones and parameters."""

    result: int
    inputs: tuple[int, ...]
    text: str
    kind: Kind
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    layers: tuple[tuple[str, str, str], ...]  # names, classes and arguments


class Part(NamedTuple):
    """Consecutive steps that are a block; with ``inner``, a setting as well, they are in a block inside of it."""

    steps: tuple[Step, ...]
    setting: str = "plain"  # or 'off', 'on', 'excluded'
    inner: str = ""

    @property
    def runs_fp32(self) -> bool:
        """Whether AMP is off in it."""
        return (self.setting if self.inner in ("", "plain") else self.inner) in ("off", "excluded")


class Program(NamedTuple):
    """Blocks in a row, which read what any block before them made."""

    parts: tuple[Part, ...]
    outputs: tuple[int, ...]

    @property
    def steps(self) -> list[Step]:
        """All steps in order."""
        return [step for part in self.parts for step in part.steps]

    @property
    def excluded(self) -> list[str]:
        """Names of the blocks that are excluded."""
        return [name for number, part in enumerate(self.parts) for name, setting in
                ((f"part{number}", part.setting), (f"part{number}_inner", part.inner)) if setting == "excluded"]

    def __str__(self) -> str:
        lines = [line for number, part in enumerate(self.parts) for line in (
            f"# part {number}: {part.setting} {part.inner}", *(
                f"t{step.result} = {step.text}  # {dict(step.parameters)} {list(step.layers)}" for step in part.steps))]
        return "\n".join([*lines, f"return {', '.join(f't{one}' for one in self.outputs)}"])


@lru_cache(maxsize=256)
def program_of(case: Case) -> Program:
    """Make the program of a case."""
    make, blocks, inner = _Maker(case), [Part(())], []
    for row, number in ((_FIRST, 0), *case.genes):
        draw = random.Random(number)
        if row == BLOCK:
            blocks.append(Part((), draw.choice(["plain", "plain", "off", "on", "excluded"]),
                               draw.choice(["", "", "", "plain", "off", "on", "excluded"])))
        else:
            made = make.added(row, draw)
            blocks[-1] = blocks[-1]._replace(steps=(*blocks[-1].steps, *made))
            inner += [step.result for step in made[-1:] if number % 8 == 1]
    read = {one for step in make.steps for one in step.inputs}
    unread = [step.result for step in make.steps[1:] if step.result not in read]
    # The first reads all data, whose gradients are written thus.
    outputs = list(dict.fromkeys([make.steps[0].result, *inner, *unread[-5:]]))
    needed, parts = set(outputs), []
    for step in reversed(make.steps):
        needed.update(step.inputs if step.result in needed else ())
    for part in blocks:
        part = part._replace(steps=tuple(step for step in part.steps if step.result in needed))
        if part.runs_fp32 and part.steps and case.check not in ("symbols", "imported"):  # files keep no regions
            wide = [step for step in part.steps if step.kind.name in ("map", "flat", "seq")][-1:]
            told = make.added(_TELLTALES[bool(wide) and wide[0].kind.name != "map"], random.Random(0),
                              wide[0].result if wide else 0)
            outputs.append(told[-1].result)
            part = part._replace(steps=(*part.steps, *told))
        parts += [part] * bool(part.steps)
    return Program(tuple(parts), tuple(outputs))


class _Maker:
    """Makes steps of templates."""

    def __init__(self, case: Case):
        self.case, self.kinds = case, list(INPUTS)
        self.steps: list[Step] = []
        self.pool: list[tuple[str, tuple[int, ...]]] = []

    def added(self, row: Row, draw: random.Random, first: int | None = None) -> list[Step]:
        """Add the steps of a template; none where the program has no tensor that it could read."""
        before = len(self.steps)
        try:
            self._add(row, draw, first)
        except LookupError:
            del self.steps[before:], self.kinds[len(INPUTS) + before:]
        return self.steps[before:]

    def _pick(self, name: str, draw: random.Random, channels: int = 0) -> int:
        """Return a tensor of a kind, preferably a late one; make one of a map where there is none."""
        most = 1 if name == "map1" else 2
        found = [number for number, one in enumerate(self.kinds) if one.name == name.rstrip("1") and one.halved <= most
                 and channels in (0, one.channels)]
        if not found and name not in _CONVERSIONS:
            raise LookupError(name)
        if not found:
            return self._add(_CONVERSIONS[name], draw, self._pick("map", draw, channels))
        return draw.choice(found[-3:])

    def _add(self, row: Row, draw: random.Random, first: int | None) -> int:
        kinds, _, other = row.kinds.partition("+")
        first = self._pick(draw.choice(kinds.split()), draw) if first is None else first
        kind, inputs = self.kinds[first], [first] * ("{0}" in row.text)
        if "{1}" in row.text:
            alike = [number for number, one in enumerate(self.kinds) if one == kind]
            inputs.append(self._pick(other, draw, kind.channels if other == "flat" else 0) if other else
                          draw.choice(alike[-3:]))
        letters = _letters(kind, draw, self.case)
        result = _result(kind, row.result, letters)
        parameters: dict[str, tuple[int, ...]] = {}
        layers: list[tuple[str, str, str]] = []

        def parameter(found: Any) -> str:
            name, shape = self._parameter(found[1], eval(f"({found[2].rstrip(',')},)", {}, letters), draw)
            parameters[name] = shape
            return name

        def layer(found: Any) -> str:
            layers.append((f"layer{len(self.kinds)}_{len(layers)}", found[1], found[2].strip()))
            return layers[-1][0]

        text = re.sub(r"\[\[(.*?)\]\]", lambda found: draw.choice(found[1].split("|")), row.text)
        text = re.sub(r"<(\w+):([^>]*)>", parameter, re.sub(r"\$(\w)", lambda found: str(letters[found[1]]), text))
        text = re.sub(r"<(gluon\.[\w.]+):([^>]*)>", layer, text)
        text = re.sub(r"\{(\d)\}", lambda found: f"t{inputs[int(found[1])]}", text)
        if self.case.numpy:
            text = re.sub(r"\bF\.(\w+)\(", lambda found: f"F.{_NUMPY_NAMES.get(found[1], found[1])}(", text)
        self.kinds.append(result)
        made = len(self.kinds) - 1
        self.steps.append(Step(made, tuple(inputs), text, result, tuple(parameters.items()), tuple(layers)))
        if self.case.exact and ("<" in row.text or "{1}" in row.text):  # values stay small enough for exact arithmetic
            return self._add(Row("", "", "F.clip({0}, -4, 4)"), draw, made)
        return made

    def _parameter(self, role: str, shape: tuple[int, ...], draw: random.Random) -> tuple[str, tuple[int, ...]]:
        """Return a parameter: a new one, or sometimes one that an earlier step reads."""
        alike = [each for each in self.pool if each[1] == shape and each[0].rpartition("_")[0] == role]
        if not alike or draw.random() > 0.3:
            self.pool.append((f"{role}_{len(self.pool)}", shape))
            return self.pool[-1]
        return draw.choice(alike)


def _letters(kind: Kind, draw: random.Random, case: Case) -> dict[str, Any]:
    width = draw.choice((1, 3))
    return {
        "c": kind.channels, "o": draw.choice((kind.channels, 8, 16, 24, 32, 48)), "h": kind.channels // 2,
        "a": 2 if kind.name == "seq" else 1, "s": round(kind.channels ** -0.5, 3), "k": width, "p": width // 2,
        "m": "max" if case.exact else "avg", "r": "max" if case.exact else "mean", "n": case.shapes[0][0],
        "w": draw.choice((2, 4)), "d": 0.5 if "inference" in case.switches else 0.0}


def _result(kind: Kind, changes: str, letters: Mapping[str, Any]) -> Kind:
    for change in changes.split():
        if change in ("up", "down"):
            kind = kind._replace(halved=kind.halved + (1 if change == "down" else -1))
        elif change in ("flat", "seq", "scalar", "end"):
            kind = Kind(change, 1 if change == "scalar" else kind.channels)
        else:
            kind = kind._replace(channels=eval(change, {}, dict(letters)))
    if not (0 <= kind.halved <= 2 and kind.channels <= 96 and (kind.name == "scalar" or kind.channels % 8 == 0)):
        raise LookupError(kind)
    return kind


# Its network

_MODULES = {"_contrib_": "contrib", "_linalg_": "linalg", "_image_": "image", "_npi_": "np._internal", "_npx_": "npx",
            "_np_": "np"}


def call(F: Any, name: str, *inputs: Any, **attrs: Any) -> Any:
    """Call an operator by its registered name."""
    for prefix, module in _MODULES.items():
        if name.startswith(prefix) and hasattr(attrgetter(module)(F), name[len(prefix):]):
            return getattr(attrgetter(module)(F), name[len(prefix):])(*inputs, **attrs)
    return (getattr(F, name, None) or getattr(F._internal, name))(*inputs, **attrs)


def prelu(F: Any, data: Any, slopes: Any, shape: tuple[int, ...]) -> Any:
    """Run a rectifier with slopes that are learned: by hand without AMP, where MXNet gets their gradient wrong."""
    if amp.is_active():
        return F.LeakyReLU(data, slopes, act_type="prelu")
    return F.relu(data) - F.broadcast_mul(F.relu(-data), F.reshape(slopes, shape))


def is_statistic(name: str) -> bool:
    """Tell whether a parameter is one that BatchNorm moves."""
    return _role(name) in ("mean", "var")


def _role(name: str) -> str:
    """Return what a parameter is: of a template, of a sample, or of one of Gluon's layers."""
    return re.sub(r"^net_(layer\w*_)?|_\d+$", "", name)


def _input(name: str, shape: tuple[int, ...]) -> Input | None:
    """Return the input of a sample that a parameter stands for."""
    values, _, kind = _role(name).partition("__")
    return Input(shape, kind, re.sub(r"_(\d+)$", r":\1", values)) if kind else None


def first(made: Any) -> Any:
    """Return the first output of an operator."""
    several = isinstance(made, (list, tuple)) or (isinstance(made, mx.sym.Symbol) and len(made.list_outputs()) > 1)
    return made[0] if several else made


def listed(value: Any) -> list[Any]:
    """Return what a network gives as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


class _Steps(gluon.HybridBlock):
    """A block that runs steps."""

    def __init__(self, steps: Sequence[Step], reads: Sequence[int], gives: Sequence[int], rounded: Callable,
                 **settings: Any):
        super().__init__(**settings)
        self._code = [(step.result, compile(step.text, f"t{step.result}", "eval")) for step in steps]
        self._reads, self._gives, self._rounded = reads, gives, rounded
        for name in {name for step in steps for name, _ in step.parameters}:
            setattr(self, name, self.params.get(name))
        for name, kind, arguments in [each for step in steps for each in step.layers]:
            setattr(self, name, eval(f"{kind}({arguments}{', ' * bool(arguments)}params=params)",
                                     {"gluon": gluon, "params": gluon.ParameterDict(f"net_{name}_")}))

    def hybrid_forward(self, F: Any, *tensors: Any, **parameters: Any) -> Any:
        """Run the steps."""
        names = {"F": F, "call": call, "first": first, "prelu": prelu, **self._children, **parameters,
                 **{f"t{number}": tensor for number, tensor in zip(self._reads, tensors)}}
        for result, code in self._code:
            names[f"t{result}"] = self._rounded(F, eval(code, names))
        return [names[f"t{number}"] for number in self._gives]


class Around(gluon.HybridBlock):
    """A block around another, perhaps in a region."""

    def __init__(self, inner: gluon.HybridBlock, setting: str = "plain", **settings: Any):
        super().__init__(**settings)
        self.inner, self._setting = inner, setting

    def hybrid_forward(self, F: Any, *tensors: Any) -> Any:
        """Run what is inside."""
        with amp.autocast(enabled=self._setting == "on") if self._setting in ("on", "off") else nullcontext():
            return self.inner(*tensors)


class _Net(gluon.HybridBlock):
    """The blocks of a program."""

    def __init__(self, program: Program, regions: bool, rounded: Callable):
        super().__init__(prefix="net_", params=gluon.ParameterDict("net_"))
        self._outputs, self._interfaces = program.outputs, []
        for name, shape in sorted({pair for step in program.steps for pair in step.parameters}):
            sample = _input(name, shape)
            learns = sample.differentiable if sample else _role(name) not in ("big", "fixed", "mean", "var")
            dtype = sample.kind if sample and sample.kind != LOW else "float32"
            self.params.get(name, shape=shape, dtype=dtype, grad_req="write" if learns else "null",
                            differentiable=learns, init="zeros")
        for number, part in enumerate(program.parts):
            here = {step.result for step in part.steps}
            reads = sorted({one for step in part.steps for one in step.inputs} - here) or [0]
            later = {one for other in program.parts[number + 1:] for step in other.steps for one in step.inputs}
            gives = sorted(here & (later | set(program.outputs)))
            made: gluon.HybridBlock = _Steps(part.steps, reads, gives, rounded, prefix=f"part{number}_steps_",
                                               params=self.params)
            for name, setting in ((f"part{number}_inner_", part.inner), (f"part{number}_", part.setting)):
                if setting:
                    made = Around(made, setting if regions else "plain", prefix=name, params=self.params)
            setattr(self, f"part{number}", made)
            self._interfaces.append((made, reads, gives))

    def hybrid_forward(self, F: Any, first: Any, second: Any) -> Any:
        """Run the blocks."""
        made = {0: first, 1: second}
        for block, reads, gives in self._interfaces:
            made.update(zip(gives, listed(block(*(made[number] for number in reads)))))
        return [made[number] for number in self._outputs]


def network(case: Case, regions: bool = True, rounded: Callable = lambda F, value: value) -> gluon.HybridBlock:
    """Build the network of a case with its values; as stock MXNet is to run it where there are no regions."""
    if amp.is_active() and not regions:
        raise RuntimeError("expected AMP to be off: what stock MXNet gives is asked before it is switched on")
    net = _Net(program_of(case), regions, rounded)
    net.initialize()
    set_values(case, net)
    for name, found in net.collect_params().items():
        if regions and name in frozen(case):
            found.grad_req = "null"
    return net


def frozen(case: Case) -> frozenset[str]:
    """Name the parameters without gradients: some, where the case asks for it."""
    names = {f"net_{name}" for step in program_of(case).steps for name, _ in step.parameters} - {"net_w_0"}
    return frozenset(name for name in names
                     if "frozen" in case.switches and zlib.crc32(f"{case.seed}{name}".encode()) % 3 == 0)


def set_values(case: Case, net: gluon.HybridBlock, version: int = 0, statistics_only: bool = False) -> None:
    """Give a network the values of its case, or others, or only its statistics."""
    for name, found in net.collect_params().items():
        if not statistics_only or is_statistic(name):
            found.set_data(array(_values(case, name, found.shape, version), found.dtype))


def _values(case: Case, name: str, shape: tuple[int, ...], version: int) -> np.ndarray:
    draw = np.random.RandomState(zlib.crc32(f"{case.seed}{name}".encode()) + version)
    role, fan_in, of_sample = _role(name), int(np.prod(shape[1:])), _input(name, shape)
    if of_sample:
        return fill(of_sample, case.dtype, f"{case.seed + version}{name}")
    if role == "big":
        return np.full(shape, 1024.0)
    if case.exact:
        chance = min(1.0, 6 / fan_in) if role in ("w", "weight") else 1.0
        return draw.choice([-1, 1], shape) * (draw.uniform(size=shape) < chance)
    if role in ("gamma", "var"):
        return draw.uniform(0.5, 1.5, shape)
    return draw.normal(scale=(1.6 / fan_in) ** 0.5 if role in ("w", "weight") else 0.2, size=shape)


def array(values: Any, dtype: Any = "float32") -> mx.nd.NDArray:
    """Make an array of the semantics in force."""
    return (mx.np if mx.util.is_np_array() else mx.nd).array(values, dtype=dtype)


def data(case: Case, shape: Shape | None = None) -> list[mx.nd.NDArray]:
    """Return the arguments of a call."""
    draw, shape = np.random.RandomState(case.seed), shape or case.shapes[0]
    made = [draw.normal(size=(shape[0], kind.channels, *shape[1:])) for kind in INPUTS]
    return [array(np.clip(np.rint(one), -3, 3) if case.exact else one) for one in made]


def hybridize(net: gluon.HybridBlock, way: str) -> None:
    """Hybridize a network in one of the ways: not, as a whole, or what is in it only."""
    for block in net._children.values() if way == "parts" else [net]:
        block.hybridize(**WAYS[way])


# What Hypothesis draws

@st.composite
def cases(draw: Callable, kinds: Sequence[str], checks: Mapping[str, Sequence[str]], most: int = 10) -> Case:
    """Draw a case of some kinds; ``checks`` names the types that each check is for, ``most`` a third of the steps."""
    kind, way, number = draw(st.sampled_from(kinds)), draw(st.sampled_from(list(WAYS))), st.integers(0, 2 ** 16)
    check = draw(st.sampled_from(list(checks)))
    exact = kind != "loops" and draw(st.integers(0, 3)) == 3
    families = [*FAMILIES[kind][:1 if exact else None], [BLOCK]]
    gene = st.tuples(st.one_of([st.sampled_from(rows) for rows in families]), number)
    lists = [draw(st.lists(gene, max_size=most)) for _ in range(3)]  # longer than one, and each shrinks
    shapes = st.permutations(SHAPES[:3] if kind == "loops" else SHAPES)  # first states have a size
    return Case(kind, tuple(each for some in lists for each in some), check, draw(st.sampled_from(checks[check])), way,
                frozenset(draw(st.sets(st.sampled_from(SWITCHES)))), tuple(draw(shapes)[:2]), exact, draw(number))
