"""Run tests in processes of their own, so that none is blamed for what another one left behind, and say what they find.

A GPU's error outlives the operator that it comes from: CUDA reports a failed allocation again at the next launch, and
after a kernel that failed nothing runs in that process any more.
"""
from __future__ import annotations

import contextlib
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Iterator, Mapping, Sequence

import mxnet as mx

from ..dtypes import Support
from ..session.autocast import deinit
from .processes import NORMALLY, Outcome, isolated

OK, WRONG, ERROR, SKIPPED, INFO = "ok", "wrong", "error", "skipped", "info"
FAILED = (WRONG, ERROR)
# The words of CUDA, cuDNN and cuBLAS, of MXNet on a CPU, and of Python.
_OUT_OF_MEMORY = re.compile(r"out of memory|_ALLOC_FAILED|Failed to allocate CPU Memory|bad_alloc|MemoryError")
_SECONDS = 240.0
_PROBE = 1 << 20  # bytes: more than any test's arrays, and next to nothing on a device

Found = tuple  # verdict, detail and data of a Finding


@dataclass(frozen=True)
class Finding:
    """One line of a self-test."""

    # what was looked at
    section: str
    name: str
    verdict: str  # ``'ok'``, ``'wrong'``, ``'error'``, ``'skipped'`` or ``'info'``
    detail: str = ""  # for people
    data: Mapping[str, Any] = field(default_factory=dict)  # for programs; what JSON can hold

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


@dataclass(frozen=True)
class Section:
    """Tests of one kind."""

    names: Callable[[Support], Sequence[str]]  # of its tests on a device; none where it has nothing to run there
    test: Callable[[str, mx.Context, Support], Found]  # runs one of them; a function that can be pickled
    together: int = 25  # how many share a process: a GPU takes seconds to get ready in each
    forked: bool = True  # MXNet has one thread in a process that is forked, where nothing may be timed


def _is_out_of_memory(said: str) -> bool:
    """Tell whether an engine's words are about memory that ran out."""
    return _OUT_OF_MEMORY.search(said) is not None


def findings(name: str, section: Section, device: mx.Context, runs: Support) -> Iterator[Finding]:
    """Run a section's tests, each of which is judged by itself."""
    waiting = list(section.names(runs))
    while waiting:
        found = _tested(name, section, waiting[:section.together], device, runs)
        yield from found
        del waiting[:len(found)]
        if any("out_of_memory" in each.data for each in found) and waiting and not _has_memory(device):
            yield Finding(name, f"{len(waiting)} more", ERROR, f"not tested: {device} has no memory left, not even "
                          f"{_PROBE >> 20} MiB. Other processes may hold it",
                          {"out_of_memory": True, "not_tested": waiting})
            return


def _tested(name: str, section: Section, tests: Sequence[str], device: mx.Context, runs: Support) -> list[Finding]:
    """Run tests in one process, up to the first error, which has to show itself in a process of its own as well."""
    outcome = isolated(_run, (name, section.test, tests, device, runs), _SECONDS, forked=section.forked)
    if outcome.ended != NORMALLY:
        if len(tests) == 1:
            return [_ended(name, tests[0], device, outcome)]
        return [found for each in tests for found in _tested(name, section, [each], device, runs)]
    found = outcome.value
    if len(found) > 1 and found[-1].verdict == ERROR:
        found[-1:] = _tested(name, section, [found[-1].name], device, runs)
    return found


def _run(name: str, test: Callable[[str, mx.Context, Support], Found], tests: Sequence[str], device: mx.Context,
         runs: Support) -> list[Finding]:
    """Run tests up to the first error, in the process at hand."""
    found: list[Finding] = []
    for each in tests:
        try:
            with device:
                found.append(Finding(name, each, *test(each, device, runs)))
        except Exception as error:
            found.append(Finding(name, each, ERROR, message_of(error)))
        finally:
            deinit()
        if found[-1].verdict == ERROR:
            if _is_out_of_memory(found[-1].detail):
                found[-1] = _without_memory(found[-1], device)
            break
    return found


def _without_memory(found: Finding, device: mx.Context) -> Finding:
    """Say of a test that memory ran out, which is not the fault of what was tested."""
    said, data = "", {**found.data, "out_of_memory": True}
    if device.device_type == "gpu":
        with contextlib.suppress(mx.MXNetError):
            free, total = (size >> 20 for size in mx.context.gpu_memory_info(device.device_id))
            said, data = f", which has {free} of {total} MiB free", {**data, "free_mib": free, "total_mib": total}
    detail = f"not tested: out of memory on {device}{said} ({found.detail})"
    return Finding(found.section, found.name, ERROR, detail, data)


def _ended(name: str, test: str, device: mx.Context, outcome: Outcome) -> Finding:
    """Make the finding of a test that ended its process."""
    said = [line.strip() for line in outcome.said.splitlines() if _is_out_of_memory(line)]
    if said:
        return Finding(name, test, ERROR, f"not tested: out of memory on {device} ended the process ({said[-1][:240]})",
                       {"out_of_memory": True})
    return Finding(name, test, ERROR, f"its process ended with {outcome.ended}")


def _has_memory(device: mx.Context) -> bool:
    """Tell whether a new process gets a little memory of a device."""
    return isolated(_allocate, (device,), _SECONDS).ended == NORMALLY


def _allocate(device: mx.Context) -> None:
    mx.nd.zeros(_PROBE // 4, ctx=device).wait_to_read()
    mx.nd.waitall()


def message_of(error: Exception) -> str:
    r"""Return the line of an engine's message that says what is wrong, without paths and addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Traceback", "Stack trace", "File ", "[bt]"))]
    telling = [line for line in lines if "Error in operator" in line or "Check failed" in line or "could not" in line]
    text = (telling or lines or [repr(error)])[-1].split("src/")[-1]
    return re.sub(r"0x[0-9a-f]+", "0x...", text)[:240]
