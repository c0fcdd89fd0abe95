"""What must hold for every network: each check compares AMP or a conversion with stock FP32, and raises ``Wrong``."""
from __future__ import annotations

import os
import tempfile
import textwrap
import warnings
import zlib
from typing import Any, Callable, Sequence

import gluon_amp as amp  # isort: skip
import mxnet as mx
import numpy as np
from fuzz_programs import EXACT, Program
from mxnet import autograd, gluon

__all__ = ["CHECKS", "Wrong", "check_stock", "full_source", "network"]

WAYS: dict[str, dict[str, bool] | None] = {"eager": None, "hybridized": {}, "static": {"static_alloc": True},
                                           "static shape": {"static_alloc": True, "static_shape": True}}
SHAPES = ((2, 8, 8), (3, 12, 8), (1, 16, 12))
# Largest differences, as root mean squares, of outputs and of gradients: what 30 operators lose by rounding is less,
# what a lost or stale tensor does is more.
TOLERANCES = {"bfloat16": (0.2, 0.5), "float16": (0.03, 0.15), "float32": (2e-4, 2e-3)}


class Wrong(Exception):
    """A result is not that of stock FP32."""


def parameter(block: gluon.HybridBlock, name: str, shape: tuple[int, ...]) -> gluon.Parameter:
    """Return the network's parameter of a name; blocks that ask for the same one share it."""
    moving = name.startswith(("mean", "var"))
    return block.params.get(name, shape=shape, grad_req="null" if moving else "write", differentiable=not moving)


def network(program: Program, with_regions: bool = True) -> gluon.HybridBlock:
    """Build a program, with the values that belong to its seed."""
    program = program if with_regions else program.without_regions()
    names: dict[str, Any] = {"gluon": gluon, "amp": amp, "parameter": parameter}
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


def _listed(value: Any) -> list[mx.nd.NDArray]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def outputs(net: Callable, arguments: Sequence[mx.nd.NDArray]) -> list[np.ndarray]:
    """Run a network in inference."""
    return [one.asnumpy() for one in _listed(net(*arguments))]


def gradients(net: gluon.HybridBlock, arguments: Sequence[mx.nd.NDArray], exact: bool, passes: int = 1
              ) -> dict[str, np.ndarray]:
    """Differentiate a sum of the outputs with fixed weights; add up over several passes."""
    found = {name: one for name, one in net.collect_params().items() if one.grad_req != "null"}
    for one in found.values():
        one.grad_req = "add" if passes > 1 else "write"
        one.zero_grad()
    for _ in range(passes):
        with autograd.record():
            loss = sum((one * _cotangent(one.shape, number, exact)).sum()
                       for number, one in enumerate(_listed(net(*arguments))))
        loss.backward()
    return {name: one.grad().asnumpy() for name, one in found.items()}


def _cotangent(shape: tuple[int, ...], number: int, exact: bool) -> mx.nd.NDArray:
    random = np.random.RandomState(number)
    if exact:
        return mx.nd.array(random.choice([-1, 1], shape) * (random.uniform(size=shape) < 0.05))
    return mx.nd.array(random.normal(size=shape))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def compare(what: str, expected: Sequence[np.ndarray], found: Sequence[np.ndarray], tolerance: float,
            names: Sequence[str] = ()) -> None:
    """Raise ``Wrong`` when arrays differ by more than the tolerance, relative to their size."""
    if [one.shape for one in expected] != [one.shape for one in found]:
        raise Wrong(f"{what}: shapes {[one.shape for one in found]}, expected {[one.shape for one in expected]}")
    # What is nearly zero beside the rest is rounding noise.
    floor = 0.1 * max([_rms(one) for one in expected] or [0.0]) if names else 1e-3
    for number, (one, other) in enumerate(zip(expected, found)):
        if not tolerance and np.array_equal(one, other):
            continue
        error = _rms(one - other) / max(_rms(one), floor, 1e-12)
        if not error <= tolerance:
            raise Wrong(f"{what}: {names[number] if names else f'output {number}'} is off by {error:.3g}, "
                        f"at most {tolerance:g} was expected")


def _tolerances(program: Program, dtype: str) -> tuple[float, float]:
    return (0.0, 1e-2) if program.mode == EXACT else TOLERANCES[dtype]


