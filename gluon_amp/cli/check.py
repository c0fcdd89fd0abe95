"""``gluon-amp check``: a self-test of this machine, to be attached to a report."""
from __future__ import annotations

import argparse
import re
from collections import Counter
from typing import Any, Sequence

import mxnet as mx
from rich.console import Console

from .._mxnet import gpus
from ..errors import AmpError, expected
from ..files import replacing
from ..selftest import FAILED, INFO, OK, SECTIONS, check
from .env import environment
from .words import STANDARD_OUTPUT, add_json_argument, filled, write_json

HELP = "test kernels, overflow detection, training and speed on this machine; a few minutes"

_FORMAT = "gluon_amp check 1"
_STYLES = {OK: "green", INFO: "", **dict.fromkeys(FAILED, "bold red")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--device", metavar="DEVICE", default=None,
                        help="cpu, or a GPU, as in gpu(0) (default: the first GPU, the CPU without one)")
    add_json_argument(parser)
    parser.add_argument("--only", metavar="PART", choices=list(SECTIONS), action="append", default=[],
                        help=f"run this part only; repeatable. One of {', '.join(SECTIONS)}")


def run(args: argparse.Namespace) -> int:
    """Run the self-test; return 1 when something is wrong."""
    to_file = args.json not in (None, STANDARD_OUTPUT)
    with replacing(*([args.json] if to_file else [])) as files:  # one that cannot be written is told of at once
        report = _checked(_device(args.device), args.only, Console(highlight=False, quiet=args.json == STANDARD_OUTPUT))
        write_json({"format": _FORMAT, **report, "environment": environment()}, *(files or [args.json]))
    return 1 if report["failed"] else 0


def _checked(device: mx.Context, parts: Sequence[str], console: Console) -> dict[str, Any]:
    """Test a device, printing what is found; return that."""
    lines = []
    for line in check(device, parts):
        lines.append(line)
        console.print(filled(f"{line.verdict:8} {line.section}: {line.name}  {line.detail}", 9), markup=False,
                      soft_wrap=True, style=_STYLES.get(line.verdict, "dim"))
    counts = Counter(line.verdict for line in lines)
    failed = sum(counts[verdict] for verdict in FAILED)
    verdict = f"{failed} of {len(lines)} lines are wrong" if failed else "everything that was tested is right"
    console.print(f"{device}: {verdict} ({', '.join(f'{count} {name}' for name, count in sorted(counts.items()))})")
    return {"device": str(device), "verdict": verdict, "failed": failed,
            "findings": [line.to_dict() for line in lines]}


def _device(text: str | None) -> mx.Context:
    count = gpus.count()
    if text is None:
        return mx.gpu(0) if count else mx.cpu()
    named = re.fullmatch(r"(cpu|gpu)(?:\((\d+)\)|:(\d+))?", text)
    if named is None:
        raise AmpError(expected("cpu, gpu or a number in brackets, as in gpu(0)", "--device", text))
    device = mx.Context(named[1], int(named[2] or named[3] or 0))
    if device.device_type == "gpu" and device.device_id >= count:
        raise AmpError(f"--device: MXNet finds {count} GPUs here, and no {device}. {gpus.problem() or ''}".rstrip())
    return device
