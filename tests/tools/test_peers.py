"""tools/peers.py on a small checkout: what it reports, and what it takes for rounding."""
from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import peers
import pytest
from gluoncv_scripts import compared
from peers import DIED, FAILED, NOT_RUN, PASSED, STOCK, TOO_LONG, Finding, Outcome, compare, without_statement

ROOT = Path(__file__).resolve().parents[2]
TESTS = '''
import os
import mxnet as mx
from mxnet.contrib.amp import amp
from mxnet.test_utils import assert_almost_equal
from nose.tools import assert_raises, raises

data, weight = mx.nd.array([[1.003, 2.007]]), mx.nd.array([[1.0, 1.0]])

def test_of_what_amp_leaves():
    assert_raises(ValueError, int, "one")

@raises(ZeroDivisionError)
def test_that_raises():
    1 / 0

def test_that_fails_everywhere():
    raise ValueError

def test_of_a_product():
    found = mx.nd.FullyConnected(data, weight, no_bias=True, num_hidden=1)
    assert_almost_equal(found, mx.nd.array([[3.01]]), rtol=1e-6, atol=1e-6)

def test_of_a_trained_network():
    net = mx.gluon.model_zoo.vision.mobilenet0_25(pretrained=True)
    assert abs(net.features[0].weight.data()).sum() > 0

def test_that_amp_breaks():
    assert not amp._amp_initialized

def test_that_ends_the_process_with_amp():
    if amp._amp_initialized:
        os._exit(9)

def test_behind_it():
    pass
'''


def run(tmp_path, *options):
    folder = tmp_path / "tests" / "python" / "unittest"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(TESTS)
    return subprocess.run([sys.executable, str(ROOT / "tools" / "peers.py"), str(tmp_path), *options],
                          capture_output=True, text=True)


@pytest.mark.bf16
@pytest.mark.slow
def test_a_file_is_run_stock_and_with_amp(tmp_path):
    done = run(tmp_path, "--files", "unittest/test_small.py", "--modes", "install", "bfloat16")
    assert done.returncode == 1, done.stderr
    summary, breaks, died, _, total = done.stdout.splitlines()
    assert summary == "unittest/test_small.py: 8 tests; pass stock 7, install 7, bfloat16 5 (1 by rounding)"
    assert breaks.startswith("  bfloat16: test_that_amp_breaks failed: NO REASON: E ")
    assert died == "  bfloat16: test_that_ends_the_process_with_amp died: NO REASON: the process ended with code 9"
    assert total == "2 tests fail with AMP only, 2 of them without a reason"


def test_files_that_the_checkout_lacks_are_named(tmp_path):
    done = run(tmp_path, "--files", "unittest/test_large.py")
    assert done.returncode == 1
    assert "lacks unittest/test_large.py: expected a copy of apache/mxnet's branch v1.x" in done.stderr


def test_what_fails_stock_is_no_finding():
    outcomes = {STOCK: {"a": Outcome(FAILED), "b": Outcome(PASSED), "c": Outcome(PASSED)},
                "float32": {"a": Outcome(FAILED), "b": Outcome(DIED, "code 9"), "c": Outcome(PASSED)}}
    assert list(compare("file", outcomes)) == [Finding("file", "b", "float32", Outcome(DIED, "code 9"), "")]


def test_a_statement_is_left_out():
    source = "def f():\n    if a:\n        g(b,\n          c)\n    return 1\n"
    assert without_statement(source, "b,") == "def f():\n    if a:\n        pass\n    return 1\n"
    with pytest.raises(SystemExit, match="another version"):
        without_statement(source, "missing")


@pytest.mark.parametrize(("found", "verdict"), [
    ([2.0, 1.1], ""), ([2.0], "expected 2 losses, received 1"), ([2.0, float("nan")], "a loss is not finite"),
    ([2.3, 1.0], "the first loss is 15 % off"), ([2.0, 5.0], "the mean loss is 133 % off")])
def test_losses_that_leave_those_of_fp32(found, verdict):
    assert compared([2.0, 1.0], found) == verdict


def test_what_does_not_run_is_a_finding():
    outcomes = {STOCK: {"a": Outcome(PASSED), "b": Outcome(FAILED)}, "float32": {}}
    assert list(compare("file", outcomes)) == [Finding("file", "a", "float32", Outcome(NOT_RUN), "")]


class Processes:
    """Processes that end with what the caller says; they note what they are asked for."""

    def __init__(self, monkeypatch, *results):
        self.results, self.expressions, self.done = list(results), [], []
        monkeypatch.setattr(peers, "_run_process", self)

    def __call__(self, tests, name, mode, keyword, timeout, limit, outcomes):
        self.expressions.append(keyword)
        self.done.append(list(outcomes))
        return self.results.pop(0)


def settings(keyword="", limit=10.0):
    return argparse.Namespace(keyword=keyword, timeout=1, limit=limit)


def test_what_ends_its_process_stock_is_not_run_again(monkeypatch):
    stock = {"a": Outcome(DIED, "code 9"), "b": Outcome(TOO_LONG, "more than 1 s"), "c": Outcome(FAILED)}
    processes = Processes(monkeypatch, ({}, 1.0))
    assert list(peers.run_file(Path(), "file", "float32", settings(), stock)) == ["a", "b"]
    assert processes.done == [["a", "b"]]


def test_each_expression_has_a_process(monkeypatch):
    monkeypatch.setitem(peers.FILES, "file", ("conv", "dot"))
    processes = Processes(monkeypatch, ({"a": Outcome(DIED)}, 1.0), ({}, 1.0), ({}, 1.0))
    assert peers.run_file(Path(), "file", STOCK, settings()) == {"a": Outcome(DIED)}
    assert processes.expressions == ["conv", "conv", "dot"]
    assert processes.done == [[], ["a"], ["a"]]


def test_the_limit_ends_an_expression_and_not_the_next(monkeypatch):
    monkeypatch.setitem(peers.FILES, "file", ("conv", "dot"))
    processes = Processes(monkeypatch, ({"a": Outcome(TOO_LONG)}, 11.0), ({}, 1.0))
    assert peers.run_file(Path(), "file", STOCK, settings()) == {"a": Outcome(TOO_LONG)}
    assert processes.expressions == ["conv", "dot"]


def test_a_process_that_takes_longer_than_its_limit_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "START", 0)
    events = tmp_path / "events"
    writes = f"import time\nwhile True:\n  open({str(events)!r}, 'a').write('x')\n  time.sleep(0.05)"
    events.touch()
    process = subprocess.Popen([sys.executable, "-c", writes])
    ended, taken = peers._watch(process, events, 0.9, 1.0)
    assert ended == (TOO_LONG, "more than 1 s with those before it")
    assert taken > 1.0
    assert process.returncode


def test_tests_that_are_too_slow_exist_in_files_that_run():
    assert {file for file, _ in peers.TOO_SLOW} <= set(peers.FILES)
    assert all(peers.TOO_SLOW.values())
