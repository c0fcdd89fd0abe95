"""``gluon-amp run``: run a training script in mixed precision without changing it."""
from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
from types import TracebackType

from ..compat.stand_in import install, uninstall
from ..errors import StateError
from ..session.autocast import deinit, init
from .models import dtype_name

_RUNNERS = (__file__, runpy.run_path.__code__.co_filename)

HELP = "run a script with AMP switched on, and with this package in the place of mxnet.contrib.amp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--dtype", type=dtype_name, metavar="TYPE",
                        help="the type, as in amp.init (default: what is fastest here)")
    parser.add_argument("--no-init", action="store_true",
                        help="leave it to the script to call amp.init of mxnet.contrib.amp")
    add_script_arguments(parser)
    parser.set_defaults(keeps_warnings=True)


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name a script."""
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script ...",
                        help="a Python script and its arguments")


def script_of(args: argparse.Namespace, example: str) -> list[str]:
    """Return a script, or the name of a module, and its arguments."""
    command = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not command:
        raise SystemExit(f"gluon-amp {args.command}: expected a Python script to run, as in `gluon-amp {example}`, or "
                         "a module behind -m")
    return command


def run(args: argparse.Namespace) -> int:
    """Run the script in this process; return its exit code."""
    command = script_of(args, "run train.py")
    if not args.module and not os.path.exists(command[0]):  # a directory or a zip file may hold a program, too
        raise StateError(f"the script {command[0]!r} does not exist: expected a Python file, or -m and a module")
    install()
    before = set(threading.enumerate())
    try:
        if not args.no_init:
            init(args.dtype)
        code = _run(command, args.module)
        _wait_for_threads(before)
        return code
    finally:
        deinit()
        uninstall()


def _run(command: list[str], is_module: bool) -> int:
    before = sys.argv, sys.path[:]
    sys.argv = list(command)
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(command[0])))
    try:
        if is_module:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except Exception as error:
        trace = _of_the_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames that run the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:
        trace = trace.tb_next
    return trace


def _wait_for_threads(before: set[threading.Thread]) -> None:
    """Wait for the threads that keep a script alive, as Python does at its end: AMP is on for them, too."""
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join()
