"""Run MXNet's own unit tests stock and with gluon_amp standing in for its AMP; list what fails with AMP only.

    python tools/peers.py CHECKOUT [--files test_loss.py ...] [--modes float32 bfloat16] [--json FILE]
    python3.13 tools/peers.py CHECKOUT --modes --against FILE

CHECKOUT is a copy of apache/mxnet's branch v1.x; its folder ``tests/python`` is enough. Every file runs in a process of
its own, test_operator.py in several: stock, then after ``gluon_amp.install()`` and ``gluon_amp.init(mode)`` for each
mode. A process that dies, or whose test takes too long, goes on behind that test; one that takes longer than
``--limit`` ends, and what it has not run is listed. In float32 nothing may differ. In low precision, arrays that leave
a test's tolerance by no more than rounding count as equal, and the summary says how many tests needed that. The mode
``install`` leaves AMP off. With ``--native`` operators run in C++ at every size, rather than from the size on at which
they gain: most tests are smaller. ``--against`` takes the FILE of a run on another Python, and also lists what passed
stock there and does not here, as with NumPy 2, where "stock" means that this package is imported. The exit code is 1 if
a test fails with AMP only and is not in ``EXPLAINED`` or, in low precision, in ``ROUNDED``.
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

TOOLS = Path(__file__).resolve().parent
PASSED, FAILED, SKIPPED, DIED, TOO_LONG, NOT_RUN = "passed", "failed", "skipped", "died", "took too long", "did not run"
LOW = ("bfloat16", "float16")
STEP = 0.2  # seconds between looks at a process
START = 300  # seconds for importing what the tests need, on a busy machine
STOCK, MODES = "stock", ("install", "float32", "bfloat16", "float16")

# What runs, and what may differ, with reasons

# Files of tests/python, and pytest's expressions for the tests of them that AMP can affect: a process for each.
FILES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((
        "mkl/test_contrib_amp.py", "mkl/test_subgraph.py", "mkl/test_mkldnn.py", "mkl/test_bf16_operator.py",
        "quantization/test_quantization.py", *(f"unittest/test_{name}.py" for name in (
            "autograd", "higher_order_grad", "sparse_operator", "optimizer", "gluon_estimator", "gluon_contrib",
            "numpy_op", "loss", "gluon_trainer", "symbol", "subgraph_op", "module", "numpy_gluon", "gluon_rnn",
            "contrib_control_flow"))), ("",)),
    "unittest/test_gluon.py": ("not pooling2d and not test_reshape_conv and not test_slice_conv",),  # minutes each
    "unittest/test_operator.py": (
        "amp or fully or convolution or pool or norm or embedding or activation or lu or sigmoid or softsign",
        "dot or gemm or softmax or softmin or attention or sequence or regression or vector_machine or ctc or custom",
        "concat or stack or slice or split or reshape or transpose or swapaxes or axis or squeeze or dims or crop "
        "or pad or flip or tile or repeat or clip or cast or where or take or pick or one_hot or upsampling or resize",
        "reduce or broadcast or sum or add_n or moments or mean or maximum or abs or scalar or binary_op or unary "
        "or pow or sqrt or monitor or blockgrad or div or mathematical or finite",
        "dropout or float64",
    ),
}

# Tests of these files that are left out, and why.
_LONG = "more than 45 seconds in stock MXNet alone, on a busy machine"
TOO_SLOW = {("unittest/test_operator.py", name): _LONG for name in (
    "test_batchnorm", "test_big_transpose", "test_broadcast_binary_op", "test_layer_norm",
    "test_psroipooling", "test_rnnrelu_bidirectional")}

# Statements of tests that expect what this package does otherwise by intent: file, a text in the statement, and why.
LEFT_OUT = {
    ("mkl/test_contrib_amp.py", 'fp32_ops=["elemwise_add"]'):
        "fp32_ops adds to the tables, so that an operator may be named that MXNet has in another list",
    ("mkl/test_contrib_amp.py", 'assert mod._arg_params["stage2_unit1_conv2_weight"].dtype == np.float32'):
        "convert_model stores parameters in low precision unless it is told not to",
    ("mkl/test_contrib_amp.py", 'assert params["stage2_unit1_conv2_weight"].dtype == np.float32'):
        "as before: convert_hybrid_block, too",
    ("mkl/test_contrib_amp.py", 'assert arg_params["fullyconnected_weight"].dtype == bfloat16'):
        "an operator that the given target_dtype_ops leave out runs in FP32, whatever its data comes in",
    # The next two are variables that the test types float32 and expects in bfloat16.
    ("mkl/test_contrib_amp.py", "simple_bind(ctx=mx.cpu(), data2=(1, 2), data=(1, 2))"):
        "amp_multicast computes in the widest type of its inputs: casting the FP32 one would change the results",
    ("mkl/test_contrib_amp.py", "final_res = amp.convert_symbol(out8"):
        "as before: amp_multicast reads the variable in FP32",
}

# Tests that fail with AMP only, by file and name, and why they may.
EXPLAINED: dict[tuple[str, str], str] = {
    ("unittest/test_numpy_op.py", "test_np_diff"):
        "MXNet does not write the gradient of an empty result: stock leaves what the array held, zeros in this test",
}

# The same, in low precision only.
_DEEP = ("four recurrent layers with weights of deviation 1 are ill-conditioned: in stock FP32, weights moved by a "
         "rounding to bfloat16 change gradients by up to 65 % (GRU)")
ROUNDED = {("unittest/test_gluon_rnn.py", name): _DEEP for name in ("test_fused_lstm_layer", "test_fused_gru_layer")}
ROUNDED["unittest/test_operator.py", "test_fully_connected"] = (
    "its reference are differences of outputs at a distance of 1e-4, which outputs in bfloat16 do not resolve")
ROUNDED["unittest/test_operator.py", "test_op_all_names_monitor"] = (
    "casts read the variables before the operator does: a monitor is told the same names in another order")
ROUNDED["unittest/test_gluon.py", "test_inline"] = (
    "it counts recorded operators: with its casts the network has more than inline_limit, and is recorded as one")
ROUNDED["unittest/test_gluon.py", "test_hybrid_static_memory"] = (
    "batch norms over two samples of one pixel are ill-conditioned: in stock FP32, weights moved by 2^-9 change the "
    "output by half and gradients by all of their length")
ROUNDED["unittest/test_symbol.py", "test_eliminate_common_expr"] = (
    "it counts the nodes of graphs: where float16 is imitated, each tensor is rounded by nodes of its own")
ROUNDED["unittest/test_module.py", "test_module_dtype"] = (
    "the outputs of two devices are joined outside of graphs, where imitated float16 gives FP32 arrays")

# Tests that pass stock with NumPy 1 and not with NumPy 2, and why they may.
NUMPY_2 = {
    ("unittest/test_metric.py", "test_acc"):
        "the test divides a float32 number by a Python one, which is float64 with NumPy 1 and float32 with NumPy 2",
    ("unittest/test_numpy_ndarray.py", "test_np_ndarray_indexing"):
        "the test sets an element of NumPy's to an array of one value, which NumPy 2.5 refuses",
    ("unittest/test_numpy_interoperability.py", "test_np_array_function_protocol"):
        "the test puts 1621 into an int8 array, which NumPy 2 refuses",
}


class Outcome(NamedTuple):
    """How a test went, why it failed, and how long it took."""

    result: str
    message: str = ""
    seconds: float = 0.0


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
    os.environ["PEERS_NATIVE"] = str(arguments.native or "")
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
            if arguments.against:
                new += _against(name, json.loads(arguments.against.read_text()).get(name, {}), outcomes[STOCK])
            print(_summary(name, outcomes), flush=True)
            for finding in new:
                print(_line(finding), flush=True)
            findings += new
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))
    unexplained = [finding for finding in findings if not finding.reason]
    print(f"\n{len(findings)} tests fail with AMP only{', or on this Python only' * bool(arguments.against)}, "
          f"{len(unexplained)} of them without a reason")
    return bool(unexplained)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a copy of apache/mxnet's branch v1.x")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="files of tests/python, as mkl/test_contrib_amp.py "
                        f"(default: {' '.join(FILES)})")
    parser.add_argument("--modes", nargs="*", default=["install", "float32", "bfloat16"], choices=MODES,
                        help="types given to init, or install (default: install float32 bfloat16)")
    parser.add_argument("--native", action="store_true", help="run operators in C++ whatever their size")
    parser.add_argument("-k", dest="keyword", default="", help="pytest's expression for the tests to run, "
                        "among them those that are too slow otherwise")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one test (default: 120)")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for one process (default: 1200)")
    parser.add_argument("--against", type=Path, metavar="FILE", help="what --json wrote on another Python")
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
    for keyword in (arguments.keyword,) if arguments.keyword else FILES.get(name, ("",)):
        left = arguments.limit
        while left > 0:
            ended, taken = _run_process(tests, name, mode, keyword, min(arguments.timeout, left), left, outcomes)
            left -= taken
            outcomes.update(ended)
            if not ended:
                break
    return outcomes


def _run_process(tests: Path, name: str, mode: str, keyword: str, timeout: float, limit: float,
                 outcomes: dict[str, Outcome]) -> tuple[dict[str, Outcome], float]:
    """Run the tests without an outcome; return the one that ended the process, if one did, and the seconds taken."""
    with tempfile.TemporaryDirectory() as folder:
        events, done, output, settings = (Path(folder) / part for part in ("events", "done", "output", "pytest.ini"))
        events.touch()
        settings.write_text("[pytest]\n")
        is_asked_for = keyword not in FILES.get(name, ("",))
        slow = [test for file, test in TOO_SLOW if file == name and not is_asked_for]
        done.write_text("\n".join([*outcomes, *slow]))
        environment = {**os.environ, "PEERS_MODE": mode, "PEERS_EVENTS": str(events), "PEERS_DONE": str(done),
                       "GLUON_AMP_VERIFY": "1",
                       "PYTHONPATH": os.pathsep.join([str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "peers_plugin", "-p", "no:cacheprovider", "--tb=short",
                   "-c", str(settings), "--rootdir", str(tests), "-k", keyword, Path(name).name]
        with output.open("w") as sink:
            process = subprocess.Popen(command, cwd=(tests / name).parent, env=environment, stdout=sink, stderr=sink)
            ended, taken = _watch(process, events, timeout, limit)
        running = _read(events, outcomes)
        if running is not None:
            return {running: Outcome(*(ended or (DIED, f"the process ended with code {process.returncode}")))}, taken
        if process.returncode not in (0, 1, 5) and not events.read_text():
            why = f", killed after {ended[1]}" if ended else ""
            raise SystemExit(f"peers: {name} does not start ({mode}{why}):\n{output.read_text()[-3000:]}")
        return {}, taken


def _watch(process: subprocess.Popen, events: Path, timeout: float,
           limit: float) -> tuple[tuple[str, str] | None, float]:
    """Wait for a process; kill it when no test ends for some time, or after the limit; say so, and how long it took."""
    size, quiet, taken = 0, 0.0, 0.0
    while process.poll() is None:
        time.sleep(STEP)
        quiet += STEP  # rather than a clock's time: both processes may have been stopped meanwhile
        taken += STEP
        if events.stat().st_size != size:
            size, quiet = events.stat().st_size, 0.0
        too_quiet = quiet > timeout + START * (size == 0)
        if too_quiet or taken > limit + START:
            process.kill()
            process.wait()
            why = f"more than {timeout:g} s" if too_quiet else f"more than {limit:g} s with those before it"
            return (TOO_LONG, why), taken
    return None, taken


def _read(events: Path, outcomes: dict[str, Outcome]) -> str | None:
    """Note the outcomes that a process has written; return the test that was running when it ended."""
    running = None
    for line in events.read_text().splitlines():
        test, result, message, seconds = json.loads(line)
        if result == "started":
            running = test
        elif result == "finished":
            running = None
        elif outcomes.get(test, Outcome(PASSED)).result == PASSED:
            outcomes[test] = Outcome(result, message, seconds)
    return running


def compare(name: str, outcomes: dict[str, dict[str, Outcome]]) -> Iterator[Finding]:
    """Yield what passes stock and fails, or does not run, in another mode."""
    for mode, found in outcomes.items():
        yield from _lost(name, mode, outcomes[STOCK], found, {**(ROUNDED if mode in LOW else {}), **EXPLAINED})


def _against(name: str, others: Mapping[str, dict[str, list]], outcomes: Mapping[str, Outcome]) -> Iterator[Finding]:
    """Yield what passed stock on another Python, and does not here."""
    theirs = {test: Outcome(*outcome) for test, outcome in others.get(STOCK, {}).items()}
    return _lost(name, "stock here", theirs, outcomes, NUMPY_2)


def _lost(name: str, mode: str, before: Mapping[str, Outcome], now: Mapping[str, Outcome],
          reasons: Mapping[tuple[str, str], str]) -> Iterator[Finding]:
    """Yield what passed before and now fails, or does not run."""
    for test, (result, *_) in before.items():
        outcome = now.get(test, Outcome(NOT_RUN))
        if result == PASSED and outcome.result not in (PASSED, SKIPPED):
            function = test.rpartition("::")[2].partition("[")[0]
            yield Finding(name, test, mode, outcome, reasons.get((name, function), ""))


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
