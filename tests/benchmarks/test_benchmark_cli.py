"""The SSD benchmark: its errors, its statistics, the driver that takes turns, and one real tiny run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Mapping

import pytest

from benchmarks import choice, ssd_synthetic
from benchmarks.harness import cli, machine, report, sizes
from benchmarks.harness.children import Child, ChildCommand
from benchmarks.harness.compare import Comparison, Plan, Track, affordable_rounds, compare, steps_per_turn
from benchmarks.harness.errors import ChildFailed, UsageError, unknown
from benchmarks.harness.stats import Spread, round_ratios, spread

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--network", "ssd_300_mobilenet0.25_voc", "--data-shape", "64", "--batch-size", "1", "--threads", "1"]

# Answers the protocol; every turn is logged with its number of steps, and takes the seconds it was given.
FAKE_CHILD = """
import json, sys, time
name, log, seconds, trouble = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]

def answer(**message):
    print(json.dumps(message), flush=True)

if trouble == "refuse":
    answer(event="refused", message="no such thing here")
    sys.exit(2)
answer(event="ready", about={"samples_per_step": 2, "dtype": "fake"})
for line in sys.stdin:
    command = json.loads(line)
    with open(log, "a") as file:
        file.write(f"{name} {command.get('steps', command['command'])}\\n")
    if command["command"] == "stop":
        break
    if trouble == "crash":
        sys.exit("the bottom fell out")
    if trouble == "hang":
        continue
    if trouble == "chatter":
        print("hello", flush=True)
    if command["command"] == "save":
        time.sleep(1.5)
        answer(event="save", parameter_file=1)
        continue
    steps = command["steps"]
    losses = [{"loss": 1.0}] * steps
    answer(event="run", seconds=[seconds] * steps, losses=losses, peak_memory=int(1e9 * seconds))
"""


class Silent:
    """Collects what the driver says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.turns: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def total(self, turns: int) -> None:
        self.planned = turns

    def turn(self, name: str, seconds: float) -> None:
        self.turns.append(name)


class Fakes:
    """Makes commands for fake children that share a log."""

    def __init__(self, folder: Path):
        self.script = folder / "fake_child.py"
        self.script.write_text(FAKE_CHILD)
        self.log = folder / "log"
        self.log.touch()

    def command(self, name: str, seconds: float = 0.5, trouble: str = "none") -> ChildCommand:
        return ChildCommand(name, [sys.executable, str(self.script), name, str(self.log), str(seconds), trouble])

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


