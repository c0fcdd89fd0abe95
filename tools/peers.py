"""Run MXNet's own unit tests stock and with gluon_amp standing in for its AMP; list what fails with AMP only.

    python tools/peers.py CHECKOUT [--files test_loss.py ...] [--modes float32 bfloat16] [--json FILE]

CHECKOUT is a copy of apache/mxnet's branch v1.x; its folder ``tests/python`` is enough. Every file runs in a process of
its own: stock, then after ``gluon_amp.install()`` and ``gluon_amp.init(mode)`` for each mode. A process that dies, or
whose test takes too long, goes on behind that test. In float32 nothing may differ. In low precision, arrays that leave
a test's tolerance by no more than rounding count as equal, and the summary says how many tests needed that. The mode
``install`` leaves AMP off. The exit code is 1 if a test fails with AMP only and is not in ``EXPLAINED`` or, in low
precision, in ``ROUNDED``.
"""
from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import MappingProxyType
from typing import Iterator, Mapping, NamedTuple

from peers_expectations import EXPLAINED, FILES, LEFT_OUT, ROUNDED

TOOLS = Path(__file__).resolve().parent
PASSED, FAILED, SKIPPED, DIED, TOO_LONG = "passed", "failed", "skipped", "died", "took too long"
LOW = ("bfloat16", "float16")
STEP = 0.2  # seconds between looks at a process
START = 300  # seconds for importing what the tests need, on a busy machine
STOCK, MODES = "stock", ("install", "float32", "bfloat16", "float16")


class Outcome(NamedTuple):
    """How a test went, and why it failed."""

    result: str
    message: str = ""


class Finding(NamedTuple):
    """A test that passes stock and not with AMP."""

    file: str
    test: str
    mode: str
    outcome: Outcome
    reason: str  # empty if there is none


def main() -> int:
    """Run the files and print what differs."""
    arguments = _arguments()
    names = arguments.files or list(FILES)
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        tests = Path(scratch) / "tests" / "python"
        _copy(arguments.checkout / "tests" / "python", tests, names)
        findings, everything = [], {}
        for name in names:
            outcomes = {STOCK: run_file(tests, name, STOCK, arguments)}
            for mode in arguments.modes:
                outcomes[mode] = run_file(tests, name, mode, arguments, outcomes[STOCK])
            everything[name] = outcomes
            new = list(compare(name, outcomes))
            print(_summary(name, outcomes), flush=True)
            for finding in new:
                print(_line(finding), flush=True)
            findings += new
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))
    unexplained = [finding for finding in findings if not finding.reason]
    print(f"\n{len(findings)} tests fail with AMP only, {len(unexplained)} of them without a reason")
    return bool(unexplained)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a copy of apache/mxnet's branch v1.x")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="files of tests/python, as mkl/test_contrib_amp.py "
                        f"(default: {' '.join(FILES)})")
    parser.add_argument("--modes", nargs="+", default=["install", "float32", "bfloat16"], choices=MODES,
                        help="types given to init, or install (default: install float32 bfloat16)")
    parser.add_argument("-k", dest="keyword", default="", help="pytest's expression for the tests to run")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one test (default: 120)")
    parser.add_argument("--json", type=Path, help="write the outcome of every test here")
    return parser.parse_args()


def _copy(source: Path, target: Path, names: list[str]) -> None:
    """Copy the tests to where they may write, without the statements of ``LEFT_OUT``."""
    missing = [name for name in names if not (source / name).is_file()]
    if missing:
        raise SystemExit(f"peers: {source} lacks {', '.join(missing)}: expected a copy of apache/mxnet's branch v1.x")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.pyc", "__pycache__"))
    for (name, text), _ in LEFT_OUT.items():
        if name in names:
            path = target / name
            path.write_text(without_statement(path.read_text(), text))


def without_statement(source: str, text: str) -> str:
    """Replace the innermost statement that holds a text by ``pass``.

    Examples
    --------
    >>> without_statement("def f():\\n    g(a)\\n    g(b)\\n", "g(a)")
    'def f():\\n    pass\\n    g(b)\\n'
    """
    found = [node for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.stmt) and text in (ast.get_source_segment(source, node) or "")]
    if not found:
        raise SystemExit(f"peers: no statement holds {text!r}: the checkout is another version of MXNet")
    node = max(found, key=lambda one: (one.lineno, -(one.end_lineno or 0)))
    lines = source.splitlines(keepends=True)
    lines[node.lineno - 1:node.end_lineno] = [" " * node.col_offset + "pass\n"]
    return "".join(lines)


