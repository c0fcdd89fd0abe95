"""The operator audit: nothing is left out, verdicts are right, the committed results are those of this engine."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import audit_operators as command
import audit_runners
import mxnet as mx
import numpy as np
import pytest
from audit import modes, page, processes, results, runner, values, verdicts
from audit.judge import Judge, message_of
from audit.samples import FAMILIES, reason_of, sampled_operators, samples_of
from audit.samples.excluded import CUDA_ONLY, is_backward
from audit.samples.sample import low, sample

ROOT = Path(__file__).parents[2]
JSON, MARKDOWN = ROOT / "docs" / "operator_audit.json", ROOT / "docs" / "operator_audit.md"
FAST = ("Convolution", "FullyConnected", "BatchNorm", "Activation", "Pooling", "Concat", "elemwise_add", "softmax",
        "dot")


@pytest.fixture(scope="module")
def committed():
    return results.read(JSON)


# Samples


def test_every_forward_operator_has_samples_or_a_reason():
    missing = [op for op in results.forward_operators() if not samples_of(op) and reason_of(op) is None]
    both = [op for op in results.forward_operators() if samples_of(op) and reason_of(op) is not None]
    assert (missing, both) == ([], [])


def test_every_sample_is_of_a_registered_operator():
    assert set(sampled_operators()) <= set(results.forward_operators())


def test_backward_operators_are_those_with_backward_in_their_name():
    assert is_backward("_backward_dot")
    assert is_backward("_contrib_backward_quadratic")
    assert not is_backward("dot")


def test_conditions_are_unique():
    names = [(item.op, item.condition) for family in FAMILIES.values() for item in family]
    assert len(names) == len(set(names))


def test_an_operator_is_in_one_family():
    families = [{item.op for item in family} for family in FAMILIES.values()]
    assert len(set.union(*families)) == sum(map(len, families))


def test_contents_are_deterministic_and_of_the_type():
    item = low(2, 16, values="normal")
    first = values.fill(item, "bfloat16", "a")
    assert (first == values.fill(item, "bfloat16", "a")).all()
    assert (first != values.fill(item, "bfloat16", "b")).any()
    assert (first == values.round_to(first, "bfloat16")).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_that_of_amp_cast(dtype):
    array = np.random.RandomState(0).normal(size=1000).astype(np.float32)
    target = np.dtype([("bfloat16", np.uint16)]) if dtype == "bfloat16" else dtype
    cast = mx.nd.amp_cast(mx.nd.amp_cast(mx.nd.array(array), dtype=target), dtype="float32").asnumpy()
    assert (cast == values.round_to(array, dtype)).all()


def test_modes():
    names = [str(mode) for mode in modes.modes_for(samples_of("elemwise_add")[0], "bfloat16", "cpu")]
    assert len(names) == 33
    assert "cached/mixed/write" in names
    assert not any("blocked/" in str(mode) for mode in modes.modes_for(samples_of("dot")[0], "bfloat16", "cpu"))
    assert not any("blocked" in str(mode) for mode in modes.modes_for(samples_of("relu")[0], "float16", "gpu"))


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
    result = verdicts.judge({"output 0": np.array(found)}, {"output 0": np.array(wanted)}, 0.01)
    assert result.verdict == verdict


def test_missing_tensor_is_wrong():
    assert verdicts.judge({}, {"gradient of input 0": np.ones(2)}, 0.1).verdict == "wrong"


def test_truncation_shows_as_bias():
    array = np.random.RandomState(0).uniform(1, 2, 4096).astype(np.float32)
    truncated = (array.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert verdicts.bias_of(truncated, array) < -0.002
    assert abs(verdicts.bias_of(values.round_to(array, "bfloat16"), array)) < 0.0002


def test_error_message_is_cut_to_what_it_says():
    text = 'Traceback (most recent call last):\n  File "/a/op.cc", line 3\nMXNetError: Check failed: 0x7f == 0x1: x\n'
    assert message_of(ValueError(text)) == "MXNetError: Check failed: 0x... == 0x...: x"


# Processes


@pytest.mark.parametrize(("name", "verdict", "detail"), [
    ("well", "ok", ""),
    ("segfault", "crash", "SIGSEGV"),
    ("abort", "crash", "SIGABRT: malloc(): invalid size (unsorted)"),
    ("leave", "crash", "the engine ended the process (exit code 255)"),
    ("sleep", "timeout", "no end within the time allowed"),
    ("spin", "timeout", "no end within the time allowed"),
    ("fail", "error", "ValueError: no good"),
])
def test_a_process_that_does_not_end_well_costs_only_its_mode(name, verdict, detail, monkeypatch):
    monkeypatch.setattr(runner, "run_samples", getattr(audit_runners, name))
    options = runner.Options(timeout=2.0 if verdict == "timeout" else 120.0)
    write = ("default", "eager/plain/write")
    found = runner.run_modes(name, options, "bfloat16", [("default", "eager/plain/infer"), write])
    assert found[("default", "eager/plain/infer")].verdict == "ok"
    assert found[write][:2] == (verdict, detail)


def test_processes_compute_with_one_thread_and_leave_the_environment_alone():
    before = dict(os.environ)
    assert processes.isolated(os.getenv, ("OMP_NUM_THREADS",), 60.0).value == "1"
    assert dict(os.environ) == before


def test_errors_of_fp32_do_not_count():
    assert verdicts.overall({"a": "ok", "b": "error"}, {"b": "error"}) == "ok"
    assert verdicts.overall({"a": "ok", "b": "wrong"}, {"b": "wrong"}) == "wrong"
    assert verdicts.overall({"a": "ok", "b": "crash"}, {"b": "crash"}) == "crash"
    assert verdicts.overall({"a": "error", "b": "wrong"}, {}) == "wrong"
    assert verdicts.overall({"eager/plain/write": "ok", "eager/plain/addlow": "wrong"}, {}) == "ok"
    assert verdicts.overall({"a": "wrong"}, {"a": "wrong"}) == "wrong"


def test_crashes_under_malloc_checks_count():
    modes_ = {"eager/plain/write": "ok", "cached/plain/write": "ok"}
    entry = {"conditions": {"default": {"verdict": "ok", "modes": modes_}}}
    runner.merge_checks(entry, {"conditions": {"default": {
        "modes": {"eager/plain/write": "crash", "cached/plain/write": "wrong"},
        "details": {"output 0 off by 1": ["cached/plain/write"], "SIGABRT": ["eager/plain/write"]}}}})
    assert entry["conditions"]["default"]["verdict"] == "crash"
    assert modes_ == {"eager/plain/write": "crash", "cached/plain/write": "ok"}
    assert entry["conditions"]["default"]["details"] == {"with malloc checks: SIGABRT": ["eager/plain/write"]}


def test_wrong_values_are_told_from_rounding():
    """An operator that computes something else than its FP32 self: two runs of different samples."""
    right = sample("_mul_scalar", low(4, 4), scalar=2.0)
    judge = Judge(right, "float16", "float16", "cpu(0)")
    mode = modes.Mode("plain", "write", "cached")
    assert judge.run(mode).verdict == "ok"
    judge.item = sample("_mul_scalar", low(4, 4), scalar=2.5)
    result = judge.run(mode)
    assert result.verdict == "wrong"
    assert result.detail.startswith(("output 0 off by", "gradient of input 0 off by"))


def test_float16_on_the_cpu_reports_missing_kernels():
    mode = modes.Mode("plain", "infer", "eager")
    assert Judge(samples_of("relu")[0], "float16", "float16", "cpu(0)").run(mode).verdict == "ok"
    result = Judge(samples_of("dot")[0], "float16", "float16", "cpu(0)").run(mode)
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
    assert page.markdown(committed) == MARKDOWN.read_text()


@pytest.mark.bf16
def test_update_keeps_other_operators(committed, tmp_path):
    path = tmp_path / "audit.json"
    changed = json.loads(JSON.read_text())
    changed["operators"]["relu"]["conditions"]["default"]["verdict"] = "unknown"
    changed["operators"]["abs"]["conditions"]["default"]["verdict"] = "kept"
    results.write(path, changed)
    assert command.main(["--ops", "relu", "--update", "--json", str(path)]) == 0
    found = results.read(path)["operators"]
    assert found["relu"] == committed["operators"]["relu"]
    assert found["abs"]["conditions"]["default"]["verdict"] == "kept"


def test_json_is_written_as_it_is_read(committed, tmp_path):
    results.write(tmp_path / "audit.json", committed)
    assert (tmp_path / "audit.json").read_text() == JSON.read_text()


def test_committed_audit_covers_every_operator_and_sample(committed):
    assert sorted(committed["operators"]) == [op for op in results.forward_operators() if op not in CUDA_ONLY]
    for op in sampled_operators():
        found = committed["operators"][op]["conditions"]
        assert list(found) == [item.condition for item in samples_of(op)]
        for item in samples_of(op):
            assert found[item.condition]["inputs"] == item.signature
            assert list(found[item.condition]["modes"]) == [str(m) for m in modes.modes_for(item, "bfloat16", "cpu")]


def test_reasons_are_those_of_the_committed_audit(committed):
    assert {op: entry for op, entry in committed["operators"].items() if "conditions" not in entry} == \
        {op: entry for op, entry in results.not_applicable().items() if op not in CUDA_ONLY}


@pytest.mark.bf16
def test_fast_part_of_the_audit_agrees_with_the_committed_result(committed, tmp_path):
    path = tmp_path / "audit.json"
    subprocess.run([sys.executable, command.__file__, "--ops", ",".join(FAST), "--jobs", "2", "--json",
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
    done = subprocess.run([sys.executable, audit_runners.__file__, "transpose", "axes=(0, 2, 3, 1)"], check=True,
                          env={**os.environ, **command.malloc_checks()}, capture_output=True, text=True, timeout=300)
    assert set(done.stdout.split()) <= bad
    assert done.stdout.strip()
    then = committed["operators"]["transpose"]["conditions"]
    assert {result["verdict"] for result in then.values() if result["inputs"].count(",") < 4} <= bad