def run_benchmark(*arguments: str, extra: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    script = str(ROOT / "benchmarks" / "ssd_synthetic.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(extra or {})}
    command = [sys.executable, script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


# what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "--budget: expected a number above 0, received 0"),
        (["--batch-size", "0"], "--batch-size: expected an integer of at least 1, received 0"),
        (["--batch-size", "many"], "--batch-size: expected an integer of at least 1, received many"),
        (["--data-shape", "-5"], "--data-shape: expected an integer of at least 1, received -5"),
        (["--warmup", "-1"], "--warmup: expected an integer of at least 0, received -1"),
        (["--device", "tpu"], "--device: expected cpu, gpu or gpu:1, received 'tpu'"),
        (["--compare", "fp32,apm"], "unknown implementation 'apm'; did you mean amp?"),
        (["--compare", "fp32,fp32"], "expected different names"),
        (["--compare", ","], "expected different names"),
        (["--compare", "fp32", "--amp"], "--amp goes without --compare"),
        (["--data", "folder", "--compare", "fp32"], "--data goes without --compare"),
        (["--data", "folder", "--plot", "plot.png"], "--data goes without --plot"),
        (["--json", "no/such/folder/out.json"], "its folder does not exist"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, message, capsys):
    assert cli.main(ssd_synthetic.run, arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--network", "ssd_512_resnet50_v1_coc"], "did you mean ssd_512_resnet50_v1_coco"),
        (["--device", "gpu:97"], "no device 'gpu:97'"),
        (["--network", "ssd_300_vgg16_atrous_voc", "--data-shape", "32"], "data shape 32 is not possible"),
        (["--amp", "--dtype", "bfloat61"], "bfloat61"),
        (["--data", "no/such/folder"], "there is no directory no/such/folder"),
    ],
)
def test_what_only_mxnet_can_refuse(arguments, message):
    pytest.importorskip("gluoncv")
    result = run_benchmark("--batch-size", "1", *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_machine_without_bfloat16_is_refused_in_gluon_amps_words():
    pytest.importorskip("gluoncv")
    flags = ["--compare", "amp", "--dtype", "bfloat16", *SMALL]
    result = run_benchmark(*flags, extra={"DNNL_MAX_CPU_ISA": "AVX2"})
    assert result.returncode == 2, result.stderr
    assert "needs a CPU with AVX512" in result.stderr
    assert "Traceback" not in result.stderr


def test_unknown_names_without_a_close_one_are_listed():
    assert str(unknown("network", "xyz", ["alpha", "beta"])) == "unknown network 'xyz'; known: alpha, beta"


# statistics


def test_spread():
    assert spread([4.0, 1.0, 3.0, 2.0]) == Spread(median=2.5, low=1.0, high=4.0, count=4)
    with pytest.raises(ValueError, match="at least one"):
        spread([])


def test_ratios_are_taken_within_each_round():
    # the second round was slow for both: the ratio of the medians, 3/1.5, would not say 2.0 for every round
    assert round_ratios([2.0, 10.0, 3.0], [1.0, 5.0, 1.5]) == Spread(2.0, 2.0, 2.0, 3)
    with pytest.raises(ValueError, match="same number of rounds"):
        round_ratios([1.0], [1.0, 2.0])


def test_a_turn_counts_as_its_median_step():
    track = Track("fp32", about={"samples_per_step": 6}, turns=[[1.0, 9.0, 2.0], [4.0]])
    assert track.round_seconds == [2.0, 4.0]
    assert track.step == Spread(3.0, 2.0, 4.0, 2)
    assert track.speed == Spread(2.25, 1.5, 3.0, 2)


def test_turns_and_rounds_follow_from_the_measured_steps():
    assert steps_per_turn([0.3, 5.0]) == 4
    assert steps_per_turn([2.0]) == steps_per_turn([]) == 1
    assert affordable_rounds(0, 100.0, 10.0) == 9
    assert affordable_rounds(5, 100.0, 10.0) == 14
    assert affordable_rounds(5, -100.0, 10.0) == 5
    assert affordable_rounds(0, 1.0, 10.0) == affordable_rounds(0, 1.0, 0.0) == 3
    assert affordable_rounds(0, 1e6, 1.0) == 30


# sizes and machine


@pytest.mark.parametrize(("available", "expected", "reason"), [
    (40e9, 8, "batch 8 fits"), (12e9, 4, "batch 8 would need about 18 GB of 12 GB"), (0, 8, "batch 8 fits"),
    (1e9, 1, "batch 2 would need"),
])
def test_the_largest_batch_follows_the_memory(available, expected, reason):
    cost = sizes.Cost(base_bytes=1e9, sample_bytes=1e9)
    size, text = sizes.largest_batch(cost, available, [1.0, 0.5, 0.5], 8)
    assert size == expected
    assert reason in text


def test_warm_up_steps_are_given_up_before_the_batch_becomes_smaller():
    probes = [sizes.Probe(startup=5.0, first=2.0, step=1.0)] * 3

    def chosen(seconds):
        choice = sizes.choose(8, "batch 8 fits", probes, seconds, rounds=3, warmup=2)
        return choice.batch_size, choice.warmup

    assert chosen(1000.0) == (8, 2)
    assert chosen(180.0) == (8, 2)  # 150 s are expected, and 162 s may be used
    assert chosen(150.0) == (8, 1)
    assert chosen(120.0) == (4, 2)
    assert chosen(1.0) == (1, 0)  # the limit ends what does not fit even so
    assert sizes.choose(8, "it fits", probes, 1.0, rounds=3, warmup=0).warmup == 0


@pytest.mark.parametrize(("flags", "limit", "kind", "bfloat16", "amx"), [
    ("avx2", "", "AVX2", False, False),
    ("avx2 avx512f", "", "AVX512 without BF16", False, False),
    ("avx2 avx512f avx512_bf16", "", "AVX512-BF16", True, False),
    ("avx2 avx512f avx512_bf16 amx_bf16", "", "AMX-BF16", True, True),
    ("avx2 avx512f avx512_bf16 amx_bf16", "AVX512_CORE_AMX", "AMX-BF16", True, True),
    ("avx2 avx512f avx512_bf16 amx_bf16", "AVX512_CORE_BF16", "AVX512-BF16", True, False),
    ("avx2 avx512f avx512_bf16", "avx512_core", "AVX512 without BF16", False, False),
    ("avx2 avx512f avx512_bf16", "AVX2", "AVX2", False, False),
])
def test_machines_are_told_apart_and_imitated(flags, limit, kind, bfloat16, amx, monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: f"flags : {flags}\n" if path == "/proc/cpuinfo" else "")
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit)
    assert (machine.kind(), machine.has_bfloat16(), machine.has_amx()) == (kind, bfloat16, amx)
    assert ("imitated" in report.machine_text()) == (limit in ("AVX512_CORE_BF16", "avx512_core", "AVX2"))


def test_hyperthreads_are_not_cores():
    template = "processor : {0}\nphysical id : 0\ncore id : {1}\n\n"
    cpuinfo = "".join(template.format(number, number // 2) for number in range(4))
    assert machine.physical_cores(cpuinfo, {0, 1, 2, 3}) == 2
    assert machine.physical_cores(cpuinfo, {0, 1}) == 1
    assert machine.physical_cores("", {0, 1}) == 2


def test_the_load_of_others_is_a_share():
    assert 0.0 <= machine.OtherLoad().share() <= 1.0


def test_peak_memory_is_plausible():
    assert 5e6 < machine.peak_memory() < 1e12


# the driver, with children that only pretend


def test_children_take_turns_and_every_round_begins_with_the_next(fakes):
    progress = Silent()
    commands = [fakes.command("a", 1.0), fakes.command("b", 0.5), fakes.command("c", 0.25)]
    result = compare(commands, Plan(rounds=3, steps=2, warmup=1), progress)
    warm_up = ["a 1", "b 1", "c 1"]
    rounds = ["a 2", "b 2", "c 2", "b 2", "c 2", "a 2", "c 2", "a 2", "b 2"]
    assert fakes.lines[:12] == warm_up + rounds
    assert sorted(fakes.lines[12:]) == ["a stop", "b stop", "c stop"]
    assert progress.turns == [line[0] for line in rounds]
    assert progress.planned == 9
    assert result.ratio("c", "a") == Spread(4.0, 4.0, 4.0, 3)
    assert [len(track.losses) for track in result.tracks] == [7, 7, 7]


def test_rounds_follow_from_the_budget(fakes):
    progress = Silent()
    compare([fakes.command("a", 100.0)], Plan(budget=1000.0), progress)  # beside which a child's start is nothing
    assert progress.said[-1] in [f"{rounds} rounds of 1 step for each of 1 processes" for rounds in (8, 9)]
    compare([fakes.command("a", 5000.0)], Plan(budget=1000.0, warmup=1), progress)
    assert "exceed the budget" in progress.said[-1]


def test_rounds_are_planned_anew_when_the_machine_becomes_faster(fakes):
    # the children say 2 s a step but take none: after the first round all the rounds there may be fit
    result = compare([fakes.command("a", 2.0)], Plan(budget=20.0), Silent())
    assert len(result.tracks[0].turns) == 30


def test_what_crashes_is_left_out_with_its_last_words(fakes):
    started: list[Child] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.harness.compare.Child", lambda *given: started.append(Child(*given)) or started[-1])
        result = compare([fakes.command("a"), fakes.command("b", trouble="crash")], Plan(rounds=1), Silent())
    assert [track.name for track in result.tracks] == ["a"]
    assert result.failures["b"].stderr_tail == "the bottom fell out"
    assert [child._process.poll() is not None for child in started] == [True, True]
    result.require(["a"])
    with pytest.raises(ChildFailed, match="b: ended with exit code 1"):
        result.require(["a", "b"])


@pytest.mark.parametrize(
    ("trouble", "message"),
    [("hang", "did not answer within 1 s"), ("chatter", "expected a JSON object with an event")],
)
def test_a_child_that_breaks_the_protocol(fakes, trouble, message):
    result = compare([fakes.command("a", trouble=trouble)], Plan(rounds=1), Silent(), timeout=1.0)
    with pytest.raises(ChildFailed, match=message):
        result.require()


def test_a_refusal_is_passed_on(fakes):
    result = compare([fakes.command("b", trouble="refuse")], Plan(rounds=1), Silent())
    with pytest.raises(UsageError, match="no such thing here"):
        result.require()


class Clock:
    """A clock that only fake processes move on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ClockedChild:
    """Takes the seconds of its name on the fake clock: ``fast=1``; one second to start."""

    def __init__(self, clock: Clock, command: ChildCommand, timeout: float):
        self.clock, self.name, self.timeout = clock, command.name, timeout
        self.seconds = float(command.argv[0])

    def __enter__(self) -> ClockedChild:
        return self

    def __exit__(self, *_: object) -> None: ...

    def end(self, politely: bool = True) -> None: ...

    def _take(self, seconds: float) -> None:
        if seconds > self.timeout:
            self.clock.now += self.timeout
            raise ChildFailed(self.name, f"did not answer within {self.timeout:.0f} s")
        self.clock.now += seconds

    def ready(self) -> dict[str, Any]:
        self._take(1.0)
        return {"about": {"samples_per_step": 1, "dtype": "fake"}}

    def ask(self, command: str, steps: int) -> dict[str, Any]:
        self._take(self.seconds * steps)
        return {"seconds": [self.seconds] * steps, "losses": [{"loss": 1.0}] * steps, "peak_memory": 1}


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("benchmarks.harness.compare.monotonic", clock)
    monkeypatch.setattr("benchmarks.harness.compare.Child",
                        lambda command, timeout: ClockedChild(clock, command, timeout))
    return clock


def clocked(**seconds: float) -> list[ChildCommand]:
    return [ChildCommand(name, [str(value)]) for name, value in seconds.items()]


def test_rounds_stop_with_the_limit_and_the_complete_ones_count(clock):
    plan = Plan(budget=50.0, limit=60.0, warmup=1, steps=1)
    progress = Silent()
    result = compare(clocked(a=10.0, b=5.0), plan, progress)
    # 2 s to start, 15 s to warm up, and two rounds of 15 s; a third would end after 62 s
    assert [len(track.turns) for track in result.tracks] == [2, 2]
    assert result.notes == ["stopped after 2 rounds: the 60 s for all are over"]
    assert clock.now - 100.0 == 47.0


def test_a_process_that_becomes_slow_does_not_spoil_the_rounds_before(clock, monkeypatch):
    def ask(child, command, steps):
        child.seconds *= 3 if child.name == "b" else 1
        return ordinary(child, command, steps)

    ordinary = ClockedChild.ask
    monkeypatch.setattr(ClockedChild, "ask", ask)
    result = compare(clocked(a=1.0, b=1.0), Plan(budget=50.0, limit=60.0, warmup=1, steps=1), Silent())
    # b takes 3, 9 and 27 s: the third turn would end after 80 s
    assert [track.name for track in result.tracks] == ["a", "b"]
    assert len(result.tracks[0].turns) == len(result.tracks[1].turns) > 0
    assert clock.now - 100.0 <= 60.0
    assert result.ratio("a", "b").count == len(result.tracks[0].turns)


def test_the_slowest_is_left_out_where_not_a_round_of_all_fits(clock):
    plan = Plan(budget=110.0, limit=120.0, warmup=1, steps=1, keep=("fp32", "amp"))
    result = compare(clocked(fp32=12.0, amp=4.0, slow=45.0), plan, Silent())
    assert [track.name for track in result.tracks] == ["fp32", "amp"]
    assert "too slow: a step took 45 s" in str(result.failures["slow"])
    assert len(result.tracks[0].turns) == 3
    assert clock.now - 100.0 <= 120.0


def test_what_was_measured_is_not_lost_when_its_outputs_come_after_the_limit(fakes, tmp_path):
    plan = Plan(rounds=2, warmup=1, limit=0.5, keep=("fp32", "amp"))  # outputs take 1.5 s
    comparison = compare([fakes.command("fp32"), fakes.command("amp", 0.25)], plan, Silent(), save_to=tmp_path)
    assert comparison.failures == {}
    assert comparison.ratio("amp", "fp32").median == 2.0
    assert [track.saved["parameter_file"] for track in comparison.tracks] == [1, 1]


def test_what_would_take_the_time_of_the_others_is_not_begun(clock):
    plan = Plan(budget=50.0, limit=60.0, warmup=1, steps=1, keep=("fp32", "amp"))
    result = compare(clocked(fp32=8.0, peer=0.1, amp=4.0), plan, Silent())
    assert [track.name for track in result.tracks] == ["fp32", "amp"]
    assert str(result.failures["peer"]) == "peer: not measured: 46 s are left, and it would take about 70 s"
    assert len(result.tracks[0].turns) >= 3
    plan = Plan(budget=90.0, limit=100.0, warmup=1, steps=1, keep=("fp32", "amp"))
    assert [track.name for track in compare(clocked(fp32=8.0, peer=0.1, amp=4.0), plan, Silent()).tracks] == [
        "fp32", "peer", "amp"]


def test_nothing_runs_beyond_the_limit(clock):
    result = compare(clocked(a=500.0, b=1.0), Plan(budget=50.0, limit=60.0, warmup=1), Silent())
    assert "did not answer within 35 s" in str(result.failures["a"])
    assert clock.now - 100.0 <= 62.0


def test_a_second_step_that_would_not_end_is_not_begun(clock):
    plan = Plan(rounds=0, warmup=2, limit=40.0, keep=("fp32", "amp"))
    result = compare(clocked(fp32=15.0, amp=20.0), plan, Silent())
    assert [track.warmup for track in result.tracks] == [[15.0], [20.0]]
    assert result.failures == {}


def test_what_starts_slowly_leaves_time_to_the_others(clock):
    plan = Plan(budget=50.0, limit=100.0, warmup=1, steps=1, keep=("amp", "fp32"))
    result = compare(clocked(fp32=2.0, amp=1.0, compiled=500.0), plan, Silent())
    assert [track.name for track in result.tracks] == ["fp32", "amp"]
    assert len(result.tracks[0].turns) >= 3
    assert clock.now - 100.0 <= 100.0


def test_ssd_takes_its_batch_from_measured_steps(clock, monkeypatch):
    # seconds of a step of one image; a start takes a second; what runs does so on the fake clock
    seconds = {"fp32": 2.0, "amp": 1.0, "mxnet-amp": 6.0}
    monkeypatch.setattr(ssd_synthetic, "monotonic", clock)
    monkeypatch.setattr(ssd_synthetic, "command", lambda _, name, settings: ChildCommand(
        name, [str(seconds[name] * settings["batch_size"])]))
    monkeypatch.setattr(machine, "available_memory", lambda: 64e9)
    args = ssd_synthetic._parser().parse_args(["--compare", "fp32,amp,mxnet-amp", "--threads", "1"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for slower, batch in ((1.0, 4), (2.0, 2), (10.0, 1)):
        clock.now, begin = 0.0, 0.0
        seconds.update({"fp32": 2.0 * slower, "amp": 1.0 * slower, "mxnet-amp": 6.0 * slower})
        settings = ssd_synthetic._settings(args)
        result = ssd_synthetic._compared(args, settings, begin)
        assert settings["batch_size"] == batch
        assert {"fp32", "amp"} <= {track.name for track in result.tracks}
        assert clock.now <= ssd_synthetic.BUDGET + ssd_synthetic._OVERTIME < 345.0


def test_ssd_goes_on_without_what_fails_and_says_why(fakes, monkeypatch, capsys):
    trouble = {"mxnet-amp": "crash"}
    monkeypatch.setattr(ssd_synthetic, "command", lambda _, name, __: fakes.command(name,
                                                                                    trouble=trouble.get(name, "none")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(machine, "available_memory", lambda: 64e9)
    assert cli.main(ssd_synthetic.run, ["--compare", "fp32,amp,mxnet-amp", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert "batch size 8 chosen: batch 8 fits; 2 warm-up steps" in said
    assert "mxnet.contrib.amp fails: mxnet-amp: ended with exit code 1: the bottom fell out" in said
    trouble.update({"mxnet-amp": "none", "amp": "crash"})
    assert cli.main(ssd_synthetic.run, ["--compare", "fp32,amp", "--rounds", "1"]) == 1


def test_a_crash_gives_exit_code_1(fakes, monkeypatch, capsys):
    monkeypatch.setattr(ssd_synthetic, "command", lambda _, name, __: fakes.command(name, trouble="crash"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # put back after the test: the benchmark sets it
    assert cli.main(ssd_synthetic.run, ["--compare", "fp32,amp", "--batch-size", "1"]) == 1
    assert "error: fp32: ended with exit code 1\nthe bottom fell out" in capsys.readouterr().err


# the report


@pytest.fixture
def comparison() -> Comparison:
    def track(name: str, scale: float) -> Track:
        turns = [[scale * seconds] for seconds in (1.0, 2.0, 4.0)]
        about: dict[str, Any] = {"samples_per_step": 8, "dtype": "float32", "versions": {"mxnet": "1.9.1"}}
        losses = [{"CrossEntropy": 4.0}, {"CrossEntropy": 1.25}]
        return Track(name, about, turns=turns, losses=losses, peak_memory=int(scale * 4e9))

    return Comparison([track("fp32", 1.0), track("amp", 0.5), track("mxnet-amp", 0.8)], seconds=60.0, other_load=0.25)


def test_the_table_shows_speeds_ratios_memory_and_losses(comparison, capsys):
    report.show({"network": "a network", "batch_size": 8}, comparison)
    text = capsys.readouterr().out
    ratios_and_memory = ("speed vs fp32", "mxnet-amp", "2.00x", "1.60x", "4.00 GB", "0.50x fp32")
    for expected in (*ratios_and_memory, "1.25", "batch_size 8", "used 25%"):
        assert expected in text


def test_the_json_file_holds_every_step_and_the_ratios(comparison, tmp_path):
    cli.write_json(tmp_path / "out.json", report.as_dict({"batch_size": 8}, comparison))
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["speed_ratios"]["amp vs fp32"]["median"] == 2.0
    assert read["implementations"][1]["turns"] == [[0.5], [1.0], [2.0]]
    assert read["machine"]["physical_cores"] >= 1


def test_the_plot_is_an_image(comparison, tmp_path):
    pytest.importorskip("matplotlib")
    report.write_plot(str(tmp_path / "out.png"), "title", comparison)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# the real thing


def test_a_tiny_fp32_run_prints_the_tutorials_lines(tmp_path):
    pytest.importorskip("gluoncv")
    path = tmp_path / "out.json"
    result = run_benchmark(*SMALL, "--steps", "2", "--warmup", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert "[Epoch 0][Batch 2], Speed: " in result.stdout
    assert "samples/sec, CrossEntropy=" in result.stdout
    (track,) = json.loads(path.read_text())["implementations"]
    assert track["about"]["dtype"] == "float32"
    assert track["library_settings"]["OMP_NUM_THREADS"] == "1"
    assert len(track["turns"]) == 2
    assert 0 < track["losses"][-1]["CrossEntropy"] < track["losses"][0]["CrossEntropy"]


@pytest.mark.slow
@pytest.mark.bf16
def test_all_implementations_start_from_the_same_weights_and_train_alike(tmp_path):
    pytest.importorskip("gluoncv")
    path = tmp_path / "out.json"
    flags = ["--rounds", "2", "--steps", "2", "--json", str(path)]
    result = run_benchmark("--compare", "fp32,amp,mxnet-amp", *SMALL, *flags)
    assert result.returncode == 0, result.stderr
    tracks = json.loads(path.read_text())["implementations"]
    for name in ("CrossEntropy", "SmoothL1"):
        for step in (0, -1):
            first, *others = (track["losses"][step][name] for track in tracks)
            assert others == pytest.approx([first, first], rel=0.1)


def _measured(**seconds):
    about = {"dtype": "float32", "notes": ["float32 on the cpu, because so"], "samples_per_step": 1}
    return Comparison([Track(name, about, turns=[[each] for each in rounds]) for name, rounds in seconds.items()], 1.0,
                      0.0)


@pytest.mark.parametrize(("ours", "slower"), [
    ([1.2, 1.2, 1.2, 0.9], ["fp32"]),  # in three of four rounds
    ([1.2, 1.2, 0.8, 0.9], []),
    ([0.5, 0.5, 0.5, 0.5], []),
])
def test_a_promise_is_broken_where_most_rounds_are_slower(ours, slower, capsys):
    found = _measured(**{"amp": ours, "fp32": [1.0] * 4, "mxnet-amp": [2.0] * 4, "torch": [0.1] * 4})
    assert found.slower("amp", ("fp32", "mxnet-amp")) == slower
    assert ssd_synthetic._broken_promise(found) == bool(slower)
    said = capsys.readouterr().err
    assert said == ("gluon_amp is slower than MXNet FP32 here. It ran float32: float32 on the cpu, because so. --dtype "
                    "bfloat16 (amp.init('bfloat16') in a script) takes the other type\n" if slower else "")


def test_the_choice_lags_by_its_least_round():
    found = _measured(**{"as chosen": [1.3, 1.2, 2.0], "FP32": [1.0, 1.1, 1.0], "bfloat16": [2.0, 2.0, 2.0]})
    ratio, fastest = choice.lag(found)
    assert (round(ratio, 3), fastest) == (1.091, "FP32")
