"""The notebooks as committed, what they import, what executes them, and (slow) their execution at small sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest

for module in ("gluoncv", "ipykernel", "matplotlib", "nbclient", "PIL", "sklearn"):
    pytest.importorskip(module)

import nbformat  # noqa: E402
from nbformat import v4  # noqa: E402

from gluon_amp.state.devices import support  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "notebooks"), str(ROOT / "tools")]
import findings  # noqa: E402
import run_notebooks  # noqa: E402

NAMES = ["digit_detection", "numerics", "ssd_amp_tutorial"]


class TestCommitted:
    def test_all_are_known(self):
        assert run_notebooks.names() == NAMES

    @pytest.mark.parametrize("name", NAMES)
    def test_is_a_clean_run_whose_claims_hold(self, name):
        notebook = run_notebooks.load(name)
        nbformat.validate(notebook)
        assert run_notebooks.problems(notebook) == []
        holds = [each["holds"] for each in run_notebooks.findings(notebook)]
        assert True in holds
        assert False not in holds  # None: not on the machine that it ran on
        assert notebook.metadata == run_notebooks.METADATA

    @pytest.mark.parametrize("name", ["digit_detection", "ssd_amp_tutorial"])
    def test_measured_a_speedup_and_close_curves(self, name):
        claims = [each["claim"] for each in run_notebooks.findings(run_notebooks.load(name))]
        assert "the loss curves are close" in claims
        assert any("faster" in claim for claim in claims)

    @pytest.mark.parametrize("name", NAMES)
    def test_is_small_enough_to_be_shown_on_the_web(self, name):
        assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 1.5e6


@pytest.mark.machine
@pytest.mark.parametrize("name", NAMES)
def test_begins_without_a_word_on_standard_error(name):
    cells = [cell.source for cell in run_notebooks.load(name).cells if cell.cell_type == "code"]
    begins = [source for source in cells if re.match("import |gluon_amp.uninstall", source)]
    switches_on = [source for source in cells if source.startswith("amp.init()")]
    done = subprocess.run([sys.executable, "-c", "\n".join([*begins, *switches_on[:1]])], cwd=ROOT / "notebooks",
                          env={**os.environ, "MPLBACKEND": "agg"}, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    fast = support("gpu" if mx.context.num_gpus() else "cpu").dtype
    assert not switches_on or f"AMP uses {fast} on" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_imports_nothing_of_the_repository_but_the_package_and_the_last_table(name):
    cells = [cell.source for cell in run_notebooks.load(name).cells if cell.cell_type == "code"]
    imported = {(found[1] or found[2]).split(".")[0] for source in cells
                for found in re.finditer(r"^ *(?:import (\S+)|from (\S+) import)", source, re.MULTILINE)}
    ours = {path.stem for folder in ("notebooks", "benchmarks", "tools", "tests/helpers")
            for path in (ROOT / folder).glob("*.py")}
    assert imported & ours == {"findings"}
    assert "findings" in cells[-1]
    assert not any(re.search(r"\b(amp|gluon_amp)\._|\._amp", source) for source in cells)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_from_start_to_end(name):
    assert run_notebooks.problems(run_notebooks.execute(name, small=True)) == []


def executed(*outputs, count=1):
    """Give a notebook of one cell that was executed, with a picture, a claim that holds, and more outputs."""
    claim = {"claim": "faster", "measured": "2 times", "holds": True}
    good = [v4.new_output("display_data", {"image/png": ""}),
            v4.new_output("execute_result", {run_notebooks.FINDINGS: [claim]})]
    return v4.new_notebook(cells=[v4.new_markdown_cell("Text"),
                                  v4.new_code_cell("1", execution_count=count, outputs=[*good, *outputs])])


def claiming(holds):
    return v4.new_output("display_data", {run_notebooks.FINDINGS: [
        {"claim": "curves close", "measured": "9 apart", "holds": holds}]})


class TestChecks:
    def test_a_good_run_has_no_problems(self):
        assert run_notebooks.problems(executed(claiming(True), claiming(None))) == []

    @pytest.mark.parametrize(("notebook", "problem"), [
        (executed(count=None), "not all executed"),
        (executed(count=2), "not all executed"),
        (executed(v4.new_output("error", ename="ValueError", evalue="no", traceback=[])), "ValueError: no"),
        (executed(v4.new_output("stream", name="stderr", text="a warning")), "standard error: a warning"),
        (executed(v4.new_output("stream", name="stdout", text="/home/me/x.py")), "path of the machine: /home/me/x.py"),
        (executed(claiming(False)), r"does not hold: curves close \(9 apart\)"),
        (v4.new_notebook(), "no picture"),
        (v4.new_notebook(), "no claims"),
    ])
    def test_problems_are_found(self, notebook, problem):
        assert re.search(problem, "\n".join(run_notebooks.problems(notebook)))

    def test_addresses_and_divisions_are_no_paths(self):
        text = "see https://mxnet.apache.org/usr/x and 3/tmp"
        assert run_notebooks.problems(executed(v4.new_output("stream", name="stdout", text=text))) == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make the tool look for notebooks, and put its results, in a directory of the test's own."""
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(run_notebooks, "RESULTS", tmp_path / "results")
    return tmp_path


