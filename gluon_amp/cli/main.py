"""Choose the command and word its errors."""
from __future__ import annotations

import argparse
import platform
import sys
import warnings
from importlib import import_module, metadata
from typing import Sequence

import mxnet as mx

from ..errors import AmpError
from .words import complain

# Modules of this package, in the order of the help text.
COMMANDS = ("run", "env", "convert", "export-onnx", "report", "check")
# Commands of earlier versions, and what to use in their place.
_GONE = {
    "advise": "gluon-amp report lists every operator and why it runs as it does",
    "compare": "amp.compare(net, data) in Python gives the errors, gluon-amp report --time the speed",
    "info": "gluon-amp report says how a file was converted",
    "launch": "horovodrun, mpirun or MXNet's DMLC_* variables start several processes, see docs/distributed.md",
}

FAILURE, WRONG_USAGE, INTERRUPTED = 1, 2, 130

_EXAMPLES = """\
examples:
  what this machine runs:          gluon-amp env
  make a network faster, to serve: gluon-amp convert net-symbol.json \\
                                     net-0000.params -o fast
  serve it on other GPUs:          gluon-amp export-onnx net-symbol.json \\
                                     net-0000.params --data data:1,3,224,224 \\
                                     -o net.onnx
  its operators and their types:   gluon-amp report net-symbol.json \\
                                     net-0000.params --data data:1,3,224,224
  train in mixed precision:        gluon-amp run train.py

gluon-amp COMMAND --help says more. A script of your own switches to mixed
precision by amp.init(), and needs no `gluon-amp run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    name = next(iter(sys.argv[1:] if argv is None else argv), "")
    if name in _GONE:
        complain(f"gluon-amp {name} is gone: {_GONE[name]}")
        return WRONG_USAGE
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        with warnings.catch_warnings():
            if not getattr(arguments, "keeps_warnings", False):
                warnings.simplefilter("always", UserWarning)
                warnings.showwarning = lambda message, *_, **__: complain(
                    f"gluon-amp {arguments.command}: warning: {message}")
            return arguments.run(arguments)
    except KeyboardInterrupt:
        complain(f"gluon-amp {arguments.command}: interrupted")
        return INTERRUPTED
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    except (AmpError, ImportError) as error:  # a package that only this command needs
        reason = str(error)
    complain(f"gluon-amp {arguments.command}: {reason}")
    return FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gluon-amp", description="Automatic mixed precision for MXNet Gluon.",
                                     epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version",
                        version=f"gluon-amp {metadata.version('gluon_amp')} (MXNet {mx.__version__}, Python "
                                f"{platform.python_version()})")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f".{name.replace('-', '_')}", __package__)
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
