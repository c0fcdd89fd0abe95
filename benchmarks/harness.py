"""How the benchmarks measure: each implementation is a process of its own, all are alive at once and take turns.

Whatever disturbs the machine for a minute disturbs all of them alike, and cancels in ratios within a round. The process
that compares imports neither MXNet nor PyTorch. Run as a program, this file is the other side:
``python harness.py '{"serves": "harness:Steps", "workload": "training", "implementation": "amp", "settings": {...}}'``
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import difflib
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, NamedTuple, Sequence

OURS, REFERENCE, CONTRIB = "amp", "fp32", "mxnet-amp"
FEWEST_ROUNDS, MOST_ROUNDS = 3, 30
_CLEARLY = 0.75  # of the rounds: slower in fewer may be noise
_DISTURBED = 0.1  # of all processors, taken by other programs: beyond that the figures depend on them
_PROJECT = Path(__file__).resolve().parents[1]


class UsageError(Exception):
    """The request cannot be carried out on this machine: one line for the user, exit code 2."""


class ChildFailed(Exception):
    """A child process died, hung or broke the protocol."""

    def __init__(self, name: str, reason: str, log: str = ""):
        self.name, self.log = name, log
        last = log.strip().rpartition("\n")[2]
        super().__init__(f"{name}: {reason}" + (f": {last}" if last else ""))


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that is not known; it suggests the closest ones."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return UsageError(f"unknown {kind} {name!r}; " + (f"did you mean {' or '.join(close)}?" if close else
                                                      f"known: {', '.join(names)}"))


# What can be measured


@dataclass(frozen=True)
class Implementation:
    """One side of a comparison."""

    label: str
    backend: str  # ``module:class`` that switches it on, imported in its process alone
    options: Mapping[str, Any] = field(default_factory=dict)  # the class is made with
    framework: str = "mxnet"
    inference: bool = True  # whether it converts networks, too
    training: bool = True


def _ours(label: str, **options: Any) -> Implementation:
    return Implementation(label, "implementations:GluonAmp", options)


def _torch(label: str, **options: Any) -> Implementation:
    return Implementation(f"PyTorch {label}", "torch_peers:Torch", options, "torch", inference=False)


# ``amp~NAME`` is "amp" without the graph pass NAME.
IMPLEMENTATIONS: Mapping[str, Implementation] = {
    REFERENCE: Implementation("MXNet FP32", "implementations:Mxnet"),
    CONTRIB: Implementation("mxnet.contrib.amp", "implementations:MxnetAmp"),
    OURS: _ours("gluon_amp"),
    "amp-fp32": _ours("gluon_amp, FP32", fixed="float32"),
    "amp-bf16": _ours("gluon_amp, bfloat16", fixed="bfloat16"),
    "amp-int8": Implementation("gluon_amp, INT8", "implementations:GluonAmp", {"fixed": "int8"}, training=False),
    "mxnet-int8": Implementation("MXNet's quantizer", "implementations:MxnetInt8", training=False),
    "torch": _torch("FP32"),
    "torch-amp": _torch("autocast", autocast=True),
    "torch-compiled": _torch("FP32, compiled", compiled=True),
    "torch-amp-compiled": _torch("autocast, compiled", autocast=True, compiled=True),
}
# For each framework the ``module:class`` that is made from a backend and settings, and has steps.
WORKLOADS: Mapping[str, Mapping[str, str]] = {
    "training": {"mxnet": "gluon_networks:Training", "torch": "torch_peers:Training"},
    "inference": {"mxnet": "gluon_networks:Inference"},
}


def implementation(name: str) -> Implementation:
    """Return the row of a name."""
    base, tilde, disabled = name.partition("~")
    if base not in IMPLEMENTATIONS:
        raise unknown("implementation", base, IMPLEMENTATIONS)
    if not tilde:
        return IMPLEMENTATIONS[base]
    if base != OURS or not disabled:
        raise UsageError(f"expected {OURS}~ and the name of a graph pass, received {name!r}")
    return _ours(f"gluon_amp, without {disabled}", disable_passes=[disabled])


def runs(name: str, workload: str) -> bool:
    """Return whether an implementation can run a workload."""
    row = implementation(name)
    return bool(getattr(row, workload)) and row.framework in WORKLOADS[workload]


def load(reference: str) -> Any:
    """Import what a ``module:attribute`` reference points to, within `benchmarks`."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), attribute)


