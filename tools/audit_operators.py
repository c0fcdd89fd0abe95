"""Command line of the audit."""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Sequence

from audit.page import markdown
from audit.results import engine, not_applicable, read, write
from audit.runner import Options, audit_operator, merge_checks
from audit.samples import reason_of, sampled_operators
from audit.verdicts import OK

from gluon_amp import native
from gluon_amp.dtypes import BFLOAT16, FLOAT16

_SAVE_EVERY = 50
_MALLOC_DEBUG = ("/usr/lib/x86_64-linux-gnu/libc_malloc_debug.so.0", "/usr/lib64/libc_malloc_debug.so.0",
                 "/lib/x86_64-linux-gnu/libc_malloc_debug.so.0")


def main(argv: list[str] | None = None) -> int:
    """Run the audit; returns the process's exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.from_json:
        audit = read(arguments.from_json)
    else:
        names = sampled_operators() if arguments.all else [name for name in arguments.ops.split(",") if name]
        obstacles = {name: found for name in names for found in [_obstacle(name)] if found}
        for name, obstacle in obstacles.items():
            sys.stderr.write(f"{name}: {obstacle}\n")
        if (obstacles and not arguments.all) or not names:
            return 2
        names = [name for name in names if name not in obstacles]
        options = Options(arguments.dtype, arguments.device, arguments.timeout)
        audit = run(names, options, arguments.jobs, None if arguments.update else arguments.json)
        if arguments.malloc_checks:
            _check_memory(audit, names, options, arguments.jobs)
    if arguments.json:
        if arguments.update and Path(arguments.json).exists():
            earlier = read(arguments.json)
            audit = {name: {**earlier[name], **audit[name]} for name in ("engine", "operators")}
        write(arguments.json, audit)
    if arguments.markdown:
        Path(arguments.markdown).write_text(markdown(audit))
    return 0


def malloc_checks() -> dict[str, str]:
    """Environment in which glibc overwrites freed memory and checks every block when it is freed."""
    # Since glibc 2.34 the checks live in a library of their own, which may not be installed.
    library = next((path for path in _MALLOC_DEBUG if Path(path).exists()), None)
    environment = {"MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    preloaded = " ".join(filter(None, (library, os.environ.get("LD_PRELOAD"))))
    return {**environment, "LD_PRELOAD": preloaded} if library else environment


def _obstacle(name: str) -> str:
    """Say why an operator cannot be audited here; nothing where it can."""
    if name not in sampled_operators():
        return reason_of(name) or "no such operator"
    return native.obstacle_to(name)


def run(names: Sequence[str], options: Options, jobs: int = 1, save_to: str | None = None) -> dict[str, Any]:
    """Audit operators."""
    audit: dict[str, Any] = {"engine": engine(options.dtype, options.device), "operators": not_applicable()}
    with ThreadPoolExecutor(jobs) as threads:
        entries = threads.map(lambda op: audit_operator(op, options), names)
        for number, (name, entry) in enumerate(zip(names, entries), 1):
            audit["operators"][name] = entry
            bad = [f"{condition}: {result['verdict']}" for condition, result in entry["conditions"].items()
                   if result["verdict"] != OK]
            sys.stderr.write(f"{name}: {'; '.join(bad) or OK}\n")
            if save_to and number % _SAVE_EVERY == 0:
                write(save_to, audit)
    return audit


def _check_memory(audit: dict[str, Any], names: Sequence[str], options: Options, jobs: int) -> None:
    """Run everything again with glibc's malloc checks, which must be in place before a process starts."""
    sys.stderr.write("again, with malloc checks\n")
    audit["engine"]["malloc checks"] = "glibc.malloc.check=3, MALLOC_PERTURB_"
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "audit.json")
        subprocess.run([sys.executable, __file__, "--ops", ",".join(names), "--dtype", options.dtype,
                        "--device", options.device, "--timeout", str(options.timeout), "--jobs", str(jobs),
                        "--json", path], env={**os.environ, **malloc_checks()}, check=True)
        checked = read(path)["operators"]
    for name in names:
        merge_checks(audit["operators"][name], checked[name])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tools/audit_operators.py", description=(
        "Run MXNet's operators forward and backward in low precision, each in a process of its own, and compare "
        "with FP32."))
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--ops", default="", help="registered names, separated by commas")
    which.add_argument("--all", action="store_true", help="every operator that has samples")
    which.add_argument("--from-json", help="run nothing, use an earlier audit (to generate the page)")
    parser.add_argument("--dtype", choices=(BFLOAT16, FLOAT16), default=BFLOAT16)
    parser.add_argument("--device", default="cpu(0)", help="cpu(0), gpu(0)")
    parser.add_argument("--jobs", type=int, default=1, help="operators that run at a time")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--update", action="store_true", help="keep what the file says about other operators")
    parser.add_argument("--markdown", help="file for the readable page")
    parser.add_argument("--malloc-checks", action="store_true", help="run again with glibc's malloc checks")
    parser.add_argument("--timeout", type=float, default=120.0,
                        help="seconds of processor time that a process may take (120)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
