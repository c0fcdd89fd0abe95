#!/usr/bin/env python
"""Try random networks against stock FP32, and print the smallest program that shows what is found.

    python tools/fuzz.py --seconds 3600 --seed 17
    python tools/fuzz.py --kind loops numpy --check ways training --dtype bfloat16
    python tools/fuzz.py --plant stale_weights        # a defect in AMP, which has to be found
    python tools/fuzz.py --case "Case(...)"           # what a finding printed, again

Kinds of networks: plain operators, Gluon's layers, loops and branches, NumPy-style operators. Every case runs in a
process of its own: one that ends it is a finding. Hypothesis makes it smaller.
"""
from __future__ import annotations

import argparse
import copy
import random
import shlex
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from unittest import mock

from apart import NORMALLY, apart, message_of, native_at_every_size  # isort: skip  finds the package
import gluon_amp as amp  # isort: skip  before MXNet
import hypothesis
import mxnet as mx
import numpy as np
from fuzz_programs import (  # noqa: F401  Row: for --case
    INPUTS,
    KINDS,
    Around,
    Case,
    Row,
    Shape,
    array,
    cases,
    data,
    frozen,
    hybridize,
    is_statistic,
    listed,
    network,
    program_of,
    set_values,
)
from mxnet import autograd, gluon
from mxnet.ndarray import register
from mxnet.test_utils import environment

from gluon_amp._mxnet.arrays import cast_arrays
from gluon_amp._mxnet.engine import Program, serialize_execution
from gluon_amp._mxnet.invoke import original_invoke
from gluon_amp._mxnet.symbols import to_graph
from gluon_amp.eager.applier import make_recorded_invoke
from gluon_amp.graph import has_control_flow
from gluon_amp.machine.dtypes import FORMATS
from gluon_amp.rules.decision import FP32, Cause
from gluon_amp.state.devices import support

# Differences, as root mean squares, that need no excuse. Whether a larger one is rounding is asked of stock MXNet: it
# runs the program and rounds what every step gives (`bound`).
_LEAST = {"bfloat16": {"outputs": 2.0 ** -6, "gradients": 0.1, "training": 0.2},
          "float16": {"outputs": 2.0 ** -9, "gradients": 0.05, "training": 0.1},
          "float32": {"outputs": 2e-4, "gradients": 2e-3, "training": 5e-2}}
_UNITS = {"bfloat16": 2.0 ** -8, "float16": 2.0 ** -11, "float32": 2.0 ** -22}  # float32: sums in another order
_FACTOR, _MOST = 4.0, 0.9
_DRAWS, _MANY_DRAWS = 4, 32  # few show where rounding moves a value over the kink of a rectifier
_LARGE = FORMATS["float16"].largest / 4  # gradients from here on may overflow in a sum on the way
_UNWRITTEN = 7.0  # what gradients hold before they are written, where MXNet overwrites them all
_EMPTY: Shape = (0, 8, 8)  # a batch without images
RUNS_BFLOAT16 = support("cpu").requested("bfloat16") is not None  # native or emulated
LOW = "bfloat16" if RUNS_BFLOAT16 else "float16"  # which is imitated
Values = Mapping[str, np.ndarray]


class Wrong(Exception):
    """A result is not that of stock FP32."""


class Near(Wrong):
    """A result is just above its bound, which may be known better."""


class StockFails(Exception):
    """Stock MXNet does not run a case: nothing is said about AMP."""


# Running networks


def outputs(net: Callable, arguments: Sequence[mx.nd.NDArray]) -> dict[str, np.ndarray]:
    """Run a network in inference."""
    return {f"output {number}": one.asnumpy() for number, one in enumerate(listed(net(*arguments)))}


def _spoil_memory(sizes: Iterable[int]) -> None:
    """Fill memory for arrays of some sizes with large numbers, so that what reads it uninitialised is found."""
    arrays = [mx.nd.full((size,), 1e30) for size in set(sizes) for _ in range(12)]
    mx.nd.waitall()
    del arrays


@lru_cache(maxsize=64)
def trains(case: Case) -> bool:
    """Tell whether gradients are those of training; MXNet's are garbage elsewhere behind max pooling and RNNs."""
    text = str([(step.text, step.layers) for step in program_of(case).steps])
    return "inference" not in case.switches or any(name in text for name in ("'max'", "MaxPool", "RNN", "rnn"))


def _loss(outs: Any, exact: bool) -> mx.nd.NDArray:
    return sum((one * _cotangent(one.shape, number, exact)).sum() for number, one in enumerate(listed(outs)))


def _cotangent(shape: tuple[int, ...], number: int, exact: bool) -> mx.nd.NDArray:
    draw = np.random.RandomState(number)
    return array(draw.choice([-1, 1], shape) * (draw.uniform(size=shape) < 0.05) if exact else draw.normal(size=shape))


