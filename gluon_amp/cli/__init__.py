"""The command line, installed as ``gluon-amp``: it chooses the command and words its errors."""
from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import warnings
from importlib import metadata
from typing import Any, Callable, Sequence

import mxnet as mx

from ..errors import AmpError
from . import check, files, run

__all__ = ["main", "parser"]

FAILURE, INTERRUPTED, CLOSED_PIPE = 1, 130, 141
_EXAMPLES = """\
examples:
  gluon-amp check
  gluon-amp run train.py
  gluon-amp convert net-symbol.json net-0000.params -o fast
  gluon-amp report net-symbol.json net-0000.params --data data:1,3,224,224

gluon-amp COMMAND --help says more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as the package was imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    name = "gluon-amp"
    try:
        try:
            arguments = parser().parse_args(argv)
            if arguments.command is None:
                parser().print_help()
                return 0
            name += f" {arguments.command}"
            with warnings.catch_warnings():
                if not getattr(arguments, "keeps_warnings", False):
                    warnings.simplefilter("always", UserWarning)
                    warnings.showwarning = lambda message, *_, **__: print(f"{name}: warning: {message}",
                                                                           file=sys.stderr)
                return arguments.run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` has: what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    except (AmpError, ImportError) as error:  # a package that only this command needs
        reason = str(error)
    print(f"{name}: {reason}", file=sys.stderr)
    return FAILURE


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    made = argparse.ArgumentParser(prog="gluon-amp", description="Automatic mixed precision for MXNet Gluon.",
                                   epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--version", action="version", version=f"gluon-amp {metadata.version('gluon_amp')} (MXNet "
                      f"{mx.__version__}, Python {platform.python_version()})")
    commands = made.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> Any:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=function)
        return added

    for module in (run, files, check):
        module.declare(command)
    return made
