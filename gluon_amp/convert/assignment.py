"""Which layers of a network run in INT8: all that are right and gain, or as many as an error or a metric allows."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Callable, Collection, Mapping, Sequence, Tuple

import mxnet as mx
from mxnet.gluon import HybridBlock

from .. import checks
from .._mxnet.arrays import NDArrayWeights, cast_arrays, values_of
from .._mxnet.engine import interleaved
from .._mxnet.invoke import Program
from .._mxnet.symbols import first_line, to_graph
from ..dtypes import FLOAT32
from ..errors import DTypeError, PolicyError, StateError, expected, some_of, warn
from ..metrics import fewest, relative_error
from ..progress import progress_bar
from ..rules import ANY_DEVICE, Device, Policy
from ..state.in_force import under
from .calibration import Batch, Calibration, batches_of, check_mode, collect
from .convert import Conversion, convert, with_record
from .int8 import Int8, Plain, errors, in_fp32, layers_of, prepared, uniquely_named

WRONG = 0.15  # the error from which on an operator in INT8 is taken for wrong: rounding gives 0.005 to 0.07
_ROUNDS = 5  # of timing


@dataclass(frozen=True)
class Request:
    """What the arguments of a conversion to INT8 ask for; :func:`gluon_amp.convert_hybrid_block` describes them."""

    calib_data: Any
    mode: str = "naive"
    batches: int | None = None
    metric: Any = None
    budget: float | None = None
    max_error: float | None = None
    greater_is_better: bool = True
    time_limit: float = math.inf
    progress: bool = True
    only: bool = False  # whether layers that may run in INT8 do, however slow

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if self.metric is not None and self.max_error is not None:
            raise PolicyError("expected metric (with budget) or max_error, received both")
        if (self.metric is None) != (self.budget is None):
            raise PolicyError("metric and budget belong together: expected what measures a network, and how much worse "
                              "than in FP32 it may be")
        for name in ("budget", "max_error"):
            value = getattr(self, name)
            if value is not None and not (checks.is_number(value) and 0 <= value < math.inf):
                raise PolicyError(expected("a number, 0 or above", name, value))
        checks.above_zero("time_limit", self.time_limit)


@dataclass(frozen=True)
class Network:
    """A traced FP32 network that is to be converted."""

    symbol: mx.sym.Symbol
    arrays: Mapping[str, mx.nd.NDArray]  # its parameters
    inputs: Sequence[str]  # the names of its data
    policy: Policy  # for what does not run in INT8
    device: Device  # where it will run
    example: Mapping[str, Any]  # data, or shapes of data
    cast_outputs: bool = True
    on_cpu: bool = True


@dataclass(frozen=True)
class Made:
    """A converted network."""

    symbol: mx.sym.Symbol
    arrays: Mapping[str, mx.nd.NDArray]
    record: Conversion
    int8: Int8 | None = None


Build = Callable[[Made], HybridBlock]
_Found = Tuple[Sequence[str], Made]  # a network, and its layers that are not in INT8


def readied(network: Network) -> tuple[Network, Plain]:
    """Return a network whose operators have names of their own, and how it is before types are decided."""
    network = replace(network, symbol=uniquely_named(network.symbol))
    return network, prepared(network.symbol, network.arrays, network.policy)


def calibrated(request: Request, network: Network, plain: Plain) -> tuple[Calibration, Batch]:
    """Return the ranges that were given, or collect them; and some data to try the network on."""
    if isinstance(request.calib_data, Calibration):
        return _checked(request.calib_data, network), _example(network)
    batches = batches_of(request.calib_data, network.inputs, request.batches)
    first = next(batches, None)
    if first is None:
        raise StateError("calib_data gave no batch: expected a loader, an iterator or arrays with some data. A "
                         "generator that was used before gives nothing: make a new one")
    return collect(*plain, chain([first], batches), request.mode, request.progress), first


def _checked(calibration: Calibration, network: Network) -> Calibration:
    """Return ranges that were given, of this network."""
    if calibration.ranges.keys().isdisjoint(node.name for node in to_graph(network.symbol).operators()):
        raise PolicyError("calib_data: the ranges are of a network with other names: expected those that calibrate() "
                          f"returned for this one, received those of {some_of(list(calibration.ranges)) or 'nothing'}. "
                          "Give a network a prefix to use its ranges in another process")
    return calibration


def _example(network: Network) -> Batch:
    if not all(isinstance(network.example.get(name), mx.nd.NDArray) for name in network.inputs):
        raise PolicyError("expected data_example with arrays: ranges that were collected before say nothing of the "
                          "errors of INT8, which are measured on it")
    return {name: network.example[name] for name in network.inputs}


def converted_network(network: Network, request: Request | None, build: Build) -> Made:
    """Convert a network, whose layers run in INT8 where that is asked for, right, and keeps what was asked for."""
    if request is None:
        return _converted(network, network.policy)
    if not network.on_cpu:
        raise DTypeError("expected a network on the CPU for INT8: MXNet's INT8 operators are oneDNN's. Give "
                         "device=mx.cpu()")
    if not network.policy.runs("fuse"):
        raise PolicyError("INT8 needs the pass 'fuse': expected it in optimize, and not in disable_passes")
    network, plain = readied(network)
    assignment = _Assignment(network, plain, *calibrated(request, network, plain))
    assignment.leave_out_wrong()
    with progress_bar(desc="search", unit="trial", shown=request.progress) as bar:
        return _Search(assignment, request, build, bar).fastest()


def _converted(network: Network, policy: Policy, int8: Int8 | None = None) -> Made:
    weights = NDArrayWeights(network.arrays) if int8 is None else int8.weights
    device = network.device if policy is network.policy else ANY_DEVICE  # FP32, which depends on none
    symbol, record = convert(network.symbol, weights, policy, device, network.example, on_cpu=network.on_cpu,
                             cast_outputs=network.cast_outputs, int8=int8)
    return Made(symbol, weights.arrays, record, int8)


class _Assignment:
    """Which layers may run in INT8, and the network that has given ones in it."""

    def __init__(self, network: Network, plain: Plain, calibration: Calibration, batch: Batch):
        self.network, self._plain, self._calibration, self.batch = network, plain, calibration, batch
        layers = layers_of(to_graph(plain.symbol), plain.arrays, network.policy)
        self.reasons = {name: reason for name, reason in layers.items() if reason}
        self.layers = [name for name, reason in layers.items() if not reason]
        self._apart: frozenset[str] = frozenset()  # operators between layers that are wrong in INT8
        self.errors: dict[str, float] = {}  # of operators in INT8 by themselves
        with under(None):
            self._results = [values_of(each).astype("float64") for each in Program(*plain)(batch)]

    def make(self, wide: Collection[str] = (), policy: Policy | None = None) -> Made:
        """Convert the network with all layers in INT8 but some."""
        layers = frozenset(self.layers).difference(wide)
        int8 = (Int8(self._calibration, layers, self._apart, NDArrayWeights(self.network.arrays), self.network.symbol)
                if layers else None)
        return _converted(self.network, policy or self.network.policy, int8)

    def leave_out_wrong(self) -> None:
        """Keep what is wrong in INT8 out of it: MXNet's operators are measured one by one."""
        made = self.make()
        if made.int8 is None:
            return
        self.errors = errors(made.int8, self._plain, self.batch)
        wrong = {name: error for name, error in self.errors.items() if error > WRONG}
        without = {name: "the range of its data or result is unknown or zero" for name in self.layers
                   if name not in self.errors}
        self.reasons.update(without)
        self.reasons.update((name, f"its result in INT8 is {error:.0%} off") for name, error in wrong.items())
        self._apart |= wrong.keys() - set(self.layers)
        self.layers = [name for name in self.layers if name not in self.reasons]

    def error(self, made: Made) -> float:
        """Return the relative error of the worst output."""
        with under(None):
            found = Program(made.symbol, made.arrays)(self.batch)
        return max(relative_error([(wide, values_of(cast_arrays(each, FLOAT32)))])
                   for wide, each in zip(self._results, found))

    def recorded(self, made: Made, reasons: Mapping[str, str] | None = None,
                 trials: Sequence[Mapping[str, Any]] = ()) -> Made:
        """Return a converted network with the record of what runs in INT8, and why others do not."""
        reasons, layers = {**self.reasons, **(reasons or {})}, made.int8.layers if made.int8 else frozenset()
        record = replace(made.record, int8=tuple(sorted(layers)), wide=reasons, error=self.error(made),
                         layer_errors={name: self.errors[name] for name in sorted(layers)}, trials=tuple(trials))
        return replace(made, symbol=with_record(made.symbol, record, self._notes(record)), record=record)

    def _notes(self, record: Conversion) -> dict[str, str]:
        """Say of every layer why it runs in what it runs in."""
        return {**record.wide, **{name: f"in INT8: by itself {error:.1%} off FP32"
                                  for name, error in record.layer_errors.items()}}


