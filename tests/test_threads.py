"""Threads of elementwise operators on machines of few processors: who gets them, and what child processes see."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gluon_amp import _threads

NOT_MEASURED = "OMP overhead: 2147483647"  # what MXNet says when all elementwise operators will use one thread


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(_threads, "_settings", [])


@pytest.mark.parametrize(("count", "threads"), [(2, "2"), (3, "2"), (2, "4"), (2, "2,1")])
def test_mxnet_measures_with_all_of_few_processors(count, threads):
    environ = {"OMP_NUM_THREADS": threads}
    assert _threads.request(environ, count)
    assert environ[_threads.VARIABLE] == str(count)
    _threads.settle()
    assert environ == {"OMP_NUM_THREADS": threads}


@pytest.mark.parametrize(("environ", "count"), [
    ({"OMP_NUM_THREADS": "2"}, 1), ({"OMP_NUM_THREADS": "2"}, 4), ({"OMP_NUM_THREADS": "1"}, 2), ({}, 2),
    ({"OMP_NUM_THREADS": "many"}, 2),
    ({"OMP_NUM_THREADS": "2", "MXNET_USE_NUM_CORES_OPERATOR_TUNING": "1"}, 2),
    ({"OMP_NUM_THREADS": "2", "MXNET_USE_OPERATOR_TUNING": "0"}, 2),
])
def test_otherwise_the_environment_stays_as_it_is(environ, count):
    before = dict(environ)
    assert not _threads.request(environ, count)
    _threads.settle()
    assert environ == before


PROGRAM = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import gluon_amp
print(os.environ.get("MXNET_USE_NUM_CORES_OPERATOR_TUNING"))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or _threads.processors() < 2, reason="needs two processors")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_mxnet_obeys_and_children_do_not_inherit_it(threads):
    environ = {name: value for name, value in os.environ.items() if name not in (_threads.VARIABLE, _threads._SWITCH)}
    child = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120,
                           env={**environ, "OMP_NUM_THREADS": threads, "MXNET_VERBOSE_TUNING_INFO": "1"})
    assert child.stdout.strip() == "None"
    assert (NOT_MEASURED in child.stderr) is (threads == "1")
