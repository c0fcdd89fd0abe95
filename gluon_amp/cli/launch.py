"""``gluon-amp launch``: run a training script in several processes on this machine."""
from __future__ import annotations

import argparse

from ..parallel.launcher import ENGINES, Job, launch
from .models import count
from .run import add_script_arguments, script_of

HELP = "run a script in several processes that train together on this machine, and end all of them when one fails"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("-n", "--workers", type=count, required=True, metavar="N", help="how many processes")
    parser.add_argument("--engine", choices=list(ENGINES), default="kvstore",
                        help="what the script trains with: MXNet's KVStore or Horovod (default: %(default)s)")
    parser.add_argument("--servers", type=count, default=1, metavar="N",
                        help="how many parameter servers the KVStore has (default: %(default)s)")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N",
                        help="how many times to start all over when a process fails (default: %(default)s)")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS",
                        help="how long processes may take to end before they are killed (default: %(default)s)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end everything after this time")
    add_script_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Launch the job; return its exit code."""
    command = script_of(args, "launch -n 2 train.py")
    job = Job(["-m", *command] if args.module else command, args.workers, args.engine, args.servers, args.grace,
              args.timeout, args.max_restarts)
    try:
        return launch(job)
    except ValueError as error:
        raise SystemExit(f"gluon-amp launch: {error}") from error

