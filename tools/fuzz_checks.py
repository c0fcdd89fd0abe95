"""What must hold for every network: each check compares AMP or a conversion with stock FP32, and raises ``Wrong``."""
from __future__ import annotations

import copy
import os
import tempfile
import textwrap
import warnings
from typing import Callable

import gluon_amp as amp  # isort: skip
import mxnet as mx
from fuzz_apart import ENDED, apart
from fuzz_networks import (
    EMPTY,
    UNWRITTEN,
    apply_amp,
    data,
    frozen,
    gradients,
    hybridize,
    native_operators,
    network,
    outputs,
    renew,
    reset_statistics,
    semantics,
    shapes,
    some_ways,
    trained,
)
from fuzz_programs import Program
from fuzz_stock import (
    Wrong,
    compare,
    compare_named,
    initialized,
    rounding,
    stock_accumulates,
    stock_gradients,
    stock_outputs,
    stock_renewed,
    stock_trained,
    stock_trains,
    stock_writes,
)
from fuzz_symbols import check_executor, check_imported, check_symbols
from mxnet import gluon

from gluon_amp._mxnet.arrays import cast_arrays

__all__ = ["CHECKS", "full_source"]


def check_ways(program: Program, dtype: str) -> None:
    """Forward and gradients, hybridized in every way and not, for changed shapes and changed parameters."""
    first, second, _ = called = shapes(program)
    expected = {shape: stock_outputs(program, shape) for shape in called}
    bounds = {shape: rounding(program, dtype, shape) for shape in called}
    slopes, bound = stock_gradients(program), rounding(program, dtype, of="gradients")
    later, later_bound = stock_gradients(program, second), rounding(program, dtype, second, of="gradients")
    renewed = stock_renewed(program)
    for way, flags in some_ways(program, dtype, 2).items():
        lost = _lost_biases(program, way, dtype)
        written, added = stock_writes(program, way) - lost, stock_accumulates(program, way) - lost
        with native_operators(program):
            net = network(program)
            hybridize(net, flags)
            apply_amp(program, dtype)
            compare(f"forward, {way}, {dtype}", expected[first], outputs(net, data(program)), bounds[first])
            if program.seed % 4 == 2:
                compare(f"forward of a copy, {way}, {dtype}", expected[first],
                        outputs(copy.deepcopy(net), data(program)), bounds[first])
            if program.seed % 6 == 5 and flags is not None:
                net.register_op_hook(lambda *_: None, monitor_all=program.seed % 2 == 0)
            # Where data has gradients dense layers that are not hybridized keep FP32.
            found = gradients(net, program, data(program), with_data=program.seed % 4 != 1, unwritten=UNWRITTEN)
            compare_named(f"gradients, {way}, {dtype}", slopes, found, bound, written)
            reset_statistics(program, net)
            found = gradients(net, program, data(program), passes=2)
            compare_named(f"gradients that accumulate, {way}, {dtype}", {name: 2 * one for name, one in slopes.items()},
                          found, bound, added)
            reset_statistics(program, net)
            for shape in (*called, first):
                compare(f"forward, {way}, {dtype}, shape {shape}", expected[shape], outputs(net, data(program, shape)),
                        bounds[shape])
            found = gradients(net, program, data(program, second))
            compare_named(f"gradients, {way}, {dtype}, shape {second}", later, found, later_bound, written)
            reset_statistics(program, net)
            if program.seed % 5 == 0:
                hybridize(net, flags)
            if renewed is not None:
                renew(program, net)
                compare(f"forward, {way}, {dtype}, other parameters", renewed, outputs(net, data(program)),
                        bounds[first])
            amp.deinit()
            if all("on" not in part.settings for part in program.parts):
                compare(f"forward, {way}, after deinit", renewed or expected[first], outputs(net, data(program)),
                        2e-4)


def check_training(program: Program, dtype: str) -> None:
    """Steps of two trainers, hybridized and not."""
    rate, expected = stock_trained(program)
    bound = rounding(program, dtype, of="training")
    for way, flags in some_ways(program, dtype, 1).items():
        if (expected.keys() - initialized(program, expected, way) or not stock_trains(program, way)
                or _lost_biases(program, way, dtype)):  # one wrong gradient spoils all later steps
            continue
        written = stock_writes(program, way)
        with native_operators(program):
            net = network(program)
            hybridize(net, flags)
            apply_amp(program, dtype)
            compare_named(f"training, {way}, {dtype}", expected, trained(net, program, rate), bound, written)
            amp.deinit()


