"""What stock FP32 gives for a program, how far rounding alone can take that, and comparisons with it."""
from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence
from unittest import mock

import mxnet as mx
import numpy as np
from fuzz_networks import (
    UNWRITTEN,
    WAYS,
    Shape,
    array,
    data,
    expect_no_amp,
    gradients,
    hybridize,
    is_statistic,
    network,
    outputs,
    renew,
    semantics,
    shapes,
    stock,
    trained,
)
from fuzz_programs import EXACT, Program
from mxnet import gluon
from mxnet.ndarray import register

from gluon_amp._mxnet.arrays import cast_arrays
from gluon_amp._mxnet.invoke import original_invoke
from gluon_amp.dtypes import FORMATS
from gluon_amp.eager.applier import make_recorded_invoke

__all__ = ["StockFails", "Wrong", "check_stock", "compare", "compare_named", "initialized", "right", "rounding",
           "stock_accumulates", "stock_alone", "stock_gradients", "stock_outputs", "stock_renewed", "stock_trained",
           "stock_writes", "thoroughly"]

# Differences, as root mean squares, that need no excuse. Whether a larger one is rounding is asked of stock MXNet: it
# runs the program and rounds what every step gives (``rounding``).
_LEAST = {"bfloat16": {"outputs": 2.0 ** -6, "gradients": 0.1, "training": 0.2},
          "float16": {"outputs": 2.0 ** -9, "gradients": 0.05, "training": 0.1},
          "float32": {"outputs": 2e-4, "gradients": 2e-3, "training": 5e-2}}
_UNITS = {"bfloat16": 2.0 ** -8, "float16": 2.0 ** -11, "float32": 2.0 ** -22}  # float32: sums in another order
_FACTOR, _MOST = 4.0, 0.9
_TIMES = 8  # that MXNet gives gradients rightly before it is taken to
_LARGE = FORMATS["float16"].largest / 4  # gradients from here on may overflow in a sum on the way
_MOST_RENEWED = 1e4  # of outputs with other parameters
_draws = ContextVar("draws", default=4)


@contextmanager
def thoroughly() -> Iterator[None]:
    """Ask much more often what rounding does: few draws show where it moves a value over the kink of a rectifier."""
    token = _draws.set(32)
    try:
        yield
    finally:
        _draws.reset(token)


class Wrong(Exception):
    """A result is not that of stock FP32; ``excess`` says how many times the bound the difference is."""

    def __init__(self, message: str, excess: float = np.inf):
        super().__init__(message)
        self.excess = excess


class StockFails(Exception):
    """Stock MXNet does not run a program as a check wants it."""


@contextmanager
def stock_alone() -> Iterator[None]:
    """Run the body, which has no AMP in it: an error there says nothing about AMP."""
    try:
        yield
    except Exception as error:  # of whatever kind
        raise StockFails(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def rms(values: np.ndarray) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def compare(what: str, expected: Sequence[np.ndarray], found: Sequence[np.ndarray], bound: float | Mapping[Any, float]
            ) -> None:
    """Raise ``Wrong`` when outputs differ, relative to their size, by more than a bound, or one for each number."""
    if len(expected) != len(found):
        raise Wrong(f"{what}: {len(found)} outputs, expected {len(expected)}")
    _compare(what, {f"output {number}": one for number, one in enumerate(expected)},
             {f"output {number}": one for number, one in enumerate(found)}, bound)


def compare_named(what: str, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray],
                  bound: Mapping[str, float], names: Collection[str] | None = None) -> None:
    """Raise ``Wrong`` when gradients or statistics differ by more than a bound; those that both have are compared.

    With ``names`` others are not compared, because MXNet itself is wrong.
    """
    found = {name: one for name, one in found.items() if name in expected and (names is None or name in names)}
    _compare(what, {name: expected[name] for name in found}, found, bound, _largest(expected))


def _compare(what: str, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray],
             bound: float | Mapping[str, float], largest: float = 0.0) -> None:
    if {name: one.shape for name, one in expected.items()} != {name: one.shape for name, one in found.items()}:
        raise Wrong(f"{what}: shapes {[one.shape for one in found.values()]}, expected "
                    f"{[one.shape for one in expected.values()]}")
    for name, error in _errors(expected, found, largest).items():
        allowed = bound[name] if isinstance(bound, Mapping) else bound
        if not (error <= allowed or np.isinf(allowed)):
            raise Wrong(f"{what}: {name} is off by {error:.3g}, at most {allowed:.3g} was expected",
                        error / allowed if allowed else np.inf)


def _largest(slopes: Mapping[str, np.ndarray]) -> float:
    """Return the size of the largest gradient."""
    return max((rms(one) for name, one in slopes.items() if not is_statistic(name)), default=0.0)


