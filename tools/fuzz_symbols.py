"""Checks of networks as symbols: executors, conversions of symbols, and networks that are read from files."""
from __future__ import annotations

import os
import tempfile
import warnings
from functools import partial
from typing import Any, Callable, Mapping, Sequence

import gluon_amp as amp  # isort: skip
import mxnet as mx
import numpy as np
from fuzz_networks import (
    SHAPES,
    WAYS,
    Wrong,
    apply_amp,
    compare,
    cotangent,
    data,
    gradients,
    hybridize,
    native_operators,
    network,
    outputs,
    rms,
    rounding,
    tolerances,
)
from fuzz_programs import EXACT, Program
from mxnet import gluon
from mxnet.test_utils import environment

__all__ = ["check_executor", "check_imported", "check_symbols"]


def _symbol(net: gluon.HybridBlock, program: Program) -> mx.sym.Symbol:
    """Trace a network."""
    traced = net(*(mx.sym.var(f"data{number}") for number in range(len(program.inputs))))
    return mx.sym.Group(traced) if isinstance(traced, (list, tuple)) else traced


def _feed(symbol: mx.sym.Symbol, program: Program, shape: tuple[int, int, int]) -> dict[str, mx.nd.NDArray]:
    """Return the data that a symbol reads, by name."""
    read = set(symbol.list_inputs())
    return {f"data{number}": one for number, one in enumerate(data(program, shape)) if f"data{number}" in read}


def _values(net: gluon.HybridBlock) -> dict[str, mx.nd.NDArray]:
    return {name: one.data() for name, one in net.collect_params().items()}


def _executor_results(executor: Any, feed: Mapping[str, mx.nd.NDArray], exact: bool
                      ) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Run an executor forward, and forward and backward."""
    made = [one.asnumpy() for one in executor.forward(is_train=False, **feed)]
    kept = {name: one.copy() for name, one in executor.aux_dict.items()}
    for one in executor.grad_dict.values():
        if one is not None:
            one[:] = 1  # overwritten, or added to
    executor.forward(is_train=True, **feed)
    executor.backward([cotangent(one.shape, number, exact) for number, one in enumerate(executor.outputs)])
    slopes = {name: one.asnumpy() for name, one in executor.grad_dict.items() if one is not None}
    for name, one in kept.items():
        executor.aux_dict[name][:] = one
    return made, slopes


def _run_executors(program: Program, net: gluon.HybridBlock) -> list[tuple[list[np.ndarray], dict[str, np.ndarray]]]:
    """Bind a network, run it, and reshape it for the other shapes; again with gradients that are added up."""
    symbol, exact = _symbol(net, program), program.mode == EXACT
    found = []
    for request in ("write", "add"):
        executor = symbol.simple_bind(mx.cpu(), grad_req=request,
                                      **{name: one.shape for name, one in _feed(symbol, program, SHAPES[0]).items()})
        executor.copy_params_from({name: one for name, one in _values(net).items() if name in executor.arg_dict},
                                  {name: one for name, one in _values(net).items() if name in executor.aux_dict})
        for shape in (*SHAPES, SHAPES[0]):
            feed = _feed(symbol, program, shape)
            executor = executor.reshape(partial_shaping=True, allow_up_sizing=True,
                                        **{name: one.shape for name, one in feed.items()})
            found.append(_executor_results(executor, feed, exact))
    return found


def check_executor(program: Program, dtype: str) -> None:
    """``simple_bind``, ``reshape``, and gradients that are written and added."""
    expected = _run_executors(program, network(program, with_regions=False))
    forward, backward = tolerances(program, dtype)
    with native_operators(program):
        apply_amp(program, dtype)
        found = _run_executors(program, network(program))
    written = [slopes for _, slopes in expected[:len(expected) // 2]] * 2
    for number, ((outs, slopes), (other_outs, other_slopes)) in enumerate(zip(expected, found)):
        bound = partial(rounding, program, dtype, (*SHAPES, SHAPES[0])[number % (len(SHAPES) + 1)])
        compare(f"executor, run {number}, {dtype}", outs, other_outs, forward, rounding=bound)
        names = list(slopes) if number < len(expected) // 2 else _accumulated(written[number], slopes)
        compare(f"gradients of an executor, run {number}, {dtype}", [slopes[name] for name in names],
                [other_slopes[name] for name in names], backward, names, bound)


def _accumulated(written: Mapping[str, np.ndarray], added: Mapping[str, np.ndarray]) -> list[str]:
    """Name the gradients that MXNet has added to ones, as it was told: some of its operators write instead."""
    floor = 0.1 * max(map(rms, written.values()))
    return [name for name, one in written.items() if rms(added[name] - one - 1) <= 1e-3 * max(rms(one), floor)]


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
    plain = network(program, with_regions=False)
    symbol, values = _symbol(plain, program), _values(plain)
    feeds = [_feed(symbol, program, shape) for shape in SHAPES]
    auxiliary = {name: values[name] for name in symbol.list_auxiliary_states()}
    arguments = {name: values[name] for name in symbol.list_arguments() if name in values}
    expected = _predict(symbol, arguments, auxiliary, feeds)
    tolerance = tolerances(program, dtype)[0]

    def check(what: str, converted: mx.sym.Symbol, args: Mapping[str, Any], aux: Mapping[str, Any]) -> None:
        if converted.list_outputs() != symbol.list_outputs():
            raise Wrong(f"{what}: outputs are called {converted.list_outputs()}, expected {symbol.list_outputs()}")
        for shape, wanted, made in zip(SHAPES, expected, _predict(converted, args, aux, feeds)):
            compare(f"{what}, {dtype}, shape {shape}", wanted, made, tolerance,
                    rounding=partial(rounding, program, dtype, shape))

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
    plain, exact = network(program, with_regions=False), program.mode == EXACT
    expected, slopes = outputs(plain, data(program)), gradients(plain, data(program), exact)
    for way, flags in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            files = _export(program, dtype, os.path.join(folder, "net"))
            names = sorted({f"data{number}" for number in range(len(program.inputs))}
                           & set(mx.sym.load(files[0]).list_inputs()))
            arguments = [data(program)[int(name[4:])] for name in names]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                imported = gluon.SymbolBlock.imports(files[0], names, files[1])
        has_low_regions = any("on" in part.settings for part in program.parts)  # files keep them; the innermost counts
        if not has_low_regions:
            compare(f"export during AMP, {dtype}", expected, outputs(imported, arguments),
                    tolerances(program, "float32")[0])
        net = _Around(imported)
        hybridize(net, flags)
        apply_amp(program, dtype)
        if program.seed % 3 == 0:
            amp.exclude(imported)
        bound = tolerances(program, "float32" if program.seed % 3 == 0 and not has_low_regions else dtype)
        allowed = partial(rounding, program, dtype)
        compare(f"imported, {way}, {dtype}", expected, outputs(net, arguments), bound[0], rounding=allowed)
        found = gradients(net, arguments, exact)
        compared = [name for name in found if not name.startswith("data")]
        compare(f"gradients of an imported network, {way}, {dtype}", [slopes[name] for name in compared],
                [found[name] for name in compared], bound[1], compared, allowed)
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
