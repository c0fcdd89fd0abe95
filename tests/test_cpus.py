"""How many threads MXNet starts, and how many CPUs a container leaves to them."""
import logging
import os

import pytest

import gluon_amp as amp
from gluon_amp import _cpus


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Make a container of eight CPUs with a quota; return where it begins."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    def make(**files):
        for name, text in files.items():
            path = tmp_path / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path
    return make


@pytest.mark.parametrize(("files", "cpus"), [
    ({}, 8), ({"cpu_max": "max 100000\n"}, 8), ({"cpu_max": "150000 100000\n"}, 2),
    ({"cpu_max": "50000 100000\n"}, 1),
    ({"cpu_max": "6400000 100000\n"}, 8)])
def test_affinity_and_quota(files, cpus, container):
    assert _cpus.allowed(container(**files)) == cpus


def test_quota_of_older_systems(container):
    root = container()
    (root / "sys/fs/cgroup/cpu").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("300000\n")
    (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
    assert _cpus.allowed(root) == 3
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert _cpus.allowed(root) == 8


@pytest.mark.parametrize(("given", "threads"), [({}, 32), ({"OMP_NUM_THREADS": "4"}, 4),
                                                ({"OMP_NUM_THREADS": "6,2"}, 6),
                                                ({"OMP_NUM_THREADS": "many"}, 32)])
def test_threads(given, threads, container):
    container()
    assert _cpus.threads(given) == threads


def test_what_is_said(container):
    root = container(cpu_max="200000 100000")
    assert _cpus.misfit({}, root) == ("MXNet runs 32 threads, and this process may use 2 CPUs: they wait for one "
                                      "another. Set OMP_NUM_THREADS=2 before Python starts")
    assert _cpus.misfit({"OMP_NUM_THREADS": "2"}, root) == ""


def test_init_says_it(monkeypatch, caplog):
    monkeypatch.setattr(_cpus, "misfit", lambda: "too many threads")
    with caplog.at_level(logging.WARNING, "gluon_amp"):
        amp.init("float32")
    assert "too many threads" in caplog.text