def build(workload: str, name: str, settings: Mapping[str, Any]) -> Any:
    """Switch an implementation on in this process and build a workload under it."""
    row = implementation(name)
    if not runs(name, workload):
        raise UsageError(f"{name} is not for {workload}")
    backend = load(row.backend)(settings["device"], settings["dtype"], workload == "training", **row.options)
    return load(WORKLOADS[workload][row.framework])(backend, settings)


def torch_python() -> str | None:
    """Return the interpreter that has PyTorch, None when there is none: GluonCV refuses to be imported beside it."""
    own = _PROJECT / ".venv-torch" / "bin" / "python"
    here = sys.executable if importlib.util.find_spec("torch") else None
    return os.environ.get("TORCH_PYTHON") or (str(own) if own.exists() else here)


class Command(NamedTuple):
    """How to start a child process."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = {}


def serving(name: str, serves: str, python: str = sys.executable, environment: Mapping[str, str] | None = None,
            **arguments: Any) -> Command:
    """Return how to start a process that serves a class of `benchmarks`, made with these arguments."""
    return Command(name, [python, __file__, json.dumps({"serves": serves, **arguments})], environment or {})


def command(workload: str, name: str, settings: Mapping[str, Any]) -> Command:
    """Return how to start an implementation with a workload."""
    python, environment = sys.executable, {}
    if implementation(name).framework == "torch":
        found = torch_python()
        if found is None:
            raise UsageError(f"{name} needs torch, torchvision and timm: name an interpreter that has them in "
                             "TORCH_PYTHON")
        python, environment = found, {"ATEN_CPU_CAPABILITY": "avx2"} if isa_limit() == "AVX2" else {}
    return serving(name, "harness:Steps", python, environment, workload=workload, implementation=name,
                   settings=dict(settings))


# The child's side


class Steps:
    """An implementation of a workload, one step after the other."""

    def __init__(self, workload: str, implementation: str, settings: Mapping[str, Any]):
        self.session = build(workload, implementation, settings)

    def about(self) -> dict[str, Any]:
        return {**self.session.about, "versions": versions()}

    def run(self, steps: int) -> dict[str, Any]:
        results = [timed_step(self.session) for _ in range(steps)]
        flush()
        seconds, losses = zip(*results)
        return {"seconds": seconds, "losses": losses, "peak_memory": peak_memory()}


def timed_step(session: Any) -> tuple[float, dict[str, float]]:
    """Run one step and return its seconds and its losses."""
    begin = time.perf_counter()
    losses = session.step()
    return time.perf_counter() - begin, losses


def serve() -> int:
    """Answer each command on standard input, until it ends; all that libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    spec = json.loads(sys.argv[1])

    def answer(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        served = load(spec.pop("serves"))(**spec)
        for line in sys.stdin:
            given = json.loads(line)
            answer({"answer": getattr(served, given.pop("command"))(**given)})
    except UsageError as error:
        answer({"refused": str(error)})
        return 2
    return 0


# The parent's side


class Child:
    """A running child process that answers every command with one line of JSON."""

    def __init__(self, command: Command, timeout: float = 1800.0):
        self.name, self.timeout, self._timed_out = command.name, timeout, False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._process = subprocess.Popen(
            list(command.argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, encoding="utf-8",
            env={**os.environ, **command.environment},
            start_new_session=True)  # Ctrl-C reaches the parent alone, which then ends the children

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(politely=kind is None)

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a command and return the answer; the first one comes when the child is built."""
        timer = threading.Timer(self.timeout, self._give_up)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            line = self._process.stdout.readline()  # type: ignore[union-attr]
            message = json.loads(line) if line else {}
        except (OSError, ValueError):
            message = {}
        finally:
            timer.cancel()
        if "refused" in message:
            raise UsageError(message["refused"])
        if "answer" not in message:
            raise ChildFailed(self.name, self._how_it_ended(), self.log()[-4000:])
        return message["answer"]

    def log(self) -> str:
        """Return all that the child and its libraries have printed so far, but for the answers."""
        position = self._log.tell()
        self._log.seek(0)
        text = self._log.read().decode("utf-8", errors="replace")
        self._log.seek(position)
        return text

    def end(self, politely: bool = True) -> None:
        """End the child, which the end of its input asks for, and wait until it is gone. Once is enough."""
        if self._log.closed:
            return
        with contextlib.suppress(OSError):  # closing flushes, and the reader may be gone
            self._process.stdin.close()  # type: ignore[union-attr]
        if not politely:
            self._kill()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()

    def _give_up(self) -> None:
        self._timed_out = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # with what it has started, such as compilers
            os.killpg(self._process.pid, signal.SIGKILL)

    def _how_it_ended(self) -> str:
        if self._timed_out:
            return f"did not answer within {self.timeout:.0f} s"
        try:
            code = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return "broke the protocol"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


class Spread(NamedTuple):
    """The middle and the ends of a set of measurements."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """Return the median, minimum and maximum."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(reference: Sequence[float], measured: Sequence[float]) -> Spread:
    """Return how many times as fast as the reference something ran: the ratio is taken within each round.

    Examples
    --------
    >>> ratios([2.0, 4.0, 9.0], [1.0, 4.0, 3.0])
    Spread(median=2.0, low=1.0, high=3.0)
    """
    return spread([slow / fast for slow, fast in zip(reference, measured)])


@dataclass
class Track:
    """Everything that was measured of one implementation; times in seconds, memory in bytes."""

    name: str
    about: dict[str, Any] = field(default_factory=dict)
    startup: float = 0.0
    warmup: list[float] = field(default_factory=list)
    turns: list[list[float]] = field(default_factory=list)
    losses: list[dict[str, float]] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def round_seconds(self) -> list[float]:
        """Seconds of a step, one value a round: the median of the turn's steps."""
        return [statistics.median(turn) for turn in self.turns]

    def record(self, answer: Mapping[str, Any], warms_up: bool = False) -> None:
        """Add the answer to the command ``run``."""
        if warms_up:
            self.warmup += answer["seconds"]
        else:
            self.turns.append(answer["seconds"])
        self.losses += answer["losses"]
        self.peak_memory = answer["peak_memory"]


@dataclass(frozen=True)
class Comparison:
    """The tracks of all implementations that ran, in the order asked for."""

    tracks: Sequence[Track]
    seconds: float  # that everything took
    other_load: float  # share of the processors that other programs used meanwhile
    failures: Mapping[str, Exception] = field(default_factory=dict)  # why others did not run
    waiting: Sequence[str] = ()  # names for which the memory was too small beside the others

    def track(self, name: str) -> Track:
        """Return the track of an implementation."""
        return next(track for track in self.tracks if track.name == name)

    def ratio(self, name: str, reference: str) -> Spread:
        """Return how many times as fast as the reference an implementation is."""
        return ratios(self.track(reference).round_seconds, self.track(name).round_seconds)

    def slower(self, name: str, references: Collection[str]) -> list[str]:
        """Name the references that an implementation is slower than: in the median, and in three quarters of rounds."""
        found, measured = [], {track.name for track in self.tracks}
        for reference in measured.intersection(references) if name in measured else ():
            below = [mine > theirs for mine, theirs in zip(self.track(name).round_seconds,
                                                           self.track(reference).round_seconds)]
            if self.ratio(name, reference).median < 1.0 and sum(below) >= _CLEARLY * len(below):
                found.append(reference)
        return sorted(found)

    def require(self, names: Collection[str] = ()) -> None:
        """Raise the failure of one of these names; of any, where nothing ran at all."""
        for name, failure in self.failures.items():
            if name in names or not self.tracks:
                raise failure


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int | None = None  # how often each takes its turn; what fits the budget by default, 0: warm up only
    steps: int | None = None  # of one turn; about a second's by default
    warmup: int = 2  # steps before: the first builds graphs and kernels
    budget: float = 300.0  # seconds, when `rounds` is not given; the fewest rounds are run to their end
    limit: float | None = None  # seconds after which it ends, whatever still runs


def compare(commands: Sequence[Command], plan: Plan) -> Comparison:
    """Run implementations in turns and return what was measured, and why others could not run."""
    load, names = OtherLoad(), [command.name for command in commands]
    with contextlib.ExitStack() as stack:
        driver = _Driver(plan)
        for command in sorted(commands, key=lambda each: each.name not in (REFERENCE, OURS)):
            driver.start(stack, command)
        if plan.rounds != 0:
            driver.run_rounds()
        tracks = sorted((track for _, track in driver.pairs), key=lambda track: names.index(track.name))
    return Comparison(tracks, monotonic() - driver.begin, load.share(), driver.failures, driver.waiting)


class _Driver:
    """The processes of a comparison that are still in it."""

    def __init__(self, plan: Plan):
        self.plan, self.begin = plan, monotonic()
        self.pairs: list[tuple[Child, Track]] = []
        self.failures: dict[str, Exception] = {}
        self.waiting: list[str] = []

    def left(self) -> float:
        return math.inf if self.plan.limit is None else self.begin + self.plan.limit - monotonic()

    def start(self, stack: contextlib.ExitStack, command: Command) -> None:
        """Start a process and warm it up, unless the memory that is left is less than another one took."""
        needed = 1.1 * max((track.peak_memory for _, track in self.pairs), default=0)
        if len(self.pairs) > 1 and 0 < available_memory() < needed:
            self.waiting.append(command.name)
            return
        begin, track = monotonic(), Track(command.name)
        child = stack.enter_context(Child(command))
        try:
            child.timeout = self.patience(0.5)
            track.about = child.ask("about")
            track.startup = monotonic() - begin
            for _ in range(self.plan.warmup):
                child.timeout = self.patience(0.5)
                track.record(child.ask("run", steps=1), warms_up=True)
        except (UsageError, ChildFailed) as failure:
            self.leave_out(child, failure)
            return
        self.pairs.append((child, track))
        if track.warmup:
            say(f"{track.name}: first step {track.warmup[0]:.2f} s, last warm-up step {track.warmup[-1]:.2f} s")

    def patience(self, share: float = 1.0) -> float:
        return max(1.0, min(1800.0, share * self.left()))

    def expected(self) -> list[float]:
        return [track.warmup[-1] for _, track in self.pairs if track.warmup]

    def run_rounds(self) -> None:
        """Run as many rounds as there is time for; rounds that are not complete do not count."""
        steps = self.plan.steps or max(1, min(100, math.ceil(1.0 / min(self.expected() or [1.0]))))
        while len(self.pairs) > 2 and steps * sum(self.expected()) > self.left():
            child, track = max(self.pairs[2:], key=lambda pair: pair[1].warmup[-1])
            self.leave_out(child, ChildFailed(child.name, f"too slow: a step took {track.warmup[-1]:.0f} s, and "
                                                          f"{self.left():.0f} s are left for a round of all"))
        most = self.plan.rounds or MOST_ROUNDS
        for number in range(most):
            begin = monotonic()
            if not self.pairs or not self.run_round(number, steps):
                break
            took, spent = monotonic() - begin, monotonic() - self.begin
            if self.left() < took or (self.plan.rounds is None and number + 1 >= FEWEST_ROUNDS
                                      and spent + took > self.plan.budget):
                break

    def run_round(self, number: int, steps: int) -> bool:
        """Let each process take its turn, another one first in every round; return whether the round is complete."""
        first = number % len(self.pairs)
        for child, track in [*self.pairs[first:], *self.pairs[:first]]:
            child.timeout = self.patience()
            try:
                if steps > 1:  # the first step finds its memory in no cache, or reclaimed: it would be the others' time
                    child.ask("run", steps=1)
                track.record(child.ask("run", steps=steps))
            except (UsageError, ChildFailed) as failure:
                if number and self.left() <= 0:  # not its fault: the rounds before count
                    for _, each in self.pairs:
                        del each.turns[number:]
                    return False
                self.leave_out(child, failure)
        shown = ", ".join(f"{track.name} {track.round_seconds[-1]:.3f} s" for _, track in self.pairs)
        if sys.stderr.isatty():
            print(f"\rround {number + 1}: {shown}   ", end="", file=sys.stderr, flush=True)
        return True

    def leave_out(self, child: Child, failure: Exception) -> None:
        self.pairs = [pair for pair in self.pairs if pair[0] is not child]
        child.end(politely=False)
        self.failures[child.name] = failure
        say(f"{child.name} is left out: {failure}")


def say(text: str) -> None:
    """Tell what is being done, on standard error."""
    print(f"\r{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def in_turns(functions: Sequence[Callable[[], Any]], rounds: int, warm_up: int = 1) -> list[list[float]]:
    """Run functions of this process in turns; return the seconds of each, round by round."""
    times: list[list[float]] = [[] for _ in functions]
    for number in range(warm_up + rounds):
        for function, kept in zip(functions, times):
            begin = time.perf_counter()
            function()
            if number >= warm_up:
                kept.append(time.perf_counter() - begin)
    return times


class Execution(NamedTuple):
    """One line of oneDNN's log."""

    primitive: str  # such as ``'convolution'``
    kernel: str  # ``'jit:avx512_core_amx_bf16'``
    direction: str  # ``'backward_data'``
    seconds: float


def executions(log: str) -> Iterator[Execution]:
    """Read oneDNN's log, which ``DNNL_VERBOSE=1`` lets it write.

    Examples
    --------
    >>> next(executions("dnnl_verbose,exec,cpu,reorder,jit:uni,undef,src_f32::blocked:abcd:f0,,,2x3x4x5,1.0"))
    Execution(primitive='reorder', kernel='jit:uni', direction='undef', seconds=0.001)
    """
    for match in re.finditer(r"^(?:dnnl|onednn)_verbose,exec,cpu,(.+)$", log, re.MULTILINE):
        primitive, kernel, direction, *_, milliseconds = match[1].split(",")
        yield Execution(primitive, kernel, direction, float(milliseconds) / 1e3)


# The machine


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpuinfo() -> list[dict[str, str]]:
    return [{key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
            for block in _read("/proc/cpuinfo").strip().split("\n\n")]


def _meminfo(field: str) -> int:
    found = re.search(rf"^{field}: +(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def physical_cores() -> int:
    """Count the physical cores that this process may use."""
    usable = os.sched_getaffinity(0)
    cores = {(each.get("physical id", "0"), each.get("core id", each["processor"])) for each in _cpuinfo()
             if each.get("processor", "").isdigit() and int(each["processor"]) in usable}
    return len(cores) or len(usable)


def isa_limit() -> str:
    """Return the instruction set that MXNet's oneDNN is told to stop at, such as ``AVX2``; empty for none."""
    limit = os.environ.get("DNNL_MAX_CPU_ISA", "").upper()
    return "" if limit in ("ALL", "DEFAULT", "AVX512_CORE_AMX") else limit


def kind() -> str:
    """Return the kind of instructions that decides which kernels run here."""
    flags, limit = set(_cpuinfo()[0].get("flags", "").split()), isa_limit()
    if "amx_bf16" in flags and not limit:
        return "AMX-BF16"
    if flags & {"avx512_bf16", "amx_bf16"} and limit in ("", "AVX512_CORE_BF16"):
        return "AVX512-BF16"
    return "AVX512 without BF16" if "avx512f" in flags and (not limit or limit.startswith("AVX512")) else "AVX2"


def describe() -> dict[str, Any]:
    """Return the machine; memory in bytes."""
    first = _cpuinfo()[0]
    return {"kind": kind(), "cpu": first.get("model name", "unknown"), "isa_limit": isa_limit(),
            "cpu_family_model": f"{first.get('cpu family', '?')}/{first.get('model', '?')}",
            "cores": physical_cores(), "memory": _meminfo("MemTotal"), "python": platform.python_version()}


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that take part."""
    found = {}
    for name in ("mxnet", "mxnet-cu112", "torch", "torchvision", "timm", "gluon_amp", "gluoncv", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine_line() -> str:
    """Return a line that says what this machine is, and the versions."""
    about = describe()
    imitated = f", imitated by DNNL_MAX_CPU_ISA={about['isa_limit']}" if about["isa_limit"] else ""
    return (f"{about['cpu']} (family/model {about['cpu_family_model']}), {about['kind']}{imitated}, {about['cores']} "
            f"cores, {about['memory'] / 1e9:.0f} GB; Python {about['python']}, "
            + ", ".join(f"{name} {version}" for name, version in versions().items()))


def available_memory() -> int:
    """Return the bytes that new processes can use: the machine's, or the container's if it has fewer."""
    available = _meminfo("MemAvailable")
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return min(available, max(1, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else available


def peak_memory() -> int:
    """Return the most bytes of host memory that this process has held, or since `forget_peak_memory`."""
    found = re.search(r"VmHWM:\s+(\d+)", _read("/proc/self/status"))
    return int(found[1]) * 1024 if found else 0


def forget_peak_memory() -> None:
    """Let `peak_memory` begin with the memory that is held now."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # no glibc, no Linux
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def flush() -> None:
    """Write out what C libraries have printed; they collect it when they do not print to a terminal."""
    ctypes.CDLL(None).fflush(None)


class OtherLoad:
    """Watches how much of the machine other programs use, from its creation on."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        fields = _read("/proc/stat").partition("\n")[0].split()[1:9]
        # user, nice, system, irq, softirq and steal; not idle and iowait
        ticks = sum(int(value) for place, value in enumerate(fields) if place not in (3, 4))
        own = os.times()
        return monotonic(), ticks / os.sysconf("SC_CLK_TCK"), sum(own[:4])

    def share(self) -> float:
        """Return the mean share of all processors, 0 to 1; child processes count as own once they have ended."""
        elapsed, busy, own = (now - before for now, before in zip(self._now(), self._begin))
        return max(0.0, min(1.0, (busy - own) / max(elapsed, 1e-9) / (os.cpu_count() or 1)))


def load_line(other_load: float) -> str:
    """Say how much of the processors other programs took."""
    remark = " (too much: measure again)" if other_load > _DISTURBED else ""
    return f"other programs used {other_load:.0%} of the processors meanwhile{remark}"


# Command lines, tables and files


def integer(least: int) -> Callable[[str], int]:
    """Return the type of an option that takes an integer of at least so much."""
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, received {text}")
        return int(text)
    return parse


def integers(text: str) -> tuple[int, ...]:
    """Return the value of an option that takes integers of at least 1 with commas."""
    return tuple(integer(1)(part) for part in text.split(","))


def above_zero(text: str) -> float:
    """Return the value of an option that takes a time or a ratio."""
    if not re.fullmatch(r"\d*\.?\d+", text) or not float(text):
        raise argparse.ArgumentTypeError(f"expected a number above 0, received {text}")
    return float(text)


def writable(text: str) -> str:
    """Return a path to write to; refuse one whose folder does not exist early, before a long measurement."""
    if not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: its folder does not exist")
    return text


def device(text: str) -> str:
    """Return the name of a device."""
    if not re.fullmatch(r"(cpu|gpu)(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, gpu or gpu:1, received {text!r}")
    return text


class Parser(argparse.ArgumentParser):
    """A parser of the options that all scripts have, whose errors are `UsageError`."""

    def __init__(self, description: str | None):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--threads", type=integer(1), help="OpenMP threads (default: all physical cores)")
        self.add_argument("--json", metavar="PATH", type=writable, help="write everything that was measured")

    def error(self, message: str) -> Any:
        raise UsageError(message)

    def add_measuring(self, budget: float) -> None:
        """Add the options of `plan`, and those of workloads."""
        add = self.add_argument_group("how to measure").add_argument
        add("--dtype", help="bfloat16 or float16 (default: chosen by the machine)")
        add("--device", type=device, default="cpu", help="cpu, gpu or gpu:1 (default: cpu)")
        add("--seed", type=integer(0), default=0, help="of the weights and of the data (default: 0)")
        add("--steps", type=integer(1), help="timed steps of one turn (default: about a second's)")
        add("--warmup", type=integer(1), default=2, help="steps before timing (default: 2)")
        add("--rounds", type=integer(1), help="turns of each implementation (default: chosen from the budget)")
        add("--budget", type=above_zero, default=budget, help=f"seconds for a comparison (default: {budget:.0f})")


def plan(args: argparse.Namespace) -> Plan:
    """Return how long the options say to measure."""
    return Plan(args.rounds, args.steps, args.warmup, args.budget)


def use_threads(args: argparse.Namespace) -> int:
    """Set the number of threads for this process and its children and return it; before anything loads OpenMP."""
    args.threads = args.threads or physical_cores()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    return int(args.threads)


def names(flag: str, text: str, kind: str = "", known: Collection[str] | None = None) -> list[str]:
    """Return different names that were given with commas, each of the known ones."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) < len(found):
        raise UsageError(f"{flag}: expected different names with commas, received {text!r}")
    for name in found:
        if known is not None and name not in known:
            raise unknown(kind, name, known)
    return found


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    Examples
    --------
    >>> print(table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(line)} |" for line in [heading, *rows]]
    return "\n".join([lines[0], "|---" * len(heading) + "|", *lines[1:], ""])


def seconds(value: float) -> str:
    """Return a time in words.

    Examples
    --------
    >>> seconds(2.345), seconds(0.0123)
    ('2.35 s', '12.3 ms')
    """
    return f"{value:.2f} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"


def write_json(path: str | Path | None, measured: Mapping[str, Any]) -> None:
    """Write everything that was measured, with the machine, where a path is given."""
    if path:
        text = json.dumps({"machine": describe(), "versions": versions(), **measured}, indent=2) + "\n"
        Path(path).write_text(text, encoding="utf-8")


def main(program: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    try:
        return program(argv) or 0
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ChildFailed as failure:
        print(f"error: {failure}\n{failure.log}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    from benchmarks import harness  # this module under the name that all others import it by

    sys.exit(harness.serve())
