"""How many threads MXNet starts, and how many CPUs a container leaves to them."""
import logging
import os
import subprocess
import sys
import time

import pytest

import gluon_amp as amp
from gluon_amp.machine import host


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Make a container of eight CPUs with a quota; return where it begins."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    def make(running=1, **files):
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/loadavg").write_text(f"70.00 70.00 70.00 {running}/900 4711\n")
        for name, text in files.items():
            path = tmp_path / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path
    return make


@pytest.mark.parametrize(("files", "cpus"), [
    ({}, 8), ({"cpu_max": "max 100000\n"}, 8), ({"cpu_max": "150000 100000\n"}, 2),
    ({"cpu_max": "50000 100000\n"}, 1), ({"cpu_max": "6400000 100000\n"}, 8)])
def test_affinity_and_quota(files, cpus, container):
    assert host.allowed_cpus(container(**files)) == cpus


def test_quota_of_older_systems(container):
    root = container()
    (root / "sys/fs/cgroup/cpu").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("300000\n")
    (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
    assert host.allowed_cpus(root) == 3
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert host.allowed_cpus(root) == 8


@pytest.mark.parametrize(("given", "threads"), [({}, 32), ({"OMP_NUM_THREADS": "4"}, 4),
                                                ({"OMP_NUM_THREADS": "6,2"}, 6), ({"OMP_NUM_THREADS": "many"}, 32)])
def test_threads(given, threads, container):
    container()
    assert host.threads(given) == threads


def test_what_is_said(container):
    root = container(cpu_max="200000 100000")
    assert host.threads_advice({}, root) == (
        True, "MXNet runs 32 threads, and this process may use 2 CPUs: they wait for one another. "
        "Set OMP_NUM_THREADS=2 before Python starts")
    assert host.threads_advice({"OMP_NUM_THREADS": "2"}, root) == (False, "")


def test_fewer_threads_than_cpus_are_said_where_the_user_has_not_chosen(container, monkeypatch):
    root = container(cpu_max="max 100000")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert host.threads_advice({}, root) == (
        False, "MXNet runs 4 threads, and this process may use 8 CPUs. Where each of them is a core of its own, "
        "OMP_NUM_THREADS=8 before Python starts makes FP32 and AMP faster")
    assert host.threads_advice({"OMP_NUM_THREADS": "1"}, root) == (False, "")
    assert host.threads_advice({}, container(cpu_max="400000 100000")) == (False, "")


@pytest.mark.parametrize(("given", "running", "set_to"), [
    ({}, 64, {"OMP_NUM_THREADS": "2"}),
    ({}, 65, {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "20000"}),
    ({"OMP_NUM_THREADS": "4"}, 65, {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "20000"}),
    ({"OMP_WAIT_POLICY": "active"}, 65, {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "2"}),
    ({"GOMP_SPINCOUNT": "7"}, 65, {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "2"})])
def test_what_the_user_has_not_set_is_set_for_containers_and_busy_machines(given, running, set_to, container,
                                                                           monkeypatch):
    root, environ = container(running, cpu_max="200000 100000"), dict(given)
    monkeypatch.delitem(sys.modules, "mxnet")
    host.share_cpus(environ, root)
    assert environ == set_to


def test_threads_that_fit_stay_as_they_are_and_nothing_is_set_behind_mxnet(container, monkeypatch):
    root, environ = container(65, cpu_max="max 100000"), {}
    host.share_cpus(environ, root)
    assert environ == {}
    monkeypatch.delitem(sys.modules, "mxnet")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    host.share_cpus(environ, container(16))
    assert environ == {}


def test_systems_that_do_not_say_what_runs_count_as_quiet(tmp_path):
    assert host.others_running(tmp_path) == 0


@pytest.fixture
def busy():
    """Keep the machine's processors busy with two processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    deadline = time.monotonic() + 30
    while host.others_running() < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    yield
    for process in processes:
        process.kill()
        process.wait()


_ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not say what runs")


@_ON_LINUX
def test_busy_processes_are_seen(busy):
    assert host.others_running() >= 2


@_ON_LINUX
def test_openmp_is_told(busy):
    code = "import os; os.cpu_count = lambda: 2; import gluon_amp; print(os.environ['GOMP_SPINCOUNT'])"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env={**environ, "OMP_DISPLAY_ENV": "verbose"},
                          capture_output=True, text=True, timeout=120)
    assert done.stdout == "20000\n"
    assert "GOMP_SPINCOUNT = '20000'" in done.stderr


@pytest.mark.parametrize(("is_fault", "level"), [(True, "WARNING"), (False, "INFO")])
def test_init_says_it(is_fault, level, monkeypatch, caplog):
    monkeypatch.setattr(host, "threads_advice", lambda: (is_fault, "other threads than CPUs"))
    with caplog.at_level(logging.INFO, "gluon_amp"):
        amp.init("float32")
    assert [record.levelname for record in caplog.records if "other threads" in record.message] == [level]


COPIES = """
import os
import numpy as np
{imports}
threads = lambda: len(os.listdir("/proc/self/task"))
(mx.nd.ones((64, 64)) + 1).wait_to_read()
values, before = np.arange(3e6, dtype=np.float32), threads()
array = mx.nd.array(values)
assert (array.asnumpy() == values).all()
print(threads() - before)
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU has no second thread")
@pytest.mark.parametrize(("imports", "environment", "made"), [
    ("import mxnet as mx", {}, "1"), ("import gluon_amp, mxnet as mx", {}, "0"),
    ("import gluon_amp, mxnet as mx", {"MXNET_CPU_PARALLEL_SIZE": "1000"}, "1")],
    ids=["MXNet alone", "gluon_amp", "the user's word"])
def test_copies_of_arrays_start_no_threads_of_their_own(imports, environment, made):
    """With more OpenMP threads than CPUs GNU's OpenMP lets the engine's threads sleep between any two operators."""
    environ = {name: value for name, value in os.environ.items() if name != "MXNET_CPU_PARALLEL_SIZE"}
    run = subprocess.run([sys.executable, "-c", COPIES.format(imports=imports)], capture_output=True, text=True,
                         check=True, env={**environ, "OMP_NUM_THREADS": "2", **environment})
    assert run.stdout.strip() == made
