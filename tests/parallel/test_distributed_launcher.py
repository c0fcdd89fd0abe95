"""The launcher: output, exit codes, signals, and that no process is left; with scripts that need no MXNet."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gluon_amp as amp
from gluon_amp import _cpus
from gluon_amp.cli import main
from gluon_amp.parallel import launcher
from gluon_amp.parallel.launcher import Job, launch
from gluon_amp.parallel.supervisor import TIMED_OUT, Process, Supervisor

ROOT = Path(amp.__file__).parents[1]
FOREVER = "import time; time.sleep(1000)"


@contextlib.contextmanager
def plain_engine(job, environ):
    yield [Process(f"worker {rank}", f"[{rank}] ", job.command, {**environ, "RANK": str(rank)})
           for rank in range(job.workers)]


@pytest.fixture
def script(tmp_path):
    """Write a script; return its path."""
    def write(code):
        path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
        path.write_text("import os, signal, sys\nRANK = int(os.environ['RANK'])\n" + code)
        return str(path)
    return write


@pytest.fixture
def run(monkeypatch, script):
    """Run code in some workers under the launcher; return its exit code."""
    monkeypatch.setitem(launcher.ENGINES, "plain", plain_engine)

    def call(code, workers=2, arguments=(), **options):
        return launch(Job([script(code), *arguments], workers, "plain", **{"timeout": 120, "grace": 30, **options}))
    return call


def ended(pid):
    """Whether a process is gone, after a while at most."""
    for _ in range(600):
        state = Path(f"/proc/{pid}/stat")
        with contextlib.suppress(OSError):
            if state.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


def test_output_is_forwarded_behind_the_rank(run, capfd):
    code = "print('out', sys.argv[1:]); print('error', file=sys.stderr)\nsys.stdout.write('10%\\r20%\\rlast')"
    assert run(code, arguments=["--lr", "0.1"]) == 0
    out, error = capfd.readouterr()
    for rank in range(2):
        lines = [line for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] {text}" for text in ("out ['--lr', '0.1']", "10%", "20%", "last")]
        assert f"[{rank}] error" in error.splitlines()


@pytest.mark.parametrize(("failure", "code", "said"), [
    ("sys.exit(7)", 7, "worker 1 ended with exit code 7"),
    ("sys.exit('no data')", 1, "[1] no data"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "worker 1 was killed by SIGKILL"),
    ("1 / 0", 1, "[1] ZeroDivisionError"),
])
def test_one_failure_ends_all(run, capfd, failure, code, said):
    assert run(f"if RANK == 1: {failure}\n{FOREVER}", workers=3) == code
    error = capfd.readouterr().err
    assert said in error
    assert "ending the others" in error
    assert "runpy" not in error
    assert "start.py" not in error


def test_a_process_that_does_not_end_when_told_to_is_killed(run, tmp_path):
    told = tmp_path / "told"
    code = f"""
import time, pathlib
told = pathlib.Path({str(told)!r})
if RANK == 0:
    signal.signal(signal.SIGTERM, lambda *_: told.with_suffix('.signal').touch())
    told.with_suffix('.ready').touch()
else:
    while not told.with_suffix('.ready').exists():
        time.sleep(0.01)
    sys.exit(3)
while True:
    time.sleep(1)
"""
    assert run(code, grace=0.5) == 3
    assert told.with_suffix(".signal").exists()


def test_processes_that_a_worker_leaves_behind_are_killed(run, tmp_path):
    left = tmp_path / "left"
    code = f"import subprocess\nopen({str(left)!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid))"
    assert run(code, workers=1) == 0
    assert ended(int(left.read_text()))


def test_what_is_no_worker_ends_after_the_workers(script, monkeypatch):
    monkeypatch.setattr("gluon_amp.parallel.supervisor._SECONDS_TO_SHUT_DOWN", 0.2)
    environ = {**os.environ, "RANK": "0"}
    server = Process("server", "", [script(FOREVER)], environ, is_worker=False)
    worker = Process("worker", "", [script("")], environ)
    assert Supervisor([server, worker], 30, 120).run() == (0, False)
    assert server.code == 128 + signal.SIGTERM


def test_a_server_that_fails_ends_the_workers(script, capfd):
    environ = {**os.environ, "RANK": "0"}
    server = Process("server 0", "", [script("sys.exit(9)")], environ, is_worker=False)
    assert Supervisor([server, Process("worker", "", [script(FOREVER)], environ)], 30, 120).run() == (9, True)
    assert "server 0 ended with exit code 9" in capfd.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_the_launcher_end_the_workers(run, capfd, signum):
    code = f"""
