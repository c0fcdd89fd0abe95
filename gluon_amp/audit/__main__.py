"""Command line of the audit."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Iterable

from ..dtypes import BFLOAT16, FLOAT16
from .compare import OK
from .pool import Pool, malloc_checks
from .report import engine, markdown, not_applicable, read, write
from .runner import Options, audit_operator, checked_operator, merge_checks
from .samples import reason_of, sampled_operators


def main(argv: list[str] | None = None) -> int:
    """Run the audit; returns the process's exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.from_json:
        audit = read(arguments.from_json)
    else:
        names = sampled_operators() if arguments.all else [name for name in arguments.ops.split(",") if name]
        unknown = [name for name in names if name not in sampled_operators()]
        for name in unknown:
            sys.stderr.write(f"{name}: {reason_of(name) or 'no such operator'}\n")
        if unknown or not names:
            return 2
        audit = run(names, Options(arguments.dtype, arguments.device, arguments.timeout), arguments.jobs,
                    arguments.malloc_checks, None if arguments.update else arguments.json)
    if arguments.json:
        if arguments.update and Path(arguments.json).exists():
            earlier = read(arguments.json)
            audit = {name: {**earlier[name], **audit[name]} for name in ("engine", "operators")}
        write(arguments.json, audit)
    if arguments.markdown:
        Path(arguments.markdown).write_text(markdown(audit))
    return 0


def run(names: Iterable[str], options: Options, jobs: int = 1, checks: bool = False,
        save_to: str | None = None) -> dict:
    """Audit operators.

    Parameters
    ----------
    names : iterable of str
        Registered names of operators that have samples.
    options : Options
        Type, device and patience.
    jobs : int
        Worker processes.
    checks : bool
        Run everything again with glibc's malloc checks.
    save_to : str, optional
        JSON file to write results to as they come.

    Returns
    -------
    dict
        The audit, see :mod:`gluon_amp.audit.report`.
    """
    names = list(names)
    audit: dict[str, dict] = {"engine": engine(options.dtype, options.device), "operators": not_applicable()}
    with Pool(jobs) as pool:
        for number, entry in enumerate(pool.map(lambda op: audit_operator(pool, op, options), names)):
            audit["operators"][names[number]] = entry
            _say(names[number], entry)
            if save_to and number % 50 == 49:
                write(save_to, audit)
    if checks:
        audit["engine"]["malloc checks"] = "glibc.malloc.check=3, MALLOC_PERTURB_"
        sys.stderr.write("again, with malloc checks\n")
        with Pool(jobs, malloc_checks()) as pool:
            for number, crashed in enumerate(pool.map(lambda op: checked_operator(pool, op, options), names)):
                merge_checks(audit["operators"][names[number]], crashed)
    return audit


def _say(name: str, entry: dict) -> None:
    bad = [f"{condition}: {result['verdict']}" for condition, result in entry["conditions"].items()
           if result["verdict"] != OK]
    sys.stderr.write(f"{name}: {'; '.join(bad) or OK}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gluon_amp.audit", description=(
        "Run MXNet's operators forward and backward in low precision, each in a process of its own, and compare "
        "with FP32."))
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--ops", default="", help="registered names, separated by commas")
    which.add_argument("--all", action="store_true", help="every operator that has samples")
    which.add_argument("--from-json", help="run nothing, use an earlier audit (to generate the page)")
    parser.add_argument("--dtype", choices=(BFLOAT16, FLOAT16), default=BFLOAT16)
    parser.add_argument("--device", default="cpu(0)", help="cpu(0), gpu(0)")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--update", action="store_true", help="keep what the file says about other operators")
    parser.add_argument("--markdown", help="file for the readable page")
    parser.add_argument("--malloc-checks", action="store_true", help="run again with glibc's malloc checks")
    parser.add_argument("--timeout", type=float, default=120.0,
                        help="seconds of processor time, and of idle waiting, per operator (120)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
