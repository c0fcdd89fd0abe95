"""Which layers of a network run in INT8: all that are right and gain, or as many as an error or a metric allows."""
from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any, Collection, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock

from .. import passes
from .._mxnet.arrays import NDArrayWeights, cast_arrays, values_of
from .._mxnet.engine import Program, interleaved
from .._mxnet.symbols import first_line, from_graph, to_graph, with_lasting_casts
from ..base.metrics import fewest, measured, relative_error
from ..errors import DTypeError, PolicyError, StateError, some_of, warn
from ..graph.attrs import NOTE
from ..machine.dtypes import FLOAT32, INT8
from ..passes import Context, Facts, Int8
from ..rules import Policy
from ..rules.tables.groups import CHOOSE_BY_ORDER
from ..state.in_force import under
from .calibration import Batch, Calibration, batches_of, collect
from .convert import Made, Network, analyse_network, convert, earlier
from .int8 import MADE, Quantizer, decided_in, layers_of
from .options import ConversionOptions

WRONG = 0.08  # the error from which on an operator in INT8 is taken for wrong: rounding gives 0.005 to 0.07
# Allowed errors of outputs where no limit is named, and on the batch that decides: other data give up to 1.35 times it.
_FAR, _FAR_HERE = 0.05, 0.035
_ROUNDS = 5  # of timing


def converted_network(network: Network, options: ConversionOptions) -> Made:
    """Convert a network, whose layers run in INT8 where that is asked for, right, and keeps what was asked for."""
    if not options.is_int8:
        return convert(network)
    record = earlier(to_graph(network.symbol), INT8)
    if record is not None:
        return Made(network.symbol, network.arrays, record)
    if not network.on_cpu:
        raise DTypeError("expected a network on the CPU for INT8: MXNet's INT8 operators are oneDNN's. Give "
                         "device=mx.cpu()")
    if not network.policy.runs("fuse"):
        raise PolicyError("INT8 needs the pass 'fuse': expected it in optimize, and not in disable_passes")
    return _Search(network, options).fastest()


def _in_fp32(policy: Policy) -> Policy:
    """Return the policy for the same network in FP32."""
    return Policy(FLOAT32, training=False, excluded=policy.excluded, disabled_passes=policy.disabled_passes)


def prepared(network: Network) -> Network:
    """Return a network as all its conversions begin, BatchNorm folded: its tensors have the names of the ranges."""
    graph, weights = to_graph(network.symbol), NDArrayWeights(network.arrays)
    analyse_network(network.symbol, graph, weights, {}, {})
    passes.run(graph, Context.of(graph, _in_fp32(network.policy), facts=Facts(recorded=False), weights=weights))
    return replace(network, symbol=from_graph(graph, network.symbol), arrays=weights.arrays)


def calibrated(options: ConversionOptions, network: Network, plain: Network) -> tuple[Calibration, Batch]:
    """Return the ranges that were given, or collect them; and some data to try the network on."""
    given = options.calib_data
    if isinstance(given, Calibration):
        if given.ranges.keys().isdisjoint(node.name for node in to_graph(network.symbol).operators()):
            raise PolicyError("calib_data: the ranges are of a network with other names: expected those that "
                              "calibrate() returned for this one, received those of "
                              f"{some_of(list(given.ranges)) or 'nothing'}. Give a network a prefix to use its ranges "
                              "in another process")
        if not all(isinstance(network.example.get(name), mx.nd.NDArray) for name in network.inputs):
            raise PolicyError("expected data_example with arrays: ranges that were collected before say nothing of the "
                              "errors of INT8, which are measured on it")
        return given, {name: network.example[name] for name in network.inputs}
    batches = batches_of(given, network.inputs, options.calib_batches)
    first = next(batches, None)
    if first is None:
        raise StateError("calib_data gave no batch: expected a loader, an iterator or arrays with some data. A "
                         "generator that was used before gives nothing: make a new one")
    return collect(plain.symbol, plain.arrays, chain([first], batches), options.calib_mode), first