import time
def save(number, frame):
    print('saving at', number)
    sys.exit(1)
signal.signal({int(signum)}, save)
if RANK == 0:
    os.kill(os.getppid(), {int(signum)})
{FOREVER}
"""
    before = signal.getsignal(signum)
    assert run(code, workers=1, max_restarts=3) == 128 + signum
    out, error = capfd.readouterr()
    assert f"[0] saving at {int(signum)}" in out
    assert f"received {signal.Signals(signum).name}" in error
    assert signal.getsignal(signum) is before


def test_other_signals_are_passed_on(run, capfd):
    code = """
def note(number, frame):
    print('noted')
    sys.exit()
signal.signal(signal.SIGUSR1, note)
os.kill(os.getppid(), signal.SIGUSR1)
signal.pause()
"""
    assert run(code, workers=1) == 0
    assert "[0] noted" in capfd.readouterr().out


def test_the_time_is_limited(run, capfd):
    assert run(FOREVER, timeout=0.5) == TIMED_OUT
    assert "not done within 0.5 seconds" in capfd.readouterr().err


def test_no_worker_outlives_a_launcher_that_is_killed(tmp_path, script):
    pids = tmp_path / "pids"
    code = script(f"open({str(pids)!r}, 'w').write(str(os.getpid()) + '.')\n{FOREVER}")
    supervise = (f"from gluon_amp.parallel.supervisor import *; import os\n"
                 f"Supervisor([Process('worker', '', [{code!r}], dict(os.environ, RANK='0'))], 1).run()")
    parent = subprocess.Popen([sys.executable, "-c", supervise], cwd=ROOT)
    while not (pids.exists() and pids.read_text().endswith(".")):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert ended(int(pids.read_text()[:-1]))


def test_a_failed_job_starts_again_with_the_number_of_restarts_and_a_share_of_the_processors(run, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = """
print(os.environ['GLUON_AMP_RESTARTS'], os.environ['OMP_NUM_THREADS'])
sys.exit(0 if os.environ['GLUON_AMP_RESTARTS'] == '2' else 5)
"""
    assert run(code, workers=1, max_restarts=1) == 5
    assert run(code, workers=1, max_restarts=3) == 0
    threads = _cpus.allowed()
    assert capfd.readouterr().out.split("\n")[:-1] == [f"[0] {restart} {threads}" for restart in (0, 1, 0, 1, 2)]


def test_modules_run_too(run, tmp_path, monkeypatch, capfd):
    (tmp_path / "trained.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert launch(Job(["-m", "trained", "-x"], 1, "plain", timeout=120)) == 0
    assert capfd.readouterr().out == "[0] __main__ ['-x']\n"


@pytest.mark.parametrize(("change", "message"), [
    ({"engine": "kvstor"}, "Did you mean 'kvstore'"),
    ({"workers": 0}, "expected a number of at least 1, received workers=0"),
    ({"timeout": 0}, "expected a number above 0"), ({"command": []}, "expected a script"),
    ({"max_restarts": -1}, "at least 0, received max_restarts=-1"),
])
def test_wrong_jobs(change, message):
    with pytest.raises(ValueError, match=message):
        launch(Job(**{"command": [__file__], "workers": 1, **change}))


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["-n", "0", "x.py"], 2, "expected a whole number from 1 on, received '0'"),
    (["-n", "2", "--engine", "mpi", "x.py"], 2, "invalid choice: 'mpi'"),
    (["-n", "2"], 1, "expected a Python script"),
])
def test_wrong_command_lines(arguments, code, message, capfd):
    with pytest.raises(SystemExit) as caught:
        main(["launch", *arguments])
    assert (caught.value.code if isinstance(caught.value.code, int) else 1) == code
    assert message in capfd.readouterr().err + str(caught.value.code)


def test_a_script_that_is_missing(capsys):
    assert main(["launch", "-n", "2", "missing.py"]) == 1
    assert "the script 'missing.py' does not exist" in capsys.readouterr().err


def test_horovod_that_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["launch", "-n", "2", "--engine", "horovod", __file__]) == 1
    assert "Horovod is not installed" in capsys.readouterr().err
