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

from gluon_amp.state.devices import support  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "notebooks"), str(ROOT / "tools")]
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
