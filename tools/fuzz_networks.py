"""Run programs as networks, and compare what comes out."""
from __future__ import annotations

import warnings
import zlib
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, Callable, Iterator, Mapping, Sequence

import gluon_amp as amp  # isort: skip
import mxnet as mx
import numpy as np
from fuzz_programs import EXACT, Program
from mxnet import autograd, gluon

from gluon_amp._mxnet.arrays import cast_arrays
from gluon_amp.passes.native_operators import REPLACEMENTS
from gluon_amp.runtime import eager_native

__all__ = ["SHAPES", "WAYS", "Wrong", "apply_amp", "check_stock", "compare", "cotangent", "data", "errors", "gradients",
           "hybridize", "native_operators", "network", "outputs", "reset_statistics", "rms", "rounding",
           "stock_accumulates", "stock_gradients", "tolerances"]

WAYS: dict[str, dict[str, Any] | None] = {"eager": None, "hybridized": {}, "static": {"static_alloc": True},
                                          "static shape": {"static_alloc": True, "static_shape": True},
                                          "parts": {"below": True}}
SHAPES = ((2, 8, 8), (3, 12, 8), (1, 16, 12))
# Differences, as root mean squares, of outputs and of gradients, that most programs keep within. Whether a larger one
# is rounding is asked of stock MXNet, which runs the program and rounds what every step gives (``rounding``).
TOLERANCES = {"bfloat16": (0.2, 0.5), "float16": (0.03, 0.15), "float32": (2e-4, 2e-3)}


class Wrong(Exception):
    """A result is not that of stock FP32."""


def parameter(block: gluon.HybridBlock, name: str, shape: tuple[int, ...]) -> gluon.Parameter:
    """Return the network's parameter of a name; blocks that ask for the same one share it."""
    moving = name.startswith(("mean", "var"))
    return block.params.get(name, shape=shape, grad_req="null" if moving else "write", differentiable=not moving)


def network(program: Program, with_regions: bool = True, rounded: Callable | None = None) -> gluon.HybridBlock:
    """Build a program, with the values that belong to its seed."""
    program = program if with_regions else program.without_regions()
    names: dict[str, Any] = {"gluon": gluon, "amp": amp, "parameter": parameter, "rounded": rounded}
    exec(compile(program.source(), f"<program {program.seed}>", "exec"), names)
    net = names["Net"]()
    net.initialize()
    for name, found in net.collect_params().items():
        found.set_data(mx.nd.array(_values(program, name.rpartition("_")[2], found.shape)))
    return net