def write(folder, name, *cells):
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, folder / f"{name}.ipynb")


class TestExecution:
    def test_runs_in_order_with_the_sizes_asked_for_until_an_error(self, folder):
        write(folder, "broken", "import os; print(os.environ['GLUON_AMP_NOTEBOOKS'])", "1 / 0", "print('after')")
        notebook = run_notebooks.execute("broken", small=True)
        first, second, third = (cell.outputs for cell in notebook.cells)
        assert first[0].text == "small\n"
        assert second[0].ename == "ZeroDivisionError"
        assert third == []
        assert "ZeroDivisionError: division by zero" in run_notebooks.problems(notebook)

    def test_reports_each_notebook_and_fails_when_one_does(self, folder, capsys, monkeypatch):
        claim = {"claim": "faster", "measured": "2 times", "holds": True}
        display = f"display({{'image/png': '', '{run_notebooks.FINDINGS}': [{claim}]}}, raw=True)"
        write(folder, "good", display)
        write(folder, "silent", "1")
        assert run_notebooks.main(["good"]) == 0
        assert "faster: 2 times (holds)" in capsys.readouterr().out
        assert run_notebooks.problems(nbformat.read(folder / "results" / "good.ipynb", as_version=4)) == []
        assert run_notebooks.load("good").cells[0].outputs == []
        assert run_notebooks.main(["--in-place"]) == 1
        assert "silent: it makes no claims" in capsys.readouterr().err
        assert run_notebooks.load("good").cells[0].outputs != []

    @pytest.mark.parametrize(("arguments", "message"), [
        (["nothing"], "expected names among good, received nothing"),
        (["--small", "--in-place"], "--in-place goes without --small"),
    ])
    def test_refuses_what_it_cannot_do(self, folder, capsys, arguments, message):
        write(folder, "good", "1")
        with pytest.raises(SystemExit):
            run_notebooks.main(arguments)
        assert message in capsys.readouterr().err


def test_conditions_say_when_sizes_are_small(monkeypatch):
    monkeypatch.setenv("GLUON_AMP_NOTEBOOKS", "small")
    assert findings.conditions().endswith(f"; {findings.SMALL_SIZES}")
    monkeypatch.delenv("GLUON_AMP_NOTEBOOKS")
    assert findings.SMALL_SIZES not in findings.conditions()


def test_findings_are_shown_and_can_be_read():
    found = findings.Findings()
    found.add("faster", "2 < 3", holds=True)
    found.add("closer", "no", holds=False)
    found.add("never", "not measured", holds=False, about_this_machine=False)
    shown = found._repr_mimebundle_()
    assert shown["text/plain"] == repr(found)
    assert repr(found).splitlines() == ["faster: 2 < 3 (holds)", "closer: no (DOES NOT HOLD)",
                                        "never: not measured (not on this machine)"]
    assert "<td style='text-align:left'>2 &lt; 3</td>" in shown["text/html"]
    assert [each["holds"] for each in shown[run_notebooks.FINDINGS]] == [True, False, None]
