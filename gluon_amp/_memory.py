"""Let glibc keep the memory of arrays that MXNet frees, for those of the next step, and let MXNet's graphs need less.

MXNet 1.9.1 takes every array on a CPU from malloc. glibc gives large ones back to the system with free, so that the
system clears each page of the next step's arrays anew: a fifth of the time of an LSTM's step, half of it in
MobileNet v2's inference. Graphs with ``static_alloc`` keep their arrays and do not need this.

The first step makes what stays (gradients, the optimizer's states, arrays of graphs). Its large arrays are mapped:
glibc would put some of these in gaps that others leave, and take new memory for the others in the next step. What is
never written takes no memory on fresh pages.
"""
from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Mapping, Sequence

VARIABLE = "GLUON_AMP_KEEP_MEMORY"
_SEARCH, _RANGE = "NNVM_AUTO_SEARCH_MATCH_RANGE", "NNVM_EXEC_MATCH_RANGE"
_SPACES, _WORKERS = "MXNET_CPU_TEMP_COPY", "MXNET_CPU_WORKER_NTHREADS"
_KERNELS = "MXNET_MKLDNN_CACHE_NUM"  # read when oneDNN runs its first operator
# What glibc calls a setting, its number for mallopt, and the value: in the first step, and from the second one on.
_FIRST = (("MMAP_THRESHOLD", -3, 1 << 17),)  # where glibc begins; it raises this with the first large array that goes
_SETTINGS = (
    ("TRIM_THRESHOLD", -1, 1 << 30),  # bytes that stay free at the end of the main heap
    ("TOP_PAD", -2, 1 << 26),  # as large as a heap of another thread: empty ones stay
    ("MMAP_THRESHOLD", -3, 1 << 25),  # the most that glibc takes; larger arrays are mapped, and go back at once
)
_seen: set[str] = set()


def take_little() -> None:
    """Let MXNet's graphs take little memory, unless the user has set what they take."""
    if _RANGE not in os.environ:  # the smallest of five plans of a graph's memory
        os.environ.setdefault(_SEARCH, "1")
    # Operators take temporary memory from four spaces in turns, which all grow to the largest request. Two do for the
    # one thread that hands out a CPU's operators. MXNet reads this when the first operator asks for such a space.
    if os.environ.get(_WORKERS, "1") == "1":
        os.environ.setdefault(_SPACES, "2")


def bound_kernels() -> None:
    """Let MXNet keep so many kernels of oneDNN for each operator, unless the user has said how many."""
    # MXNet keeps one for every shape, for good, where it is not told: half a megabyte for each new shape of a small
    # network. oneDNN keeps the last 1,024 of all operators itself, from which MXNet's are made again in no time.
    os.environ.setdefault(_KERNELS, "512")


def note(event: str) -> None:
    """Take note of what happens once a step; the first step is over when the same event comes again."""
    if event in _seen:
        keep_freed_memory()
    elif not _seen:
        _tell_glibc(_FIRST)
    _seen.add(event)


@functools.lru_cache(maxsize=None)
def keep_freed_memory() -> None:
    """Tell glibc, for the rest of the process, unless there is an obstacle; a second call does nothing."""
    _seen.add("kept")
    _tell_glibc(_SETTINGS)


def _tell_glibc(settings: Sequence[tuple[str, int, int]]) -> None:
    if not obstacle(os.environ):
        libc = ctypes.CDLL(None)
        for _, number, value in settings:
            libc.mallopt(number, value)


def obstacle(environ: Mapping[str, str]) -> str:
    """Return what speaks against it: another allocator, or the user's word; empty when nothing does."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return "the C library is not glibc"
    if environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    tunables = environ.get("GLIBC_TUNABLES", "")
    theirs = [f"MALLOC_{name}_" for name, *_ in _SETTINGS if f"MALLOC_{name}_" in environ]
    theirs += [f"glibc.malloc.{name.lower()}" for name, *_ in _SETTINGS if f"glibc.malloc.{name.lower()}=" in tunables]
    return f"{theirs[0]} is set, and wins" if theirs else ""
