"""Run a function in a process of its own, which a crash may end."""
from __future__ import annotations

import json
import os
from typing import Callable

__all__ = ["ENDED", "apart", "ended"]

ENDED = "the process ended"


def apart(function: Callable[[], str | None]) -> str | None:
    """Return what a function returns that runs in another process, or that it ended the process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(_result(function)))
        os._exit(0)  # without the handlers of the process that this one was forked from
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(text) if text else ended(status)


def ended(status: int) -> str:
    """Say how a process ended, by what `os.waitpid` gives: with a code, or with a signal, whose number is negative."""
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)  # Python 3.8 has no function
    return f"{ENDED} with {code}"


def _result(function: Callable[[], str | None]) -> str | None:
    try:
        return function()
    except Exception as error:  # of whatever kind
        said = str(error).strip().splitlines() or [""]
        return f"{ENDED} with {type(error).__name__}: {said[-1]}"  # MXNet names the check that failed last
