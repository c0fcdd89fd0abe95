"""The command line: what it prints, and its exit codes."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

import gluon_amp as amp
from gluon_amp.cli import main

pytestmark = pytest.mark.machine


def test_alone_it_prints_help_with_examples(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "usage: gluon-amp" in out
    assert "gluon-amp convert net-symbol.json" in out
    assert max(map(len, out.splitlines())) <= 80


def test_errors_are_one_line(capsys):
    assert main(["report", "missing.json", "missing.params"]) == 1
    assert capsys.readouterr().err == "gluon-amp report: missing.json: No such file or directory\n"


@pytest.mark.parametrize("argv", [["launch"], ["check", "--nonsense"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: gluon-amp" in capsys.readouterr().err


def test_an_interrupt_ends_in_one_line(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("gluon_amp.cli.check.run", interrupted)
    assert main(["check"]) == 130
    assert capsys.readouterr().err == "gluon-amp check: interrupted\n"


def test_the_package_runs_as_a_module_and_tells_versions():
    done = subprocess.run([sys.executable, "-m", "gluon_amp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"gluon-amp {amp.__version__} (MXNet 1.9.1, Python ")


@pytest.fixture
def script(tmp_path):
    """The command as pip installs it."""
    path = tmp_path / "gluon-amp"
    path.write_text("import sys\nprint('begins', file=sys.stderr, flush=True)\n"
                    "from gluon_amp.cli import main\nsys.exit(main())\n")
    return [sys.executable, str(path)]


@pytest.mark.parametrize("arguments", ["--help", "check"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_error(script, arguments, unbuffered):
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([*script, arguments], stdout=writes, stderr=subprocess.PIPE, text=True, timeout=120,
                          env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    os.close(writes)
    assert done.returncode in ((0, 141) if arguments == "--help" else (141,))  # argparse drops an error of its print
    assert done.stderr == "begins\n"
