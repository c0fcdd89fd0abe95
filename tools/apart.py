"""Child processes that may crash or hang, and what AMP is told in them; tools import the tree from here."""
from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [str(ROOT / name) for name in ("", "tools", "tests/helpers")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]
NORMALLY, TIMED_OUT = "normally", "timeout"
_DEADLY = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGXCPU)
_CONTEXT = multiprocessing.get_context("forkserver")
_MEMORY = 6 << 30  # bytes that a process may have: cases take 250 MB, and one took the machine's
_WAITS = 3  # times the processor time that a process may take: how long it may take by the clock


class Outcome(NamedTuple):
    """How a process ended."""

    ended: str  # 'normally', 'timeout', a signal's name, 'exit code N', or the text of an exception
    value: Any = None  # what the function returned
    said: str = ""  # the end of what the process wrote to its output and error streams

    @property
    def failed(self) -> bool:
        """Whether the function raised an exception."""
        return self.ended not in (NORMALLY, TIMED_OUT) and not self.ended.startswith(("SIG", "exit code"))


def apart(function: Callable, *arguments: Any, seconds: float = 300.0) -> Outcome:
    """Call a function in a process of its own, in which MXNet has one thread.

    The process is forked from a server that has imported MXNet and runs nothing. After so many seconds of processor
    time it is ended, and it cannot have more than 6 GB.
    """
    _start_server()
    with tempfile.NamedTemporaryFile("r", errors="replace") as stream:
        reader, writer = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_child, args=(function, arguments, int(seconds), writer, stream.name),
                                   daemon=True)
        process.start()
        writer.close()
        with reader:
            try:
                ended, value = reader.recv() if reader.poll(_WAITS * seconds) else (TIMED_OUT, None)
            except (EOFError, OSError):  # it is gone
                ended, value = "", None
        if ended == TIMED_OUT:
            process.kill()
        process.join()
        return Outcome(ended or _end(process.exitcode or 0), value, stream.read()[-2000:])


def _start_server() -> None:
    """Start the process that the others are forked from; do nothing when it runs already."""
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", MXNET_SUBGRAPH_VERBOSE="0",
                      PYTHONPATH=os.pathsep.join([*FOLDERS, before.get("PYTHONPATH", "")]))
    try:
        _CONTEXT.set_forkserver_preload(["gluon_amp", "fuzz"])  # what cannot be imported is left out
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _child(function: Callable, arguments: tuple, cpu_seconds: int, writer: Any, stream: str) -> None:
    """Call the function, send what it returns or raises, and leave without Python's shutdown."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    for number in _DEADLY:  # MXNet's own handlers end the process normally
        signal.signal(number, signal.SIG_DFL)
    with open(stream, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        answer = NORMALLY, function(*arguments)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}", None
    writer.send(answer)
    os._exit(0)


def _end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return TIMED_OUT if -code == signal.SIGXCPU else signal.Signals(-code).name


def message_of(error: Exception) -> str:
    """Return the line of an engine's message that says what is wrong, without paths and addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Traceback", "Stack trace", "File ", "[bt]"))]
    telling = [line for line in lines if re.search("Error in operator|Check failed|could not", line)]
    return re.sub(r"0x[0-9a-f]+", "0x...", (telling or lines or [repr(error)])[-1].split("src/")[-1])[:240]


@contextmanager
def native_at_every_size(least: int = 1) -> Iterator[None]:
    """Let operators in C++ run at every size, rather than from the size on at which they gain."""
    from gluon_amp.eager import native
    from gluon_amp.passes import native_attention, native_operators

    kept = dict(native_operators.REPLACEMENTS), native_attention._LEAST, native._LEAST
    native_operators.REPLACEMENTS.update((name, one._replace(least=least)) for name, one in kept[0].items())
    native_attention._LEAST, native._LEAST = least, max(least, 2)  # MXNet tells libraries no scalar's shape
    try:
        yield
    finally:
        native_operators.REPLACEMENTS.update(kept[0])
        native_attention._LEAST, native._LEAST = kept[1:]
