"""The command line: what it prints, and its exit codes."""
from __future__ import annotations

import json
import subprocess
import sys

import pytest

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.cli import main
from gluon_amp.state.devices import device_supports

pytestmark = pytest.mark.machine


def test_env_says_what_init_would_choose_and_why(capsys):
    assert main(["env", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    support = device_supports()["cpu"]
    assert found["chosen"]["cpu"] == {"dtype": support.dtype, "native": support.native, "reason": support.reason}
    assert found["mxnet"] == "1.9.1"
    assert any("oneDNN v" in line for line in found["onednn"])


def test_env_says_whether_there_are_operators_in_cpp_and_what_is_missing(capsys, monkeypatch):
    assert main(["env", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["native_operators"]
    assert found == {library.name: library.missing or "loaded" for library in native.load()}
    monkeypatch.setattr(native, "load", lambda: (native.Library("core", frozenset(), "install a compiler"),))
    assert main(["env"]) == 0
    assert "install a compiler" in capsys.readouterr().out


def test_env_prints_a_table(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("amp.init() runs ")
    assert "oneDNN uses" in out
    assert not any(dump in out for dump in ("True", "False", "None", "{", "['"))


def test_alone_it_prints_help_with_examples(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "usage: gluon-amp" in out
    assert "gluon-amp convert net-symbol.json" in out
    assert max(map(len, out.splitlines())) <= 80


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"gluon-amp {amp.__version__} (MXNet 1.9.1, Python ")


@pytest.mark.parametrize("columns", [60, 100])
def test_what_it_prints_is_as_wide_as_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert columns - 30 < max(map(len, lines)) <= columns


@pytest.mark.parametrize(("name", "instead"), [("launch", "horovodrun"), ("info", "gluon-amp report"),
                                               ("compare", "amp.compare(net, data)"), ("advise", "gluon-amp report")])
def test_commands_of_earlier_versions_answer_with_what_to_use(name, instead, capsys):
    assert main([name, "-n", "2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"gluon-amp {name} is gone: ")
    assert instead in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_errors_fit_a_terminal_and_are_one_line_in_files(terminal, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    main(["report", "/a/rather/long/name/of/a/file/that/is/missing.json", "missing.params"])
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines) == ("gluon-amp report: /a/rather/long/name/of/a/file/that/is/missing.json: No such file or "
                               "directory")
    assert len(lines) == (3 if terminal else 1)


@pytest.mark.parametrize("argv", [["nonsense"], ["env", "--nonsense"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: gluon-amp" in capsys.readouterr().err


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "gluon_amp.cli", "--help"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "env" in child.stdout


def test_an_interrupt_ends_in_one_line(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("gluon_amp.cli.env.run", interrupted)
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "gluon-amp env: interrupted\n"


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "gluon_amp", "--version"], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("gluon-amp ")
