"""The worker: imports MXNet once, then runs every request in a forked process of its own.

A crash ends the fork only. Requests come as JSON lines on standard input, outcomes leave as JSON lines on the file
descriptor given as the first argument; the second names the function that runs a request. Run by
:mod:`gluon_amp.audit.pool`.
"""
from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import mxnet as mx

from .execute import Judge, drain
from .records import modes_for
from .samples import samples_of

__all__ = ["isolated", "main", "run_request"]

_TICK = 0.02
_DEADLY = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGXCPU)
Request = dict
Runner = Callable[[Request], Iterable[dict]]


def run_request(request: Request) -> Iterator[dict]:
    """Run an operator's samples in all modes, or in those that the request names.

    Parameters
    ----------
    request : dict
        ``op``, ``dtype``, ``rounding``, ``device`` and optionally ``only``, a list of ``[condition, mode]``.

    Yields
    ------
    dict
        ``{"done": [condition, mode], "verdict": ...}`` after every mode.
    """
    only = None if request.get("only") is None else {tuple(pair) for pair in request["only"]}
    name, _, number = request["device"].partition("(")
    context = mx.Context(name, int(number.rstrip(")") or 0))
    for item in samples_of(request["op"]):
        judge = Judge(item, request["dtype"], context, request["rounding"])
        for mode in modes_for(item, request["rounding"], name):
            key = [item.condition, str(mode)]
            if only is None or tuple(key) in only:
                result = judge.run(mode)
                yield {"done": key, "verdict": result.verdict, "detail": result.detail, "error": result.error,
                       "bias": result.bias, "gradient": judge.item.gradient}
    gc.collect()  # checks of the memory allocator act when memory is freed
    drain()


def isolated(run: Runner, request: Request) -> dict:
    """Run a request in a forked process and say how that ended.

    Parameters
    ----------
    run : callable
        Takes the request and yields records.
    request : dict
        ``cpu_seconds`` and ``idle_seconds`` limit the process: the time it computes, and the time it waits without
        computing. Time in which it is suspended or waits for a processor does not count.

    Returns
    -------
    dict
        ``records``: what ``run`` yielded; ``ended``: ``'normally'``, ``'timeout'``, a signal's name or the text of an
        exception; ``said``: what the process wrote to standard error, without Python's own tracebacks.
    """
    with tempfile.TemporaryDirectory(prefix="gluon_amp_audit") as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        child = os.fork()
        if child == 0:
            _child(run, request, out, err)
        ended = _wait(child, float(request["idle_seconds"]))
        lines = out.read_text().splitlines() if out.exists() else []
        said = err.read_text(errors="replace") if err.exists() else ""
    records = [json.loads(line) for line in lines if line.endswith("}")]
    failed = [record["failed"] for record in records if "failed" in record]
    return {"records": [record for record in records if "failed" not in record],
            "ended": failed[0] if failed else ended, "said": said[-2000:]}


def _child(run: Runner, request: Request, out: Path, err: Path) -> None:
    """Run the request and leave; never returns."""
    code = 1
    try:
        limit = int(request["cpu_seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in _DEADLY:  # MXNet's own handlers end the process normally
            signal.signal(number, signal.SIG_DFL)
        with err.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        with out.open("w", buffering=1) as stream:
            try:
                for record in run(request):
                    stream.write(json.dumps(record) + "\n")
                code = 0
            except Exception as error:
                stream.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}) + "\n")
    finally:
        os._exit(code)


def _wait(child: int, idle_seconds: float) -> str:
    """Wait for a process and name its end; kill it when it neither computes nor ends."""
    idle, used = 0.0, -1.0
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(_TICK)
        state, now = _state(child)
        idle = idle + _TICK if state == "S" and now == used else (idle if state == "T" else 0.0)
        used = now
        if idle > idle_seconds:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout"
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        return "normally" if code == 0 else f"exit code {code}"
    number = os.WTERMSIG(status)
    return "timeout" if number == signal.SIGXCPU else signal.Signals(number).name


def _state(pid: int) -> tuple[str, float]:
    """Read a process's state letter and the processor time it has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?", 0.0
    return fields[0], float(fields[11]) + float(fields[12])


def main(argv: list[str]) -> None:
    """Serve requests until standard input ends."""
    module, _, function = argv[2].partition(":")
    run: Any = getattr(importlib.import_module(module), function)
    with os.fdopen(int(argv[1]), "w", buffering=1) as answers:
        for line in sys.stdin:
            answers.write(json.dumps(isolated(run, json.loads(line))) + "\n")


if __name__ == "__main__":
    main(sys.argv)