class _Search:
    """Finds the fastest assignment that keeps a metric, or an error of the outputs, among layers right in INT8."""

    def __init__(self, network: Network, options: ConversionOptions):
        self._network, self._options = network, options
        plain = prepared(network)
        self._calibration, self._batch = calibrated(options, network, plain)
        with under(None):
            given = Program(plain.symbol, plain.arrays)(self._batch)
            self._results = [values_of(each).astype("float64") for each in given]
        if not any(np.isfinite(each).any() for each in self._results):
            raise StateError("expected a network that gives finite values on the first batch of calib_data, found none "
                             "in FP32: nothing tells whether INT8 is right. Look for what makes infinities or NaN")
        layers = layers_of(to_graph(plain.symbol), plain.arrays, network.policy)
        self._reasons = {name: reason for name, reason in layers.items() if reason}  # why layers are not in INT8
        self._order = [name for name, reason in layers.items() if not reason]  # layers that may be, the worst first
        self._wrong: frozenset[str] = frozenset()  # operators between layers that are wrong in INT8
        self._errors = self._errors_alone(plain)
        self._order.sort(key=lambda name: -self._errors[name])
        self._trials: list[dict[str, Any]] = []
        policy, fp32 = network.policy, _in_fp32(network.policy)
        self._policies = [policy, fp32] if policy.lowers and not options.only_int8 else [policy]
        # Detections may change places, which says nothing of their values.
        sorts = any(node.op in CHOOSE_BY_ORDER for node in to_graph(network.symbol).operators())
        self._is_own_limit = options.limit is None and not sorts
        self._limit = math.inf if options.limit is None else options.limit
        if self._is_own_limit and not options.only_int8:
            self._limit = _FAR_HERE
        self._reference = 0.0
        if options.metric is not None:
            made = self._made(self._order, fp32)
            self._reference = self._measured(made, network.built(made))

    def _errors_alone(self, plain: Network) -> dict[str, float]:
        """Measure MXNet's INT8 operators one by one; keep those that are wrong out of INT8."""
        made = self._made((), self._network.policy)
        if made.quantizer is None:
            return {}
        errors = made.quantizer.errors(plain, self._batch)
        wrong = {name: f"its result in INT8 is {error:.0%} off" for name, error in errors.items() if error > WRONG}
        without = set(self._order).difference(errors)
        self._reasons.update(dict.fromkeys(without, "the range of its data or result is unknown or zero"), **wrong)
        self._wrong |= frozenset(wrong).difference(self._order)
        self._order = [name for name in self._order if name not in self._reasons]
        return errors

    def _made(self, wide: Collection[str], policy: Policy) -> Made:
        """Convert the network with all layers in INT8 but some."""
        layers = frozenset(self._order).difference(wide)
        if not layers:
            return convert(self._network, policy)
        while True:
            quantizer = Quantizer(Int8(layers, self._wrong), self._calibration, policy.excluded,
                                  NDArrayWeights(self._network.arrays), self._network.symbol)
            made = convert(self._network, policy, quantizer)
            wrong = quantizer.wrong_sums() - self._wrong
            if not wrong:
                return made
            self._wrong |= wrong

    def fastest(self) -> Made:
        """Return the fastest of what holds: all layers in INT8, as many as may be, or none."""
        for policy in self._policies:
            found = self._holding(policy)
            if found:
                with under(None):
                    runs = [partial(self._run, self._network.built(made)) for made in found]
                    times = interleaved(runs, _ROUNDS, warm_up=2, of=min)
                return self._recorded(min(zip(found, times), key=itemgetter(1))[0])
        if self._options.only_int8:
            raise StateError(f"with all layers in INT8 the network is not within {self._limit:g} of FP32 (found "
                             f"{self._trials[0]['value']:.4g}): name other types in dtypes, too")
        raise StateError(f"not even FP32 is within {self._limit:g} of itself: the metric differs from run to run. Look "
                         "for random data or random operators in it")

    def _holding(self, policy: Policy) -> list[Made]:
        """Return the networks that hold with a type beside INT8: of all layers in INT8, as many as may be, and none."""
        order = [] if self._options.only_int8 else self._order
        tried = lru_cache(maxsize=None)(lambda count: self._tried(order[:count], policy))
        wide = fewest(order, lambda wide: tried(len(wide)) is not None)
        sizes = {len(order)} if wide is None else {len(wide), len(order)}
        return [each for each in map(tried, sorted(sizes)) if each is not None]

    def _tried(self, wide: Sequence[str], policy: Policy) -> Made | None:
        """Convert the network with some layers in another type; return it if it is accurate enough."""
        made, count = self._made(wide, policy), len(self._order) - len(wide)
        block = self._network.built(made)
        try:
            with under(None):
                for _ in range(2):  # what is wrong with static memory shows in the second call
                    self._run(block)
            value = self._measured(made, block)
        except mx.MXNetError as error:  # of shapes that its INT8 operators cannot run
            value = math.nan
            warn(f"MXNet cannot run the network with {count} layers in INT8: {first_line(error)}")
        loss = value - self._reference
        lost = -loss if self._options.metric is not None and self._options.greater_is_better else loss
        held = lost <= self._limit and math.isfinite(value)
        self._trials.append({"int8": count, "beside": policy.target_dtype, "value": value, "holds": held})
        return made if held else None

    def _measured(self, made: Made, block: HybridBlock) -> float:
        """Return the metric of a network, or the error of its outputs."""
        if self._options.metric is None:
            return self._error(made)
        value = measured(self._options.metric, block)
        if not math.isfinite(value):
            raise StateError(f"metric: expected a finite number, received {value!r} for the network in "
                             f"{made.record.summary()}")
        return value

    def _error(self, made: Made) -> float:
        """Return the relative error of the worst output."""
        with under(None):
            found = Program(made.symbol, made.arrays)(self._batch)
        return max(relative_error([(wide, values_of(cast_arrays(each, FLOAT32)))])
                   for wide, each in zip(self._results, found))

    def _run(self, block: HybridBlock) -> None:
        """Run a network as it is to be served."""
        block(*self._batch.values())
        mx.nd.waitall()

    def _recorded(self, made: Made) -> Made:
        """Return a converted network with the record of what runs in INT8, and why others do not."""
        layers, error = sorted(made.quantizer.int8.layers) if made.quantizer else [], self._error(made)
        reason = ("the network is no faster with it in INT8" if self._trials[0]["holds"] else
                  "the network is not accurate enough with it")
        wide = dict.fromkeys((name for name in self._order if name not in layers), reason)
        record = replace(made.record, int8=tuple(layers), wide={**self._reasons, **wide},
                         error=error, layer_errors={name: self._errors[name] for name in layers},
                         trials=tuple(self._trials))
        all_int8 = self._trials[0]["value"]
        far = _FAR if self._options.only_int8 else _FAR_HERE
        if self._is_own_limit and self._order and far < all_int8 < math.inf:
            remedy = (f"leave dtypes out, and layers stay in another type until they are at most {_FAR:.0%} off"
                      if self._options.only_int8 else
                      f"{len(self._order) - len(layers)} of {len(self._order)} layers stay in another type. Name what "
                      "is allowed, by max_error, or by metric and budget")
            warn(f"with all layers in INT8 outputs are {all_int8:.1%} off FP32: {remedy}")
        graph = to_graph(made.symbol)
        notes = {**record.wide, **{name: f"in INT8: by itself {error:.1%} off FP32"
                                   for name, error in record.layer_errors.items()}}
        for node in graph.operators():
            names = [node.name, node.name.replace(MADE, "", 1), *decided_in(node)]
            told = next((notes[name] for name in names if name in notes), None)
            node.attrs = node.attrs if told is None else {**node.attrs, NOTE: told}
        record.write(graph)
        symbol = with_lasting_casts(from_graph(graph, made.symbol), needed=True)
        return replace(made, symbol=symbol, record=record)