def gradients(net: gluon.HybridBlock, case: Case, arguments: Sequence[mx.nd.NDArray], passes: int = 1,
              with_data: bool = True, unwritten: float = 0.0) -> dict[str, np.ndarray]:
    """Differentiate a weighted sum of the outputs; add up over passes. Gradients hold ``unwritten`` before.

    With one pass the result also tells how far it moved the statistics of BatchNorm.
    """
    request, every = "add" if passes > 1 else "write", net.collect_params()
    found = {name: one for name, one in every.items() if one.grad_req != "null"}
    moved = {name: every[name].data().asnumpy() for name in _moving(case, net) if passes == 1}
    for one in found.values():
        one.grad_req = request
        one.grad()[:] = unwritten
    for one in arguments if with_data else ():
        one.attach_grad(request)
        one.grad[:] = unwritten
    for _ in range(passes):
        _spoil_memory(one.grad().size for one in found.values())
        with autograd.record(train_mode=trains(case)):
            loss = _loss(net(*arguments), case.exact)
        loss.backward()
    return {**{name: one.grad().asnumpy() for name, one in found.items()},
            **{f"data{number}": one.grad.asnumpy() for number, one in enumerate(arguments) if with_data},
            **{name: every[name].data().asnumpy() - one for name, one in moved.items()}}


def _moving(case: Case, net: gluon.HybridBlock) -> list[str]:
    """Name the statistics that move once: MXNet moves them in the backward pass, which frozen layers may lack."""
    uses = Counter(f"net_{name}" for step in program_of(case).steps for name, _ in step.parameters)
    return [name for name in net.collect_params() if is_statistic(name) and uses[name] <= 1
            and "frozen" not in case.switches and trains(case)]


def trained(net: gluon.HybridBlock, case: Case, rate: float) -> dict[str, np.ndarray]:
    """Take three steps with two trainers, and return how far they moved the parameters and statistics.

    Under AMP the losses are scaled, and a step with infinite gradients comes in between, which is skipped.
    """
    every, is_on = net.collect_params(), amp.is_active()
    names = sorted(name for name, one in every.items() if one.grad_req != "null" and name not in frozen(case))
    settings = {"learning_rate": rate, "momentum": case.seed % 2 / 2, "wd": 0.0}
    trainers = [gluon.Trainer({name: every[name] for name in some}, "sgd", settings, update_on_kvstore=False)
                for some in (names[::2], names[1::2]) if some]
    before = {name: every[name].data().asnumpy() for name in (*names, *_moving(case, net))}
    scaler = amp.StaticLossScaler(2.0 ** (case.seed % 3 * 5))
    for trainer in trainers if is_on else ():
        amp.init_trainer(trainer, scaler)
    for is_bad in (False, False, True, False) if is_on else (False,) * 3:
        with autograd.record(train_mode=trains(case)):
            loss = _loss(net(*data(case)), case.exact)
            with amp.scale_loss(loss, trainers) if is_on else nullcontext(loss) as scaled:
                autograd.backward(scaled)
        for trainer in trainers if is_bad else ():  # operators that make their own gradient would not pass it on
            trainer._params[0].grad()[:] = np.inf
        for trainer in trainers:
            trainer.step(1)
    return {name: every[name].data().asnumpy() - one for name, one in before.items()}


# What stock FP32 gives, and how far rounding alone can take that


