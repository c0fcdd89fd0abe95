"""What the launcher starts in place of a script: ends with the launcher, and at once when the script fails.

Run by its path, with the standard library alone, so that a script can set the environment before it imports MXNet.

A worker that raises would otherwise hang: MXNet's KVStore waits for the other workers when it is freed, and they wait
for this one.
"""
from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import traceback
from types import TracebackType
from typing import Callable

LAUNCHER_PID = "GLUON_AMP_LAUNCHER_PID"
SERVICE = "--service"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run ``start.py --service``, ``start.py -m MODULE ...`` or ``start.py SCRIPT ...``."""
    _end_with(int(os.environ.pop(LAUNCHER_PID)))
    arguments = sys.argv[1:]
    if arguments == [SERVICE]:
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        import gluon_amp  # noqa: F401  MXNet serves as scheduler or server while it is imported, and exits
    elif arguments[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), arguments[1:]
        _run(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(arguments[0])), arguments
        _run(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(script: Callable[[], object]) -> None:
    try:
        script()
    except SystemExit as error:
        if error.code not in (None, 0):
            _abort(error.code if isinstance(error.code, int) else print(error.code, file=sys.stderr) or 1)
    except BaseException as error:
        traceback.print_exception(type(error), error, _of_the_script(error.__traceback__))
        _abort(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this file and of runpy."""
    own = (__file__, runpy.__file__)
    while trace is not None and ("frozen runpy" in trace.tb_frame.f_code.co_filename
                                 or trace.tb_frame.f_code.co_filename in own):
        trace = trace.tb_next
    return trace


def _abort(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
