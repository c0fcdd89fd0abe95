"""Random networks as Python source, so that what fails can be printed, cut down and run again."""
from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, replace
from typing import Iterator, NamedTuple, Sequence

__all__ = ["EXACT", "FLOAT", "Kind", "Part", "Program", "Step", "needed"]

FLOAT, EXACT = "float", "exact"


class Kind(NamedTuple):
    """What a tensor is: a map (N, C, H, W), halved ``level`` times, a sequence (N, T, C), flat (N, C), a scalar ()."""

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
    layers: tuple[tuple[str, str], ...] = ()  # names of Gluon layers that it calls, and what makes them

    @property
    def is_telltale(self) -> bool:
        """Whether it is right in FP32 only: see :func:`fuzz_operators.telltale`."""
        return any(name.startswith("big") for name, _ in self.parameters)

    def line(self, rounded: bool = False) -> str:
        """Return the line of Python."""
        made = self.text.format(*(f"t{number}" for number in self.inputs))
        return f"t{self.result} = " + (f"rounded(F, {made})" if rounded else made)


@dataclass(frozen=True)
class Part:
    """Consecutive steps that are a block of their own; ``setting`` is 'plain', 'off', 'on' or 'excluded'.

    With ``inner``, a setting, the steps are in a block inside of it.
    """

    steps: tuple[Step, ...]
    setting: str = "plain"
    inner: str = ""

    @property
    def settings(self) -> tuple[str, str]:
        """The settings of both."""
        return self.setting, self.inner

    @property
    def runs_fp32(self) -> bool:
        """Whether AMP is off in it."""
        return (self.setting if self.inner in ("", "plain") else self.inner) in ("off", "excluded")