def _values(program: Program, name: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.RandomState(zlib.crc32(f"{program.seed}{name}".encode()))
    role = name.rstrip("0123456789")
    fan_in = int(np.prod(shape[1:]))
    if program.mode == EXACT:
        chance = min(1.0, 6 / fan_in) if role == "w" else 1.0
        return random.choice([-1, 1], shape) * (random.uniform(size=shape) < chance)
    if role in ("gamma", "var"):
        return random.uniform(0.5, 1.5, shape)
    return random.normal(scale=(1.6 / fan_in) ** 0.5 if role == "w" else 0.2, size=shape)


def data(program: Program, shape: tuple[int, int, int] = SHAPES[0]) -> list[mx.nd.NDArray]:
    """Return the arguments of a call."""
    random = np.random.RandomState(program.seed)
    made = [random.normal(size=(shape[0], kind.channels, *shape[1:])) for kind in program.inputs]
    return [mx.nd.array(np.clip(np.rint(one), -3, 3) if program.mode == EXACT else one) for one in made]


@contextmanager
def native_operators(program: Program) -> Iterator[None]:
    """Let operators in C++ serve every size, for half of the programs; they gain from some size on."""
    kept = dict(REPLACEMENTS), eager_native._LEAST
    try:
        if program.seed % 2:
            REPLACEMENTS.update({name: one._replace(least=0) for name, one in REPLACEMENTS.items()})
            eager_native._LEAST = 0
        yield
    finally:
        REPLACEMENTS.update(kept[0])
        eager_native._LEAST = kept[1]


def hybridize(net: gluon.HybridBlock, flags: Mapping[str, Any] | None) -> None:
    """Hybridize a network in one of the ways: not, as a whole, or what is in it only."""
    flags = {"active": False} if flags is None else dict(flags)
    for block in net._children.values() if flags.pop("below", False) else [net]:
        block.hybridize(**flags)


def _listed(value: Any) -> list[mx.nd.NDArray]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def outputs(net: Callable, arguments: Sequence[mx.nd.NDArray]) -> list[np.ndarray]:
    """Run a network in inference."""
    return [one.asnumpy() for one in _listed(net(*arguments))]


def gradients(net: gluon.HybridBlock, arguments: Sequence[mx.nd.NDArray], exact: bool, passes: int = 1
              ) -> dict[str, np.ndarray]:
    """Differentiate a weighted sum of the outputs with respect to parameters and data; add up over passes."""
    found = {name: one for name, one in net.collect_params().items() if one.grad_req != "null"}
    for one in found.values():
        one.grad_req = "add" if passes > 1 else "write"
        one.zero_grad()
    for one in arguments:
        one.attach_grad("add" if passes > 1 else "write")
    for _ in range(passes):
        with autograd.record():
            loss = sum((one * cotangent(one.shape, number, exact)).sum()
                       for number, one in enumerate(_listed(net(*arguments))))
        loss.backward()
    return {**{name: one.grad().asnumpy() for name, one in found.items()},
            **{f"data{number}": one.grad.asnumpy() for number, one in enumerate(arguments)}}


def cotangent(shape: tuple[int, ...], number: int, exact: bool) -> mx.nd.NDArray:
    """Return the fixed weights of an output in the loss."""
    random = np.random.RandomState(number)
    if exact:
        return mx.nd.array(random.choice([-1, 1], shape) * (random.uniform(size=shape) < 0.05))
    return mx.nd.array(random.normal(size=shape))


def rms(values: np.ndarray) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def compare(what: str, expected: Sequence[np.ndarray], found: Sequence[np.ndarray], tolerance: float,
            names: Sequence[str] = (), rounding: Callable[[], Mapping[Any, float]] = dict) -> None:
    """Raise ``Wrong`` when arrays differ, relative to their size, by more than the tolerance and more than by rounding.

    ``rounding`` gives what rounding alone does to a gradient, by its name, or to an output, by its number.
    """
    if [one.shape for one in expected] != [one.shape for one in found]:
        raise Wrong(f"{what}: shapes {[one.shape for one in found]}, expected {[one.shape for one in expected]}")
    for number, error in enumerate(errors(expected, found, bool(names))):
        if error <= tolerance:
            continue
        bound = max(tolerance, rounding().get(names[number] if names else number, 0.0)) if tolerance else 0.0
        if not (error <= bound or np.isinf(bound)):
            raise Wrong(f"{what}: {names[number] if names else f'output {number}'} is off by {error:.3g}, "
                        f"at most {bound:.3g} was expected")


def errors(expected: Sequence[np.ndarray], found: Sequence[np.ndarray], are_gradients: bool) -> list[float]:
    """Return differences relative to the size of each array."""
    # What is nearly zero beside the rest is rounding noise.
    floor = 0.1 * max([rms(one) for one in expected] or [0.0]) if are_gradients else 1e-3
    return [0.0 if np.array_equal(one, other) else rms(one - other) / max(rms(one), floor, 1e-12)
            for one, other in zip(expected, found)]


@lru_cache(maxsize=8)
def rounding(program: Program, dtype: str, shape: tuple[int, int, int] = SHAPES[0]) -> Mapping[Any, float]:
    """Return the largest errors that rounding can excuse, of outputs by number and of gradients by name.

    Stock MXNet runs the program with the result of every step, and its gradient, rounded to the type; then again with
    data and weights moved by a rounding unit at random, as one rounding says little where errors grow. AMP rounds more
    often than once a step: three times the largest of these errors is allowed. Where that is nearly as much as an
    array that is lost or doubled is off (1), or stock MXNet overflows, the type tells nothing of the array; finer ones
    do.
    """
    if program.mode == EXACT:
        return {}
    exact = replace(program, rounded=True).without_regions()
    expected = _both(network(exact, rounded=lambda F, value: value), data(program, shape))
    found: dict[Any, float] = {}
    for draw in range(3):
        net, inputs = network(exact, rounded=_rounding(dtype, draw)), data(program, shape)
        if draw:
            random = np.random.RandomState(draw)
            for array in (*inputs, *(one.data() for one in net.collect_params().values() if len(one.shape) > 1)):
                array[:] = array * mx.nd.array(1 + _UNITS[dtype] * random.choice([-1, 1], array.shape))
        outs, slopes = _both(net, inputs)
        off = [*enumerate(errors(expected[0], outs, False)),
               *zip(slopes, errors(list(expected[1].values()), list(slopes.values()), True))]
        for name, error in off:
            found[name] = max(found.get(name, 0.0), error if np.isfinite(error) else np.inf)
    return {name: 3 * error if 3 * error < 0.9 else np.inf for name, error in found.items()}


_UNITS = {"bfloat16": 2.0 ** -8, "float16": 2.0 ** -11, "float32": 2.0 ** -22}  # float32: sums in another order


def _rounding(dtype: str, seed: int) -> Callable[[Any, Any], Any]:
    """Make the function that rounds a tensor, and its gradient on the way back."""
    random = np.random.RandomState(seed)

    def rounded(F: Any, value: mx.nd.NDArray) -> mx.nd.NDArray:
        if dtype == "float32":
            return value * mx.nd.array(1 + _UNITS[dtype] * random.choice([-1, 1], value.shape))
        return cast_arrays(cast_arrays(value, dtype), "float32")
    return rounded


def _both(net: gluon.HybridBlock, arguments: Sequence[mx.nd.NDArray]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return outputs and gradients."""
    with autograd.predict_mode():
        outs = outputs(net, arguments)
    return outs, gradients(net, arguments, False)


def tolerances(program: Program, dtype: str) -> tuple[float, float]:
    """Return how far outputs and gradients may be off."""
    return (0.0, 1e-2) if program.mode == EXACT else TOLERANCES[dtype]


def apply_amp(program: Program, dtype: str) -> None:
    """Switch AMP on, with the exclusions of a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amp.init(dtype)
    if program.excluded:
        amp.exclude(*program.excluded)


@lru_cache(maxsize=64)
def stock_gradients(program: Program, way: str, passes: int = 1) -> dict[str, np.ndarray]:
    """Return the gradients of a program without AMP."""
    net = network(program, with_regions=False)
    hybridize(net, WAYS[way])
    return gradients(net, data(program), program.mode == EXACT, passes)


def stock_accumulates(program: Program, way: str) -> list[str]:
    """Name the gradients that MXNet adds up rightly: some of its operators write instead."""
    expected = {name: 2 * one for name, one in stock_gradients(program, "eager").items()}
    found = stock_gradients(program, way, passes=2)
    floor = 0.1 * max(map(rms, expected.values()))
    return [name for name, one in expected.items() if rms(one - found[name]) <= 1e-3 * max(rms(one), floor)]


def check_stock(program: Program) -> None:
    """Run a program without AMP: what fails or ends the process here is no fault of ours."""
    expected = stock_gradients(program, "eager")
    for way, flags in WAYS.items():
        found = stock_gradients(program, way)
        compare(f"gradients of stock MXNet, {way}", list(expected.values()), list(found.values()), 1e-2, list(found))
        stock_gradients(program, way, passes=2)
        net = network(program, with_regions=False)
        hybridize(net, flags)
        for shape in SHAPES:
            if not all(np.isfinite(one).all() for one in outputs(net, data(program, shape))):
                raise Wrong(f"stock MXNet, {way}, shape {shape}: the outputs are not finite")


def reset_statistics(program: Program, net: gluon.HybridBlock) -> None:
    """Undo what training did to the statistics of batches."""
    for name, found in net.collect_params().items():
        if found.grad_req == "null":
            found.set_data(mx.nd.array(_values(program, name.rpartition("_")[2], found.shape)))