@contextmanager
def stock_alone() -> Iterator[None]:
    """Run the body, which has no AMP in it: an error there says nothing about AMP."""
    try:
        yield
        mx.nd.waitall()
    except Exception as error:
        raise StockFails(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _stock(case: Case, way: str = "eager") -> gluon.HybridBlock:
    net = network(case, regions=False)
    hybridize(net, way)
    return net


@lru_cache(maxsize=64)
def stock_outputs(case: Case, shape: Shape | None = None) -> dict[str, np.ndarray]:
    """Return the outputs without AMP, which is not hybridized."""
    with stock_alone():
        made = outputs(_stock(case), data(case, shape))
    if not all(np.isfinite(one).all() for one in made.values()):
        raise StockFails("the outputs are not finite")
    return made


@lru_cache(maxsize=64)
def stock_gradients(case: Case, shape: Shape | None = None) -> dict[str, np.ndarray]:
    """Return the gradients without AMP that are the same each time."""
    with stock_alone():
        first, second = (gradients(_stock(case), case, data(case, shape)) for _ in range(2))
    return {name: first[name] for name, error in errors(first, second, _largest(first)).items() if error <= 1e-3}


@lru_cache(maxsize=64)
def stock_is_right(case: Case, passes: int = 1, unwritten: float = 0.0) -> frozenset[str]:
    """Name the gradients that MXNet gives rightly in the case's way."""
    net = _stock(case, case.way)
    for name in frozen(case):
        net.collect_params()[name].grad_req = "null"
    expected = {name: passes * one for name, one in stock_gradients(case).items()}
    with stock_alone():
        found = gradients(net, case, data(case), passes, "data" in case.switches, unwritten)
    off = errors({name: expected[name] for name in found if name in expected}, found, _largest(expected))
    return frozenset(name for name, error in off.items() if error <= 1e-3)


@lru_cache(maxsize=4)
def stock_trained(case: Case) -> tuple[float, dict[str, np.ndarray]]:
    """Return a learning rate at which a network without AMP moves by a percent, and how far each parameter moves."""
    slopes = [_rms(one) for name, one in stock_gradients(case).items()
              if name.startswith("net") and not is_statistic(name)]
    rate = 0.003 / (max(slopes, default=1.0) or 1.0)
    with stock_alone():
        moved = trained(_stock(case), case, rate)
    if not all(np.isfinite(one).all() for one in moved.values()):
        raise StockFails("the training does not stay finite, and AMP skips such steps")
    return rate, moved


_MEASURES: dict[str, Callable] = {
    "outputs": lambda net, _, inputs: outputs(net, inputs), "gradients": gradients,
    "training": lambda net, case, _: trained(net, case, stock_trained(case)[0])}
_draws = [_DRAWS]


def bound(case: Case, shape: Shape | None = None, of: str = "outputs") -> Mapping[str, float]:
    """Return the largest errors that rounding can excuse, of outputs and of gradients by name.

    Stock MXNet runs the program with the result of every step, and its gradient, rounded to the type; then again with
    data and weights moved by a rounding unit at random, as one rounding says little where errors grow. AMP rounds more
    often than once a step: four times the largest of these errors is allowed. Where that is nearly as much as an
    array that is lost or doubled is off (1), or stock MXNet overflows, the type tells nothing of the array; finer ones
    do.
    """
    return _bound(case, shape, of, _draws[0])


# MXNet ends the process behind a BlockGrad of what has no array on the way back, such as a cast of a cast.
@lru_cache(maxsize=64)
@mock.patch.object(register, "_imperative_invoke", make_recorded_invoke(original_invoke))
def _bound(case: Case, shape: Shape | None, of: str, draws: int) -> Mapping[str, float]:
    dtype, measure = case.dtype, _MEASURES[of]
    with stock_alone():
        expected = measure(_stock(case), case, data(case, shape))
    if case.exact and of != "training":  # which leaves the integers
        return dict.fromkeys(expected, 0.0 if of == "outputs" else 2e-3 if dtype == "float32" else 1e-2)
    found, largest = dict.fromkeys(expected, 0.0), 0.0 if of == "outputs" else _largest(expected)
    for draw in range(draws):
        net, inputs = network(case, regions=False, rounded=_rounded(dtype, draw)), data(case, shape)
        signs = np.random.RandomState(draw)
        for one in (*inputs, *(each.data() for each in net.collect_params().values()
                               if len(each.shape) > 1 and each.grad_req != "null")):
            one[:] = one * array(1 + _UNITS[dtype] * signs.choice([-1, 1], one.shape) * bool(draw))
        with stock_alone():
            measured = measure(net, case, inputs)
        if of == "gradients" and dtype == "float16":  # sums on the way to a large gradient may be too large for it
            measured = {name: one if is_statistic(name) else np.where(abs(one) > _LARGE, np.inf, one.astype(np.float32))
                        for name, one in measured.items()}
        for name, error in errors(expected, measured, largest).items():
            found[name] = max(found[name], _FACTOR * error if np.isfinite(error) else np.inf)
    return {name: max(_LEAST[dtype][of], error) if error < _MOST else np.inf for name, error in found.items()}


def _rounded(dtype: str, seed: int) -> Callable[[Any, Any], Any]:
    """Make the function that rounds a tensor, and its gradient on the way back."""
    signs = np.random.RandomState(seed)

    def rounded(F: Any, value: mx.nd.NDArray) -> mx.nd.NDArray:
        plain = (value if value.shape else value.reshape((1,))).as_nd_ndarray()
        if dtype == "float32":
            plain = plain * mx.nd.array(1 + _UNITS[dtype] * signs.choice([-1, 1], plain.shape))
        else:
            plain = cast_arrays(cast_arrays(plain, dtype), "float32")
        made = plain.as_np_ndarray() if mx.util.is_np_array() else plain
        return made if value.shape else made.reshape(())
    return rounded


# Comparisons


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def _largest(slopes: Values) -> float:
    """Return the size of the largest gradient."""
    return max((_rms(one) for name, one in slopes.items() if not is_statistic(name)), default=0.0)


def errors(expected: Values, found: Values, largest: float = 0.0) -> dict[str, float]:
    """Return differences relative to the size of each array; what is nearly zero beside the rest is rounding noise."""
    return {name: 0.0 if np.array_equal(one, found[name], equal_nan=True) else
            _rms(one - found[name]) / max(_rms(one), 1e-3 if is_statistic(name) else 0.1 * largest or 1e-3)
            for name, one in expected.items()}


def same(what: str, expected: Values, found: Values, allowed: Mapping[str, float] | float,
         largest: float = 0.0) -> None:
    """Raise ``Wrong`` when arrays differ by more than a bound."""
    shaped = [{name: one.shape for name, one in each.items()} for each in (expected, found)]
    if shaped[0] != shaped[1]:
        raise Wrong(f"{what}: shapes {shaped[1]}, expected {shaped[0]}")
    for name, error in errors(expected, found, largest).items():
        most = allowed[name] if isinstance(allowed, Mapping) else allowed
        if not (error <= most or np.isinf(most)):
            raise (Near if error <= _FACTOR * most else Wrong)(
                f"{what}: {name} is off by {error:.3g}, at most {most:.3g} was expected")


def same_gradients(what: str, expected: Values, found: Values, allowed: Mapping[str, float],
                   names: Collection[str] | None = None) -> None:
    """Compare the gradients that both have; with ``names`` only these."""
    both = [name for name in expected if name in found and (names is None or name in names)]
    same(what, {name: expected[name] for name in both}, {name: found[name] for name in both}, allowed,
         _largest(expected))


# What must hold for every network: each check compares AMP or a conversion with stock FP32


def _quietly(function: Callable, *arguments: Any, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **settings)


def apply_amp(case: Case) -> None:
    """Switch AMP on, with the exclusions of a network."""
    _quietly(amp.init, case.dtype)
    if program_of(case).excluded:
        amp.exclude(*program_of(case).excluded)


def _prepared(case: Case) -> gluon.HybridBlock:
    """Build a network as AMP runs it."""
    net = network(case)
    for _ in range(2 if "again" in case.switches else 1):
        hybridize(net, case.way)
    apply_amp(case)
    return net


def _names(case: Case, passes: int = 1, unwritten: float = 0.0) -> Collection[str] | None:
    """Name the gradients that have to be right: all, but FP32 calls outside of graphs are MXNet's own.

    Nor does MXNet write there what only the branch of a condition reads that is not taken.
    """
    in_fp32 = case.dtype == "float32" or case.kind == "loops" or any(part.runs_fp32 for part in program_of(case).parts)
    return stock_is_right(case, passes, unwritten) if in_fp32 and case.way == "eager" else None


def check_ways(case: Case) -> None:
    """Forward and gradients, for changed shapes and changed parameters."""
    (first, second), with_data = case.shapes, "data" in case.switches
    expected = {shape: (stock_outputs(case, shape), bound(case, shape)) for shape in case.shapes}
    slopes = {shape: (stock_gradients(case, shape), bound(case, shape, "gradients")) for shape in case.shapes}
    written, added = _names(case, unwritten=_UNWRITTEN), _names(case, passes=2)
    renewed, other = _renewed(case)
    net = _prepared(case)
    same("forward", expected[first][0], outputs(net, data(case)), expected[first][1])
    if "copy" in case.switches:
        same("forward of a copy", expected[first][0], outputs(copy.deepcopy(net), data(case)), expected[first][1])
    # Of inputs MXNet's hooks cannot name those of loops; in backward passes it reads beyond its arrays for them.
    for sees_all in (case.kind != "loops", False) if "hook" in case.switches and case.way != "eager" else ():
        net.register_op_hook(lambda *_: None, monitor_all=sees_all)
        same("forward with a hook", expected[first][0], outputs(net, data(case)), expected[first][1])
    same_gradients("gradients", slopes[first][0], gradients(
        net, case, data(case), with_data=with_data, unwritten=_UNWRITTEN), slopes[first][1], written)
    set_values(case, net, statistics_only=True)
    same_gradients("gradients that accumulate", {name: 2 * one for name, one in slopes[first][0].items()}, gradients(
        net, case, data(case), passes=2, with_data=with_data), slopes[first][1], added)
    set_values(case, net, statistics_only=True)
    for shape in (second, first):
        same(f"forward, shape {shape}", expected[shape][0], outputs(net, data(case, shape)), expected[shape][1])
    same_gradients(f"gradients, shape {second}", slopes[second][0], gradients(
        net, case, data(case, second), with_data=with_data), slopes[second][1], written)
    if not other:
        return
    if "file" in case.switches:
        with tempfile.TemporaryDirectory() as folder:
            renewed.save_parameters(f"{folder}/net.params")
            net.load_parameters(f"{folder}/net.params")
    set_values(case, net, version=1, statistics_only="file" in case.switches)
    same("forward, other parameters", other, outputs(net, data(case)), expected[first][1])
    amp.deinit()
    if not any("on" in (part.setting, part.inner) for part in program_of(case).parts) and not (
            case.kind == "loops" and "static" in case.way):  # where MXNet's loops give what was in memory
        same("forward, after deinit", other, outputs(net, data(case)), 2e-4)


def _renewed(case: Case) -> tuple[gluon.HybridBlock, dict[str, np.ndarray]]:
    """Return a network with other parameters, and its outputs; none where MXNet cannot write them, or large ones."""
    net = _stock(case)
    outputs(net, data(case))
    try:
        set_values(case, net, version=1)
        mx.nd.waitall()  # otherwise the error is told where something else is read
        made = outputs(net, data(case))
    except mx.MXNetError:
        return net, {}
    return net, made if all(np.abs(one).max(initial=0.0) < 1e4 for one in made.values()) else {}


def check_training(case: Case) -> None:
    """Steps of two trainers."""
    (rate, expected), allowed, right = stock_trained(case), bound(case, of="training"), _names(case)
    if right is None or right >= {name for name in expected if not is_statistic(name)}:  # a wrong one spoils all steps
        same_gradients("training", expected, trained(_prepared(case), case, rate), allowed)


def check_conversion(case: Case) -> None:
    """A converted network, and what MXNet alone makes of its files."""
    expected = {shape: (stock_outputs(case, shape), bound(case, shape)) for shape in case.shapes}
    _run_graph(case)
    made = _quietly(amp.convert_hybrid_block, network(case), case.dtype, exclude=program_of(case).excluded or None,
                    cast_outputs="again" not in case.switches)
    with tempfile.TemporaryDirectory() as folder:
        for shape in (*case.shapes, case.shapes[0]):
            same(f"conversion, shape {shape}", expected[shape][0], _wide(made, data(case, shape)), expected[shape][1])
        loaded, names = _imported(made.export(f"{folder}/net"))
    for flags in ({"active": False}, {"static_alloc": case.kind != "loops"}):  # MXNet's loops give what was in memory
        loaded.hybridize(**flags)
        for shape in case.shapes:
            found = _wide(loaded, [data(case, shape)[int(name[4:])] for name in names])
            same(f"exported conversion, shape {shape}", expected[shape][0], found, expected[shape][1])


def _imported(files: Sequence[str]) -> tuple[gluon.SymbolBlock, list[str]]:
    names = sorted(name for name in mx.sym.load(files[0]).list_inputs() if name.startswith("data"))
    return _quietly(gluon.SymbolBlock.imports, files[0], names, files[1]), names


def _wide(net: Callable, arguments: Sequence[mx.nd.NDArray]) -> dict[str, np.ndarray]:
    """Return the outputs of a network in FP32."""
    return outputs(lambda *tensors: cast_arrays(listed(net(*tensors)), "float32"), arguments)


_FAR = 0.05  # what INT8 allows where no limit is named


def _run_graph(case: Case) -> None:
    """Run the graph of a network without AMP: MXNet cannot make graphs of all, such as of khatri_rao."""
    plain = _stock(case)
    with stock_alone():  # one operator after another: with loops MXNet's engine ends the process now and then
        symbol = _symbol(plain, case)
        Program(symbol, _held(plain))(_feed(symbol, case, case.shapes[0]))


def check_int8(case: Case) -> None:
    """A network with layers in INT8 is as near FP32 as it says, again and from its files, and finite on other data."""
    expected = stock_outputs(case)
    _run_graph(case)
    made = _quietly(amp.convert_hybrid_block, network(case), case.dtype, calib_data=[data(case)],
                    exclude=program_of(case).excluded or None, data_example=data(case))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            same("INT8", expected, outputs(made, data(case)), _FAR + 1e-3)
        loaded, names = _imported(made.export(f"{folder}/net"))
    loaded.hybridize(static_alloc=True)
    if case.kind != "loops":  # beside which MXNet's engine is wrong now and then
        read = [data(case)[int(name[4:])] for name in names]
        same("exported INT8", expected, _wide(loaded, read), _FAR + 1e-3)
    for name, one in outputs(made, data(case, case.shapes[1])).items():
        if not np.isfinite(one).all():
            raise Wrong(f"INT8, shape {case.shapes[1]}: {name} is not finite")


def check_onnx(case: Case) -> None:
    """A float16 file, in which each node computes in its own type. Refusals name their reasons."""
    from onnx.reference import ReferenceEvaluator

    expected, allowed = stock_outputs(case), bound(case)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _quietly(amp.export_onnx, network(case), f"{folder}/net.onnx", data(case))
        except amp.AmpError as error:
            raise StockFails(str(error)) from error
        with stock_alone():  # the evaluator knows not all activations of recurrent layers; onnxruntime has run the file
            runs = ReferenceEvaluator(f"{folder}/net.onnx")
            made = runs.run(None, {name: data(case)[int(name[4:] or 0)].asnumpy() for name in runs.input_names})
    found = {f"output {number}": np.asarray(one, "float32") for number, one in enumerate(made)}
    same("ONNX", expected, found, {name: max(error, 0.011) for name, error in allowed.items()})


def check_first_call(case: Case) -> None:
    """The region around the first call leaves nothing behind."""
    _run_graph(case)
    nets = [network(case) for _ in range(3)]
    for net in nets:
        net.hybridize()
    apply_amp(case)
    with amp.autocast(enabled=False):
        outputs(nets[1], data(case))
    expected = outputs(nets[0], data(case))
    same("a first call in autocast(False), then outside", expected, outputs(nets[1], data(case)), 0.0)
    with amp.autocast():
        same("a first call in autocast()", expected, outputs(nets[2], data(case)), 0.0)


def check_empty(case: Case) -> None:
    """A batch without images, in inference; with legacy semantics a size of 0 is one that is not known."""
    def shapes_of(net: gluon.HybridBlock) -> str:
        return str([[one.shape for one in outputs(net, data(case, shape)).values()]
                    for shape in (case.shapes[0], _EMPTY) * 2])

    if case.numpy:
        with stock_alone():
            expected = shapes_of(_stock(case, case.way))
        found = shapes_of(_prepared(case))
        if found != expected:
            raise Wrong(f"a batch without images: {found}, expected {expected}")


# Networks as symbols: executors, conversions of symbols, networks that are read from files


def _symbol(net: gluon.HybridBlock, case: Case) -> mx.sym.Symbol:
    inputs = [mx.sym.var(f"data{number}") for number in range(len(INPUTS))]
    traced = listed(net(*(one.as_np_ndarray() if case.numpy else one for one in inputs)))
    return mx.sym.Group(traced, type(traced[0]))


def _feed(symbol: mx.sym.Symbol, case: Case, shape: Shape) -> dict[str, mx.nd.NDArray]:
    """Return the data that a symbol reads, by name."""
    read = set(symbol.list_inputs())
    return {f"data{number}": one.as_nd_ndarray() for number, one in enumerate(data(case, shape))
            if f"data{number}" in read}


def _held(net: gluon.HybridBlock) -> dict[str, mx.nd.NDArray]:
    return {name: one.data().as_nd_ndarray() for name, one in net.collect_params().items()}


def _requests(case: Case, net: gluon.HybridBlock) -> dict[str, str]:
    """Return what an executor is asked for, by name: gradients that are written, added, or both and none."""
    draw, known = random.Random(case.seed), net.collect_params()
    choices = draw.choice((("write",), ("add",), ("write", "add", "null")))
    drawn = {name: draw.choice(choices) for name in (*(f"data{number}" for number in range(len(INPUTS))), *known)}
    return {name: "null" if name in known and known[name].grad_req == "null" else one for name, one in drawn.items()}


def _bind(symbol: mx.sym.Symbol, case: Case, net: gluon.HybridBlock, shape: Shape) -> Any:
    """Bind a symbol to arrays, of one's own or MXNet's, with a network's values."""
    feed, values, names = _feed(symbol, case, shape), _held(net), symbol.list_arguments()
    requests = {name: one for name, one in _requests(case, net).items() if name in names}
    arguments = {name: one.copy() for name, one in {**feed, **values}.items() if name in names}
    auxiliary = {name: values[name].copy() for name in symbol.list_auxiliary_states()}
    if "bind" in case.switches:
        slopes = {name: mx.nd.zeros(one.shape) for name, one in arguments.items() if requests[name] != "null"}
        return symbol.bind(mx.cpu(), arguments, slopes, requests, auxiliary)
    executor = symbol.simple_bind(mx.cpu(), grad_req=requests, **{name: one.shape for name, one in feed.items()})
    executor.copy_params_from({name: one for name, one in arguments.items() if name in values}, auxiliary)
    return executor


def _executed(case: Case, net: gluon.HybridBlock) -> Iterator[tuple[Shape, Values, Values]]:
    """Bind a network, run it, and reshape it for other shapes; yield outputs and gradients."""
    symbol, requests = _symbol(net, case), _requests(case, net)
    executor = _bind(symbol, case, net, case.shapes[0])
    for shape in (*case.shapes, case.shapes[0]):
        feed = _feed(symbol, case, shape)
        # With NumPy semantics MXNet cannot let arrays of another size share memory.
        executor = _bind(symbol, case, net, shape) if case.numpy else executor.reshape(
            partial_shaping=True, allow_up_sizing=True, **{name: one.shape for name, one in feed.items()})
        if not amp.is_active() and has_control_flow(to_graph(symbol)):  # MXNet's engine ends the process now and then
            serialize_execution(executor)
        made = outputs(lambda feed=feed, executor=executor: executor.forward(is_train=False, **feed), ())
        slopes = _backward(executor, feed, case) if trains(case) else {}
        if amp.is_active():
            _check_kept(executor, _bind(symbol, case, net, shape), shape)
        yield shape, made, {name: one - (requests[name] == "add") for name, one in slopes.items()}


def _backward(executor: Any, feed: Mapping[str, mx.nd.NDArray], case: Case) -> Values:
    """Return the gradients of an executor, which begin as ones; leave its states as they were."""
    kept = {name: one.copy() for name, one in executor.aux_dict.items()}
    slopes = {name: one for name, one in executor.grad_dict.items() if one is not None}
    for one in slopes.values():
        one[:] = 1  # overwritten, or added to
    _spoil_memory(one.size for one in slopes.values())
    executor.forward(is_train=True, **feed)
    executor.backward([_cotangent(one.shape, number, case.exact).as_nd_ndarray()
                       for number, one in enumerate(executor.outputs)])
    found = {name: one.asnumpy() for name, one in slopes.items()}
    for name, one in kept.items():
        executor.aux_dict[name][:] = one
    return found


def _check_kept(executor: Any, fresh: Any, shape: Shape) -> None:
    """Compare what a shape keeps in FP32 with an executor that has seen no other: few results show garbage."""
    kept = {node.name for node in fresh.plan.graph.operators() if node.decision and node.decision.cause is Cause.SHAPE}
    low = {node.name for node in executor.plan.graph.operators() if node.decision and node.decision.rule != FP32} & kept
    if low:
        raise Wrong(f"executor, shape {shape}: expected {sorted(low)} in FP32 because of shapes")


def check_executor(case: Case) -> None:
    """``bind``, ``simple_bind``, ``reshape``, and gradients that are written, added, and not asked for."""
    expected = {shape: (stock_outputs(case, shape), bound(case, shape)) for shape in case.shapes}
    slopes = {shape: (stock_gradients(case, shape), bound(case, shape, "gradients")) for shape in case.shapes}
    with stock_alone():
        list(_executed(case, _stock(case)))
    net = network(case)
    apply_amp(case)
    for shape, made, found in _executed(case, net):
        same(f"executor, shape {shape}", expected[shape][0], made, expected[shape][1])
        same_gradients(f"gradients of an executor, shape {shape}", slopes[shape][0], found, slopes[shape][1])


def _predict(symbol: mx.sym.Symbol, arguments: Mapping[str, Any], auxiliary: Mapping[str, Any],
             feeds: Sequence[Mapping[str, mx.nd.NDArray]]) -> list[Values]:
    """Run a symbol by a module that is told the shapes of data, as deployed models are, without MXNet's fusion.

    With loops each batch has a module of its own, which runs one operator after another: MXNet's engine is wrong beside
    them now and then.
    """
    names = sorted(feeds[0])
    if len(feeds) > 1 and has_control_flow(to_graph(symbol)):
        return [found for feed in feeds for found in _predict(symbol, arguments, auxiliary, [feed])]
    module = mx.mod.Module(symbol, data_names=names, label_names=None)
    with environment("MXNET_SUBGRAPH_BACKEND", "NONE"):
        module.bind([(name, feeds[0][name].shape) for name in names], for_training=False)
        module.set_params(dict(arguments), dict(auxiliary))
        for executor in module._exec_group.execs if len(feeds) == 1 else ():
            serialize_execution(executor)

        def forward(*arrays: mx.nd.NDArray) -> list[mx.nd.NDArray]:
            module.forward(mx.io.DataBatch(list(arrays)), is_train=False)
            return module.get_outputs()
        return [outputs(forward, [feed[name] for name in names]) for feed in feeds]


def check_symbols(case: Case) -> None:
    """``convert_symbol`` and ``convert_model``, what files make of them, and MXNet alone that runs them."""
    plain = _stock(case)
    symbol, values = _symbol(plain, case), _held(plain)
    feeds = [_feed(symbol, case, shape) for shape in case.shapes]
    auxiliary = {name: values[name] for name in symbol.list_auxiliary_states()}
    arguments = {name: values[name] for name in symbol.list_arguments() if name in values}
    with stock_alone():
        expected = _predict(symbol, arguments, auxiliary, feeds)
    bounds = [bound(case, shape) for shape in case.shapes]
    converted = {"convert_symbol": (_quietly(amp.convert_symbol, symbol, case.dtype), arguments, auxiliary)}
    for optional in (None, False, True):
        converted[f"convert_model with cast_optional_params={optional}"] = _quietly(
            amp.convert_model, symbol, arguments, auxiliary, case.dtype, cast_optional_params=optional)
    for what, (made, args, aux) in converted.items():
        if made.list_outputs() != symbol.list_outputs():
            raise Wrong(f"{what}: outputs are called {made.list_outputs()}, expected {symbol.list_outputs()}")
        with tempfile.TemporaryDirectory() as folder:
            mx.model.save_checkpoint(f"{folder}/net", 0, made, dict(args), dict(aux))
            for where, model in (("", (made, args, aux)), (", saved", mx.model.load_checkpoint(f"{folder}/net", 0))):
                for shape, allowed, wanted, found in zip(case.shapes, bounds, expected, _predict(*model, feeds)):
                    same(f"{what}{where}, shape {shape}", wanted, found, allowed)


def check_imported(case: Case) -> None:
    """What ``export`` writes during AMP is the FP32 network; a network that is read from it trains, inside another."""
    expected, slopes, names = stock_outputs(case), stock_gradients(case), _names(case)
    is_excluded = "frozen" in case.switches
    kept = replace(case, dtype="float32") if is_excluded else case
    bounds = bound(kept), bound(kept, of="gradients")
    with tempfile.TemporaryDirectory() as folder:
        net = network(case)
        net.hybridize()
        apply_amp(case)
        outputs(net, data(case))
        net.export(f"{folder}/net")
        amp.deinit()
        if "__amp" in Path(f"{folder}/net-symbol.json").read_text():
            raise Wrong("export during AMP: the file holds marks of the process that wrote it")
        imported, read = _imported((f"{folder}/net-symbol.json", f"{folder}/net-0000.params"))
    for name, one in imported.collect_params().items():  # files do not tell which parameters have no gradient
        one.grad_req = "write" if name in frozen(case) else net.collect_params()[name].grad_req
    arguments = [data(case)[int(name[4:])] for name in read]
    same("export during AMP", expected, outputs(imported, arguments), 2e-4)
    outer = Around(imported)
    hybridize(outer, case.way)
    with stock_alone():  # MXNet cannot put all imported networks into others
        outputs(outer, arguments)
    hybridize(outer, case.way)
    apply_amp(case)
    if is_excluded:
        amp.exclude(imported)
    same("imported", expected, outputs(outer, arguments), bounds[0])
    same_gradients("gradients of an imported network", slopes, gradients(outer, case, arguments, with_data=False),
                   bounds[1], names)


CHECKS: dict[str, Callable[[Case], None]] = {
    "ways": check_ways, "training": check_training, "conversion": check_conversion, "first_call": check_first_call,
    "executor": check_executor, "symbols": check_symbols, "imported": check_imported, "empty": check_empty,
    "int8": check_int8, "onnx": check_onnx}
# The types that suit each check; float16 is imitated on CPUs, and converted networks cannot have it there.
DTYPES = {**dict.fromkeys(CHECKS, (LOW, "float32")), "int8": ("int8",), "onnx": ("float16",),
          "ways": tuple(dict.fromkeys((LOW, "float16", "float32"))),
          **({} if RUNS_BFLOAT16 else dict.fromkeys(("training", "conversion", "symbols"), ("float32",)))}


# The command


def failure(case: Case, defect: str = "") -> str:
    """Return what is wrong with a case; nothing when all is well. A defect is planted in AMP meanwhile."""
    with _planted(defect), mx.util.np_shape(case.numpy), mx.util.np_array(case.numpy), \
            native_at_every_size() if "native" in case.switches else nullcontext():
        try:
            _checked(case)
        except StockFails:
            return ""
        except Wrong as error:
            return str(error)
        except Exception as error:  # whatever a network that runs in FP32 raises is a finding
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} in {Path(last.filename).name}: {message_of(error)}"
        finally:
            amp.deinit()
    return ""


