"""Choose the command and word its errors."""
from __future__ import annotations

import argparse
import sys
import warnings
from importlib import import_module
from typing import Sequence

from ..errors import AmpError

__all__ = ["COMMANDS", "main"]

# Modules of this package, in the order of the help text.
COMMANDS = ("run", "convert", "compare", "env", "check", "launch")

USAGE_ERROR, FAILURE = 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; the process's own when None.

    Returns
    -------
    int
        The exit code: 0 for success, 1 for a failure that is reported on standard error, 2 for wrong usage.

    Examples
    --------
    >>> main(['env', '--json']) == 0  # doctest: +ELLIPSIS
    {...
    True
    """
    arguments = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            if not getattr(arguments, "keeps_warnings", False):
                warnings.showwarning = lambda message, *_, **__: print(
                    f"gluon-amp {arguments.command}: warning: {message}", file=sys.stderr)
            return arguments.run(arguments)
    except (AmpError, OSError) as error:
        print(f"gluon-amp {arguments.command}: {error}", file=sys.stderr)
        return FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gluon-amp", description="Automatic mixed precision for MXNet Gluon.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f".{name}", __package__)
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
