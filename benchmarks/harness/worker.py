"""The child side of a benchmark: it builds what the arguments name and does what it is told, until told to stop.

Usage: ``python worker.py '{"serves": "harness.worker:Steps", "workload": "ssd", "implementation": "amp", ...}'``

``serves`` names a class, made with the other values. It answers with one JSON object a line on standard output:

- ``{"event": "ready", ...}``, what its method `ready` returns, or ``{"event": "refused", "message": "..."}``;
- to ``{"command": "run", "steps": 3}``: ``{"event": "run", ...}``, what its method `run` returns for these arguments;
- to ``{"command": "stop"}``, or when its input ends, it ends.

The process that starts this one sets the number of threads in the environment, before anything loads OpenMP.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Mapping, TextIO, cast

from . import machine
from .errors import UsageError
from .registry import SavingSession, Session, build, load


def timed_step(session: Session) -> tuple[float, dict[str, float]]:
    """Run one step and return its seconds and its losses."""
    begin = time.perf_counter()
    losses = session.step()
    return time.perf_counter() - begin, losses


class Steps:
    """An implementation of a workload, one step after the other."""

    refuses = (UsageError,)

    def __init__(self, workload: str, implementation: str, settings: Mapping[str, Any]):
        self.session = build(workload, implementation, settings)

    def ready(self) -> dict[str, Any]:
        return {"about": about(self.session), "library_settings": machine.library_settings()}

    def run(self, steps: int) -> dict[str, Any]:
        results = [timed_step(self.session) for _ in range(steps)]
        machine.flush()
        seconds, losses = zip(*results)
        return {"seconds": seconds, "losses": losses, "peak_memory": machine.peak_memory()}

    def save(self, folder: str) -> dict[str, Any]:
        return cast(SavingSession, self.session).save(folder)


def about(session: Session) -> dict[str, Any]:
    """Return what a session says of itself, with the versions of its libraries."""
    return {**session.about, "samples_per_step": session.samples_per_step, "versions": machine.versions()}


def serve(spec: Mapping[str, Any], commands: TextIO, answers: TextIO) -> int:
    """Answer commands until told to stop; return the exit code, 2 for a request that cannot be met."""

    def answer(event: str, content: Mapping[str, Any]) -> None:
        answers.write(json.dumps({"event": event, **content}) + "\n")
        answers.flush()

    arguments = dict(spec)
    kind = load(arguments.pop("serves"))
    try:
        served = kind(**arguments)
        answer("ready", served.ready())
        for line in commands:
            given = json.loads(line)
            command = given.pop("command")
            if command == "stop":
                break
            answer(command, getattr(served, command)(**given))
    except kind.refuses as error:
        answer("refused", {"message": str(error)})
        return 2
    return 0


def main() -> int:
    """Serve on standard input and output; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return serve(json.loads(sys.argv[1]), sys.stdin, answers)