def _errors(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], largest: float = 0.0
            ) -> dict[str, float]:
    """Return differences relative to the size of each array."""
    # What is nearly zero beside the rest is rounding noise.
    return {name: 0.0 if np.array_equal(one, found[name], equal_nan=True) else
            rms(one - found[name]) / max(rms(one), 1e-3 if is_statistic(name) else 0.1 * largest or 1e-3)
            for name, one in expected.items()}


def right(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Name what stock MXNet gets right in some way of running."""
    off = _errors({name: expected[name] for name in found}, found, _largest(expected))
    return frozenset(name for name, error in off.items() if error <= 1e-3)


def stock_outputs(program: Program, shape: Shape | None = None) -> list[np.ndarray]:
    """Return the outputs of a program without AMP."""
    return outputs(stock(program), data(program, shape))


@lru_cache(maxsize=4)
def stock_renewed(program: Program) -> list[np.ndarray] | None:
    """Return the outputs with other parameters; None where MXNet cannot write them, or float16 would overflow."""
    net = stock(program)
    outputs(net, data(program))
    try:
        renew(program, net)
        mx.nd.waitall()  # otherwise the error is told where something else is read
        made = outputs(net, data(program))
    except mx.MXNetError:
        return None
    return made if all(np.abs(one).max(initial=0.0) < _MOST_RENEWED for one in made) else None


@lru_cache(maxsize=64)
def stock_gradients(program: Program, shape: Shape | None = None) -> dict[str, np.ndarray]:
    """Return the gradients of a program without AMP, which is not hybridized."""
    return gradients(stock(program), program, data(program, shape))


@lru_cache(maxsize=64)
def stock_writes(program: Program, way: str) -> frozenset[str]:
    """Name the gradients that MXNet writes rightly where others were: some of its operators add to what is there."""
    return _stock_right(program, way, stock_gradients(program), unwritten=UNWRITTEN)


@lru_cache(maxsize=64)
def stock_accumulates(program: Program, way: str) -> frozenset[str]:
    """Name the gradients that MXNet adds up rightly: some of its operators write instead."""
    return _stock_right(program, way, {name: 2 * one for name, one in stock_gradients(program).items()}, passes=2)


def _stock_right(program: Program, way: str, expected: Mapping[str, np.ndarray], **settings: Any) -> frozenset[str]:
    """Name the gradients that MXNet gives rightly, each time: some are right by chance.

    Beside a loop its engine decides, more often so without gradients of the data. What tensordot adds up begins with
    whatever lies in its temporary memory.
    """
    named: set[str] = set()
    wrong: set[str] = set()
    by_chance = program.loops or any("tensordot" in step.text for step in program.steps)
    for number in range(_TIMES if by_chance else 1):
        found = _stock_gradients(program, way, with_data=number % 2 == 0, **settings)
        if not found:
            return frozenset()
        named.update(found)
        wrong.update(found.keys() - right(expected, found))
    return initialized(program, named - wrong, way)


def _stock_gradients(program: Program, way: str, **settings: Any) -> dict[str, np.ndarray]:
    """Return the gradients of a program without AMP, none where MXNet fails."""
    try:
        return gradients(_hybridized(program, way), program, data(program), **settings)
    except mx.MXNetError:
        return {}


def _hybridized(program: Program, way: str) -> gluon.HybridBlock:
    """Build a program as stock MXNet runs it in a way."""
    net = stock(program)
    hybridize(net, WAYS[way])
    return net


def initialized(program: Program, names: Collection[str], way: str = "hybridized") -> frozenset[str]:
    """Leave out weights inside of loops in graphs: MXNet adds their gradients to memory that nothing has written."""
    return frozenset(name for name in names if way == "eager" or not program.is_in_loop(name))


@lru_cache(maxsize=4)
def stock_trained(program: Program) -> tuple[float, dict[str, np.ndarray]]:
    """Return a learning rate at which a program without AMP moves by a percent, and how far each parameter moves."""
    slopes = [rms(one) for name, one in stock_gradients(program).items()
              if name.startswith("net") and not is_statistic(name)]
    rate = 0.003 / max(slopes, default=1.0)
    moved = trained(stock(program), program, rate)
    if not all(np.isfinite(one).all() for one in moved.values()):
        raise StockFails("the training does not stay finite, and AMP skips such steps")
    return rate, moved


def stock_trains(program: Program, way: str) -> bool:
    """Tell whether MXNet trains all parameters rightly: from the second step on some gradients hold old memory."""
    rate, expected = stock_trained(program)
    return right(expected, trained(_hybridized(program, way), program, rate)) == set(expected)


def check_stock(program: Program) -> None:
    """Run a program without AMP: what fails or ends the process here is no fault of ours."""
    with semantics(program):
        _check_stock(program)


def _check_stock(program: Program) -> None:
    expected = {shape: stock_outputs(program, shape) for shape in shapes(program)}
    if not all(np.isfinite(one).all() for outs in expected.values() for one in outs):
        raise Wrong("stock MXNet: the outputs are not finite")
    for way, flags in WAYS.items():
        named = len(stock_writes(program, way)), len(stock_accumulates(program, way))
        if 2 * min(named) < len(stock_gradients(program)):
            raise Wrong(f"stock MXNet, {way}: most gradients are wrong")
        net = stock(program)
        hybridize(net, flags)
        for shape in shapes(program):
            compare(f"stock MXNet, {way}, shape {shape}", expected[shape], outputs(net, data(program, shape)), 1e-3)


def _outputs(net: Any, program: Program, inputs: list[mx.nd.NDArray]) -> dict[str, np.ndarray]:
    return {f"output {number}": one for number, one in enumerate(outputs(net, inputs))}


def _trained(net: Any, program: Program, inputs: list[mx.nd.NDArray]) -> dict[str, np.ndarray]:
    return trained(net, program, stock_trained(replace(program, rounded=False, with_regions=True))[0])


_MEASURES: dict[str, Callable] = {"outputs": _outputs, "gradients": gradients, "training": _trained}


def rounding(program: Program, dtype: str, shape: Shape | None = None, of: str = "outputs") -> Mapping[str, float]:
    """Return the largest errors that rounding can excuse, of outputs by number and of gradients by name.

    Stock MXNet runs the program with the result of every step, and its gradient, rounded to the type; then again with
    data and weights moved by a rounding unit at random, as one rounding says little where errors grow. AMP rounds more
    often than once a step: four times the largest of these errors is allowed. Where that is nearly as much as an
    array that is lost or doubled is off (1), or stock MXNet overflows, the type tells nothing of the array; finer ones
    do.
    """
    expect_no_amp()
    return _rounding_errors(program, dtype, shape, of, _draws.get())


# MXNet ends the process behind a BlockGrad of what has no array on the way back, such as a cast of a cast.
@lru_cache(maxsize=64)
@mock.patch.object(register, "_imperative_invoke", make_recorded_invoke(original_invoke))
def _rounding_errors(program: Program, dtype: str, shape: Shape | None, of: str, draws: int) -> Mapping[str, float]:
    exact = replace(program, rounded=True).without_regions()
    net = network(exact, rounded=lambda F, value: value)
    expected = _MEASURES[of](net, exact, data(program, shape))
    if program.mode == EXACT and of != "training":  # which leaves the integers
        return dict.fromkeys(expected, 0.0 if of == "outputs" else 2e-3 if dtype == "float32" else 1e-2)
    found, largest = dict.fromkeys(expected, 0.0), 0.0 if of == "outputs" else _largest(expected)
    for draw in range(draws):
        net, inputs = network(exact, rounded=_rounding(dtype, draw)), data(program, shape)
        if draw:
            random = np.random.RandomState(draw)
            for one in (*inputs, *(each.data() for each in net.collect_params().values() if len(each.shape) > 1)):
                one[:] = one * array(1 + _UNITS[dtype] * random.choice([-1, 1], one.shape))
        measured = _MEASURES[of](net, exact, inputs)
        if of == "gradients" and dtype == "float16":  # sums on the way to a large gradient may be too large for it
            measured = {name: one if is_statistic(name) else np.where(abs(one) > _LARGE, np.inf, one.astype(np.float32))
                        for name, one in measured.items()}
        for name, error in _errors(expected, measured, largest).items():
            found[name] = max(found[name], error if np.isfinite(error) else np.inf)
    return {name: max(_LEAST[dtype][of], _FACTOR * error) if _FACTOR * error < _MOST else np.inf
            for name, error in found.items()}


def _rounding(dtype: str, seed: int) -> Callable[[Any, Any], Any]:
    """Make the function that rounds a tensor, and its gradient on the way back."""
    random = np.random.RandomState(seed)

    def rounded(F: Any, value: mx.nd.NDArray) -> mx.nd.NDArray:
        plain = (value if value.shape else value.reshape((1,))).as_nd_ndarray()
        if dtype == "float32":
            plain = plain * mx.nd.array(1 + _UNITS[dtype] * random.choice([-1, 1], plain.shape))
        else:
            plain = cast_arrays(cast_arrays(plain, dtype), "float32")
        made = plain.as_np_ndarray() if mx.util.is_np_array() else plain
        return made if value.shape else made.reshape(())
    return rounded