def _planted(defect: str) -> Any:
    if not defect:
        return nullcontext()
    from planted_defects import DEFECTS
    return DEFECTS[defect]()


def _checked(case: Case) -> None:
    """Run a check; a difference just above its bound is measured against a bound that is known better."""
    try:
        CHECKS[case.check](case)
    except Near:
        amp.deinit()
        _draws[0] = _MANY_DRAWS
        try:
            CHECKS[case.check](case)
        finally:
            _draws[0] = _DRAWS


def failure_apart(case: Case, defect: str = "") -> str:
    """Return what is wrong with a case, which runs in a process of its own: that it ended the process, perhaps."""
    outcome = apart(failure, case, defect)
    if outcome.ended == NORMALLY:
        return outcome.value
    if outcome.failed:
        raise RuntimeError(f"{outcome.ended}, in {case}")
    return "" if apart(stock_runs, case).ended != NORMALLY else f"the process ended: {outcome.ended}"


def stock_runs(case: Case) -> None:
    """Run a case without AMP: one that ends its process then, too, says nothing."""
    with mx.util.np_shape(case.numpy), mx.util.np_array(case.numpy):
        for way in (case.way, "hybridized"):
            stock_is_right(replace(case, way=way))
            for shape in case.shapes:
                outputs(_stock(case, way), data(case, shape))


