"""Checks of networks as symbols: executors, conversions of symbols, and networks that are read from files."""
from __future__ import annotations

import os
import random
import tempfile
import warnings
from typing import Any, Callable, Mapping, Sequence

import gluon_amp as amp  # isort: skip
import mxnet as mx
import numpy as np
from fuzz_networks import (
    Shape,
    apply_amp,
    cotangent,
    data,
    gradients,
    hybridize,
    native_operators,
    network,
    outputs,
    shapes,
    some_ways,
    spoil_memory,
    stock,
    trains_batches,
)
from fuzz_programs import EXACT, Program
from fuzz_stock import (
    Wrong,
    compare,
    compare_named,
    initialized,
    right,
    rounding,
    stock_alone,
    stock_gradients,
    stock_outputs,
    stock_writes,
)
from mxnet import gluon
from mxnet.test_utils import environment

from gluon_amp.rules.decision import FP32, Cause

__all__ = ["check_executor", "check_imported", "check_symbols"]


def _symbol(net: gluon.HybridBlock, program: Program) -> mx.sym.Symbol:
    """Trace a network."""
    inputs = [mx.sym.var(f"data{number}") for number in range(len(program.inputs))]
    traced = net(*(one.as_np_ndarray() if program.numpy else one for one in inputs))
    return mx.sym.Group(traced, type(traced[0])) if isinstance(traced, (list, tuple)) else traced


def _feed(symbol: mx.sym.Symbol, program: Program, shape: Shape) -> dict[str, mx.nd.NDArray]:
    """Return the data that a symbol reads, by name."""
    read = set(symbol.list_inputs())
    return {f"data{number}": one.as_nd_ndarray() for number, one in enumerate(data(program, shape))
            if f"data{number}" in read}


def _values(net: gluon.HybridBlock) -> dict[str, mx.nd.NDArray]:
    return {name: one.data().as_nd_ndarray() for name, one in net.collect_params().items()}


def _executor_results(executor: Any, feed: Mapping[str, mx.nd.NDArray], program: Program
                      ) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Run an executor forward, and forward and backward."""
    made = [one.asnumpy() for one in executor.forward(is_train=False, **feed)]
    kept = {name: one.copy() for name, one in executor.aux_dict.items()}
    for one in executor.grad_dict.values():
        if one is not None:
            one[:] = 1  # overwritten, or added to
    if not trains_batches(program):
        return made, {}
    spoil_memory(one.size for one in executor.grad_dict.values() if one is not None)
    executor.forward(is_train=True, **feed)
    executor.backward([cotangent(one.shape, number, program.mode == EXACT).as_nd_ndarray()
                       for number, one in enumerate(executor.outputs)])
    slopes = {name: one.asnumpy() for name, one in executor.grad_dict.items() if one is not None}
    for name, one in kept.items():
        executor.aux_dict[name][:] = one
    return made, slopes


def _requests(program: Program, net: gluon.HybridBlock) -> list[dict[str, str]]:
    """Return what two executors are asked for, by name of the argument: gradients that are written, added, or both."""
    known = net.collect_params()
    names = [*(f"data{number}" for number in range(len(program.inputs))), *known]
    draw = random.Random(f"{program.seed}requests")
    drawn = [{name: draw.choice(choices) for name in names}
             for choices in draw.sample((("write",), ("add",), ("write", "add", "null")), 2)]
    # Without AMP all gradients are asked for: MXNet loses those of biases behind weights that have none.
    return [{name: "null" if name in known and known[name].grad_req == "null" else
             "write" if one == "null" and not program.with_regions else one for name, one in each.items()}
            for each in drawn]


def _bound(symbol: mx.sym.Symbol, program: Program, net: gluon.HybridBlock, requests: Mapping[str, str],
           shape: Shape) -> Any:
    """Bind a symbol to arrays, of one's own or MXNet's, with a network's values."""
    feed, values, names = _feed(symbol, program, shape), _values(net), symbol.list_arguments()
    requests = {name: requests[name] for name in names}
    arguments = {name: one.copy() for name, one in {**feed, **values}.items() if name in names}
    auxiliary = {name: values[name].copy() for name in symbol.list_auxiliary_states()}
    if program.seed % 2:
        slopes = {name: mx.nd.zeros(one.shape) for name, one in arguments.items() if requests[name] != "null"}
        return symbol.bind(mx.cpu(), arguments, slopes, requests, auxiliary)
    executor = symbol.simple_bind(mx.cpu(), grad_req=requests, **{name: one.shape for name, one in feed.items()})
    executor.copy_params_from({name: one for name, one in arguments.items() if name in values}, auxiliary)
    return executor


