"""The benchmarks of several networks: how they divide, compare and report, and real runs of tiny networks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cpu_kinds import in_bfloat16
from test_benchmark_cli import Fakes, Silent, fakes  # noqa: F401

from benchmarks import bench, inference, machines, training
from benchmarks.harness import cli, commands, least, machine, onednn, outputs, registry, sizes, suites, tables
from benchmarks.harness.compare import Plan, compare
from benchmarks.harness.errors import Refused, UsageError
from benchmarks.harness.stats import percentiles
from benchmarks.networks import tasks

ROOT = Path(__file__).resolve().parents[2]
COMMON = {"device": "cpu", "dtype": None, "seed": 0, "threads": 1, "small": True}


def run_script(name, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def run_suite(name, path, *arguments):
    result = run_script(name, "--small", "--threads", "1", "--json", str(path), *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(path.read_text())


# the registry


def test_a_name_may_carry_a_number_of_threads():
    assert registry.implementation("amp@1").label == "gluon_amp, 1 thread"
    assert registry.implementation("fp32@4").threads == 4
    assert commands.command("training", "fp32@4", {}).environment == {"OMP_NUM_THREADS": "4"}
    for name in ("amp@", "amp@0", "amp@two"):
        with pytest.raises(UsageError, match="expected a number of threads behind amp@"):
            registry.implementation(name)


def test_a_name_may_leave_a_pass_out():
    row = registry.implementation("amp~fuse@1")
    assert (row.label, row.threads, row.disabled_pass) == ("gluon_amp, without fuse, 1 thread", 1, "fuse")
    registry.check("inference", "amp~fuse@1")
    for name in ("amp~", "fp32~fuse", "torch~fuse"):
        with pytest.raises(UsageError, match="expected the name of a pass of gluon_amp"):
            registry.implementation(name)


def test_every_implementation_is_for_some_workload():
    assert set(registry.names("training")) | set(registry.names("inference")) == {
        row.name for row in registry.IMPLEMENTATIONS}
    with pytest.raises(UsageError, match="fp32-optimized is not for training; known: fp32, amp"):
        registry.check("training", "fp32-optimized")
    with pytest.raises(UsageError, match="torch is not for inference"):
        registry.check("inference", "torch")


def test_pytorch_has_an_interpreter_of_its_own(monkeypatch):
    monkeypatch.setenv("TORCH_PYTHON", "/somewhere/python")
    assert commands.command("training", "torch", {}).argv[0] == "/somewhere/python"
    assert commands.command("training", "fp32", {}).argv[0] == sys.executable
    monkeypatch.setenv("IPEX_PYTHON", "/elsewhere/python")
    assert commands.command("training", "ipex", {}).argv[0] == "/elsewhere/python"
    monkeypatch.setattr(commands, "peer_python", lambda _: None)
    with pytest.raises(UsageError, match="torch-amp needs torch: name an interpreter that has it in TORCH_PYTHON"):
        commands.command("training", "torch-amp", {})


def test_pytorch_stops_at_the_instruction_set_that_mxnet_stops_at(monkeypatch):
    monkeypatch.setenv("TORCH_PYTHON", "/somewhere/python")
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert commands.command("training", "torch", {}).environment == {"ATEN_CPU_CAPABILITY": "avx2"}
    assert commands.command("training", "fp32", {}).environment == {}


@pytest.mark.parametrize(("bfloat16", "amx", "expected"), [
    (False, False, ["fp32", "amp", "mxnet-amp", "torch", "torch-compiled"]),
    (True, False, ["fp32", "amp", "mxnet-amp", "torch", "torch-compiled", "torch-amp", "torch-amp-compiled"]),
    (True, True, ["fp32", "amp", "mxnet-amp", "mxnet-amp-amx", "torch", "torch-compiled", "torch-amp",
                  "torch-amp-compiled"]),
])
def test_what_is_measured_by_default_follows_the_machine(bfloat16, amx, expected, monkeypatch):
    monkeypatch.setattr(commands, "peer_python", lambda name: None if name == "ipex" else "python")
    monkeypatch.setattr(machine, "has_bfloat16", lambda: bfloat16)
    monkeypatch.setattr(machine, "has_amx", lambda: amx)
    assert [name for name in registry.names("training") if commands.runs_here(name)] == expected


@pytest.mark.parametrize("module", ["backends", "amp_backends"])
def test_only_the_backends_of_gluon_amp_import_it(module):
    code = f"import sys; import benchmarks.harness.{module}; print('gluon_amp' in sys.modules)"
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == str(module == "amp_backends"), result.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (training, ["--networks", "resnet5"], "unknown network 'resnet5'; did you mean resnet50"),
        (training, ["--compare", "fp32-optimized"], "fp32-optimized is not for training"),
        (inference, ["--compare", "torch"], "torch is not for inference"),
        (inference, ["--batch-sizes", "1,none"], "--batch-sizes: expected integers of at least 1, received '1,none'"),
        (inference, ["--batch-sizes", "0"], "--batch-sizes: expected integers of at least 1, received '0'"),
        (training, ["--markdown", "no/such/folder/x.md"], "its folder does not exist"),
        (training, ["--rounds", "0"], "--rounds: expected an integer of at least 1"),
        (bench, ["--only", "trainin"], "unknown part 'trainin'; did you mean training"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_code_2(script, arguments, message, capsys):
    assert cli.main(script.run, arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


# sizes and tasks


def test_processes_are_divided_where_the_memory_does_not_hold_all():
    cost = sizes.Cost(base_bytes=1e9, sample_bytes=1e9)
    shares = {"ours": 0.5, "fp32": 1.0, "peer": 1.0, "huge": 9.0}
    assert sizes.groups(cost, 80e9, shares, 4, "ours") == [["ours", "fp32", "peer", "huge"]]
    assert sizes.groups(cost, 10e9, shares, 4, "ours") == [["ours", "fp32"], ["ours", "peer"]]
    assert sizes.groups(cost, 0, shares, 4, "ours") == [["ours", "fp32", "peer", "huge"]]
    assert sizes.groups(cost, 10e9, {"ours": 0.5}, 4, "ours") == [["ours"]]


@pytest.mark.parametrize("network", tasks.SIZES)
def test_tasks_are_the_same_for_the_same_seed(network):
    numbers = tasks.size(network, small=True)
    first, again, other = (tasks.batch(numbers, 3, seed) for seed in (0, 0, 1))
    for one, two in zip((*first.inputs, *first.labels), (*again.inputs, *again.labels)):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first.inputs[0], other.inputs[0])
    assert set(sizes.COSTS) == set(tasks.SIZES)


def test_a_masked_task_says_which_tokens_count():
    tokens, segments, mask = tasks.batch(tasks.size("encoder_masked"), 5, 0).inputs
    assert tokens.shape == segments.shape == mask.shape == (5, 128)
    assert (np.diff(mask, axis=1) <= 0).all()
    assert 64 <= mask.sum(1).min() < 128


# figures


def test_percentiles_are_measured_values():
    values = [float(value) for value in range(1, 101)]
    assert percentiles(values) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}


def test_errors_are_relative_to_the_largest_output_and_the_worst_output_counts():
    expected = [np.array([[0.0, 2.0], [4.0, 1.0]]), np.array([[1.0, 0.0]])]
    found = [np.array([[0.0, 2.0], [0.0, 1.0]]), np.array([[1.5, 0.0]])]
    assert outputs.difference(expected, found) == {"max_error": 1.0, "mean_error": 0.25, "top1": 0.5}
    assert outputs.difference(expected, expected) == {"max_error": 0.0, "mean_error": 0.0, "top1": 1.0}


LOG = """dnnl_verbose,info,cpu,runtime:OpenMP
dnnl_verbose,exec,cpu,convolution,jit:avx512_core_amx_bf16,backward_data,src_bf16::blocked:acdb:f0 \
wei_bf16::blocked:ABcd16a16b2a:f0 bia_undef::undef::f0 dst_bf16::blocked:acdb:f0,,alg:convolution_direct,\
mb2_ic8oc16_ih5oh5kh3sh1dh0ph1_iw5ow5kw3sw1dw0pw1,2.5
something else
dnnl_verbose,exec,cpu,batch_normalization,bnorm_jit:avx512_common,forward_training,data_f32::blocked:aBcd16b:f0 \
diff_undef::undef::f0,,flags:S,mb2ic16ih4iw4,0.5
dnnl_verbose,exec,cpu,reorder,jit:uni,undef,src_f32::blocked:abcd:f0 dst_bf16::blocked:acdb:f0,,,2x3x4x5,1.0
"""


def test_onednns_log_is_read():
    convolution, norm, reorder = onednn.executions(LOG)
    assert convolution.tensors == "src_bf16:acdb wei_bf16:ABcd16a16b2a dst_bf16:acdb"
    assert (convolution.direction, convolution.seconds, convolution.precision) == ("backward_data", 0.0025, "bf16")
    assert convolution.gflop == pytest.approx(2 * 2 * 8 * 16 * 5 * 5 * 3 * 3 / 1e9)
    assert (norm.gflop, norm.precision) == (0.0, "f32")
    assert norm.gigabytes == pytest.approx(2 * 16 * 4 * 4 * (4 + 4) / 1e9)
    assert reorder.gigabytes == pytest.approx(2 * 3 * 4 * 5 * (4 + 2) / 1e9)


def test_primitives_are_added_up_against_the_ceilings():
    runs = list(onednn.executions(LOG)) * 2
    text = onednn.table_of(runs, 0.016, ["primitive"], {"f32": 1.0, "bf16": 0.1, "memory": 1.0})
    rows = {cells[1]: cells[2:] for cells in ([cell.strip() for cell in line.split("|")] for line in text.splitlines())}
    assert rows["convolution"][:3] == ["2", "5.0", "31%"]
    assert rows["convolution"][4] == "46% of bf16"  # 115200 operations in 2.5 ms
    assert rows["outside oneDNN"][1:3] == ["8.0", "50%"]


def test_outputs_without_any_difference_are_not_called_right():
    with pytest.raises(ValueError, match=r"received 4 times 1\.0"):
        outputs.difference([np.ones((2, 2))], [np.ones((2, 2))])


# suites, with children that only pretend


@pytest.fixture
def pretend(fakes, monkeypatch):  # noqa: F811
    trouble: dict[str, str] = {}
    seconds = {"fp32": 0.4, "amp": 0.2, "mxnet-amp": 0.8}
    monkeypatch.setattr(suites, "command", lambda _, name, __: fakes.command(name, seconds[name],
                                                                            trouble.get(name, "none")))
    return trouble


def measured(*names):
    suite = suites.Suite("training", {"resnet50": (2,)})
    return suites.measure(suite, "resnet50", 2, names, COMMON, Plan(rounds=1, warmup=1, steps=1), Silent())


def test_those_that_cannot_run_are_left_out_and_noted(pretend):
    pretend.update({"fp32": "crash", "mxnet-amp": "refuse"})
    result = measured("fp32", "amp", "mxnet-amp")
    assert [track.name for track in result.comparisons[0].tracks] == ["amp"]
    assert result.failures == {"fp32": "fp32: ended with exit code 1: the bottom fell out",
                               "mxnet-amp": "no such thing here"}


def test_groups_share_ours_and_speeds_go_by_way_of_it(pretend, monkeypatch):
    monkeypatch.setattr(sizes, "groups", lambda *_: [["amp", "fp32"], ["amp", "mxnet-amp"]])
    result = measured("fp32", "amp", "mxnet-amp")
    assert [[track.name for track in each.tracks] for each in result.comparisons] == [["fp32", "amp"],
                                                                                     ["amp", "mxnet-amp"]]
    record = json.loads(json.dumps(result.as_dict()))
    assert tables.ratio(record, "mxnet-amp", "fp32") is None
    assert tables.speed_against(record, "mxnet-amp", "fp32") == pytest.approx(0.5)
    assert tables.speed_against(record, "fp32", "fp32") == 1.0


def test_what_does_not_fit_the_memory_is_said(pretend, monkeypatch):
    monkeypatch.setattr(sizes, "groups", lambda *_: [["amp", "fp32"]])
    assert measured("fp32", "amp", "mxnet-amp").failures == {"mxnet-amp": "does not fit the memory"}


def test_tables_and_plot_of_training(pretend, tmp_path):
    pytest.importorskip("matplotlib")
    pretend["mxnet-amp"] = "refuse"
    record = {"workload": "training", "results": [measured("fp32", "amp", "mxnet-amp").as_dict()]}
    text = tables.suite(json.loads(json.dumps(record)))
    assert "| network | batch | gluon_amp | MXNet FP32 | mxnet.contrib.amp |" in text
    assert "| ResNet-50 v1 | 2 | 200 ms | 400 ms, **2.00x** (2.00-2.00) | fails |" in text
    assert "| ResNet-50 v1 | 2 | 200 MB, 0.50x | 400 MB | fails |" in text
    assert "- ResNet-50 v1, batch 2, mxnet.contrib.amp: no such thing here" in text
    tables.plot(record, str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# the least ratio


def suite_of(*ratios, name="training", dtype="bfloat16"):
    """Give a suite of one row whose rounds have these ratios of gluon_amp to FP32."""
    def track(which, seconds, dtype="float32"):
        spread = {"median": sorted(seconds)[len(seconds) // 2], "low": min(seconds), "high": max(seconds)}
        return {"name": which, "turns": [[value] for value in seconds], "about": {"dtype": dtype, "versions": {}},
                "seconds_per_step": spread, "peak_memory": 1}

    ordered = sorted(ratios)
    middle = {"median": ordered[len(ratios) // 2], "low": ordered[0], "high": ordered[-1]}
    comparison = {"implementations": [track("fp32", list(ratios)), track("amp", [1.0] * len(ratios), dtype)],
                  "speed_ratios": {"amp vs fp32": middle}}
    return {"workload": name, "skipped": [], "settings": {"threads": 2},
            "results": [{"network": "lstm", "batch_size": 4, "comparisons": [comparison], "failures": {}}]}


def test_the_least_ratio_is_named_and_nothing_fails_above_one():
    text, failures = least.verdict([suite_of(1.2, 1.3, 1.1), suite_of(1.05, 1.5, 1.04, name="inference")])
    assert failures == []
    assert text == ("Least ratio of gluon_amp to MXNet FP32 of 2 rows: LSTM, inference, batch 4, bfloat16: 1.05x "
                    "(1.04-1.50), below 1.0 in 0 of 3 rounds")


def test_a_row_below_one_is_measured_again_before_it_fails():
    suite, asked = suite_of(0.8, 0.9, 1.1), []

    def again(*ratios):
        comparison = suite_of(*ratios)["results"][0]["comparisons"][0]
        return lambda result, seconds: asked.append(result["network"]) or comparison

    least.measure_low_rows_again(suite, again(*[1.1] * 15))
    assert asked == ["lstm"]
    assert least.verdict([suite])[1] == []
    least.measure_low_rows_again(suite, again(*[0.9] * 15))
    assert asked == ["lstm"]  # it is not low any more
    del suite["results"][0]["again"]
    least.measure_low_rows_again(suite, again(*[0.9] * 12, *[1.1] * 3))
    assert least.verdict([suite])[1] == ["slower than FP32: LSTM, training, batch 4, bfloat16: 0.90x (0.90-1.10), "
                                          "below 1.0 in 12 of 15 rounds, measured again"]


def test_the_plain_median_decides():
    assert least.verdict([suite_of(*[0.97] * 9, *[1.02] * 6)])[1] == [
        "slower than FP32: LSTM, training, batch 4, bfloat16: 0.97x (0.97-1.02), below 1.0 in 9 of 15 rounds"]
    assert least.verdict([suite_of(*[0.97] * 7, *[1.02] * 8)])[1] == []


def test_a_row_without_a_ratio_is_a_failure_and_one_without_time_is_not():
    suite = suite_of(1.2)
    suite["results"].append({"network": "vgg16", "batch_size": 1, "comparisons": [], "failures": {"amp": "it broke"}})
    suite["skipped"].append(["encoder", 16])
    text, failures = least.verdict([suite])
    assert failures == ["not compared with FP32: VGG-16, training, batch 1: it broke"]
    assert "Not measured, the time was over: encoder, training, batch 16" in text


def test_the_benchmark_fails_after_everything_is_written(tmp_path, monkeypatch, capsys):
    part = bench.Part("Training", lambda args, end: suite_of(*[0.5] * 15), str, share=1.0)
    monkeypatch.setattr(bench, "PARTS", {"training": part})
    monkeypatch.setattr(bench, "_PLOTTED", ())
    assert cli.main(bench.run, ["--output", str(tmp_path)]) == 1
    assert "slower than FP32: LSTM, training, batch 4" in capsys.readouterr().err
    written = (tmp_path / "bench.md").read_text()
    assert "Least ratio of gluon_amp to MXNet FP32 of 1 rows: LSTM" in written
    assert "| training | LSTM | 4 | bfloat16 | 1.00 s | **0.50x** (0.50-0.50) |" in written
    assert cli.main(bench.run, ["--output", str(tmp_path), "--small"]) == 0  # tiny networks prove nothing


def test_a_run_divides_its_time():
    plan = Plan(budget=60.0)
    assert suites.share_of(plan, float("inf"), [1.0] * 3) is plan
    assert suites.share_of(plan, 0.0, [1.0] * 3) is None
    assert suites.share_of(plan, 300.0, [3.0, 1.0, 1.0]).limit == pytest.approx(234.0)
    share = suites.share_of(plan, 300.0, [1.0] * 3)
    assert (share.budget, share.limit, set(share.keep)) == (60.0, 130.0, {"fp32", "amp"})
    assert suites.share_of(plan, 300.0, [1.0] * 30, [1.0] * 10).limit == pytest.approx(30.0)
    for total in (100.0, 1200.0, 7200.0):
        slots = bench.slots(list(bench.PARTS), total)
        assert sum(slots.values()) == pytest.approx(total)
        assert slots["training"] + slots["inference"] > 0.6 * total
    assert slots["primitives"] == 100.0
    assert bench.slots(["eager_overhead"], 1000.0) == {"eager_overhead": 40.0}


def test_only_the_largest_batch_is_compiled_unless_asked_for():
    suite = suites.Suite("training", {"resnet50": (2, 4)})
    args = suites.parser(suite, None).parse_args([])
    assert suites._of_row(["amp", "torch", "torch-compiled"], args, False) == ["amp", "torch"]
    assert suites._of_row(["amp", "torch", "torch-compiled"], args, True) == ["amp", "torch", "torch-compiled"]
    args.compare = "torch-compiled"
    assert suites._of_row(["torch-compiled"], args, False) == ["torch-compiled"]


def two_networks(fakes, monkeypatch, compared):  # noqa: F811
    """Return a suite of two networks, and the arguments of its shortest run with pretended processes."""
    monkeypatch.setattr(suites, "command", lambda _, name, __: fakes.command(name, 0.1))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    suite = suites.Suite("training", {"resnet50": (2,), "lstm": (2,)})
    return suite, suites.parser(suite, None).parse_args(["--small", "--threads", "1", "--rounds", "1", "--steps", "1",
                                                         "--warmup", "1", "--compare", compared])


def test_what_compiles_does_so_before_the_rows_as_far_as_there_is_time(fakes, monkeypatch):  # noqa: F811
    suite, args = two_networks(fakes, monkeypatch, "amp,torch-compiled")
    now = [0.0]
    monkeypatch.setattr(suites, "monotonic", lambda: now[0])
    monkeypatch.setattr(suites, "compare", lambda *given: now.__setitem__(0, now[0] + 15.0) or compare(*given))
    record = suites.run(suite, args, end=100.0)
    slow, quick = record["results"]
    reason = "not compiled: torch-compiled: the time for compilation was over"
    assert slow["failures"] == {"torch-compiled": reason}
    assert quick["failures"] == {}
    text = tables.suite(json.loads(json.dumps(record)))
    assert "| ResNet-50 v1 | 2 | 100 ms | no time |" in text
    assert f"- ResNet-50 v1, batch 2, PyTorch FP32, compiled: {reason}\n" in text
    assert "fails" not in text
    assert fakes.lines[:2] == ["torch-compiled 1", "torch-compiled stop"]


def test_rows_without_time_are_skipped(pretend, monkeypatch, capsys):
    suite = suites.Suite("training", {"resnet50": (2, 4)})
    args = suites.parser(suite, None).parse_args(["--small", "--threads", "1", "--rounds", "1", "--steps", "1",
                                                  "--compare", "fp32,amp"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    moments = iter([0.0, 200.0])
    monkeypatch.setattr(suites, "monotonic", lambda: next(moments))
    record = suites.run(suite, args, end=100.0)
    assert [each["batch_size"] for each in record["results"]] == [2]
    assert record["skipped"] == [["resnet50", 4]]


def test_a_run_that_ends_in_time_compares_every_network_with_fp32_before_any_peer(fakes, monkeypatch):  # noqa: F811
    suite, args = two_networks(fakes, monkeypatch, "fp32,amp,mxnet-amp,torch")
    record = suites.run(suite, args, end=suites.monotonic() + 1000.0)
    compared = [[[track["name"] for track in each["implementations"]] for each in result["comparisons"]]
                for result in record["results"]]
    assert compared == [[["fp32", "amp"], ["amp", "mxnet-amp", "torch"]]] * 2
    stops = [line.split()[0] for line in fakes.lines if line.endswith("stop")]
    assert stops.index("torch") > 3
    assert [result["comparisons"][1]["settings"]["batch_size"] for result in record["results"]] == [2, 2]
    assert record["skipped"] == []


def test_no_network_takes_the_time_in_which_another_is_compared_with_fp32(fakes, monkeypatch):  # noqa: F811
    suite, args = two_networks(fakes, monkeypatch, "fp32,amp,mxnet-amp,torch")
    clock, plans = [0.0], []

    def takes_all_it_may(suite, network, batch_size, names, common, plan, *_):
        plans.append((len(names), plan.limit))
        clock[0] += plan.limit
        return suites.Result(network, batch_size, {})

    monkeypatch.setattr(suites, "monotonic", lambda: clock[0])
    monkeypatch.setattr(suites, "measure", takes_all_it_may)
    suites.run(suite, args, end=1000.0)
    pairs = [limit for number, limit in plans if number == 2]
    assert pairs == pytest.approx([500.0, 500.0])


def test_peers_of_what_is_quick_come_before_those_of_what_is_slow():
    suite = suites.TRAINING
    rows = [suites.Row(network, size, ["fp32", "amp", "torch"]) for network in ("ssd512", "lstm") for size in (8, 1)]
    turns = [(row.place, len(row.names)) for row in suites._by_importance(suite, rows, small=False)]
    assert turns[:4] == [(row.place, 2) for row in rows]
    assert [place for place, _ in turns[4:]] == [("lstm", 1), ("lstm", 8), ("ssd512", 1), ("ssd512", 8)]


def test_the_fastest_of_pytorch_is_named(fakes, monkeypatch):  # noqa: F811
    seconds = {"fp32": 0.4, "amp": 0.2, "torch": 0.3, "torch-compiled": 0.1}
    monkeypatch.setattr(suites, "command", lambda _, name, __: fakes.command(name, seconds[name]))
    record = json.loads(json.dumps(measured(*seconds).as_dict()))
    assert tables.fastest_peer(record) == "torch-compiled"
    suite = {"workload": "training", "results": [record], "settings": {"threads": 1}}
    assert "| fastest PyTorch |\n" in tables.suite(suite)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    section = tables.machine_section(machine.describe(), {"mxnet": "1.9.1"}, [suite], 120.0)
    assert section.startswith("### AVX2\n")
    assert "imitated by `DNNL_MAX_CPU_ISA=AVX2`" in section
    assert "| **0.50x** (0.50-0.50) | PyTorch FP32, compiled |" in section


def test_the_sections_of_machines_go_into_the_page(tmp_path, monkeypatch, capsys):
    record = {"machine": machine.describe(), "versions": {}, "seconds": 60.0, "parts": {"training": suite_of(1.5)}}
    (tmp_path / "bench.json").write_text(json.dumps(record))
    page = tmp_path / "README.md"
    page.write_text(f"before\n{machines.BEGIN}\nold\n{machines.END}\nafter\n")
    monkeypatch.setattr(machines, "README", page)
    assert cli.main(machines.run, [str(tmp_path), "--write"]) == 0
    text = page.read_text()
    assert "old" not in text
    assert "| **1.50x** (1.50-1.50) |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert cli.main(machines.run, [str(tmp_path / "nowhere")]) == 2
    assert machines.BEGIN in (ROOT / "benchmarks" / "README.md").read_text()


def test_a_child_that_refuses_says_who_it_is(fakes):  # noqa: F811
    result = compare([fakes.command("b", trouble="refuse")], Plan(rounds=1), Silent())
    assert isinstance(result.failures["b"], Refused)
    assert result.failures["b"].name == "b"


def test_the_report_of_everything_is_written_after_every_part(tmp_path, monkeypatch, capsys):
    figure = {"figure": 1}
    parts = {"one": bench.Part("First", lambda args, end: figure, lambda part: f"figure {part['figure']}\n", 9.0),
             "two": bench.Part("Second", lambda args, end: 1 / 0, str, share=0.5)}
    monkeypatch.setattr(bench, "PARTS", parts)
    with pytest.raises(ZeroDivisionError):
        cli.main(bench.run, ["--output", str(tmp_path / "out"), "--only", "one,two"])
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["parts"] == {"one": {"figure": 1}}
    assert "## First\n\nfigure 1\n" in (tmp_path / "out" / "bench.md").read_text()


def test_results_measured_earlier_are_kept(tmp_path, monkeypatch, capsys):
    def part(*batch_sizes):
        return {"results": [{"network": "lstm", "batch_size": size, "at": len(batch_sizes)} for size in batch_sizes]}

    answers = [part(1, 8), part(8)]
    measured_part = bench.Part("Training", lambda args, end: answers.pop(0), str, share=1.0)
    monkeypatch.setattr(bench, "PARTS", {"training": measured_part})
    monkeypatch.setattr(bench, "_suites", lambda parts: [])
    monkeypatch.setattr(bench, "_PLOTTED", ())
    path = tmp_path / "bench.json"
    assert cli.main(bench.run, ["--output", str(tmp_path)]) == 0
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": 600.0}))
    assert cli.main(bench.run, ["--output", str(tmp_path), "--add"]) == 0
    written = json.loads(path.read_text())
    assert [(each["batch_size"], each["at"]) for each in written["parts"]["training"]["results"]] == [(1, 2), (8, 1)]
    assert 600.0 < written["seconds"] < 660.0  # the time of both


def test_a_part_that_fails_fails_the_benchmark(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_HERE", tmp_path)
    (tmp_path / "eager_overhead.py").write_text("raise SystemExit(3)")
    assert cli.main(bench.run, ["--output", str(tmp_path / "out"), "--only", "eager_overhead"]) == 1
    assert "eager_overhead: ended with exit code 3" in capsys.readouterr().err


# the real thing, with tiny networks


def test_fp32_trains_in_the_training_suite(tmp_path):
    text, record = run_suite("training", tmp_path / "out.json", "--networks", "encoder_masked", "--batch-sizes", "2",
                             "--compare", "fp32", "--rounds", "1", "--steps", "5")
    (track,) = record["results"][0]["comparisons"][0]["implementations"]
    losses = [each["CrossEntropy"] for each in track["losses"]]
    assert losses[-1] < losses[0]
    assert "| encoder, masked | 2 |" in text


def test_optimised_fp32_computes_what_fp32_does(tmp_path):
    _, record = run_suite("inference", tmp_path / "out.json", "--networks", "mobilenet_v2", "--batch-sizes", "1",
                             "--compare", "fp32,fp32-optimized", "--rounds", "1", "--steps", "2")
    fp32, optimised = record["results"][0]["comparisons"][0]["implementations"]
    assert fp32["saved"]["max_error"] == 0.0
    assert 0.0 < optimised["saved"]["max_error"] < 1e-4
    assert optimised["saved"]["top1"] == 1.0
    assert 0.9 < optimised["saved"]["parameter_file"] / fp32["saved"]["parameter_file"] < 1.1
    assert set(fp32["latency"]) == {"p50", "p90", "p99"}


@pytest.mark.slow
@in_bfloat16
def test_all_implementations_of_inference_agree(tmp_path):
    _, record = run_suite("inference", tmp_path / "out.json", "--networks", "resnet50,ssd512,encoder",
                          "--batch-sizes", "2", "--rounds", "1", "--steps", "1")
    for result in record["results"]:
        assert result["failures"] == {}
        for track in result["comparisons"][0]["implementations"]:
            exact = track["name"].startswith("fp32")
            assert track["saved"]["mean_error"] < (1e-5 if exact else 0.03), (result["network"], track["name"])
            assert exact or track["saved"]["max_error"] > 0  # otherwise it compares nothing


@pytest.mark.slow
@in_bfloat16
def test_the_primitives_of_a_step_fill_most_of_it(tmp_path):
    path = tmp_path / "out.json"
    result = run_script("primitives", "--network", "vgg16", "--workload", "inference", "--small", "--batch-size", "2",
                        "--threads", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    record = json.loads(path.read_text())
    seconds = sum(each["seconds"] for each in record["primitives"])
    assert 0.2 * record["seconds"] < seconds <= 1.05 * record["seconds"]
    assert {"convolution", "inner_product"} <= {each["primitive"] for each in record["primitives"]}
    assert record["ceilings"]["bf16"] > 0


needs_torch = pytest.mark.skipif(commands.peer_python("torch") is None, reason="no interpreter with PyTorch")

SHAPES = """
import json, sys
from benchmarks.networks import tasks, torch_networks
network = sys.argv[1]
net = torch_networks.SSD() if network == "ssd512" else torch_networks.create(network, tasks.size(network, True))
print(json.dumps(sorted(list(each.shape) for each in net.parameters())))
"""


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("network", suites.TRAINING.batch_sizes)
def test_the_networks_of_both_frameworks_have_the_same_parameters(network):
    import gluon_amp  # noqa: F401 - before mxnet

    # isort: split
    import mxnet as mx

    from benchmarks.networks.gluon_networks import create

    numbers = tasks.size(network, small=True)
    net = create(network, numbers, 0)
    batch = tasks.batch({**numbers, "side": 64} if network == "ssd512" else numbers, 2, 0)
    net(*(mx.nd.array(each, dtype=each.dtype) for each in batch.inputs))
    theirs = sorted(list(each.shape) for each in net.collect_params().values() if each.grad_req != "null")
    command = [commands.peer_python("torch"), "-c", SHAPES, network]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert json.loads(run.stdout) == theirs, run.stderr


@needs_torch
@pytest.mark.slow
def test_pytorch_trains_too(tmp_path):
    _, record = run_suite("training", tmp_path / "out.json", "--batch-sizes", "2", "--compare", "torch,torch-amp",
                          "--rounds", "1", "--steps", "6")
    for result in record["results"]:
        assert result["failures"] == {}
        for track in result["comparisons"][0]["implementations"]:
            losses = [sum(each.values()) for each in track["losses"]]
            assert losses[-1] < losses[0], (result["network"], track["name"])