class _Search:
    """Finds the fastest assignment that keeps a metric, or an error of the outputs."""

    def __init__(self, assignment: _Assignment, request: Request, build: Build, bar: Any):
        self._assignment, self._request, self._build, self._bar = assignment, request, build, bar
        self._end = time.monotonic() + request.time_limit
        self._trials: list[dict[str, Any]] = []
        policy = assignment.network.policy
        fp32 = in_fp32(policy)
        self._policies = [policy, fp32] if policy.lowers else [policy]
        self._order = sorted(assignment.layers, key=lambda name: -assignment.errors[name])
        self._reference = 0.0
        if request.metric is not None:
            made = assignment.make(self._order, fp32)
            self._reference = self._measured(made, self._build(made))

    def fastest(self) -> Made:
        """Return the fastest of what holds: all layers in INT8, as many as may be, or none."""
        for policy in self._policies[:1] if self._request.only else self._policies:
            found = self._holding(policy)
            if found:
                wide, made = min(zip(found, self._seconds([made for _, made in found])), key=itemgetter(1))[0]
                return self._assignment.recorded(made, self._why(wide), self._trials)
        if self._request.only:
            raise StateError(f"with all layers in INT8 the network is not within {self._limit:g} of FP32 (found "
                             f"{self._trials[0]['value']:.4g}): name other types in dtypes, too")
        raise StateError(f"not even FP32 is within {self._limit:g} of itself: the metric differs from run to run. Look "
                         "for random data or random operators in it")

    def _why(self, wide: Sequence[str]) -> dict[str, str]:
        """Say why layers are not in INT8."""
        is_exact = math.isinf(self._limit) or self._trials[0]["holds"]
        return dict.fromkeys(wide, "the network is no faster with it in INT8" if is_exact else
                             "the network is not accurate enough with it")

    def _holding(self, policy: Policy) -> list[_Found]:
        """Return the networks that hold with a type beside INT8: of all layers in INT8, as many as may be, and none."""
        found: dict[int, _Found | None] = {}

        def holds(wide: Sequence[str]) -> bool:
            if len(wide) not in found:
                found[len(wide)] = self._tried(wide, policy)
            return found[len(wide)] is not None

        if self._request.only:
            holds(())
            return [each for each in found.values() if each is not None]
        wide = fewest(self._order, holds)
        holds(self._order)
        sizes = {len(self._order)} if wide is None else {len(wide), len(self._order)}
        return [each for each in map(found.get, sorted(sizes)) if each is not None]

    def _tried(self, wide: Sequence[str], policy: Policy) -> _Found | None:
        """Convert the network with some layers in another type; return it if it is accurate enough."""
        is_last = self._request.only or (policy is self._policies[-1] and len(wide) == len(self._order))
        if time.monotonic() > self._end and not is_last:
            return None
        made = self._assignment.make(wide, policy)
        block = self._build(made)
        try:
            with under(None):
                for _ in range(2):  # what is wrong with static memory shows in the second call
                    self._run(block)
            value = self._measured(made, block)
        except mx.MXNetError as error:  # of shapes that its INT8 operators cannot run
            value = math.nan
            warn(f"MXNet cannot run the network with {len(self._order) - len(wide)} layers in INT8: "
                 f"{first_line(error)}")
        loss = value - self._reference
        lost = -loss if self._request.metric is not None and self._request.greater_is_better else loss
        held = lost <= self._limit
        self._trials.append({"int8": len(self._order) - len(wide), "beside": policy.target_dtype, "value": value,
                             "holds": held})
        self._bar.update()
        self._bar.set_postfix_str(f"{len(wide)} of {len(self._order)} layers in {policy.target_dtype}: {value:.4g}")
        return (wide, made) if held else None

    @property
    def _limit(self) -> float:
        given = self._request.max_error if self._request.metric is None else self._request.budget
        return math.inf if given is None else given

    def _measured(self, made: Made, block: HybridBlock) -> float:
        """Return the metric of a network, or the error of its outputs."""
        if self._request.metric is None:
            return self._assignment.error(made)
        value = _metric_of(self._request.metric, block)
        if not math.isfinite(value):
            raise StateError(f"metric: expected a finite number, received {value!r} for the network in "
                             f"{made.record.summary()}")
        return value

    def _run(self, block: HybridBlock) -> None:
        """Run a network as it is to be served."""
        block(*self._assignment.batch.values())
        mx.nd.waitall()

    def _seconds(self, networks: Sequence[Made]) -> list[float]:
        """Measure networks in turns."""
        with under(None):
            return interleaved([partial(self._run, self._build(made)) for made in networks], _ROUNDS, warm_up=2, of=min)


def _metric_of(metric: Any, net: HybridBlock) -> float:
    """Measure a network by a function, or by a metric of MXNet's and a loader of data and labels."""
    if not isinstance(metric, (list, tuple)):
        return float(metric(net))
    judge, loader = metric
    judge.reset()
    for data, label in loader:
        judge.update([label], [net(data)])
    return float(judge.get()[1])
