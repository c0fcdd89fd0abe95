"""What is in force here: the process-wide setting of ``init``, and the regions and blocks that the code is in."""
from __future__ import annotations

import functools
import inspect
import threading
from contextlib import contextmanager
from typing import Any, Callable, Container, ContextManager, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from .._mxnet.invoke import Invoke, original_invoke
from .._mxnet.symbols import marks
from ..base.context import ContextStack
from ..graph.attrs import REGION_OFF, REGION_ON
from ..rules import ANY_DEVICE, Device, Policy
from .state import EagerPolicy, State, remember

_CPU = mx.cpu()


class _InForce:
    """Says which state is in force, to everything that asks."""

    def __init__(self) -> None:
        self.state: State | None = None  # set by init
        self.marked: State | None = None  # for symbols traced in regions and run outside of them
        self.hooked = False  # whether names of MXNet are replaced
        self.invoke: Invoke = original_invoke  # MXNet's own way of running an operator, without casts
        self.states: dict[Any, State] = {}  # of regions, by their settings
        # The autocast regions that the code is in; None for one without AMP anywhere.
        self.regions: ContextStack[State | None] = ContextStack("gluon_amp_regions")
        self.session = 0  # how often AMP was switched on after it had been switched off
        self._ended = False  # whether it was switched off since

    def current(self) -> State | None:
        """Return the state in force here: in this thread, and in this asyncio task."""
        regions = self.regions.entries()
        return regions[-1].value if regions else self.state

    def is_on(self) -> bool:
        """Tell whether a state is in force here, on any device and in any precision."""
        return self.current() is not None

    def rewriter(self) -> State | None:
        """Return the state that graphs run under, None for MXNet's own way; ``marked`` outside of all regions."""
        current = self.current()
        return self.marked if current is None and self.hooked and not self.regions.entries() else current

    def remembered(self, settings: Any, make: Callable[[], State]) -> State:
        """Return the state of some settings; a recent equal one is used again."""
        state = self.states.get(settings)
        if state is None:
            state = remember(self.states, settings, make(), most=16)
        return state

    def eager(self, inputs: Sequence[Any]) -> EagerPolicy | None:
        """Return the policy for an imperative call with these inputs."""
        regions = self.regions.entries()  # in line: this is asked at every operator call
        current = regions[-1].value if regions else self.state
        if current is None:
            return None
        return current.eager_anywhere or current.eager(inputs)

    def device(self, device: mx.Context) -> Device:
        """Return the properties of a device under the state in force."""
        state = self.current()
        return ANY_DEVICE if state is None else state.device(state.key(device))

    def policy(self, device: mx.Context) -> Policy | None:
        """Return the policy in force for a device here, None where AMP is off."""
        state = self.current()
        return None if state is None or not state.enabled else state.policy(state.key(device))

    def runs_natively(self) -> bool:
        """Tell whether imperative calls made here may run operators in C++, as graphs do."""
        policy = self.policy(_CPU)
        return policy is not None and policy.runs_native(self.device(_CPU))

    def off(self) -> region:
        """Return a region without AMP."""
        current = self.current()
        return region(current.disabled() if current else None, REGION_OFF)

    def begin(self) -> None:
        """Note that AMP is being switched on."""
        self.session += self._ended
        self._ended = False

    def end(self) -> None:
        """Forget the setting, and the states of regions."""
        self._ended = True
        self.state = self.marked = None
        self.states.clear()


in_force = _InForce()
under = in_force.regions.entered  # runs the body under a state, None for FP32; operators traced in it carry no mark


class region:
    """Run the body under a state; operators traced in it carry the mark."""

    __slots__ = ("_entered", "_mark", "_state")

    def __init__(self, state: State | None, mark: str = REGION_ON):
        self._state, self._mark = state, mark

    def __enter__(self) -> None:
        self._entered = in_force.regions.enter(self._state), marks.enter(self._mark)

    def __exit__(self, *details: Any) -> None:
        state, mark = self._entered
        in_force.regions.leave(state)
        marks.leave(mark)


def run_in(region: Callable[[], ContextManager], function: Callable, prepared: Callable | None = None) -> Callable:
    """Return a function that runs in a region; ``prepared`` changes its arguments there."""
    if any(kind(function) for kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction,
                                       inspect.isasyncgenfunction)):
        raise TypeError(f"expected a plain function, received {function.__name__}, which waits: write "
                        "`with amp.autocast(...):` inside of it, around the code that does not")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with region():
            if prepared is not None:
                args, kwargs = prepared(args, kwargs)
            return function(*args, **kwargs)
    return run


class Frame(threading.local):
    """The current thread's calls of blocks."""

    def __init__(self) -> None:
        self.blocks = 0  # how many calls of blocks are under way
        self.hybrid_blocks = 0  # how many of them are of hybrid blocks
        # Casts of parameters in this call of the outermost block that MXNet could trace, each made once; None outside.
        # They must not live longer: two losses that share a recorded cast cannot both be differentiated.
        self.casts: dict[tuple[int, str], tuple[NDArray, NDArray]] | None = None
        self.excluded: Container[Block] = ()  # the blocks that are excluded by a block around them in this call
        # the blocks inside networks that were given to ``initialize``, where the outermost block is none of them
        self.parts: Mapping[Any, Any] = {}
        self.data_gradients = False  # whether gradients of the data of the outermost block's call are recorded
        self.imitates = False  # whether the casts that are made now imitate a type


frame = Frame()


@contextmanager
def outermost() -> Iterator[None]:
    """Treat the body as code outside of all blocks, whose results are FP32."""
    around, frame.hybrid_blocks = frame.hybrid_blocks, 0
    try:
        yield
    finally:
        frame.hybrid_blocks = around
