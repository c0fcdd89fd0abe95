"""``gluon-amp run``: scripts that know nothing of AMP, and scripts written for MXNet's."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gluon_amp.cli import main

ROOT = Path(__file__).parents[2]


def run(tmp_path, script, *options):
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run([sys.executable, "-m", "gluon_amp", "run", *options, str(path), "--epochs", "3"],
                          capture_output=True, text=True, cwd=tmp_path, env=environment)


def test_a_script_runs_with_amp_on(tmp_path):
    done = run(tmp_path, "import sys, gluon_amp\nprint(sys.argv[1:], __name__, gluon_amp.is_active())\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--epochs', '3'] __main__ True\n"


def test_a_bare_init_of_the_script_keeps_the_type(tmp_path):
    script = "from mxnet.contrib import amp\namp.init()\nprint(amp.active_dtype(), amp.amp._amp_initialized)\n"
    done = run(tmp_path, script, "--dtype", "float32")
    assert done.stdout == "None True\n", done.stderr
    done = run(tmp_path, "import warnings\nwarnings.simplefilter('ignore')\n" + script, "--dtype", "float16")
    assert done.stdout == "float16 True\n", done.stderr


def test_init_may_be_left_to_the_script(tmp_path):
    script = "from mxnet.contrib.amp import amp\nprint(amp._amp_initialized)\namp.init()\nprint(amp._amp_initialized)\n"
    assert run(tmp_path, script, "--no-init").stdout == "False\nTrue\n"


def test_modules_beside_the_script_are_found(tmp_path):
    (tmp_path / "beside.py").write_text("value = 7\n")
    assert run(tmp_path, "import beside\nprint(beside.value)\n").stdout == "7\n"


@pytest.mark.parametrize("error", ["OSError('no data')", "ValueError('no data')",
                                   "__import__('gluon_amp').StateError('no data')"])
def test_errors_of_the_script_keep_their_traceback(tmp_path, error):
    done = run(tmp_path, f"def load():\n    raise {error}\nload()\n")
    assert done.returncode == 1
    first, second, *_ = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert first.endswith("line 3, in <module>")
    assert second.endswith("line 2, in load")
    assert done.stderr.endswith(": no data\n")


def test_the_scripts_own_hook_for_errors_is_called(tmp_path):
    script = "import sys\nsys.excepthook = lambda kind, *_: print('caught', kind.__name__)\n1 / 0\n"
    assert run(tmp_path, script).stdout == "caught ZeroDivisionError\n"


def test_the_exit_code_is_the_scripts(tmp_path):
    assert run(tmp_path, "raise SystemExit(3)\n").returncode == 3


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "expected a Python script to run, as in `gluon-amp run train.py`"),
    (["none.py"], "the script 'none.py' does not exist: expected a Python file, or -m and a module"),
    (["--dtype", "float8", __file__], "expected"),
])
def test_what_cannot_run_is_said_in_a_line(arguments, said, capsys):
    assert main(["run", *arguments]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"gluon-amp run: {said}")
    assert err.count("\n") == 1


def test_threads_that_the_script_leaves_behind_run_with_amp(tmp_path):
    done = run(tmp_path, (
        "import threading, time, gluon_amp\n"
        "def work():\n"
        "    time.sleep(0.5)\n"
        "    print('thread', gluon_amp.is_active())\n"
        "threading.Thread(target=work).start()\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('main')\n"))
    assert done.stdout == "main\nthread True\n", done.stderr
