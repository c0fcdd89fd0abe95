"""What makes random programs, step by step; families of operators add theirs to it."""
from __future__ import annotations

import random
import re
from typing import Callable, Mapping

from fuzz_programs import EXACT, Kind, Step

__all__ = ["CHANNELS", "Adds", "Maker", "binary", "unary"]

CHANNELS = (8, 16, 24, 32, 48)
INPUTS = (Kind("map", 16), Kind("map", 16))


class Maker:
    """Adds random steps to a program."""

    def __init__(self, seed: int, mode: str, names: Mapping[str, str] | None = None):
        self.random = random.Random(f"{mode}{seed}")
        self.mode = mode
        self.names = names  # other names of operators; None to keep those of mx.nd
        self.kinds = list(INPUTS)
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

    def add(self, inputs: tuple[int, ...], text: str, kind: Kind, *parameters: tuple[str, tuple[int, ...]],
            layer: str = "") -> int:
        """Add a step; with ``layer``, the source of a Gluon layer, the text calls it as ``<layer>``."""
        for number, (name, _) in enumerate(parameters):
            text = text.replace(f"<{number}>", name)
        if self.names is not None:
            text = re.sub(r"\bF\.(\w+)\(", lambda found: f"F.{self.names[found[1]]}(", text)
        layers = ((f"layer{len(self.kinds)}", layer),) if layer else ()
        for name, _ in layers:
            text = text.replace("<layer>", f"self.{name}")
        self.kinds.append(kind)
        self.steps.append(Step(len(self.kinds) - 1, inputs, text, kind, parameters, layers))
        return len(self.kinds) - 1

    def bounded(self, made: int) -> None:
        """Keep values small enough for exact arithmetic."""
        if self.mode == EXACT:
            self.add((made,), "F.clip({0}, a_min=-4, a_max=4)", self.kinds[made])


Adds = Callable[[Maker], None]  # adds steps; LookupError tells that the program has no tensor that they could read


def unary(*texts: str, kinds: tuple[str, ...] = ("map", "flat", "seq"), most_halved: int = 2) -> Adds:
    """Return what adds one of these operators of one tensor, which was halved so often at most."""
    def add(make: Maker) -> None:
        source = make.pick(make.random.choice(kinds))
        if make.kinds[source].level > most_halved:
            raise LookupError(kinds)
        make.add((source,), make.random.choice(texts), make.kinds[source])
    return add


def binary(*texts: str, kinds: tuple[str, ...] = ("map", "map", "flat", "seq")) -> Adds:
    """Return what adds one of these operators of two tensors of a kind, or of one that is read twice."""
    def add(make: Maker) -> None:
        first = make.pick(make.random.choice(kinds))
        second = first if make.random.random() < 0.12 else make.pick(make.kinds[first])
        make.bounded(make.add((first, second), make.random.choice(texts), make.kinds[first]))
    return add