class Search:
    """Tries cases until the time is over, and lets Hypothesis make what fails smaller."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.tried = options, Counter()
        self.known: dict[Case, str] = {}
        self.limit = self.until = time.monotonic() + options.seconds
        self.cases = cases(options.kind, {name: options.dtype or DTYPES[name] for name in options.check}, options.steps)

    def message(self, case: Case) -> str:
        """Return what is wrong with a case, the same each time; nothing of new ones when the time is over."""
        if case not in self.known and time.monotonic() < self.limit:
            self.known[case] = failure_apart(case, self.options.plant)
            self.tried[case.kind] += 1
        return self.known.get(case, "")

    def run(self, seed: int) -> tuple[Case, str] | None:
        """Try cases of a seed up to the first that fails; return it as small as can be found, and what is wrong."""
        found: list[tuple[Case, str]] = []

        @hypothesis.seed(seed)
        @hypothesis.settings(max_examples=50, deadline=None, database=None, report_multiple_bugs=False,
                             suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(self.cases)
        def fails(case: Case) -> None:
            message = self.message(case)
            if message:
                if not found:
                    self.limit = time.monotonic() + self.options.shrink
                found.append((case, message))
                raise _error_of(message.split(",")[0].split(":")[0])

        try:
            fails()
        except AssertionError:
            return found[-1]
        finally:
            self.limit = self.until
        return None


@lru_cache(maxsize=None)
def _error_of(kind: str) -> type:
    """Return a type of error for a kind of failure: Hypothesis takes errors of one type for one failure."""
    return type(kind, (AssertionError,), {})


def _report(case: Case, message: str) -> int:
    print(f"{case.check}, {case.dtype}, {case.way}, {sorted(case.switches)}: {message or 'nothing is wrong'}\n"
          f"{program_of(case)}\n"
          f"python tools/fuzz.py --case {shlex.quote(repr(case))}", flush=True)
    return int(bool(message))


def main(argv: Sequence[str] | None = None) -> int:
    """Search; return 1 where something is found, or where a planted defect is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="for how long (600)")
    parser.add_argument("--seed", type=int, default=0, help="the first one; the next are tried one after the other")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="of networks (all)")
    parser.add_argument("--check", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="what is tried (all)")
    parser.add_argument("--dtype", nargs="+", choices=list(_UNITS), help="instead of those that suit each check")
    parser.add_argument("--steps", type=int, default=10, help="a third of the operators in a network at most (10)")
    parser.add_argument("--shrink", type=float, default=90, help="seconds to look for a smaller case (90)")
    parser.add_argument("--plant", default="", help="a defect of tests/helpers/planted_defects.py")
    parser.add_argument("--case", help="run this case only")
    options = parser.parse_args(argv)
    if options.case:
        case = eval(options.case)
        return _report(case, failure_apart(case, options.plant))
    search, seed, findings = Search(options), options.seed, 0
    while time.monotonic() < search.until and not (findings and options.plant):
        found = search.run(seed)
        if found:
            print(f"== seed {seed}", flush=True)
            findings += _report(*found)
        seed += 1
    tried = ", ".join(f"{count} of {kind}" for kind, count in search.tried.items())
    print(f"{findings} findings in {sum(search.tried.values())} cases: {tried}")
    return int(not findings if options.plant else findings > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
