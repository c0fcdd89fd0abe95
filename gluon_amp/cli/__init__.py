"""The command line, installed as ``gluon-amp``: one module per command.

A command is a module with ``HELP``, ``add_arguments(parser)`` and ``run(args)``, which returns the exit code.
"""
from .main import main

__all__ = ["main"]
