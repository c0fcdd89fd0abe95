"""The child side of a comparison: builds one implementation and runs steps when it is told to.

Usage: ``python _worker.py '{"workload": "ssd", "implementation": "amp", "settings": {...}}'``

It answers with one JSON object a line on standard output:

- ``{"event": "ready", "about": {...}}`` or ``{"event": "refused", "message": "..."}`` after start-up;
- to ``{"command": "run", "steps": 3}``:
  ``{"event": "ran", "seconds": [...], "losses": [...], "peak_memory": bytes}``;
- to ``{"command": "save", "folder": "..."}``, which workloads with a method `save` understand:
  ``{"event": "saved", ...}`` with the figures that it returns;
- to ``{"command": "stop"}``, or when its input ends, it ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO, cast

import _machine
from _errors import UsageError
from _registry import SavingSession, Session, build


def timed_step(session: Session) -> tuple[float, dict[str, float]]:
    """Run one step and return its seconds and its losses."""
    begin = time.perf_counter()
    losses = session.step()
    return time.perf_counter() - begin, losses


def run_steps(session: Session, steps: int) -> dict[str, Any]:
    """Run steps and return the answer to a ``run`` command."""
    results = [timed_step(session) for _ in range(steps)]
    _machine.flush()
    return {
        "event": "ran",
        "seconds": [seconds for seconds, _ in results],
        "losses": [losses for _, losses in results],
        "peak_memory": _machine.peak_memory(),
    }


def _ready(session: Session) -> dict[str, Any]:
    about = dict(session.about, samples_per_step=session.samples_per_step, versions=_machine.versions())
    return {"event": "ready", "about": about, "library_settings": _machine.library_settings()}


def serve(spec: dict[str, Any], commands: TextIO, answers: TextIO) -> int:
    """Build what the specification asks for and answer commands until told to stop.

    Parameters
    ----------
    spec : dict
        ``workload``, ``implementation`` and ``settings``.
    commands, answers : text file
        Lines of JSON, in and out.

    Returns
    -------
    int
        The exit code.
    """

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        session = build(spec["workload"], spec["implementation"], spec["settings"])
    except UsageError as error:
        answer({"event": "refused", "message": str(error)})
        return 2
    answer(_ready(session))
    for line in commands:
        command = json.loads(line)
        if command["command"] == "stop":
            break
        if command["command"] == "save":
            answer({"event": "saved", **cast(SavingSession, session).save(command["folder"])})
        else:
            answer(run_steps(session, command["steps"]))
    return 0


def main() -> int:
    """Serve on standard input and output; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return serve(json.loads(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())
