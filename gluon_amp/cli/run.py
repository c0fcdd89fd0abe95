"""``gluon-amp run``: run a training script in mixed precision without changing it."""
from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
from typing import Callable

from ..compat.stand_in import install, uninstall
from ..errors import StateError
from ..session.init import deinit, init

_RUNNERS = (__file__, runpy.run_path.__code__.co_filename)


def declare(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command and its arguments."""
    parser = command("run", run, "run a script with AMP switched on, and with this package in the place of "
                     "mxnet.contrib.amp")
    parser.add_argument("--dtype", metavar="TYPE", help="the type, as in amp.init (default: what is fastest here)")
    parser.add_argument("--no-init", action="store_true",
                        help="leave it to the script to call amp.init of mxnet.contrib.amp")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script ...",
                        help="a Python script and its arguments")
    parser.set_defaults(keeps_warnings=True)


def run(args: argparse.Namespace) -> int:
    """Run the script in this process; return its exit code."""
    command = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not command:
        raise StateError("expected a Python script to run, as in `gluon-amp run train.py`, or a module behind -m")
    if not args.module and not os.path.exists(command[0]):  # a directory or a zip file may hold a program, too
        raise StateError(f"the script {command[0]!r} does not exist: expected a Python file, or -m and a module")
    install()
    before = set(threading.enumerate())
    try:
        if not args.no_init:
            init(args.dtype)
        code = _run(command, args.module)
        for thread in set(threading.enumerate()) - before:  # as Python does at its end: AMP is on for them, too
            if not thread.daemon:
                thread.join()
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
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:  # leave only the script's frames
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0
