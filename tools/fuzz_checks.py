"""What must hold for every network: each check compares AMP or a conversion with stock FP32, and raises ``Wrong``."""
from __future__ import annotations

import os
import tempfile
import textwrap
import warnings
from functools import partial
from typing import Callable

import gluon_amp as amp  # isort: skip
import mxnet as mx
from fuzz_networks import (
    SHAPES,
    WAYS,
    apply_amp,
    compare,
    data,
    gradients,
    hybridize,
    native_operators,
    network,
    outputs,
    reset_statistics,
    rounding,
    stock_accumulates,
    stock_gradients,
    tolerances,
)
from fuzz_programs import EXACT, Program
from fuzz_symbols import check_executor, check_imported, check_symbols
from mxnet import gluon

__all__ = ["CHECKS", "full_source"]


def check_ways(program: Program, dtype: str) -> None:
    """Forward and gradients, hybridized in every way and not, and for changed shapes."""
    with native_operators(program):
        _check_ways(program, dtype)


def _check_ways(program: Program, dtype: str) -> None:
    plain = network(program, with_regions=False)
    exact = program.mode == EXACT
    expected = [outputs(plain, data(program, shape)) for shape in SHAPES]
    slopes = stock_gradients(program, "eager")
    forward, backward = tolerances(program, dtype)
    bounds = {shape: partial(rounding, program, dtype, shape) for shape in SHAPES}
    bound = bounds[SHAPES[0]]
    for way, flags in WAYS.items():
        net = network(program)
        hybridize(net, flags)
        apply_amp(program, dtype)
        compare(f"forward, {way}, {dtype}", expected[0], outputs(net, data(program)), forward, rounding=bound)
        found = gradients(net, data(program), exact)
        compare(f"gradients, {way}, {dtype}", list(slopes.values()), list(found.values()), backward, list(slopes),
                bound)
        found, names = gradients(net, data(program), exact, passes=2), stock_accumulates(program, way)
        compare(f"gradients that accumulate, {way}, {dtype}", [2 * slopes[name] for name in names],
                [found[name] for name in names], backward, names, bound)
        reset_statistics(program, net)
        for shape, wanted in [*zip(SHAPES, expected), (SHAPES[0], expected[0])]:
            compare(f"forward, {way}, {dtype}, shape {shape}", wanted, outputs(net, data(program, shape)), forward,
                    rounding=bounds[shape])
        amp.deinit()
        if all("on" not in part.settings for part in program.parts):
            compare(f"forward, {way}, after deinit", expected[0], outputs(net, data(program)),
                    tolerances(program, "float32")[0])


def check_conversion(program: Program, dtype: str) -> None:
    """A converted network, and what MXNet alone makes of its files."""
    expected = {shape: outputs(network(program, with_regions=False), data(program, shape)) for shape in SHAPES}
    tolerance = tolerances(program, dtype)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = amp.convert_hybrid_block(network(program), dtype, exclude=program.excluded or None)
    for shape in (*SHAPES, SHAPES[0]):
        compare(f"conversion, {dtype}, shape {shape}", expected[shape], outputs(made, data(program, shape)), tolerance,
                rounding=partial(rounding, program, dtype, shape))
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
                    outputs(loaded, [data(program, shape)[int(name[4:])] for name in names]), tolerance,
                    rounding=partial(rounding, program, dtype, shape))


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


def full_source(program: Program, check: str, dtype: str) -> str:
    """Return a script that shows what went wrong."""
    return textwrap.dedent(f"""\
        import sys; sys.path.insert(0, "tools")
        from fuzz_checks import CHECKS
        from fuzz_programs import Part, Program, Step, Kind
        program = {program!r}
        CHECKS[{check!r}](program, {dtype!r})
        """)


CHECKS: dict[str, Callable[[Program, str], None]] = {
    "ways": check_ways, "conversion": check_conversion, "first_call": check_first_call, "executor": check_executor,
    "symbols": check_symbols, "imported": check_imported}
