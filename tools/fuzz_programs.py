"""Random networks as Python source, so that what fails can be printed, cut down and run again."""
from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass, field, replace
from typing import Callable, Iterator, NamedTuple

__all__ = ["EXACT", "FLOAT", "Part", "Program", "Step", "generate"]

FLOAT, EXACT = "float", "exact"
CHANNELS = (8, 16, 24, 32, 48)


class Kind(NamedTuple):
    """What a tensor is: a map (N, C, H, W), a sequence (N, T, C) or flat (N, C), halved ``level`` times."""

    name: str
    channels: int
    level: int = 0


@dataclass(frozen=True)
class Step:
    """One line of a program: a tensor computed from earlier ones and parameters."""

    result: int
    inputs: tuple[int, ...]
    text: str
    kind: Kind
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def line(self) -> str:
        """Return the line of Python."""
        return f"t{self.result} = " + self.text.format(*(f"t{number}" for number in self.inputs))


@dataclass(frozen=True)
class Part:
    """Consecutive steps that are a block of their own; ``setting`` is 'plain', 'off', 'on' or 'excluded'."""

    steps: tuple[Step, ...]
    setting: str = "plain"


@dataclass(frozen=True)
class Program:
    """A network: blocks in a row, which read what any block before them made."""

    seed: int
    mode: str
    parts: tuple[Part, ...]
    outputs: tuple[int, ...]
    inputs: tuple[Kind, ...] = (Kind("map", 16), Kind("map", 16))
    with_regions: bool = field(default=True, compare=False)

    @property
    def steps(self) -> list[Step]:
        """All steps in order."""
        return [step for part in self.parts for step in part.steps]

    @property
    def excluded(self) -> list[str]:
        """Names of the blocks that are excluded."""
        return [f"part{number}" for number, part in enumerate(self.parts) if part.setting == "excluded"]

    def without_regions(self) -> Program:
        """Return the same network as plain FP32 code."""
        return replace(self, with_regions=False)

    def source(self) -> str:
        """Return the classes ``Part0``, ..., and ``Net``."""
        classes = [self._part(number) for number in range(len(self.parts))]
        return "\n\n".join([*classes, self._net()])

    def _part(self, number: int) -> str:
        part = self.parts[number]
        read, made = self._interface(number)
        parameters = dict(pair for step in part.steps for pair in step.parameters)
        body = [step.line() for step in part.steps]
        if self.with_regions and part.setting in ("on", "off"):
            body = [f"with amp.autocast(enabled={part.setting == 'on'}):", *("    " + line for line in body)]
        arguments = ", ".join(["self", "F", *(f"t{one}" for one in read), *parameters])
        return "\n".join([
            f"class Part{number}(gluon.HybridBlock):",
            "    def __init__(self, params):",
            f"        super().__init__(prefix='part{number}_', params=params)",
            *(f"        self.{name} = parameter(self, {name!r}, {shape})" for name, shape in parameters.items()),
            "",
            f"    def hybrid_forward({arguments}):",
            textwrap.indent("\n".join(body), " " * 8),
            "        return " + ", ".join(f"t{one}" for one in made)])

    def _net(self) -> str:
        lines = ["class Net(gluon.HybridBlock):", "    def __init__(self):",
                 "        super().__init__(prefix='net_', params=gluon.ParameterDict('net_'))"]
        parameters = dict(pair for step in self.steps for pair in step.parameters)
        lines += [f"        parameter(self, {name!r}, {shape})" for name, shape in parameters.items()]
        lines += [f"        self.part{number} = Part{number}(self.params)" for number in range(len(self.parts))]
        read = ", ".join(f"t{one}" for one in range(len(self.inputs)))
        lines += ["", f"    def hybrid_forward(self, F, {read}):"]
        for number in range(len(self.parts)):
            read_here, made = self._interface(number)
            lines.append(f"        {', '.join(f't{one}' for one in made)} = self.part{number}("
                         f"{', '.join(f't{one}' for one in read_here)})")
        return "\n".join([*lines, "        return " + ", ".join(f"t{one}" for one in self.outputs)])

    def _interface(self, number: int) -> tuple[list[int], list[int]]:
        """Return what a part reads from others, and what others read of it."""
        here = {step.result for step in self.parts[number].steps}
        read = sorted({one for step in self.parts[number].steps for one in step.inputs} - here)
        later = {one for part in self.parts[number + 1:] for step in part.steps for one in step.inputs}
        return read or [0], sorted(here & (later | set(self.outputs))) or [max(here)]

    def smaller(self) -> Iterator[Program]:
        """Yield programs that are a little simpler, most of all first."""
        if len(self.outputs) > 1:
            for one in self.outputs:
                yield from replace(self, outputs=tuple(other for other in self.outputs if other != one))._without(set())
        for number, part in enumerate(self.parts):
            if part.setting != "plain":
                yield self._with(number, replace(part, setting="plain"))
        for count in (8, 4, 2, 1):
            for first in range(0, len(self.steps), count):
                yield from self._without({step.result for step in self.steps[first:first + count]})
        for number in range(len(self.parts) - 1):
            one, two = self.parts[number:number + 2]
            if one.setting == two.setting:
                merged = Part(one.steps + two.steps, one.setting)
                yield replace(self, parts=(*self.parts[:number], merged, *self.parts[number + 2:]))

    def _with(self, number: int, part: Part) -> Program:
        return replace(self, parts=tuple(part if i == number else other for i, other in enumerate(self.parts)))

    def _without(self, dropped: set[int]) -> Iterator[Program]:
        """Let the readers of some tensors read an earlier one of the same kind."""
        kinds = dict(enumerate(self.inputs)) | {step.result: step.kind for step in self.steps}
        moved: dict[int, int] = {}
        for one in sorted(dropped):
            alike = [other for other in kinds if other < one and kinds[other] == kinds[one] and other not in dropped]
            if alike:
                moved[one] = max(alike)
        used = {one for step in self.steps if step.result not in dropped for one in step.inputs} | set(self.outputs)
        if not (used & dropped) <= set(moved):
            return
        outputs = tuple(dict.fromkeys(moved.get(one, one) for one in self.outputs))
        if min(outputs) < len(self.inputs):
            return
        parts = tuple(Part(tuple(replace(step, inputs=tuple(moved.get(one, one) for one in step.inputs))
                                 for step in part.steps if step.result not in dropped), part.setting)
                      for part in self.parts)
        needed = _needed([step for part in parts for step in part.steps], outputs)
        parts = tuple(Part(tuple(step for step in part.steps if step in needed), part.setting) for part in parts)
        parts = tuple(part for part in parts if part.steps)
        if parts:
            yield replace(self, parts=parts, outputs=outputs)


