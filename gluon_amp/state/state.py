"""What AMP is doing now: the process-wide setting, the regions that the code is in, and excluded blocks."""
from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Iterator, Mapping, NamedTuple, Protocol, Sequence

import mxnet as mx
from mxnet.gluon import Block, Trainer

from .._mxnet import gpus
from .._mxnet.arrays import cast_arrays, first_array
from .._mxnet.blocks import descendants
from .._mxnet.invoke import Invoke, original_invoke
from .._mxnet.symbols import marks
from ..graph.attrs import REGION_OFF, REGION_ON
from ..nested import Nested
from ..rules import Policy
from .eager_policy import EagerPolicy
from .exclusions import Exclusions
from .frame import frame
from .recent import remember

_MOST_STATES = 16  # of regions with settings of their own
_CPU = mx.cpu()


class State:
    """One way of running in mixed precision: a policy for each kind of device. Equal settings are equal states."""

    def __init__(self, policies: Mapping[str, Policy], enabled: bool = True):
        self.policies = policies  # by kind of device; a GPU that differs from the others has its own, as 'gpu(1)'
        self.enabled = enabled  # False: only what was traced inside autocast regions runs in low precision
        self._hash = hash((frozenset(policies.items()), enabled))  # asked for at every call of a network
        self._disabled: State | None = None
        self._eager = {device: EagerPolicy(policy, enabled) for device, policy in policies.items() if policy.lowers}
        # Without a GPU every array takes the same policy, which saves asking for its device at every call.
        self._by_device = bool(gpus.count())
        self._apart = frozenset(int(device[4:-1]) for device in policies if device.startswith("gpu("))
        self.eager_anywhere = None if self._by_device else self._eager.get("cpu")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, State) and self._hash == other._hash
                                 and self.enabled == other.enabled and self.policies == other.policies)

    def disabled(self) -> State:
        """Return the state of a region without AMP inside this one."""
        if self._disabled is None:
            self._disabled = State(self.policies, enabled=False) if self.enabled else self
        return self._disabled

    @property
    def disabled_passes(self) -> frozenset[str]:
        """The graph passes that are off, on any device."""
        return frozenset().union(*(policy.disabled_passes for policy in self.policies.values()))

    @property
    def lowers(self) -> bool:
        """Whether anything runs in low precision, on any device."""
        return any(policy.lowers for policy in self.policies.values())

    def key(self, context: mx.Context) -> str:
        """Return the name of a device that policies are kept under."""
        if context.device_type != "gpu":
            return "cpu"
        return f"gpu({context.device_id})" if context.device_id in self._apart else "gpu"

    def policy(self, device: str) -> Policy | None:
        """Return the policy for arrays on a device, None where they stay in FP32."""
        return self.policies.get(device if device.startswith("gpu") else "cpu")

    def eager(self, inputs: Sequence[Any]) -> EagerPolicy | None:
        """Return the policy for an imperative call with these inputs."""
        if not (self._by_device and self._eager):
            return self.eager_anywhere
        array = first_array(inputs)
        return None if array is None else self._eager.get(self.key(array.context))


class Network(NamedTuple):
    """How a network given to ``initialize`` runs."""

    state: State | None  # in force inside its calls; None for the one around
    output_dtype: str | None = None  # the type of its floating-point results; None to leave them as they are


Parts = Mapping[Block, Network]


class Level(Protocol):
    """What ``initialize`` leaves behind for trainers."""

    def attach(self, trainer: Trainer, warn_after: int = 20, max_skipped: int | None = None) -> None:
        """Give a trainer the loss scalers of the level."""

    def updated(self, trainer: Trainer) -> None:
        """Note that a trainer has updated its parameters, or skipped the update."""


