"""The operator audit: nothing is left out, verdicts are right, the committed results are those of this engine."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from gluon_amp.audit import __main__ as command
from gluon_amp.audit import compare, records, report, runner, values
from gluon_amp.audit.execute import Judge, first_line
from gluon_amp.audit.pool import Pool, malloc_checks
from gluon_amp.audit.samples import FAMILIES, reason_of, sampled_operators, samples_of
from gluon_amp.audit.samples.excluded import is_backward

ROOT = Path(__file__).parents[1]
JSON, MARKDOWN = ROOT / "docs" / "operator_audit.json", ROOT / "docs" / "operator_audit.md"
FAST = ("Convolution", "FullyConnected", "BatchNorm", "Activation", "Pooling", "Concat", "elemwise_add", "softmax",
        "dot")


@pytest.fixture(scope="module")
def committed():
    return report.read(JSON)


# Samples


def test_every_forward_operator_has_samples_or_a_reason():
    missing = [op for op in report.forward_operators() if not samples_of(op) and reason_of(op) is None]
    both = [op for op in report.forward_operators() if samples_of(op) and reason_of(op) is not None]
    assert (missing, both) == ([], [])


def test_every_sample_is_of_a_registered_operator():
    assert set(sampled_operators()) <= set(report.forward_operators())


def test_backward_operators_are_those_with_backward_in_their_name():
    assert is_backward("_backward_dot")
    assert is_backward("_contrib_backward_quadratic")
    assert not is_backward("dot")


def test_conditions_are_unique():
    for family in FAMILIES.values():
        names = [(item.op, item.condition) for item in family]
        assert len(names) == len(set(names))


def test_contents_are_deterministic_and_of_the_type():
    item = records.low(2, 16, values="normal")
    first = values.fill(item, "bfloat16", "a")
    assert (first == values.fill(item, "bfloat16", "a")).all()
    assert (first != values.fill(item, "bfloat16", "b")).any()
    assert (first == values.round_to(first, "bfloat16")).all()


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_rounding_is_that_of_amp_cast(dtype):
    array = np.random.RandomState(0).normal(size=1000).astype(np.float32)
    target = np.dtype([("bfloat16", np.uint16)]) if dtype == "bfloat16" else dtype
    cast = mx.nd.amp_cast(mx.nd.amp_cast(mx.nd.array(array), dtype=target), dtype="float32").asnumpy()
    assert (cast == values.round_to(array, dtype)).all()


def test_modes():
    names = [str(mode) for mode in records.modes_for(samples_of("elemwise_add")[0], "bfloat16", "cpu")]
    assert len(names) == 33
    assert "cached/mixed/write" in names
    assert not any("blocked/" in str(mode) for mode in records.modes_for(samples_of("dot")[0], "bfloat16", "cpu"))
    assert not any("blocked" in str(mode) for mode in records.modes_for(samples_of("relu")[0], "float16", "gpu"))


# Comparison


@pytest.mark.parametrize(("found", "wanted", "verdict"), [
    ([1.0, 2.0], [1.0, 2.0], "ok"),
    ([1.0, 2.01], [1.0, 2.0], "ok"),
    ([1.0, 2.5], [1.0, 2.0], "wrong"),
    ([1.0, 1e-5], [1.0, 0.0], "ok"),
    ([0.0, 0.0], [0.0, 0.0], "ok"),
    ([0.0, 1.0], [0.0, 0.0], "wrong"),
    ([1.0, np.nan], [1.0, 2.0], "wrong"),
    ([1.0, 2.0], [1.0, np.nan], "wrong"),
    ([1.0, np.inf], [1.0, np.inf], "ok"),
    ([1.0, np.inf], [1.0, -np.inf], "wrong"),
    ([1.0], [1.0, 2.0], "wrong"),
])
def test_comparison(found, wanted, verdict):
    result = compare.compare({"output 0": np.array(found)}, {"output 0": np.array(wanted)}, 0.01)
    assert result.verdict == verdict


def test_missing_tensor_is_wrong():
    assert compare.compare({}, {"gradient of input 0": np.ones(2)}, 0.1).verdict == "wrong"


def test_truncation_shows_as_bias():
    array = np.random.RandomState(0).uniform(1, 2, 4096).astype(np.float32)
    truncated = (array.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert compare.bias_of(truncated, array) < -0.002
    assert abs(compare.bias_of(values.round_to(array, "bfloat16"), array)) < 0.0002


def test_error_message_is_cut_to_what_it_says():
    text = 'Traceback (most recent call last):\n  File "/a/op.cc", line 3\nMXNetError: Check failed: 0x7f == 0x1: x\n'
    assert first_line(ValueError(text)) == "MXNetError: Check failed: 0x... == 0x...: x"


# Processes


@pytest.fixture(scope="module")
def fake_pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with Pool(1, runner="audit_runners:dispatch") as pool:
            yield pool


@pytest.mark.parametrize(("name", "verdict", "detail"), [
    ("well", "ok", ""),
    ("segfault", "crash", "SIGSEGV"),
    ("abort", "crash", "SIGABRT: malloc(): invalid size (unsorted)"),
    ("leave", "crash", "the engine ended the process (exit code 255)"),
    ("sleep", "timeout", "no end within the time allowed"),
    ("spin", "timeout", "no end within the time allowed"),
    ("fail", "error", "ValueError: no good"),
])
def test_a_process_that_does_not_end_well_costs_only_its_mode(fake_pool, name, verdict, detail):
    options = runner.Options(timeout=2.0 if verdict == "timeout" else 120.0)
    found = runner.run_modes(fake_pool, name, options, "bfloat16",
                             [("default", "eager/plain/infer"), ("default", "eager/plain/write")])
    assert found[("default", "eager/plain/infer")]["verdict"] == "ok"
    assert found[("default", "eager/plain/write")]["verdict"] == verdict
    assert found[("default", "eager/plain/write")]["detail"] == detail


def test_errors_of_fp32_do_not_count():
    assert runner.overall({"a": "ok", "b": "error"}, {"b": "error"}) == "ok"
    assert runner.overall({"a": "ok", "b": "wrong"}, {"b": "wrong"}) == "wrong"
    assert runner.overall({"a": "ok", "b": "crash"}, {"b": "crash"}) == "crash"
    assert runner.overall({"a": "error", "b": "wrong"}, {}) == "wrong"
    assert runner.overall({"eager/plain/write": "ok", "eager/plain/addlow": "wrong"}, {}) == "ok"
    assert runner.overall({"a": "wrong"}, {"a": "wrong"}) == "wrong"


def test_crashes_under_malloc_checks_count():
    entry = {"conditions": {"default": {"verdict": "ok", "modes": {"eager/plain/write": "ok"}}}}
    runner.merge_checks(entry, {("default", "eager/plain/write"): {"verdict": "crash", "detail": "SIGABRT"}})
    assert entry["conditions"]["default"]["verdict"] == "crash"
    assert entry["conditions"]["default"]["details"] == {"with malloc checks: SIGABRT": ["eager/plain/write"]}


def test_wrong_values_are_told_from_rounding():
    """An operator that computes something else than its FP32 self: two runs of different samples."""
    right = records.sample("_mul_scalar", records.low(4, 4), scalar=2.0)
    judge = Judge(right, "float16", mx.cpu(), "float16")
    mode = records.Mode("plain", "write", "cached")
    assert judge.run(mode).verdict == "ok"
    judge.item = records.sample("_mul_scalar", records.low(4, 4), scalar=2.5)
    result = judge.run(mode)
    assert result.verdict == "wrong"
    assert result.detail.startswith(("output 0 off by", "gradient of input 0 off by"))


def test_float16_on_the_cpu_reports_missing_kernels():
    mode = records.Mode("plain", "infer", "eager")
    assert Judge(samples_of("relu")[0], "float16", mx.cpu(), "float16").run(mode).verdict == "ok"
    result = Judge(samples_of("dot")[0], "float16", mx.cpu(), "float16").run(mode)
    assert (result.verdict, bool(result.detail)) == ("error", True)


# Command line and committed results


def test_command_line_refuses_unknown_operators(capsys):
    assert command.main(["--ops", "no_such_operator,_zeros"]) == 2
    said = capsys.readouterr().err
    assert "no_such_operator: no such operator" in said
    assert "_zeros: creates an array" in said


def test_page_is_generated_from_the_json_file(committed, tmp_path):
    assert command.main(["--from-json", str(JSON), "--markdown", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == MARKDOWN.read_text()
    assert report.markdown(committed) == MARKDOWN.read_text()


@pytest.mark.bf16
def test_update_keeps_other_operators(committed, tmp_path):
    path = tmp_path / "audit.json"
    changed = json.loads(JSON.read_text())
    changed["operators"]["relu"]["conditions"]["default"]["verdict"] = "unknown"
    changed["operators"]["abs"]["conditions"]["default"]["verdict"] = "kept"
    report.write(path, changed)
    assert command.main(["--ops", "relu", "--update", "--json", str(path)]) == 0
    found = report.read(path)["operators"]
    assert found["relu"] == committed["operators"]["relu"]
    assert found["abs"]["conditions"]["default"]["verdict"] == "kept"


def test_json_is_written_as_it_is_read(committed, tmp_path):
    report.write(tmp_path / "audit.json", committed)
    assert (tmp_path / "audit.json").read_text() == JSON.read_text()


def test_committed_audit_covers_every_operator_and_sample(committed):
    assert sorted(committed["operators"]) == report.forward_operators()
    for op in sampled_operators():
        found = committed["operators"][op]["conditions"]
        assert list(found) == [item.condition for item in samples_of(op)]
        for item in samples_of(op):
            assert found[item.condition]["inputs"] == item.signature
            assert list(found[item.condition]["modes"]) == [str(m) for m in records.modes_for(item, "bfloat16", "cpu")]


def test_reasons_are_those_of_the_committed_audit(committed):
    assert {op: entry for op, entry in committed["operators"].items() if "conditions" not in entry} == \
        report.not_applicable()


@pytest.mark.bf16
def test_fast_part_of_the_audit_agrees_with_the_committed_result(committed, tmp_path):
    path = tmp_path / "audit.json"
    subprocess.run([sys.executable, "-m", "gluon_amp.audit", "--ops", ",".join(FAST), "--jobs", "2", "--json",
                    str(path)], cwd=ROOT, check=True, capture_output=True, timeout=600)
    found = json.loads(path.read_text())["operators"]
    for op in FAST:
        now = {name: result["verdict"] for name, result in found[op]["conditions"].items()}
        then = {name: result["verdict"] for name, result in committed["operators"][op]["conditions"].items()}
        assert now == then, op
    assert found["dot"]["conditions"]["default"]["verdict"] == "error"


@pytest.mark.bf16
def test_transpose_corrupts_memory(committed):
    """What that leads to is not the same every time, so that one run in FAST would not do."""
    bad = {"crash", "timeout", "wrong", "error"}
    with Pool(1, malloc_checks()) as pool:
        keys = [("axes=(0, 2, 3, 1)", f"{run}/plain/infer") for run in ("eager", "cached", "static")]
        found = runner.run_modes(pool, "transpose", runner.Options(timeout=20.0), "bfloat16", keys)
    assert {record["verdict"] for record in found.values()} <= bad
    then = committed["operators"]["transpose"]["conditions"]
    assert {result["verdict"] for result in then.values() if result["inputs"].count(",") < 4} <= bad
