"""``gluon-amp advise``: what holds a network in files back on this machine."""
from __future__ import annotations

import argparse

from ..debug.advise import advise
from .models import add_file_arguments
from .report import reported
from .words import filled, write_json

HELP = "say in words what holds a network back on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_file_arguments(parser, "a network, converted or not")


def run(args: argparse.Namespace) -> int:
    """Advise, and print."""
    advice = advise(reported(args, time=True))
    if write_json(advice.to_dict(), args.json):
        print("\n".join(filled(line, 3) for line in str(advice).splitlines()))
    return 0
