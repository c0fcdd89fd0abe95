"""``gluon-amp report``: every operator of a network in files, and the precision that it runs in."""
from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import mxnet as mx

from ..convert import drawback_here, load_model
from ..debug.report import Report, report
from ..session.autocast import autocast, deinit, init
from .models import add_file_arguments, named_errors, record_of, required_shapes, runnable
from .words import complain, print_conversion, write_json

HELP = "run a network once and list its operators, the precision of each, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_file_arguments(parser, "a network, converted or not")
    parser.add_argument("--by", choices=["operator", "block", "op"], default="operator",
                        help="a line for each operator, block or kind of operator (default: %(default)s)")
    parser.add_argument("--wide", action="store_true", help="print every column, however narrow the terminal is")
    parser.add_argument("--time", action="store_true", help="measure the time of every operator")


def run(args: argparse.Namespace) -> int:
    """Report, and print."""
    model = load_model(args.symbol, args.params)
    record, made = record_of(model), _reported(args, model)
    slow = record and drawback_here(record.target_dtype)
    if slow:
        complain(f"gluon-amp report: warning: {slow}")
    if write_json({**made.to_dict(), "conversion": asdict(record) if record else None}, args.json):
        if record:
            print_conversion(record)
        made.print(args.by, args.wide)
    return 0


def _reported(args: argparse.Namespace, model: Any) -> Report:
    """Run a network on random numbers, under AMP unless it is converted."""
    shapes = required_shapes(args, model)
    with named_errors(args.symbol):
        block = runnable(model, list(shapes))
        mx.random.seed(0)
        data = tuple(mx.nd.random.uniform(shape=shape) for shape in shapes.values())
        if record_of(model) is not None:
            with autocast(enabled=False):
                return report(block, data, time=args.time)
        init(args.dtype)
        try:
            return report(block, data, time=args.time)
        finally:
            deinit()