def _lost_biases(program: Program, way: str, dtype: str) -> set[str]:
    """Name the biases behind frozen weights in FP32 calls outside of graphs, which are MXNet's own and lose them."""
    steps = [step for part in program.parts if dtype == "float32" or part.runs_fp32 for step in part.steps]
    layers = [step.parameters for step in steps if len(step.parameters) == 2
              and any(name in step.text for name in ("FullyConnected", "fully_connected"))]
    return {f"net_{bias}" for (weight, _), (bias, _) in layers
            if f"net_{weight}" in frozen(program)} if way == "eager" else set()


def check_conversion(program: Program, dtype: str) -> None:
    """A converted network, and what MXNet alone makes of its files."""
    called = shapes(program)
    expected = {shape: stock_outputs(program, shape) for shape in called}
    bounds = {shape: rounding(program, dtype, shape) for shape in called}
    keeps_types = program.seed % 5 != 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = amp.convert_hybrid_block(network(program), dtype, exclude=program.excluded or None,
                                        cast_outputs=keeps_types)
    for shape in (*called, called[0]):
        compare(f"conversion, {dtype}, shape {shape}", expected[shape], outputs(_wide(made), data(program, shape)),
                bounds[shape])
    with tempfile.TemporaryDirectory() as folder:
        files = made.export(os.path.join(folder, "net"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = sorted(name for name in mx.sym.load(files[0]).list_inputs() if name.startswith("data"))
            loaded = gluon.SymbolBlock.imports(files[0], names, files[1])
    for flags in (None, {"static_alloc": not program.loops}):  # MXNet's loops give what was in that memory before
        if flags is not None:
            loaded.hybridize(**flags)
        for shape in called:
            compare(f"exported conversion, {dtype}, shape {shape}", expected[shape],
                    outputs(_wide(loaded), [data(program, shape)[int(name[4:])] for name in names]), bounds[shape])


def _wide(net: Callable) -> Callable:
    """Return a network whose outputs are FP32."""
    def call(*arguments: mx.nd.NDArray) -> list[mx.nd.NDArray]:
        made = net(*arguments)
        return cast_arrays(list(made) if isinstance(made, (list, tuple)) else [made], "float32")
    return call


def check_first_call(program: Program, dtype: str) -> None:
    """The region around the first call leaves nothing behind."""
    nets = [network(program) for _ in range(3)]
    for net in nets:
        net.hybridize()
    apply_amp(program, dtype)
    with amp.autocast(enabled=False):
        outputs(nets[1], data(program))
    expected = outputs(nets[0], data(program))
    compare(f"a first call in autocast(False), then outside, {dtype}", expected, outputs(nets[1], data(program)), 0.0)
    with amp.autocast():
        compare(f"a first call in autocast(), {dtype}", expected, outputs(nets[2], data(program)), 0.0)
    amp.deinit()


def check_empty(program: Program, dtype: str) -> None:
    """A batch without images, in inference. Where MXNet fails at it, it fails at what follows as well."""
    def shapes_without_amp() -> str:
        return _shapes(program.without_regions())

    def shapes_with_amp() -> str:
        apply_amp(program, dtype)
        return _shapes(program)

    def _shapes(program: Program) -> str:
        net = network(program)
        hybridize(net, *some_ways(program, dtype, 1).values())
        called = first, EMPTY, first, EMPTY
        return str([[one.shape for one in outputs(net, data(program, shape))] for shape in called])

    if not program.numpy:  # with legacy semantics a size of 0 is one that is not known
        return
    first = shapes(program)[0]
    expected = apart(shapes_without_amp)
    found = None if expected is None or expected.startswith(ENDED) else apart(shapes_with_amp)
    if found is not None and found != expected:
        raise Wrong(f"a batch without images, {dtype}: {found}, expected {expected}")


def full_source(program: Program, check: str, dtype: str) -> str:
    """Return a script that shows what went wrong."""
    return textwrap.dedent(f"""\
        import sys; sys.path.insert(0, "tools")
        from fuzz_checks import CHECKS
        from fuzz_programs import Part, Program, Step, Kind
        program = {program!r}
        CHECKS[{check!r}](program, {dtype!r})
        """)


def _under_semantics(check: Callable[[Program, str], None]) -> Callable[[Program, str], None]:
    """Let a check give programs the arrays that they are written for."""
    def checked(program: Program, dtype: str) -> None:
        with semantics(program):
            check(program, dtype)
    return checked


CHECKS: dict[str, Callable[[Program, str], None]] = {name: _under_semantics(check) for name, check in {
    "ways": check_ways, "training": check_training, "conversion": check_conversion, "first_call": check_first_call,
    "executor": check_executor, "symbols": check_symbols, "imported": check_imported,
    "empty": check_empty}.items()}
