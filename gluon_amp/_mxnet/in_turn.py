"""Run the operators of a graph one after another: each starts when the one before it is done.

MXNet hands operators to threads of its engine, but runs loops and branches in the thread that hands them out. There it
copies what they read out of oneDNN's layouts, and forgets the layout of the memory that they will write to, though the
operators in front of them, which fill the one and still read the other, may not have run: the results are wrong without
a word, or the process ends. Its hook for monitors is called in that thread, before the next operator.
"""
from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable

import mxnet as mx
from mxnet.base import _LIB, NDArrayHandle, check_call
from mxnet.executor import Executor

from .invoke import Callback, StockCachedOp, array_at

_NAME = b"WaitForVar"  # which the engine gives to its own waiting


class _Context(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int32))


def _without_interpreter(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of Python's C interface that runs in any thread, and does not wait for the interpreter."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.CFUNCTYPE(result, *arguments))


_CPU = _Context(1, 0)
_nothing = _without_interpreter("Py_IsInitialized", ctypes.c_int)
_allocate = _without_interpreter("PyThread_allocate_lock", ctypes.c_void_p)
_acquire = _without_interpreter("PyThread_acquire_lock", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_release = _without_interpreter("PyThread_release_lock", None, ctypes.c_void_p)


class _Lock(threading.local):
    """A lock for each thread that waits; it is taken until the engine releases it."""

    def __init__(self) -> None:
        self.address = _allocate()
        _acquire(self.address, 1)


_lock = _Lock()


def wait_for(handle: NDArrayHandle) -> None:
    """Wait until the operator that writes an array is done; an error of it stays for whoever reads the array."""
    # MXNet's own wait_to_read takes the error away from the array, and all that is computed of it seems right. Here the
    # engine gets a task that reads the array. It drops the task, run or not, and releases the lock that belongs to it.
    lock = ctypes.c_void_p(_lock.address)
    with mx.engine.bulk(0):  # the engine starts what it has gathered
        check_call(_LIB.MXEnginePushSyncND(_nothing, lock, _release, ctypes.byref(_CPU), ctypes.byref(handle), 1,
                                           None, 0, None, 0, _NAME))
    _acquire(lock, 1)


def _wait_and_free(*told: Any) -> None:
    array = array_at(told[-2])
    wait_for(array.handle)


# These belong to the module: a backward pass may run when the Python object that started it has gone.
_waiting = Callback(_wait_and_free)
_after_each = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)(_waiting)
_after_each_bound = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)(_waiting)
check = _waiting.check  # raises what ended the waiting, as Ctrl-C does


def run_in_turn(runner: StockCachedOp | Executor) -> None:
    """Let a cached op or an executor, and its backward pass, run one operator after another."""
    if isinstance(runner, Executor):
        check_call(_LIB.MXExecutorSetMonitorCallbackEX(runner.handle, _after_each_bound, None, 0))
    else:
        check_call(_LIB.MXCachedOpRegisterOpHook(runner.handle, _after_each, 0))


def in_turn(callback: Callable[..., None]) -> Callable[..., None]:
    """Make a hook of a user's one that waits for the output first."""
    def report(*told: Any) -> None:
        wait_for(ctypes.cast(told[-1], NDArrayHandle))
        callback(*told)
    return report