def _run_executors(program: Program) -> list[tuple[list[np.ndarray], dict[str, np.ndarray]]]:
    """Bind a network, run it, and reshape it for the other shapes; again with other requests for gradients."""
    net = network(program)
    symbol, found = _symbol(net, program), []
    for requests in _requests(program, net):
        executor = _bound(symbol, program, net, requests, shapes(program)[0])
        for shape in _reshaped(program):
            feed = _feed(symbol, program, shape)
            # With NumPy semantics MXNet cannot let arrays of another size share memory.
            executor = (_bound(symbol, program, net, requests, shape) if program.numpy else
                        executor.reshape(partial_shaping=True, allow_up_sizing=True,
                                         **{name: one.shape for name, one in feed.items()}))
            found.append(_executor_results(executor, feed, program))
            if amp.is_active():
                _check_kept(executor, _bound(symbol, program, net, requests, shape), shape)
    return found


def _check_kept(executor: Any, fresh: Any, shape: Shape) -> None:
    """Compare what a shape keeps in FP32 with an executor that has seen no other: few results show garbage."""
    kept = {node.name for node in fresh.plan.graph.operators() if node.decision and node.decision.cause is Cause.SHAPE}
    low = {node.name for node in executor.plan.graph.operators() if node.decision and node.decision.rule != FP32} & kept
    if low:
        raise Wrong(f"executor, shape {shape}: expected {sorted(low)} in FP32 because of shapes")


def _reshaped(program: Program) -> list[Shape]:
    """Return the shapes of the calls of an executor."""
    return [*shapes(program), shapes(program)[0]]


def check_executor(program: Program, dtype: str) -> None:
    """``bind``, ``simple_bind``, ``reshape``, and gradients that are written, added, and not asked for."""
    runs = [(requests, shape) for requests in _requests(program, network(program)) for shape in _reshaped(program)]
    with stock_alone():
        ours = _run_executors(program.without_regions())
    bounds = {shape: (rounding(program, dtype, shape), rounding(program, dtype, shape, of="gradients"))
              for shape in shapes(program)}
    wanted = {shape: stock_gradients(program, shape) for shape in shapes(program)}
    with native_operators(program):
        apply_amp(program, dtype)
        found = _run_executors(program)
    for (requests, shape), (outs, slopes), (other_outs, other_slopes) in zip(runs, ours, found):
        what = f"{'/'.join(sorted(set(requests.values())))}, shape {shape}, {dtype}"
        compare(f"executor, {what}", outs, other_outs, bounds[shape][0])
        expected, before = wanted[shape], {name: one == "add" for name, one in requests.items()}
        rightly = initialized(program, right({name: expected[name] + before[name] for name in slopes}, slopes))
        compare_named(f"gradients of an executor, {what}", expected,
                      {name: one - before[name] for name, one in other_slopes.items()}, bounds[shape][1], rightly)


def _predict(symbol: mx.sym.Symbol, arguments: Mapping[str, Any], auxiliary: Mapping[str, Any],
             feeds: Sequence[Mapping[str, mx.nd.NDArray]]) -> list[list[np.ndarray]]:
    """Run a symbol by a module that is told the shapes of data, as deployed models are, without MXNet's fusion."""
    module = mx.mod.Module(symbol, data_names=sorted(feeds[0]), label_names=None)
    with environment("MXNET_SUBGRAPH_BACKEND", "NONE"):
        module.bind([(name, feeds[0][name].shape) for name in sorted(feeds[0])], for_training=False)
        module.set_params(dict(arguments), dict(auxiliary))
        return [_module_outputs(module, feed) for feed in feeds]


def _module_outputs(module: mx.mod.Module, feed: Mapping[str, mx.nd.NDArray]) -> list[np.ndarray]:
    module.forward(mx.io.DataBatch([feed[name] for name in sorted(feed)]), is_train=False)
    return [one.asnumpy() for one in module.get_outputs()]