class _Controller:
    """Says what is in force, to everything that asks."""

    def __init__(self) -> None:
        self.state: State | None = None  # set by init
        self.marked: State | None = None  # for symbols traced in regions and run outside of them
        self.hooked = False  # whether names of MXNet are replaced
        self.invoke: Invoke = original_invoke  # MXNet's own way of running an operator, without casts
        self.states: dict[Any, State] = {}  # of regions, by their settings
        # The autocast regions that the code is in; None for one without AMP anywhere.
        self.regions: Nested[State | None] = Nested("gluon_amp_regions")
        self.exclusions = Exclusions()
        self.custom_ops: dict[str, str] = {}  # by register_op: operator type to rule
        self.replaced: list[tuple[Any, str, Callable]] = []  # by register_float32_function and the like
        self.networks: weakref.WeakKeyDictionary[Block, Network] = weakref.WeakKeyDictionary()  # by initialize
        self.level: Level | None = None  # by initialize
        self.session = 0  # how often AMP was switched on after it had been switched off
        self._ended = False  # whether it was switched off since
        self.changes = 0  # of exclusions and networks
        self.children = 0  # how often a block got another child
        self._known_parts: tuple[tuple[int, int], Parts] = ((0, 0), {})

    def current(self) -> State | None:
        """Return the state in force here: in this thread, and in this asyncio task."""
        regions = self.regions.entries()
        return regions[-1].value if regions else self.state

    def is_on(self) -> bool:
        """Tell whether anything is in force here, on any device and in any precision."""
        return self.current() is not None

    def rewriter(self) -> State | None:
        """Return the state that graphs run under, None for MXNet's own way; ``marked`` outside of all regions."""
        regions = self.regions.entries()
        current = regions[-1].value if regions else self.state
        return self.marked if current is None and not regions and self.hooked else current

    def remembered(self, settings: Any, make: Callable[[], State]) -> State:
        """Return the state of some settings; a recent equal one is used again."""
        state = self.states.get(settings)
        if state is None:
            state = remember(self.states, settings, make(), _MOST_STATES)
        return state

    def eager(self, inputs: Sequence[Any]) -> EagerPolicy | None:
        """Return the policy for an imperative call with these inputs."""
        regions = self.regions.entries()  # in line: this is asked at every operator call
        current = regions[-1].value if regions else self.state
        if current is None:
            return None
        return current.eager_anywhere or current.eager(inputs)

    def policy(self, device: mx.Context) -> Policy | None:
        """Return the policy in force for a device here, None where AMP is off."""
        state = self.current()
        return None if state is None or not state.enabled else state.policy(state.key(device))

    def runs_natively(self) -> bool:
        """Tell whether imperative calls made here may run operators in C++, as those in graphs do."""
        policy = self.policy(_CPU)
        return policy is not None and policy.runs_native

    def region(self, block: Block) -> Any:
        """Return the region that a block's call is to run in, None for the one around it."""
        if self.exclusions and self._is_excluded(block):
            return self.off()
        network = self._network(block) if self.networks else None
        if network is None or network.state is None or self._is_switched_off():
            return None
        return region(network.state)

    def _network(self, block: Block) -> Network | None:
        """Return the network that a block is; outside of all regions, also the one that it is a part of."""
        if not frame.blocks:
            frame.parts = self._parts(block)
        network = self.networks.get(block)
        return frame.parts.get(block) if network is None and not self.regions.entries() else network

    def _parts(self, outermost: Block) -> Parts:
        """Map the blocks inside networks to them: containers may be iterated, and not called."""
        if outermost in self.networks:
            return {}
        now = self.changes, self.children
        if self._known_parts[0] != now:  # networks may have thousands of blocks, and this is asked at every loss
            self._known_parts = now, weakref.WeakKeyDictionary(
                {part: network for net, network in self.networks.items() if network.state is not None
                 for part in descendants(net)})
        return self._known_parts[1]

    def results(self, block: Block, value: Any) -> Any:
        """Return a block's results, in the type that its network is to give."""
        network = self.networks.get(block) if self.networks else None
        return value if network is None or network.output_dtype is None else cast_arrays(value, network.output_dtype)

    def updated(self, trainer: Trainer) -> None:
        """Note that a trainer has updated its parameters, or skipped the update."""
        if self.level is not None:
            self.level.updated(trainer)

    def _is_switched_off(self) -> bool:
        regions = self.regions.entries()
        return bool(regions) and (regions[-1].value is None or not regions[-1].value.enabled)

    def off(self) -> Any:
        """Return a region without AMP."""
        current = self.current()
        return region(current.disabled() if current else None, REGION_OFF)

    def epoch(self) -> int:
        """Return a number for what blocks are traced under, 0 for nothing; where it changes they are traced again."""
        return self.changes if self.exclusions or self.networks else 0

    def exclude(self, targets: Sequence[Any]) -> None:
        """Keep blocks, classes of blocks, or names of blocks (with wildcards) in FP32."""
        self.changes += self.exclusions.add(targets)

    def cast(self, networks: Mapping[Block, Network]) -> None:
        """Run whole networks under states of their own."""
        self.networks.update(networks)
        self.changes += 1

    def switched_on(self) -> bool:
        """Tell whether ``init``, or ``initialize`` for some networks, is in force."""
        return self.state is not None or any(network.state is not None for network in self.networks.values())

    def begin(self) -> None:
        """Note that AMP is being switched on."""
        self.session += self._ended
        self._ended = False

    def reset(self) -> None:
        """Forget everything that users set."""
        self._ended = True
        self.state = self.marked = self.level = None
        self.states.clear()
        self.networks.clear()
        self._known_parts = ((0, 0), {})
        self.custom_ops.clear()
        while self.replaced:
            setattr(*self.replaced.pop())
        self.exclusions.clear()

    def _is_traced(self, block: Block) -> bool:
        return block.__dict__.get("_cached_op") is not None and block.__dict__.get("_amp_epoch") == self.epoch()

    @contextmanager
    def tracing(self, block: Block) -> Iterator[None]:
        """Trace a block in the body, by a call of it or not; the blocks inside know what is excluded."""
        if self.exclusions and not frame.blocks:
            frame.excluded = self.exclusions.inside(block, self.children)
        if self.networks and not frame.blocks:
            frame.parts = self._parts(block)
        frame.blocks += 1
        try:
            yield
        finally:
            frame.blocks -= 1

    def _is_excluded(self, block: Block) -> bool:
        if not frame.blocks:  # the outermost: since its last call blocks may have been added
            frame.excluded = self.exclusions.inside(block, self.children, self._is_traced(block))
        return block in frame.excluded or self.exclusions.match(block, self.children)


controller = _Controller()


def in_force(state: State | None) -> ContextManager[None]:
    """Run the body under a state, None for FP32; operators traced in it carry no mark of it."""
    return controller.regions.entered(state)


class region:
    """Run the body under a state; operators traced in it carry the mark."""

    __slots__ = ("_entered", "_mark", "_state")

    def __init__(self, state: State | None, mark: str = REGION_ON):
        self._state, self._mark = state, mark

    def __enter__(self) -> None:
        self._entered = controller.regions.enter(self._state), marks.enter(self._mark)

    def __exit__(self, *details: Any) -> None:
        state, mark = self._entered
        controller.regions.leave(state)
        marks.leave(mark)
