"""The command line: what it prints, and its exit codes."""
from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gluon_amp import native
from gluon_amp.cli import main
from gluon_amp.runtime.devices import device_supports

pytestmark = pytest.mark.machine


def test_env_says_what_init_would_choose_and_why(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    support = device_supports()["cpu"]
    assert found["chosen"]["cpu"] == {"dtype": support.dtype, "native": support.native, "reason": support.reason}
    assert found["mxnet"] == "1.9.1"
    assert any("oneDNN v" in line for line in found["onednn"])


def test_env_says_whether_there_are_operators_in_cpp_and_what_is_missing(capsys, monkeypatch):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["native_operators"]
    assert found == {library.name: library.missing or "loaded" for library in native.load()}
    monkeypatch.setattr(native, "load", lambda: (native.Library("core", frozenset(), "install a compiler"),))
    assert main(["env"]) == 0
    assert "core: install a compiler" in capsys.readouterr().out


def test_env_prints_a_table(capsys):
    assert main(["env"]) == 0
    assert "instruction_sets" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["env", "--nonsense"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: gluon-amp" in capsys.readouterr().err


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "gluon_amp.cli", "--help"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "env" in child.stdout
