"""What operators cost on a CPU, by rates that were measured on one of its kind.

``rates.json`` has a row for each CPU that was ever measured (``gluon-amp check --measure`` writes one): milliseconds of
layers in training, in each of four kernels. A layer costs what the most similar measured one costs, by the arithmetic
or the values of both. Choices follow from the file alone, so that two runs on a machine make the same plan.
"""
from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log2, prod
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

from .dtypes import isa_distance
from .host import Cpu

_FILE = Path(__file__).with_name("rates.json")
TRANSPOSE, CAST, CALL = "transpose", "cast", "call"
OPERATORS = ("clip", "swish", "scale", "mean", "add", "activation")


class Kernel(NamedTuple):
    """How an operator may run."""

    low: bool  # in low precision rather than FP32
    nhwc: bool  # in C++ with the channels last, rather than MXNet's operator


KERNELS = tuple(Kernel(low, nhwc) for low in (False, True) for nhwc in (False, True))
Costs = Sequence[float]  # milliseconds in each of KERNELS


class Layer(NamedTuple):
    """A convolution, as far as its speed depends on it."""

    window: tuple[int, ...]  # the sides of a filter
    groups: int
    before: int  # channels of its data
    after: int  # channels of its result
    pixels: int  # of all images of the result

    @property
    def arithmetic(self) -> int:
        """The multiplications of its forward pass."""
        return prod(self.window) * self.before // self.groups * self.after * self.pixels

    @property
    def kind(self) -> tuple[bool, bool, bool, int]:
        """What kernels are chosen by: layers of different kinds are not similar."""
        is_depthwise = self.groups > 1 and self.groups == self.after
        per_group = (self.before, self.after) if is_depthwise else (self.before // self.groups,
                                                                    self.after // self.groups)
        whole = next(block for block in (16, 8, 4, 1) if all(channels % block == 0 for channels in per_group))
        return self.groups > 1, is_depthwise, prod(self.window) == 1, whole

    def distance(self, other: Layer) -> float:
        """Return how far another layer is from this one: 1 for twice the channels or pixels, 3 for twice the window."""
        sizes = ((1, self.before // self.groups, other.before // other.groups), (1, self.after, other.after),
                 (1, self.pixels, other.pixels), (3, prod(self.window), prod(other.window)))
        differ = sum(mine != theirs for mine, theirs in zip(self.kind, other.kind))
        return sum(weight * abs(log2(mine / theirs)) for weight, mine, theirs in sizes) + 100 * differ


class Measured(NamedTuple):
    """A layer that was measured: by itself, and what BatchNorm with a rectifier behind it adds."""

    layer: Layer
    convolution: Costs
    batch_norm: Costs


@dataclass(frozen=True, eq=False)
class Rates:
    """The costs on a CPU."""

    cpu: Cpu
    isa: str  # the instructions that oneDNN uses on it
    gain: float  # how many times as fast as FP32 it trains convolutions in low precision
    layers: tuple[Measured, ...] = field(repr=False, default=())
    # milliseconds for a million values in each kernel, by operator; one number each of conversions and CALL
    maps: Mapping[str, Costs] = field(repr=False, default_factory=dict)

    def __str__(self) -> str:
        return f"{self.cpu} ({self.isa})"

    def convolution(self, layer: Layer) -> list[float]:
        """Return the cost of a convolution in each kernel."""
        nearest = _nearest(self, layer)
        share = layer.arithmetic / nearest.layer.arithmetic
        return [cost * share for cost in nearest.convolution]

    def batch_norm(self, values: int, behind: Layer) -> list[float]:
        """Return the cost of BatchNorm, with a rectifier, of the result of a convolution."""
        nearest = _nearest(self, behind)
        share = values / (nearest.layer.after * nearest.layer.pixels)
        return [cost * share for cost in nearest.batch_norm]

    def map(self, name: str, values: int) -> list[float]:
        """Return the cost of an operator on each value of a map."""
        return [cost * values / 1e6 for cost in self.maps[name]]

    def conversion(self, values: int, given: Kernel, wanted: Kernel) -> float:
        """Return the cost of a map that one kernel gives and another one takes; maps are transposed in FP32."""
        transposed, casts = given.nhwc != wanted.nhwc, int(given.low != wanted.low)
        if transposed:
            casts = given.low + wanted.low
        by_value = transposed * self.maps[TRANSPOSE][0] + casts * self.maps[CAST][0]
        return by_value * values / 1e6 + (transposed + casts) * self.maps[CALL][0]


@lru_cache(maxsize=4096)
def _nearest(rates: Rates, layer: Layer) -> Measured:
    """Return the most similar layer that was measured."""
    return min(rates.layers, key=lambda each: layer.distance(each.layer))


def preferring(kernel: Kernel) -> Rates:
    """Return rates by which one kernel is the best for every operator that it can run."""
    costs = [float(each.nhwc != kernel.nhwc) + 0.5 * (each.low != kernel.low) for each in KERNELS]
    layer = Measured(Layer((1, 1), 1, 16, 16, 1), costs, costs)
    conversions = dict.fromkeys((TRANSPOSE, CAST, CALL), (1e-3,))
    return Rates(Cpu("", -1, -1), "", 1.0, (layer,), {**dict.fromkeys(OPERATORS, costs), **conversions})


def rates_of(cpu: Cpu | None, isa: str) -> Rates:
    """Return the rates of the CPU that is most like one: of the same instructions, then of the same vendor."""
    def distance(rates: Rates) -> tuple[int, bool, bool]:
        return isa_distance(rates.isa, isa), cpu is None or rates.cpu.vendor != cpu.vendor, rates.cpu != cpu

    return min(_rows(), key=distance)


@lru_cache(maxsize=1)
def _rows() -> list[Rates]:
    """Read the rows that this user measured, and those of the package."""
    files = [path for path in (own_file(), _FILE) if path.is_file()]
    rows = [_read(row) for path in files for row in json.loads(path.read_text())["rows"]]

    def completed(row: Rates) -> Rates:
        """Take what layers cost from the nearest CPU where they were not measured."""
        nearest = min((each for each in rows if each.layers), key=lambda each: isa_distance(each.isa, row.isa))
        return row if row.layers else replace(row, layers=nearest.layers, maps=nearest.maps)
    return list(map(completed, rows))


def _read(row: Mapping[str, Any]) -> Rates:
    layers = tuple(Measured(Layer((window, window), groups, channels, channels, pixels), convolution, batch_norm)
                   for window, groups, channels, pixels, convolution, batch_norm in row["layers"])
    return Rates(Cpu(*row["cpu"]), row["isa"], row["gain"], layers, row["maps"])


def own_file() -> Path:
    """Return where the rates that a user measured are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gluon_amp" / "rates.json"
