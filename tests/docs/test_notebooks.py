"""The notebooks as committed, what they import, what executes them, and (slow) their execution at small sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest

for module in ("gluoncv", "ipykernel", "matplotlib", "nbclient", "PIL", "sklearn"):
    pytest.importorskip(module)

import nbformat  # noqa: E402
from cpu_kinds import take_for  # noqa: E402
from nbformat import v4  # noqa: E402

from gluon_amp.runtime.devices import support  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "notebooks"), str(ROOT / "tools")]
with pytest.MonkeyPatch.context() as environment:
    environment.setenv("OMP_NUM_THREADS", "1")  # helpers would set it for all tests to come
    import digit_centres
    import helpers

import formats  # noqa: E402
import run_notebooks  # noqa: E402

from benchmarks.voc import digits  # noqa: E402

NAMES = ["digit_detection", "numerics", "ssd_amp_tutorial"]


class TestCommitted:
    def test_all_are_known(self):
        assert run_notebooks.names() == NAMES

    @pytest.mark.parametrize("name", NAMES)
    def test_is_a_clean_run_whose_claims_hold(self, name):
        notebook = run_notebooks.load(name)
        nbformat.validate(notebook)
        assert run_notebooks.problems(notebook) == []
        assert all(each["holds"] for each in run_notebooks.findings(notebook))
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
    first, *others = (cell.source for cell in run_notebooks.load(name).cells if cell.cell_type == "code")
    switches_on = [source for source in others if source.startswith("amp.init()")]
    last = "print(helpers.fast_dtype() or helpers.why_float32())"
    done = subprocess.run([sys.executable, "-c", "\n".join([first, *switches_on[:1], last])], cwd=ROOT / "notebooks",
                          env={**os.environ, "MPLBACKEND": "agg"}, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    fast = support("gpu" if mx.context.num_gpus() else "cpu").dtype
    said = done.stdout.splitlines()
    assert said[-1] == fast if fast != "float32" else said[-1].startswith("AMP runs in float32 here, because ")
    assert not switches_on or f"AMP uses {fast} on" in done.stdout


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


class TestFormats:
    @pytest.mark.parametrize(("kind", "known"), [(formats.FLOAT16, np.float16), (formats.FLOAT32, np.float32)])
    def test_properties_are_those_of_numpy(self, kind, known):
        about = np.finfo(known)
        assert (kind.largest, kind.smallest_normal, kind.epsilon) == (about.max, about.tiny, about.eps)
        assert kind.smallest == np.nextafter(known(0), known(1))

    @pytest.mark.parametrize("kind", [formats.FLOAT16, formats.BFLOAT16])
    def test_rounding_fits_the_properties(self, kind):
        tiny, step = kind.smallest, kind.epsilon
        kept = [tiny, kind.smallest_normal, 1 + step, kind.largest]
        assert kind.round(kept).tolist() == kept
        assert kind.round([0.49 * tiny, 1 + 0.49 * step, 1 + 0.51 * step]).tolist() == [0, 1, 1 + step]


def test_centres_are_where_the_digits_are():
    images, maps = digit_centres.digit_centres(count=4, side=64, seed=5)
    assert (images.shape, maps.shape) == ((4, 3, 64, 64), (4, 1, 64, 64))
    assert images.dtype == maps.dtype == np.float32
    assert -1 <= images.min() < -0.2 < 0.2 < images.max() <= 1
    assert (images == digit_centres.digit_centres(4, 64, seed=5)[0]).all()
    scanned = pytest.importorskip("sklearn.datasets").load_digits()
    rng = np.random.default_rng(5)
    scans = digits.scan_order(scanned, np.arange(len(scanned.images)), rng)
    for centres in maps[:, 0]:
        _, placed = digits.compose(64, scans, rng)
        middles = [((box.top + box.bottom) // 2, (box.left + box.right) // 2) for _, _, box in placed]
        assert all(centres[middle] > 0.9 for middle in middles)
        far = np.min([np.hypot(*(np.mgrid[:64, :64] - np.reshape(each, (2, 1, 1)))) for each in middles], axis=0) > 16
        assert centres[far].max(initial=0) < 0.02


class TestHelpers:
    def test_sizes_follow_environment_and_device(self, monkeypatch):
        monkeypatch.setattr(helpers, "device", lambda: mx.Context("cpu"))
        assert helpers.size(small=1, cpu=2, gpu=3) == 2
        monkeypatch.setattr(helpers, "device", lambda: mx.Context("gpu"))
        assert helpers.size(small=1, cpu=2, gpu=3) == 3
        monkeypatch.setattr(helpers, "SMALL", True)
        assert helpers.size(small=1, cpu=2, gpu=3) == 1
        assert helpers.SMALL_SIZES in helpers.conditions()

    @pytest.mark.parametrize(("available", "gflops", "batch_size"), [(64e9, 1e6, 8), (3e9, 1e6, 2), (64e9, 10, 2)])
    def test_batch_fits_memory_and_time(self, monkeypatch, available, gflops, batch_size):
        monkeypatch.setattr(helpers.machine, "available_memory", lambda: available)
        monkeypatch.setattr(helpers.machine, "matmul_gflops", lambda: gflops)
        assert helpers.affordable_batch_size("ssd512", seconds=300) == batch_size

    def test_findings_are_shown_and_can_be_read(self):
        found = helpers.Findings()
        found.add("faster", "2 < 3", holds=True)
        found.add("closer", "no", holds=False)
        found.add("never", "not measured", holds=False, about_this_machine=False)
        shown = found._repr_mimebundle_()
        assert shown["text/plain"] == repr(found)
        assert repr(found).splitlines() == ["faster: 2 < 3 (holds)", "closer: no (DOES NOT HOLD)",
                                            "never: not measured (not on this machine)"]
        assert "<td style='text-align:left'>2 &lt; 3</td>" in shown["text/html"]
        assert [each["holds"] for each in shown[run_notebooks.FINDINGS]] == [True, False, None]

    @pytest.mark.parametrize(("small", "answer", "expected"), [
        (False, SimpleNamespace(ok=True), True),
        (False, SimpleNamespace(ok=False), False),
        (False, OSError("no network"), False),
        (True, SimpleNamespace(ok=True), False),
    ])
    def test_the_server_of_pretrained_weights_is_asked_once(self, monkeypatch, tmp_path, small, answer, expected):
        asked = []

        def head(url, timeout):
            asked.append((url, timeout))
            if isinstance(answer, Exception):
                raise requests.ConnectionError(answer)
            return answer

        requests = pytest.importorskip("requests")
        monkeypatch.setattr(requests, "head", head)
        monkeypatch.setenv("MXNET_HOME", str(tmp_path))
        monkeypatch.setenv("MXNET_GLUON_REPO", "https://example.org")
        monkeypatch.setattr(helpers, "SMALL", small)
        assert helpers.has_pretrained("resnet50_v1") is expected
        assert asked == ([] if small else [("https://example.org/gluon/models/resnet50_v1-cc729d95.zip", 5)])

    def test_weights_that_are_there_are_used(self, monkeypatch, tmp_path):
        monkeypatch.setenv("MXNET_HOME", str(tmp_path))
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "resnet50_v1-cc729d95.params").touch()
        assert helpers.has_pretrained("resnet50_v1")

    @pytest.mark.skipif(mx.context.num_gpus() > 0, reason="about machines without a GPU")
    def test_types_run_where_they_can(self, monkeypatch):
        assert helpers.device_for("float16") == helpers.device_for("float32") == mx.cpu()
        take_for(monkeypatch, "AVX2")
        assert helpers.device_for("bfloat16") is None
        assert helpers.fast_dtype() is None
        assert helpers.why_float32() == "AMP runs in float32 here, because this CPU has no BF16 instructions (AVX2)."
        take_for(monkeypatch, "AVX512_CORE")
        assert helpers.device_for("bfloat16") == mx.cpu()
        assert helpers.fast_dtype() is None
        take_for(monkeypatch, "AVX512_CORE_BF16")
        assert helpers.fast_dtype() == "bfloat16"
