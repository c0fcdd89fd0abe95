"""The networks that ``initialize`` gave a precision of their own."""
from __future__ import annotations

import weakref
from typing import Any, Mapping, NamedTuple, Protocol

from mxnet.gluon import Block, Trainer

from .._mxnet.arrays import cast_arrays
from .._mxnet.blocks import descendants
from .state import State


class Network(NamedTuple):
    """How a network given to ``initialize`` runs."""

    state: State | None  # in force inside its calls; None for the one around
    output_dtype: str | None = None  # the type of its floating-point results; None to leave them as they are


Parts = Mapping[Block, Network]


class Level(Protocol):
    """What ``initialize`` leaves behind for trainers."""

    def take_on(self, trainer: Trainer, warn_after: int = 20, max_skipped: int | None = None) -> None:
        """Give a trainer the loss scalers of the level."""

    def updated(self, trainer: Trainer) -> None:
        """Note that a trainer has updated its parameters, or skipped the update."""


class Networks:
    """Networks with states of their own; `given` is whether there are any. They are referred to weakly."""

    def __init__(self) -> None:
        self.given = False
        self._networks: weakref.WeakKeyDictionary[Block, Network] = weakref.WeakKeyDictionary()
        self._known_parts: tuple[Any, Parts] = (None, {})

    def add(self, networks: Mapping[Block, Network]) -> None:
        """Run networks under states of their own."""
        self._networks.update(networks)
        self.given = self.given or bool(networks)

    def clear(self) -> None:
        """Forget all networks."""
        self._networks.clear()
        self.given = False
        self._known_parts = (None, {})

    def have_states(self) -> bool:
        """Tell whether any network runs under a state of its own."""
        return any(network.state is not None for network in self._networks.values())

    def get(self, block: Block) -> Network | None:
        """Return how a block that was given runs."""
        return self._networks.get(block)

    def parts(self, outermost: Block, version: Any) -> Parts:
        """Map the blocks inside networks to them: containers may be iterated, and not called."""
        if outermost in self._networks:
            return {}
        if self._known_parts[0] != version:  # there may be thousands of blocks, and this is asked at every loss
            self._known_parts = version, weakref.WeakKeyDictionary(
                {part: network for net, network in self._networks.items() if network.state is not None
                 for part in descendants(net)})
        return self._known_parts[1]

    def results(self, block: Block, value: Any) -> Any:
        """Return a block's results, in the type that its network is to give."""
        network = self._networks.get(block) if self.given else None
        return value if network is None or network.output_dtype is None else cast_arrays(value, network.output_dtype)