def _amp(program: Program, dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amp.init(dtype)
    if program.excluded:
        amp.exclude(*program.excluded)


def check_stock(program: Program) -> None:
    """Run a program without AMP: what fails or ends the process here is no fault of ours."""
    expected = None
    for way, flags in WAYS.items():
        net = network(program, with_regions=False)
        if flags is not None:
            net.hybridize(**flags)
        found = gradients(net, data(program), program.mode == EXACT, passes=2)
        expected = expected or found
        compare(f"gradients of stock MXNet, {way}", list(expected.values()), list(found.values()), 1e-2, list(found))
        for shape in SHAPES:
            outputs(net, data(program, shape))


def check_ways(program: Program, dtype: str) -> None:
    """Forward and gradients, hybridized in every way and not, and for changed shapes."""
    plain = network(program, with_regions=False)
    exact = program.mode == EXACT
    expected = [outputs(plain, data(program, shape)) for shape in SHAPES]
    slopes = gradients(plain, data(program), exact)
    summed = gradients(plain, data(program), exact, passes=2)
    forward, backward = _tolerances(program, dtype)
    for way, flags in WAYS.items():
        net = network(program)
        if flags is not None:
            net.hybridize(**flags)
        _amp(program, dtype)
        compare(f"forward, {way}, {dtype}", expected[0], outputs(net, data(program)), forward)
        found = gradients(net, data(program), exact)
        compare(f"gradients, {way}, {dtype}", list(slopes.values()), list(found.values()), backward, list(slopes))
        found = gradients(net, data(program), exact, passes=2)
        compare(f"gradients that accumulate, {way}, {dtype}", list(summed.values()), list(found.values()), backward,
                list(summed))
        _reset_statistics(program, net)
        for shape, wanted in [*zip(SHAPES, expected), (SHAPES[0], expected[0])]:
            compare(f"forward, {way}, {dtype}, shape {shape}", wanted, outputs(net, data(program, shape)), forward)
        amp.deinit()
        if all(part.setting != "on" for part in program.parts):
            compare(f"forward, {way}, after deinit", expected[0], outputs(net, data(program)),
                    _tolerances(program, "float32")[0])


def _reset_statistics(program: Program, net: gluon.HybridBlock) -> None:
    for name, found in net.collect_params().items():
        if found.grad_req == "null":
            found.set_data(mx.nd.array(_values(program, name.rpartition("_")[2], found.shape)))


def check_conversion(program: Program, dtype: str) -> None:
    """A converted network, and what MXNet alone makes of its files."""
    expected = {shape: outputs(network(program, with_regions=False), data(program, shape)) for shape in SHAPES}
    tolerance = _tolerances(program, dtype)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = amp.convert_hybrid_block(network(program), dtype, exclude=program.excluded or None)
    for shape in (*SHAPES, SHAPES[0]):
        compare(f"conversion, {dtype}, shape {shape}", expected[shape], outputs(made, data(program, shape)), tolerance)
    with tempfile.TemporaryDirectory() as folder:
        files = made.export(os.path.join(folder, "net"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = sorted(name for name in mx.sym.load(files[0]).list_inputs() if name.startswith("data"))
            loaded = gluon.SymbolBlock.imports(files[0], names, files[1])
    for flags in (None, {"static_alloc": True}):
        if flags is not None:
            loaded.hybridize(**flags)
        for shape in SHAPES:
            compare(f"exported conversion, {dtype}, shape {shape}", expected[shape],
                    outputs(loaded, [data(program, shape)[int(name[4:])] for name in names]), tolerance)


def check_first_call(program: Program, dtype: str) -> None:
    """The region around the first call leaves nothing behind."""
    nets = [network(program) for _ in range(3)]
    for net in nets:
        net.hybridize()
    _amp(program, dtype)
    with amp.autocast(enabled=False):
        switched_off = outputs(nets[1], data(program))
    plain = outputs(network(program, with_regions=False), data(program)) if program.mode != EXACT else None
    expected = outputs(nets[0], data(program))
    compare(f"a first call in autocast(False), then outside, {dtype}", expected, outputs(nets[1], data(program)), 0.0)
    with amp.autocast():
        compare(f"a first call in autocast(), {dtype}", expected, outputs(nets[2], data(program)), 0.0)
    amp.deinit()
    del plain, switched_off


def full_source(program: Program, check: str, dtype: str) -> str:
    """Return a script that shows what went wrong."""
    return textwrap.dedent(f"""\
        import sys; sys.path.insert(0, "tools")
        from fuzz_checks import CHECKS
        from fuzz_programs import Part, Program, Step, Kind
        program = {program!r}
        CHECKS[{check!r}](program, {dtype!r})
        """)


CHECKS: dict[str, Callable[[Program, str], None]] = {"ways": check_ways, "conversion": check_conversion,
                                                     "first_call": check_first_call}
