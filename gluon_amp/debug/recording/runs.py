"""Run a network on a tape, and leave it as it was."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence

from mxnet import autograd
from mxnet.gluon import Block
from mxnet.gluon.parameter import DeferredInitializationError
from mxnet.ndarray import NDArray

from ... import checks
from ..._mxnet.arrays import map_arrays, wait_for_statistics
from ..._mxnet.blocks import without_a_trace
from ..._mxnet.symbols import dtype_name
from ...dtypes import normalize
from ...errors import DTypeError, StateError, expected
from ...rules import Policy
from ...state.devices import choose, device_supports, verdict, warn_if_slow
from ...state.in_force import in_force, under
from ...state.policies import device_policies, devices_of, policies_of
from ...state.state import State
from .events import Event, is_float
from .tape import Tape, taped


@dataclass(eq=False)
class Run:
    """One run of a network."""

    tape: Tape
    outputs: list[NDArray]  # the floating-point ones, nested results flattened
    names: dict[int, str]  # of parameters, by the id of their arrays
    count: int  # how many of the operators ran in the network: the others are of the loss
    loss: NDArray | None = None

    def operators(self) -> list[Event]:
        """Return the operators of the network, without what AMP inserted."""
        return [event for event in self.tape.events[:self.count] if not event.inserted]


def arguments_of(data: Any) -> tuple:
    """Return the arguments of a network's call."""
    arguments = tuple(data) if isinstance(data, (list, tuple)) else (data,)
    arrays: list[NDArray] = []
    map_arrays(arrays.append, arguments)
    if not arrays:
        raise TypeError(expected("an array, or a tuple with the arguments of the network's call", "data", data))
    return arguments


def float_arrays(value: Any) -> list[NDArray]:
    """Return the floating-point arrays of nested lists, tuples and dicts."""
    arrays: list[NDArray] = []
    map_arrays(arrays.append, value)
    return [array for array in arrays if is_float(array)]


def dtype_of(array: NDArray) -> str:
    """Name an array's data type."""
    return dtype_name(array.dtype) or ""


def parameter_names(net: Block) -> dict[int, str]:
    """Map the ``id`` of parameters' arrays, on all contexts, to the parameters' names."""
    return {id(array): name for name, parameter in net.collect_params().items() for array in parameter.list_data()}


def make_ready(net: Block, arguments: Sequence[Any]) -> None:
    """Give a shape to parameters that wait for their first data; refuse those that are not initialized."""
    if not isinstance(net, Block):
        raise TypeError(expected("a Gluon block", "net", net))
    try:
        for parameter in net.collect_params().values():
            parameter.list_data()
    except DeferredInitializationError:
        with without_a_trace(net), autograd.pause():
            net(*arguments)
    except RuntimeError as error:
        raise StateError(f"the network's parameters are not initialized ({error}). Call net.initialize() or load "
                         "them first") from error


@contextmanager
def unchanged(net: Block, gradients: bool = False) -> Iterator[None]:
    """Restore what a network does not train afterwards, such as running statistics, and gradients if wanted."""
    parameters = net.collect_params().values()
    arrays = [array for parameter in parameters if parameter.grad_req == "null" for array in parameter.list_data()]
    if gradients:
        arrays += [array for parameter in parameters if parameter.grad_req != "null" for array in parameter.list_grad()]
    wait_for_statistics()
    saved = [array.copy() for array in arrays]
    try:
        yield
    finally:
        wait_for_statistics()
        for array, before in zip(arrays, saved):
            before.copyto(array)


def mixed_state(dtype: object = None, policy: Policy | None = None) -> State:
    """Return the setting of mixed precision that the user asks for; by default the one in force."""
    current = in_force.current()
    if policy is not None:
        checks.instance("policy", policy, Policy, "a Policy")
        chosen = choose(policy.target_dtype, device_supports())
        return State(policies_of(policy, chosen), devices_of(chosen))
    if dtype is None and current is not None and current.enabled and current.lowers:
        return current
    chosen = choose(None if dtype is None else normalize(dtype), device_supports())
    warn_if_slow(chosen)
    made = State(device_policies(chosen), devices_of(chosen))
    if not made.lowers:
        raise DTypeError(f"nothing runs in low precision: this machine runs {verdict(chosen)}. "
                         "Give target_dtype='float16', which is imitated, or 'bfloat16' on CPUs with AVX512")
    return made


def recorded_run(net: Block, arguments: Sequence[Any], state: State | None, train_mode: bool = True,
                 loss: Callable[[Any], NDArray] | None = None) -> Run:
    """Run a network on a tape, as when its gradients are wanted, and then its loss; FP32 without a state."""
    with under(state), taped() as tape, autograd.record(train_mode=train_mode):
        outputs = net(*arguments)
        count = len(tape.events)
        made = None if loss is None else loss(outputs)
    return Run(tape, float_arrays(outputs), parameter_names(net), count, made)
