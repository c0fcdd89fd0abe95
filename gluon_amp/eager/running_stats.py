"""Roll back running statistics: arrays that forward passes write are as before where their step is skipped.

Arrays are copied before a recorded call writes them for the first time since their trainer's last decision: all arrays
of a call by one operator, which nobody waits for. An array belongs to the trainers of the parameters beside it in that
call. Other trainers put it back too, as statistics that a generator makes a discriminator write, unless its own trainer
has scaled a loss and is still to decide.

On CPUs MXNet's BatchNorm writes in its backward pass: statistics of imperative calls are copied before a backward pass,
by one operator for all of them. Decisions come after it: they read the gradients.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Callable, Iterable, Mapping, Sequence, Tuple
from weakref import WeakSet

from mxnet import Context, autograd
from mxnet.gluon import Trainer
from mxnet.ndarray import NDArray

from .._mxnet import trainers
from .._mxnet.arrays import wait_for_statistics
from .._mxnet.invoke import Invocation, Invoke, Runs, handle_of, original_invoke, run_operator
from ..rules.tables.groups import ADDS_GRADIENT, BATCH_NORMS, CUSTOM
from .custom_operators import number_of_states

# Operators that write inputs, and the positions of these inputs.
_POSITIONS: Mapping[str, Sequence[int]] = {
    **dict.fromkeys((*BATCH_NORMS, "BatchNorm_v1", "_contrib_SyncBatchNorm"), (3, 4)), ADDS_GRADIENT: (1,)}
_MOST_AGE = 100  # of a copy: decisions of other trainers

_Copies = Sequence[Tuple[Sequence[NDArray], NDArray]]  # arrays, and the copy of all of them


@dataclass(eq=False)
class _Call:
    """The arrays that a call is about to write, and how they were before."""

    beside: Sequence[int]  # the ids of its inputs
    copies: _Copies  # arrays of other calls may be among them
    age: int = 0  # decisions of others since then; with any its arrays are copied anew before they are written again

    def put_back(self, latest: Mapping[int, _Call]) -> None:
        """Let the arrays be as they were that no later call has copied, by the ids of arrays."""
        for arrays, copy in self.copies:
            ends = list(accumulate(array.size for array in arrays))
            for array, begin, end in zip(arrays, (0, *ends), ends):
                if latest.get(id(array)) is self:
                    part = {"axis": 0, "begin": begin, "end": end} if len(arrays) > 1 else {}
                    _run("slice_axis" if part else "_copy", [copy], array, **part)


def alike(inputs: Sequence[NDArray], positions: Iterable[int]) -> list[list[int]]:
    """Group the positions of the inputs that one operator can copy."""
    kinds: dict[Any, list[int]] = {}
    for i in positions:
        array = inputs[i]
        kinds.setdefault((array.context, array.dtype) if array.ndim == 1 else i, []).append(i)
    return list(kinds.values())


def _copies_of(groups: Iterable[Sequence[NDArray]]) -> _Copies:
    return [(group, _run("Concat", group, num_args=len(group), dim=0) if len(group) > 1 else _run("_copy", group))
            for group in groups if group]


def _run(op: str, inputs: Sequence[NDArray], out: NDArray | None = None, **attrs: Any) -> NDArray:
    """Run an operator past AMP, and past the tape of gradients."""
    with autograd.pause():
        return run_operator(original_invoke, op, inputs, attrs, out)


class _RunningStats:
    """The copies at hand, and who decides on them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Trainers that may skip steps, and GradScalers, which make them skip: arrays are copied as long as one lives.
        self.deciders: WeakSet[Any] = WeakSet()
        self.waiting: WeakSet[Trainer] = WeakSet()  # trainers that scaled a loss, and will decide on it
        self._calls: dict[int, _Call] = {}  # by the ids of the arrays that they write
        # Calls whose backward pass will write, by the ids of the arrays that it writes: the ids of their inputs, those
        # arrays, and their device and type.
        self._ahead: dict[tuple[int, ...], tuple[Sequence[int], list[NDArray], Any]] = {}

    def forget(self) -> None:
        """Put no array back that was written so far."""
        with self._lock:
            self._calls.clear()
            self._ahead.clear()
            self.waiting.clear()

    def note(self, inputs: Sequence[NDArray], written: Callable[[], Sequence[Sequence[int]]]) -> None:
        """Take note that a call is about to write inputs at positions, grouped by :func:`alike`, if it is recorded."""
        if not self._is_due():
            return
        with self._lock:
            copies = _copies_of([inputs[i] for i in group if self._is_new(inputs[i])] for group in written())
            call = _Call(tuple(map(id, inputs)), copies)
            self._calls.update((id(array), call) for arrays, _ in copies for array in arrays)

    def note_ahead(self, inputs: Sequence[NDArray], positions: Sequence[int], device: Context) -> None:
        """Take note that the backward pass of a call will write vectors of one type, if the call is recorded."""
        if self._is_due():
            arrays = [inputs[i] for i in positions]
            with self._lock:
                self._ahead[tuple(map(id, arrays))] = tuple(map(id, inputs)), arrays, (device, arrays[0].dtype)

    def begin_backward(self) -> None:
        """Copy the arrays that a backward pass may write."""
        if not self._ahead:
            return
        with self._lock:
            ahead, self._ahead = list(self._ahead.values()), {}
            groups: dict[Any, list[NDArray]] = {}
            for _, arrays, kind in ahead:
                groups.setdefault(kind, []).extend(filter(self._is_new, arrays))
            copies = _copies_of(groups.values())
            for beside, arrays, _ in ahead:
                call = _Call(beside, copies)
                self._calls.update((id(array), call) for array in arrays if self._is_new(array))

    def _is_due(self) -> bool:
        return bool(self.deciders) and autograd.is_recording() and autograd.is_training()

    def _is_new(self, array: NDArray) -> bool:
        call = self._calls.get(id(array))
        return call is None or call.age > 0

    def decided(self, trainer: Trainer, skipped: bool) -> None:
        """Put back the arrays that were written for a step if it is skipped, or forget how they were."""
        with self._lock:
            self.waiting.discard(trainer)
            if not self._calls:
                return
            if skipped:
                wait_for_statistics()
            elif len(self.deciders) == 1 and trainer in self.deciders:
                self._calls.clear()
                return
            own, *awaited = map(trainers.ids_of_arrays, (trainer, *self.waiting))
            for call in set(self._calls.values()):
                is_own = not own.isdisjoint(call.beside)
                is_awaited = not all(other.isdisjoint(call.beside) for other in awaited)
                if skipped and (is_own or not (is_awaited or call.age)):
                    call.put_back(self._calls)
                if not is_awaited:
                    call.age = _MOST_AGE + 1 if is_own else call.age + 1
            self._calls = {key: call for key, call in self._calls.items() if call.age <= _MOST_AGE}


running_stats = _RunningStats()


def noting_invocations(runs: Runs) -> Runs:
    """Return how to run imperative calls, by the operators' handles: operators that write inputs take note of it."""
    return {**runs, **{handle_of(op): partial(_noting, op, runs.get(handle_of(op), lambda invoke, call: invoke(*call)))
                       for op in (*_POSITIONS, CUSTOM)}}


def _noting(op: str, run: Callable[[Invoke, Invocation], Any], invoke: Invoke, call: Invocation) -> Any:
    def groups() -> list[list[int]]:
        count = len(call.inputs)
        positions = _POSITIONS.get(op) or range(count - number_of_states(call.attrs()), count)
        return alike(call.inputs, [i for i in positions if i < count])

    if op in BATCH_NORMS and call.inputs[-1].context.device_type == "cpu":
        running_stats.note_ahead(call.inputs, _POSITIONS[op], call.inputs[-1].context)
    else:
        running_stats.note(call.inputs, groups)
    return run(invoke, call)