def run_file(tests: Path, name: str, mode: str, arguments: argparse.Namespace,
             stock: Mapping[str, Outcome] = MappingProxyType({})) -> dict[str, Outcome]:
    """Run a file's tests, in another process behind each one that ends its process; return their outcomes.

    What ends its process stock is not run again.
    """
    outcomes = {test: outcome for test, outcome in stock.items() if outcome.result in (DIED, TOO_LONG)}
    keyword = arguments.keyword or FILES.get(name, "")
    while True:
        running = _run_process(tests, name, mode, keyword, arguments.timeout, outcomes)
        if running is None:
            return outcomes
        outcomes.update(running)


def _run_process(tests: Path, name: str, mode: str, keyword: str, timeout: float,
                 outcomes: dict[str, Outcome]) -> dict[str, Outcome] | None:
    """Run the tests without an outcome; return the one that ended the process, if one did."""
    with tempfile.TemporaryDirectory() as folder:
        events, done, output, settings = (Path(folder) / part for part in ("events", "done", "output", "pytest.ini"))
        events.touch()
        settings.write_text("[pytest]\n")
        done.write_text("\n".join(outcomes))
        environment = {**os.environ, "PEERS_MODE": mode, "PEERS_EVENTS": str(events), "PEERS_DONE": str(done),
                       "PYTHONPATH": os.pathsep.join([str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "peers_plugin", "-p", "no:cacheprovider", "--tb=short",
                   "-c", str(settings), "--rootdir", str(tests), "-k", keyword, Path(name).name]
        with output.open("w") as sink:
            process = subprocess.Popen(command, cwd=(tests / name).parent, env=environment, stdout=sink, stderr=sink)
            ended = _watch(process, events, timeout)
        running = _read(events, outcomes)
        if running is not None:
            return {running: Outcome(*(ended or (DIED, f"the process ended with code {process.returncode}")))}
        if process.returncode not in (0, 1, 5) and not events.read_text():
            why = f", killed after {ended[1]}" if ended else ""
            raise SystemExit(f"peers: {name} does not start ({mode}{why}):\n{output.read_text()[-3000:]}")
        return None


def _watch(process: subprocess.Popen, events: Path, timeout: float) -> tuple[str, str] | None:
    """Wait for a process; kill it when no test ends for some time, and say so."""
    size, quiet = 0, 0.0
    while process.poll() is None:
        time.sleep(STEP)
        quiet += STEP  # rather than a clock's time: both processes may have been stopped meanwhile
        if events.stat().st_size != size:
            size, quiet = events.stat().st_size, 0.0
        elif quiet > timeout + START * (size == 0):
            process.kill()
            process.wait()
            return TOO_LONG, f"more than {timeout:g} s"
    return None


def _read(events: Path, outcomes: dict[str, Outcome]) -> str | None:
    """Note the outcomes that a process has written; return the test that was running when it ended."""
    running = None
    for line in events.read_text().splitlines():
        test, result, message = json.loads(line)
        if result == "started":
            running = test
        elif result == "finished":
            running = None
        elif outcomes.get(test, Outcome(PASSED)).result == PASSED:
            outcomes[test] = Outcome(result, message)
    return running


def compare(name: str, outcomes: dict[str, dict[str, Outcome]]) -> Iterator[Finding]:
    """Yield what passes stock and fails in another mode."""
    for mode, found in outcomes.items():
        for test, outcome in found.items():
            stock = outcomes[STOCK].get(test)
            if mode != STOCK and stock and stock.result == PASSED and outcome.result in (FAILED, DIED, TOO_LONG):
                function = test.rpartition("::")[2].partition("[")[0]
                rounded = ROUNDED if mode in LOW else {}
                yield Finding(name, test, mode, outcome, {**rounded, **EXPLAINED}.get((name, function), ""))


def _summary(name: str, outcomes: dict[str, dict[str, Outcome]]) -> str:
    counts = []
    for mode, found in outcomes.items():
        passed = [outcome for outcome in found.values() if outcome.result == PASSED]
        rounded = sum(bool(outcome.message) for outcome in passed)
        counts.append(f"{mode} {len(passed)}" + (f" ({rounded} by rounding)" if rounded else ""))
    return f"{name}: {len(outcomes[STOCK])} tests; pass {', '.join(counts)}"


def _line(finding: Finding) -> str:
    last = finding.outcome.message.strip().splitlines()[-1:] or [""]
    return f"  {finding.mode}: {finding.test.rpartition('::')[2]} {finding.outcome.result}: " \
           f"{finding.reason or 'NO REASON: ' + last[0][:160]}"


if __name__ == "__main__":
    sys.exit(main())
