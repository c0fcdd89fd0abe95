"""The random program of a seed, which decides what kinds of operators it is made of."""
from __future__ import annotations

import random
from dataclasses import replace

import fuzz_numpy
import fuzz_operators
from fuzz_layers import LAYERS, LAYERS_ON_FLOATS
from fuzz_loops import branch, loop
from fuzz_maker import Adds, Maker
from fuzz_operators import convolution, dropout, output_operator, telltale
from fuzz_programs import EXACT, FLOAT, Part, Program, Step, needed

__all__ = ["generate"]

# MXNet's gradients of these are garbage, or an error, where they are those of inference.
_WRONG_OUTSIDE_OF_TRAINING = ("'max'", "MaxPool", "RNN", "rnn")


def generate(seed: int, steps: int = 30, mode: str = FLOAT, numpy: bool | None = None) -> Program:
    """Make a random program of at least so many steps.

    Parameters
    ----------
    seed : int
        The same gives the same program.
    steps : int
        Operators, some of which are two or three in MXNet's graph.
    mode : {'float', 'exact'}
        ``'exact'`` takes operators only whose results are exact on small integers.
    numpy : bool or None
        Whether to take operators of ``mx.np`` and ``mx.npx``; with None the seed decides.
    """
    draw = random.Random(f"kinds{seed}")
    by_seed, has_loops, has_layers = (draw.random() < chance for chance in (0.35, 0.3, 0.4))
    numpy = by_seed if numpy is None else numpy
    make = Maker(seed, mode, fuzz_numpy.NAMES if numpy else None)
    makers = _makers(mode, numpy, has_loops, has_layers)
    if make.random.random() < 0.15:  # gradients are those of inference then
        makers = [*makers, dropout, dropout, dropout]
    # MXNet's reverse writes its gradient where it is to add it: it must not read the data itself.
    make.add((0, 1), "{0} - {1}" if numpy else "{0} + F.reverse(-{1}, axis=1)", make.kinds[0])
    convolution(make)
    while len(make.steps) < 1.4 * steps:  # what no output needs is dropped below
        try:
            make.random.choice(makers)(make)
        except LookupError:
            continue
    if any(name in text for step in make.steps for text in (step.text, *dict(step.layers).values())
           for name in _WRONG_OUTSIDE_OF_TRAINING):
        make.steps = [replace(step, text=step.text.replace("p=0.5", "p=0.0")) for step in make.steps]
    if mode == FLOAT and not numpy and draw.random() < 0.4:
        output_operator(make)
    outputs = _outputs(make)
    parts = [_with_telltale(make, part) if part.runs_fp32 else part for part in _parts(make, outputs)]
    told = [part.steps[-1].result for part in parts if part.runs_fp32]
    return Program(seed, mode, tuple(parts), (*outputs, *told), numpy=numpy)


def _makers(mode: str, numpy: bool, has_loops: bool, has_layers: bool) -> list[Adds]:
    family = fuzz_numpy if numpy else fuzz_operators
    makers = family.COMMON + (family.ON_INTEGERS if mode == EXACT else family.ON_FLOATS)
    if has_loops and not numpy:  # MXNet 1.9.1 has no loops of NumPy-style operators
        makers = [*makers, *[loop, branch] * 4]
    if has_layers:
        makers = [*makers, *LAYERS * 2, *([] if mode == EXACT else LAYERS_ON_FLOATS)]
    return makers


def _outputs(make: Maker) -> tuple[int, ...]:
    """Choose the last tensors, and some inner ones."""
    read = {one for step in make.steps for one in step.inputs}
    ends = [step.result for step in make.steps if step.result not in read][-5:]
    inner = make.random.sample([step.result for step in make.steps], make.random.randint(0, 3))
    return tuple(dict.fromkeys([*ends, *inner]))


def _parts(make: Maker, outputs: tuple[int, ...]) -> list[Part]:
    """Cut what the outputs need into blocks."""
    remaining, parts = needed(make.steps, outputs), []
    while remaining:
        count = make.random.randint(2, 9)
        setting = make.random.choice(["plain"] * 6 + ["off", "on", "excluded"])
        inner = make.random.choice([""] * 5 + ["plain", "off", "on", "excluded"])
        parts.append(Part(tuple(remaining[:count]), setting, inner))
        remaining = remaining[count:]
    return parts


def _with_telltale(make: Maker, part: Part) -> Part:
    wide: list[Step] = [step for step in part.steps if step.kind.name != "scalar"]
    told = telltale(make, make.random.choice(wide).result if wide else 0)
    return replace(part, steps=(*part.steps, told))
