"""Run functions in processes of their own, which may crash or hang, forked from a server that has imported MXNet."""
from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import tempfile
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, NamedTuple

NORMALLY, TIMED_OUT = "normally", "timeout"
_TICK = 0.02
_DEADLY = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGXCPU)
_CONTEXT = multiprocessing.get_context("forkserver")


class Outcome(NamedTuple):
    """How a process ended."""

    ended: str  # 'normally', 'timeout', a signal's name, 'exit code N', or the text of an exception
    value: Any = None  # what the function returned
    said: str = ""  # the end of what the process wrote to its output and error streams


def start_server() -> None:
    """Start the process that the others are forked from; do nothing when it runs already."""
    before = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    # One thread: many processes run at a time, and results are to be the same everywhere.
    os.environ.update(OMP_NUM_THREADS="1", MXNET_SUBGRAPH_VERBOSE="0",
                      PYTHONPATH=os.pathsep.join(filter(None, (root, before.get("PYTHONPATH")))))
    try:
        _CONTEXT.set_forkserver_preload(["gluon_amp"])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def isolated(function: Callable, arguments: tuple, timeout: float) -> Outcome:
    """Call a function in a process of its own, in which MXNet has one thread."""
    start_server()
    with tempfile.NamedTemporaryFile("r", errors="replace") as stream:
        reader, writer = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_child, args=(function, arguments, int(timeout), writer, stream.name),
                                   daemon=True)
        process.start()
        writer.close()
        with reader:
            try:
                ended, value = reader.recv() if _has_answer(reader, process.pid, timeout / 2) else (TIMED_OUT, None)
            except (EOFError, OSError):  # it is gone
                ended, value = "", None
        if ended == TIMED_OUT:
            process.kill()
        process.join()
        return Outcome(ended or _end(process.exitcode or 0), value, stream.read()[-2000:])


def _child(function: Callable, arguments: tuple, cpu_seconds: int, writer: Connection, stream: str) -> None:
    """Call the function, send what it returns or raises, and leave without Python's shutdown."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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


def _has_answer(reader: Connection, pid: int | None, idle_seconds: float) -> bool:
    """Wait until a process answers or is gone; return False when it neither computes nor ends."""
    idle, used = 0.0, -1.0
    while not reader.poll(_TICK):
        state, now = _state(pid)
        idle = idle + _TICK if state == "S" and now == used else (idle if state == "T" else 0.0)
        used = now
        if idle > idle_seconds:
            return False
    return True


def _state(pid: int | None) -> tuple[str, float]:
    """Read a process's state letter and the processor time it has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?", 0.0
    return fields[0], float(fields[11]) + float(fields[12])


def _end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return TIMED_OUT if -code == signal.SIGXCPU else signal.Signals(-code).name
