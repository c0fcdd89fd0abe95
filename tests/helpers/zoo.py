"""Compares one network under AMP with FP32, and prints the result as JSON. Run by test_zoo.py, in a process of its own.

    python tests/zoo.py NAME compare|train|convert [MODE ...]
"""
from __future__ import annotations

import gluon_amp as amp  # before MXNet, which newer releases of NumPy need help for

# isort: split
import json
import sys
import tempfile
from contextlib import contextmanager
from statistics import median
from typing import Any, Dict, Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from zoo_networks import DETECTS_IN_TRAINING_ONLY, NEED_STATISTICS, Task, flat, make_task

MODES: dict[str, dict[str, Any]] = {
    "eager": {"active": False},
    "hybrid": {"active": True},
    "static_alloc": {"active": True, "static_alloc": True},
    "static_shape": {"active": True, "static_alloc": True, "static_shape": True}}
STEPS = 20
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])

Arrays = Dict[str, np.ndarray]


class Bench:
    """A network whose weights can be put back."""

    def __init__(self, name: str):
        self.name = name
        self.task: Task = make_task(name)
        if name in NEED_STATISTICS:
            self.warm_up()
        self.parameters = dict(self.task.net.collect_params().items())
        self.weights = {key: parameter.data().copy() for key, parameter in self.parameters.items()}
        self.data = self.task.data

    def warm_up(self) -> None:
        """Bring running statistics near those of the data, for networks that grow out of range without."""
        for _ in range(8):
            with autograd.record():
                loss = self.task.loss(self.task.net, self.task.data)
            loss.backward()  # MXNet updates running statistics here

    def restore(self, **flags: Any) -> None:
        for key, parameter in self.parameters.items():
            parameter.set_data(self.weights[key])
        self.task.net.hybridize(**flags)
        mx.random.seed(11)

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Use weights and data rounded to bfloat16, in FP32."""
        weights, data = self.weights, self.data
        self.weights = {key: array if self.parameters[key].grad_req == "null" else through_bfloat16(array)
                        for key, array in weights.items()}
        self.data = None if data is None else through_bfloat16(data)
        yield
        self.weights, self.data = weights, data

    def infer(self, **flags: Any) -> Arrays:
        self.restore(**flags)
        return {str(i): as_numpy(array) for i, array in enumerate(flat(self.task.infer(self.task.net, self.data)))}

    def gradients(self, fixed: bool, **flags: Any) -> Arrays:
        """Return the gradients, with running statistics in every BatchNorm if `fixed`: those of a batch are chaotic."""
        self.task.net.apply(lambda block: use_running_statistics(block, fixed))
        self.restore(**flags)
        with autograd.record():
            loss = self.task.loss(self.task.net, self.data)
        loss.backward()
        return {key: as_numpy(parameter.grad()) for key, parameter in self.parameters.items()
                if parameter.grad_req != "null"}

    def train(self, **flags: Any) -> list[float]:
        """Return the losses of some steps, under AMP when it is on."""
        self.restore(**flags)
        trainer = gluon.Trainer(self.parameters, "sgd", {"learning_rate": self.task.learning_rate, "momentum": 0.9})
        if amp.is_active():
            amp.init_trainer(trainer)
        return [self.step(trainer) for _ in range(STEPS)]

    def step(self, trainer: gluon.Trainer) -> float:
        with autograd.record():
            loss = self.task.loss(self.task.net, self.data)
            if amp.is_active():
                with amp.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
        if not amp.is_active():
            loss.backward()
        trainer.step(1)
        return float(loss.asnumpy())


def use_running_statistics(block: gluon.Block, value: bool) -> None:
    if isinstance(block, nn.BatchNorm):
        own = block.__dict__.setdefault("_own", block._kwargs["use_global_stats"])
        block._kwargs["use_global_stats"] = value or own
    elif isinstance(block, gluon.SymbolBlock):
        inputs, traced = block.__dict__.setdefault("_own", block._cached_graph)
        block._cached_graph = inputs, with_running_statistics(traced) if value else traced
        block._clear_cached_op()


def with_running_statistics(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    graph = json.loads(symbol.tojson())
    for node in graph["nodes"]:
        if node["op"] == "BatchNorm":
            node.setdefault("attrs", {})["use_global_stats"] = "True"
    return mx.sym.load_json(json.dumps(graph))


def as_numpy(array: Any) -> np.ndarray:
    if array.dtype != np.float32:
        raise TypeError(f"expected a float32 array, received {array.dtype}")
    return array.asnumpy()


def through_bfloat16(array: Any) -> Any:
    legacy = array.as_nd_ndarray()
    rounded = mx.nd.amp_cast(mx.nd.amp_cast(legacy, dtype=BFLOAT16), dtype="float32")
    return rounded.as_np_ndarray() if isinstance(array, mx.np.ndarray) else rounded


def deviations(expected: Arrays, found: Arrays) -> list[float]:
    """Relative L2 errors of the arrays that are not zero."""
    pairs = [(expected[key].astype("float64"), found[key]) for key in expected if expected[key].any()]
    return [float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in pairs
            if np.isfinite(a).all() and np.isfinite(b).all()]


def compare(bench: Bench, modes: list[str]) -> dict[str, Any]:
    """Return how far outputs (the worst) and gradients (the median one) are from FP32's."""
    plain = measured(bench, active=False)
    with bench.rounded():
        result = {"yardstick": distance(plain, measured(bench, active=False))}
    amp.init("bfloat16")
    for mode in modes:
        result[mode] = distance(plain, measured(bench, **MODES[mode]))
    amp.deinit()
    return result