@dataclass(frozen=True)
class Program:
    """A network: blocks in a row, which read what any block before them made."""

    seed: int
    mode: str
    parts: tuple[Part, ...]
    outputs: tuple[int, ...]
    inputs: tuple[Kind, ...] = (Kind("map", 16), Kind("map", 16))
    with_regions: bool = field(default=True, compare=False)
    rounded: bool = False  # whether every step's result goes through a function ``rounded``
    numpy: bool = False  # whether it is made of NumPy-style operators and arrays

    @property
    def steps(self) -> list[Step]:
        """All steps in order."""
        return [step for part in self.parts for step in part.steps]

    @property
    def excluded(self) -> list[str]:
        """Names of the blocks that are excluded."""
        return [name for number, part in enumerate(self.parts)
                for name, setting in zip((f"part{number}", f"part{number}_inner"), part.settings)
                if setting == "excluded"]

    @property
    def loops(self) -> list[Step]:
        """The steps that are loops and branches."""
        return [step for step in self.steps if "F.contrib." in step.text and "lambda" in step.text]

    def is_in_loop(self, name: str) -> bool:
        """Whether the network's parameter of a name is read in a loop or a branch."""
        return any(name in [f"net_{own}" for own, _ in step.parameters]
                   or any(name.startswith(f"net_{layer}_") for layer, _ in step.layers) for step in self.loops)

    def without_regions(self) -> Program:
        """Return the same network as plain FP32 code."""
        return replace(self, with_regions=False)

    def without_telltales(self) -> Program:
        """Return the program without steps that are right in FP32 only."""
        parts = [replace(part, steps=tuple(step for step in part.steps if not step.is_telltale)) for part in self.parts]
        dropped = {step.result for step in self.steps if step.is_telltale}
        return replace(self, parts=tuple(part for part in parts if part.steps),
                       outputs=tuple(one for one in self.outputs if one not in dropped))

    def source(self) -> str:
        """Return the classes ``Part0``, ..., and ``Net``."""
        classes = [self._part(number) for number in range(len(self.parts))]
        return "\n\n".join([*classes, self._net()])

    def _part(self, number: int) -> str:
        part = self.parts[number]
        read, made = self._interface(number)
        parameters = dict(pair for step in part.steps for pair in step.parameters)
        body = [step.line(self.rounded) for step in part.steps] + ["return " + ", ".join(f"t{one}" for one in made)]
        own = [f"self.{name} = parameter(self, {name!r}, {shape})" for name, shape in parameters.items()]
        own += [f"self.{name} = layer({name!r}, {made_by})" for step in part.steps for name, made_by in step.layers]
        if not part.inner:
            return self._block(f"Part{number}", part.setting, own, [*(f"t{one}" for one in read), *parameters], body)
        call = f"return self.inner({', '.join(f't{one}' for one in read)})"
        return "\n\n".join([
            self._block(f"Part{number}_inner", part.inner, own, [*(f"t{one}" for one in read), *parameters], body),
            self._block(f"Part{number}", part.setting, [f"self.inner = Part{number}_inner(params)"],
                        [f"t{one}" for one in read], [call])])

    def _block(self, name: str, setting: str, made: Sequence[str], read: Sequence[str], body: Sequence[str]) -> str:
        """Return a class."""
        if self.with_regions and setting in ("on", "off"):
            body = [f"with amp.autocast(enabled={setting == 'on'}):", *("    " + line for line in body)]
        return "\n".join([
            f"class {name}(gluon.HybridBlock):",
            "    def __init__(self, params):",
            f"        super().__init__(prefix='{name.lower()}_', params=params)",
            *("        " + line for line in made), "",
            f"    def hybrid_forward({', '.join(['self', 'F', *read])}):",
            textwrap.indent("\n".join(body), " " * 8)])

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
        for program in self._simpler():
            if all(part.runs_fp32 or not any(step.is_telltale for step in part.steps) for part in program.parts):
                yield program

    def _simpler(self) -> Iterator[Program]:
        if len(self.outputs) > 1:
            for one in self.outputs:
                yield from replace(self, outputs=tuple(other for other in self.outputs if other != one))._without(set())
        for number, part in enumerate(self.parts):
            if part.setting != "plain":
                yield self._with(number, replace(part, setting="plain"))
            if part.inner:
                yield self._with(number, replace(part, inner=""))
                yield self._with(number, replace(part, setting=part.inner, inner=""))
        for count in (8, 4, 2, 1):
            for first in range(0, len(self.steps), count):
                yield from self._without({step.result for step in self.steps[first:first + count]})
        for number in range(len(self.parts) - 1):
            one, two = self.parts[number:number + 2]
            if one.settings == two.settings:
                merged = replace(one, steps=one.steps + two.steps)
                yield replace(self, parts=(*self.parts[:number], merged, *self.parts[number + 2:]))

    def _with(self, number: int, part: Part) -> Program:
        return replace(self, parts=tuple(part if i == number else other for i, other in enumerate(self.parts)))

    def _without(self, dropped: set[int]) -> Iterator[Program]:
        """Let the readers of some tensors read an earlier one of the same kind."""
        kinds = {**dict(enumerate(self.inputs)), **{step.result: step.kind for step in self.steps}}
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
        parts = tuple(replace(part, steps=tuple(
            replace(step, inputs=tuple(moved.get(one, one) for one in step.inputs))
            for step in part.steps if step.result not in dropped)) for part in self.parts)
        wanted = needed([step for part in parts for step in part.steps], outputs)
        parts = tuple(replace(part, steps=tuple(step for step in part.steps if step in wanted)) for part in parts)
        parts = tuple(part for part in parts if part.steps)
        if parts:
            yield replace(self, parts=parts, outputs=outputs)


def needed(steps: list[Step], outputs: tuple[int, ...]) -> list[Step]:
    """Return the steps that outputs depend on."""
    wanted, found = set(outputs), []
    for step in reversed(steps):
        if step.result in wanted:
            wanted.update(step.inputs)
            found.append(step)
    return found[::-1]