class _Maker:
    """Adds random steps to a program."""

    def __init__(self, seed: int, mode: str):
        self.random = random.Random(f"{mode}{seed}")
        self.mode = mode
        self.kinds = [Kind("map", 16), Kind("map", 16)]
        self.steps: list[Step] = []
        self.pool: list[tuple[str, tuple[int, ...]]] = []

    def weight(self, role: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Return a parameter: a new one, or sometimes one that an earlier step reads."""
        alike = [found for found in self.pool if found[1] == shape and found[0].startswith(role)]
        if alike and self.random.random() < 0.35:
            return self.random.choice(alike)
        self.pool.append((f"{role}{len(self.pool)}", shape))
        return self.pool[-1]

    def pick(self, kind: str | Kind) -> int:
        """Return a tensor of a kind, preferably a late one; the first raises for want of one."""
        found = [number for number, one in enumerate(self.kinds) if kind in (one, one.name)]
        if not found:
            raise LookupError(kind)
        chance = self.random.random()
        return found[-1] if chance < 0.4 else self.random.choice(found[-4:] if chance < 0.7 else found)

    def add(self, inputs: tuple[int, ...], text: str, kind: Kind, *parameters: tuple[str, tuple[int, ...]]) -> int:
        """Add a step."""
        for number, (name, _) in enumerate(parameters):
            text = text.replace(f"<{number}>", name)
        self.kinds.append(kind)
        self.steps.append(Step(len(self.kinds) - 1, inputs, text, kind, parameters))
        return len(self.kinds) - 1

    def bounded(self, made: int) -> None:
        """Keep values small enough for exact arithmetic."""
        if self.mode == EXACT:
            self.add((made,), "F.clip({0}, a_min=-4, a_max=4)", self.kinds[made])


def _convolution(make: _Maker) -> None:
    source = make.pick("map")
    _, channels, level = make.kinds[source]
    out = make.random.choice(CHANNELS) if make.random.random() < 0.4 else channels
    kernel = make.random.choice((1, 3))
    stride = 2 if level < 2 and make.random.random() < 0.15 else 1
    group = make.random.choice([1] * 5 + [8]) if out % 8 == 0 else 1
    weight = make.weight("w", (out, channels // group, kernel, kernel))
    bias = [make.weight("b", (out,))] if make.random.random() < 0.6 else []
    text = (f"F.Convolution({{0}}, <0>{', <1>' * len(bias)}, kernel=({kernel}, {kernel}), pad=({kernel // 2}, "
            f"{kernel // 2}), stride=({stride}, {stride}), num_filter={out}, num_group={group}, no_bias={not bias})")
    make.bounded(make.add((source,), text, Kind("map", out, level + (stride == 2)), weight, *bias))


def _dense(make: _Maker) -> None:
    source = make.pick(make.random.choice(("flat", "seq")))
    kind = make.kinds[source]
    out = make.random.choice(CHANNELS) if make.random.random() < 0.4 else kind.channels
    bias = [make.weight("b", (out,))] if make.random.random() < 0.6 else []
    text = (f"F.FullyConnected({{0}}, <0>{', <1>' * len(bias)}, num_hidden={out}, flatten=False, no_bias={not bias})")
    make.bounded(make.add((source,), text, kind._replace(channels=out), make.weight("w", (out, kind.channels)), *bias))


def _unary(*texts: str, kinds: tuple[str, ...] = ("map", "flat", "seq")) -> Callable[[_Maker], None]:
    def add(make: _Maker) -> None:
        source = make.pick(make.random.choice(kinds))
        make.add((source,), make.random.choice(texts), make.kinds[source])
    return add


def _binary(*texts: str) -> Callable[[_Maker], None]:
    def add(make: _Maker) -> None:
        first = make.pick(make.random.choice(("map", "map", "flat", "seq")))
        second = first if make.random.random() < 0.12 else make.pick(make.kinds[first])
        make.bounded(make.add((first, second), make.random.choice(texts), make.kinds[first]))
    return add


def _concat(make: _Maker) -> None:
    first = make.pick(make.random.choice(("map", "flat", "seq")))
    kind = make.kinds[first]
    alike = [number for number, one in enumerate(make.kinds) if (one.name, one.level) == (kind.name, kind.level)]
    second = make.random.choice(alike)
    channels = kind.channels + make.kinds[second].channels
    if channels <= 96:
        axis = 2 if kind.name == "seq" else 1
        make.add((first, second), f"F.concat({{0}}, {{1}}, dim={axis})", kind._replace(channels=channels))


def _slice(make: _Maker) -> None:
    source = make.pick(make.random.choice(("map", "flat", "seq")))
    kind = make.kinds[source]
    axis = 2 if kind.name == "seq" else 1
    if kind.channels % 16 == 0:
        # Both outputs are read: MXNet leaves the gradient of one that is not uninitialised, with static_alloc=True.
        text = make.random.choice((f"F.add_n(*F.SliceChannel({{0}}, num_outputs=2, axis={axis}))",
                                   f"F.slice_axis({{0}}, axis={axis}, begin=0, end={kind.channels // 2})"))
        make.add((source,), text, kind._replace(channels=kind.channels // 2))


def _batch_norm(make: _Maker) -> None:
    source = make.pick("map")
    channels = make.kinds[source].channels
    make.add((source,), "F.BatchNorm({0}, <0>, <1>, <2>, <3>, fix_gamma=False, eps=1e-3)", make.kinds[source],
             *(make.weight(role, (channels,)) for role in ("gamma", "beta", "mean", "var")))


def _norm(make: _Maker) -> None:
    source = make.pick(make.random.choice(("flat", "seq")))
    channels = make.kinds[source].channels
    make.add((source,), "F.LayerNorm({0}, <0>, <1>, axis=-1)", make.kinds[source],
             make.weight("gamma", (channels,)), make.weight("beta", (channels,)))


def _scaled(make: _Maker) -> None:
    source = make.pick("map")
    channels = make.kinds[source].channels
    make.add((source,), "F.broadcast_mul({0}, <0>)", make.kinds[source], make.weight("gamma", (1, channels, 1, 1)))


def _pooling(make: _Maker) -> None:
    source = make.pick("map")
    kind = make.kinds[source]
    types = ("max",) if make.mode == EXACT else ("avg",)  # rounding decides which of two close values is the largest
    if kind.level < 2 and make.random.random() < 0.4:
        text, kind = "kernel=(2, 2), stride=(2, 2)", kind._replace(level=kind.level + 1)
    else:
        text = "kernel=(3, 3), pad=(1, 1), stride=(1, 1)"
    make.add((source,), f"F.Pooling({{0}}, pool_type='{make.random.choice(types)}', {text})", kind)


def _enlarged(make: _Maker) -> None:
    source = make.pick("map")
    kind = make.kinds[source]
    if kind.level:
        make.add((source,), "F.UpSampling({0}, scale=2, sample_type='nearest')", kind._replace(level=kind.level - 1))


def _to_flat(make: _Maker) -> None:
    source = make.pick(make.random.choice(("map", "map", "seq")))
    kind = make.kinds[source]
    reduce = "max" if make.mode == EXACT else "mean"
    axes = "1" if kind.name == "seq" else "(2, 3)"
    make.add((source,), f"F.{reduce}({{0}}, axis={axes})", Kind("flat", kind.channels))


def _to_sequence(make: _Maker) -> None:
    source = make.pick("map")
    kind = make.kinds[source]
    make.add((source,), "F.transpose(F.reshape({0}, (0, 0, -1)), (0, 2, 1))", kind._replace(name="seq"))


def _excite(make: _Maker) -> None:
    target = make.pick("map")
    source = make.pick(Kind("flat", make.kinds[target].channels))
    make.add((target, source), "F.broadcast_mul({0}, F.sigmoid(F.reshape({1}, (0, -1, 1, 1))))", make.kinds[target])


def _attention(make: _Maker) -> None:
    query = make.pick("seq")
    key = make.pick(make.kinds[query])
    scale = make.kinds[query].channels ** -0.5
    make.add((query, key), f"F.batch_dot(F.softmax(F.batch_dot({{0}} * {scale:.3f}, {{1}}, transpose_b=True)), {{1}})",
             make.kinds[query])


_COMMON = [_convolution, _convolution, _convolution, _dense, _dense, _to_flat, _to_sequence, _concat, _slice, _pooling,
           _enlarged, _binary("{0} + {1}", "F.elemwise_add({0}, {1})", "F.broadcast_add({0}, {1})"),
           _binary("{0} - {1}", "F.broadcast_sub({0}, {1})"), _binary("F.add_n({0}, {1})"),
           _unary("F.relu({0})", "F.Activation({0}, act_type='relu')", "F.clip({0}, a_min=0, a_max=6)"),
           _unary("F.abs({0})", "-{0}", "F.identity({0})", "F.Dropout({0}, p=0.0)", "F.clip({0}, a_min=-2, a_max=2)",
                  "F.BlockGrad({0})", "F.flip({0}, axis=1)")]
_EXACT = [_binary("F.maximum({0}, {1})")]
_INEXACT = [_batch_norm, _batch_norm, _norm, _scaled, _excite, _attention, _binary("{0} * F.tanh({1})"),
            _unary(*(f"F.Activation({{0}}, act_type='{kind}')" for kind in ("sigmoid", "tanh", "softrelu"))),
            _unary("F.LeakyReLU({0}, act_type='leaky', slope=0.1)", "F.LeakyReLU({0}, act_type='elu', slope=0.5)",
                   "F.LeakyReLU({0}, act_type='gelu')"),
            _unary("{0} * 0.5", "{0} + 0.5", "F.tanh({0})", "F.exp(-F.abs({0}))", "F.square(F.tanh({0}))",
                   "F.sqrt(F.abs({0}) + 1)", "F.sigmoid({0})"),
            _unary("F.softmax({0}, axis=1)", "F.log_softmax({0}, axis=1) * 0.2", kinds=("map", "flat")),
            _unary("F.L2Normalization({0} + 1, mode='channel')", kinds=("map",))]


def generate(seed: int, steps: int = 30, mode: str = FLOAT) -> Program:
    """Make a random program of at least so many steps.

    Parameters
    ----------
    seed : int
        The same gives the same program.
    steps : int
        Operators, some of which are two or three in MXNet's graph.
    mode : {'float', 'exact'}
        ``'exact'`` takes operators only whose results are exact on small integers.
    """
    make = _Maker(seed, mode)
    makers = _COMMON + (_EXACT if mode == EXACT else _INEXACT)
    make.add((0, 1), "{0} + F.reverse({1}, axis=1)", make.kinds[0])
    _convolution(make)
    while len(make.steps) < 1.4 * steps:  # what no output needs is dropped below
        try:
            make.random.choice(makers)(make)
        except LookupError:
            continue
    read = {one for step in make.steps for one in step.inputs}
    ends = [step.result for step in make.steps if step.result not in read][-5:]
    inner = make.random.sample([step.result for step in make.steps], make.random.randint(0, 3))
    outputs = tuple(dict.fromkeys([*ends, *inner]))
    remaining = _needed(make.steps, outputs)
    parts: list[Part] = []
    while remaining:
        count = make.random.randint(2, 9)
        setting = make.random.choice(["plain"] * 6 + ["off", "on", "excluded"])
        parts.append(Part(tuple(remaining[:count]), setting))
        remaining = remaining[count:]
    return Program(seed, mode, tuple(parts), outputs)


def _needed(steps: list[Step], outputs: tuple[int, ...]) -> list[Step]:
    """Return the steps that outputs depend on."""
    wanted, found = set(outputs), []
    for step in reversed(steps):
        if step.result in wanted:
            wanted.update(step.inputs)
            found.append(step)
    return found[::-1]