def measured(bench: Bench, **flags: Any) -> dict[str, Arrays]:
    return {"outputs": bench.infer(**flags), "gradients": bench.gradients(True, **flags),
            "batch_gradients": bench.gradients(False, **flags)}


def distance(expected: dict[str, Arrays], found: dict[str, Arrays]) -> dict[str, Any]:
    errors = {key: deviations(value, found[key]) for key, value in expected.items()}
    return {**{key: (max if key == "outputs" else median)(values) for key, values in errors.items()},
            "not_finite": [name for key, arrays in found.items() for name in arrays
                           if not np.isfinite(arrays[name]).all() and np.isfinite(expected[key][name]).all()]}


def train(bench: Bench, modes: list[str]) -> dict[str, Any]:
    """Return the losses of every step."""
    result = {"fp32": bench.train(active=True)}
    amp.init("bfloat16")
    result.update((mode, bench.train(**MODES[mode])) for mode in modes if mode != "static_alloc")
    return result


CONVERSIONS: dict[str, dict[str, Any]] = {
    "all": {"target_dtype": "bfloat16"}, "none": {"target_dtype": "bfloat16", "optimize": "none"},
    "float32": {"target_dtype": "float32"}}


def convert(bench: Bench, modes: list[str]) -> dict[str, Any]:
    """Return how far the outputs of converted networks are from FP32's, and whether the network stayed as it was."""
    if bench.name in DETECTS_IN_TRAINING_ONLY:
        bench.task = bench.task._replace(infer=lambda net, x: net(x[:1]))
    plain = {"outputs": bench.infer(active=False)}
    with bench.rounded():
        result: dict[str, Any] = {"yardstick": distance(plain, {"outputs": bench.infer(active=False)})}
    bench.restore(active=False)
    for kind, options in CONVERSIONS.items():
        net = amp.convert_hybrid_block(bench.task.net, **options, **example(bench))
        result[kind] = {**distance(plain, {"outputs": run(bench, net)}), "summary": net.conversion.summary()}
        with tempfile.TemporaryDirectory() as folder:
            symbol_file, params_file = net.export(f"{folder}/net")
            names = [variable.name for variable in net._cached_graph[0]]
            imported = gluon.SymbolBlock.imports(symbol_file, names, params_file)
        imported.hybridize(static_alloc=True, static_shape=True)
        # Files hold MXNet's operators only.
        stock = amp.convert_hybrid_block(bench.task.net, **options, **example(bench),
                                         disable_passes=["native_operators"])
        outputs = [{"outputs": run(bench, each)} for each in (stock, imported)]
        result[kind]["imported"] = distance(*outputs)["outputs"]
    result["untouched"] = distance(plain, {"outputs": bench.infer(active=False)})["outputs"]
    return result


def example(bench: Bench) -> dict[str, Any]:
    return {"data_example": bench.data[:1]} if bench.name in DETECTS_IN_TRAINING_ONLY else {}


def run(bench: Bench, net: gluon.HybridBlock) -> Arrays:
    mx.random.seed(11)
    return {str(i): as_numpy(array) for i, array in enumerate(flat(bench.task.infer(net, bench.data)))}


def main(name: str, kind: str, *modes: str) -> None:
    measure = {"compare": compare, "train": train, "convert": convert}[kind]
    print(json.dumps(measure(Bench(name), list(modes or MODES))))


if __name__ == "__main__":
    main(*sys.argv[1:])