def check_symbols(program: Program, dtype: str) -> None:
    """``convert_symbol`` and ``convert_model``, what files make of them, and MXNet alone that runs them."""
    program = program.without_telltales()
    plain = stock(program)
    symbol, values = _symbol(plain, program), _values(plain)
    feeds = [_feed(symbol, program, shape) for shape in shapes(program)]
    auxiliary = {name: values[name] for name in symbol.list_auxiliary_states()}
    arguments = {name: values[name] for name in symbol.list_arguments() if name in values}
    with stock_alone():
        expected = _predict(symbol, arguments, auxiliary, feeds)
    bounds = [rounding(program, dtype, shape) for shape in shapes(program)]

    def check(what: str, converted: mx.sym.Symbol, args: Mapping[str, Any], aux: Mapping[str, Any]) -> None:
        if converted.list_outputs() != symbol.list_outputs():
            raise Wrong(f"{what}: outputs are called {converted.list_outputs()}, expected {symbol.list_outputs()}")
        for shape, bound, wanted, made in zip(shapes(program), bounds, expected, _predict(converted, args, aux, feeds)):
            compare(f"{what}, {dtype}, shape {shape}", wanted, made, bound)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _through_files("convert_symbol", amp.convert_symbol(symbol, dtype), arguments, auxiliary, check)
        for optional in (None, False, True):
            made = amp.convert_model(symbol, arguments, auxiliary, dtype, cast_optional_params=optional)
            _through_files(f"convert_model with cast_optional_params={optional}", *made, check)


def _through_files(what: str, symbol: mx.sym.Symbol, arguments: Mapping[str, Any], auxiliary: Mapping[str, Any],
                   check: Callable[..., None]) -> None:
    check(what, symbol, arguments, auxiliary)
    with tempfile.TemporaryDirectory() as folder:
        prefix = os.path.join(folder, "net")
        mx.model.save_checkpoint(prefix, 0, symbol, dict(arguments), dict(auxiliary))
        check(f"{what}, saved", *mx.model.load_checkpoint(prefix, 0))


def check_imported(program: Program, dtype: str) -> None:
    """What ``export`` writes during AMP is the FP32 network; a network that is read from it trains, inside another."""
    program = program.without_telltales()  # files keep no regions
    expected, slopes = stock_outputs(program), stock_gradients(program)
    kept = "float32" if program.seed % 3 == 0 else dtype
    bounds = rounding(program, kept), rounding(program, kept, of="gradients")
    for way, flags in some_ways(program, dtype, 2).items():
        written = stock_writes(program, way) & stock_writes(program, "hybridized")
        with tempfile.TemporaryDirectory() as folder:
            files = _export(program, dtype, os.path.join(folder, "net"))
            names = sorted({f"data{number}" for number in range(len(program.inputs))}
                           & set(mx.sym.load(files[0]).list_inputs()))
            arguments = [data(program)[int(name[4:])] for name in names]
            with open(files[0], encoding="utf-8") as text:
                if "__amp" in text.read():
                    raise Wrong(f"export during AMP, {dtype}: the file holds marks of the process that wrote it")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                imported = gluon.SymbolBlock.imports(files[0], names, files[1])
        compare(f"export during AMP, {dtype}", expected, outputs(imported, arguments), 2e-4)
        net = _Around(imported)
        hybridize(net, flags)
        apply_amp(program, dtype)
        if program.seed % 3 == 0:
            amp.exclude(imported)
        compare(f"imported, {way}, {dtype}", expected, outputs(net, arguments), bounds[0])
        found = gradients(net, program, arguments)
        compare_named(f"gradients of an imported network, {way}, {dtype}", slopes,
                      {name: one for name, one in found.items() if not name.startswith("data")}, bounds[1], written)
        amp.deinit()


def _export(program: Program, dtype: str, prefix: str) -> tuple[str, str]:
    net = network(program)
    net.hybridize()
    apply_amp(program, dtype)
    outputs(net, data(program))
    net.export(prefix)
    amp.deinit()
    return f"{prefix}-symbol.json", f"{prefix}-0000.params"


class _Around(gluon.HybridBlock):
    """A block around another."""

    def __init__(self, inner: gluon.HybridBlock):
        super().__init__()
        self.inner = inner

    def hybrid_forward(self, F: Any, *inputs: Any) -> Any:
        return self.inner(*inputs)
