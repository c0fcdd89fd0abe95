"""Run programs as networks: build, hybridize, and compute outputs, gradients and updates."""
from __future__ import annotations

import os
import random
import tempfile
import warnings
import zlib
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence, Tuple

import gluon_amp as amp  # isort: skip
import mxnet as mx
import numpy as np
from fuzz_programs import EXACT, Program
from mxnet import autograd, gluon

from gluon_amp.eager import native as eager_native
from gluon_amp.passes import native_attention
from gluon_amp.passes import native_operators as native

__all__ = ["EMPTY", "UNWRITTEN", "WAYS", "Shape", "apply_amp", "array", "cotangent", "data", "frozen", "gradients",
           "hybridize", "is_statistic", "native_operators", "network", "outputs", "renew", "reset_statistics",
           "semantics", "shapes", "some_ways", "spoil_memory", "stock", "trained", "trains_batches"]

Arrays = Mapping[str, np.ndarray]

WAYS: dict[str, dict[str, Any] | None] = {"eager": None, "hybridized": {}, "static": {"static_alloc": True},
                                          "static shape": {"static_alloc": True, "static_shape": True},
                                          "parts": {"below": True}}
Shape = Tuple[int, int, int]  # images in a batch, rows, columns
_SHAPES: tuple[Shape, ...] = ((2, 8, 8), (3, 12, 8), (1, 16, 12), (1, 8, 8), (2, 4, 4), (6, 8, 4))
EMPTY: Shape = (0, 8, 8)  # a batch without images
UNWRITTEN = 7.0  # what gradients hold before they are written, where MXNet overwrites them all


@contextmanager
def semantics(program: Program) -> Iterator[None]:
    """Give the body the arrays that a program is written for, as ``npx.set_np`` would give them to a script."""
    with mx.util.np_shape(program.numpy), mx.util.np_array(program.numpy):
        yield


def array(values: Any) -> mx.nd.NDArray:
    """Make an array of the semantics in force."""
    return (mx.np if mx.util.is_np_array() else mx.nd).array(values, dtype="float32")


def shapes(program: Program) -> tuple[Shape, ...]:
    """Return the shapes that a program is called with; the first is the one that it trains with."""
    return tuple(random.Random(f"{program.seed}shapes").sample(_SHAPES, 3))


def is_statistic(name: str) -> bool:
    """Tell whether a parameter is one that BatchNorm moves."""
    return name.rpartition("_")[2].startswith(("mean", "var"))


def parameter(block: gluon.HybridBlock, name: str, shape: tuple[int, ...]) -> gluon.Parameter:
    """Return the network's parameter of a name; blocks that ask for the same one share it."""
    fixed = is_statistic(name) or name.startswith("big")
    return block.params.get(name, shape=shape, grad_req="null" if fixed else "write", differentiable=not fixed)


def layer(name: str, kind: type, *args: Any, **kwargs: Any) -> gluon.HybridBlock:
    """Make a Gluon layer whose parameters have a name of their own in the network."""
    return kind(*args, params=gluon.ParameterDict(f"net_{name}_"), **kwargs)


def prelu(F: Any, data: Any, slopes: Any, shape: tuple[int, ...]) -> Any:
    """Run a rectifier with slopes that are learned: by hand without AMP, where MXNet gets their gradient wrong."""
    if amp.is_active():
        return F.LeakyReLU(data, slopes, act_type="prelu")
    return F.relu(data) - F.broadcast_mul(F.relu(-data), F.reshape(slopes, shape))


def network(program: Program, rounded: Callable | None = None) -> gluon.HybridBlock:
    """Build a program, with the values that belong to its seed."""
    names: dict[str, Any] = {"gluon": gluon, "amp": amp, "parameter": parameter, "layer": layer,
                             "rounded": rounded, "prelu": prelu}
    exec(_compiled(program), names)
    net = names["Net"]()
    net.initialize()
    _set_values(program, net)
    for name, found in net.collect_params().items():
        if name in frozen(program):
            found.grad_req = "null"
    return net


def stock(program: Program) -> gluon.HybridBlock:
    """Build a program as stock MXNet is to run it: without regions, every parameter with a gradient."""
    expect_no_amp()
    return network(program.without_regions())


def expect_no_amp() -> None:
    """Raise where AMP is on and stock MXNet is to run."""
    if amp.is_active():
        raise RuntimeError("expected AMP to be off: what stock MXNet gives is asked before it is switched on")


_code: dict[str, Any] = {}


def _compiled(program: Program) -> Any:
    """Compile a program once."""
    source = program.source()
    if source not in _code:
        if len(_code) > 16:
            _code.clear()
        _code[source] = compile(source, f"<program {program.seed}>", "exec")
    return _code[source]


def frozen(program: Program) -> frozenset[str]:
    """Name the parameters without gradients: in a third of the programs some of them."""
    if program.seed % 3 or not program.with_regions:
        return frozenset()
    names = {f"net_{name}" for step in program.steps for name, _ in step.parameters}
    return frozenset(name for name in names if zlib.crc32(f"{program.seed}{name}frozen".encode()) % 4 == 0)


def _set_values(program: Program, net: gluon.HybridBlock, version: int = 0) -> None:
    for name, found in net.collect_params().items():
        found.set_data(array(_values(program, name, found.shape, version)))


def renew(program: Program, net: gluon.HybridBlock) -> None:
    """Give a network other parameters, as a step of an optimizer or a file would."""
    if program.seed % 2:
        _set_values(program, net, 1)
        return
    other = network(program.without_regions())
    _set_values(program, other, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "net.params")
        other.save_parameters(path)
        net.load_parameters(path)


_ROLES = {"weight": "w", "bias": "b", "gamma": "gamma", "beta": "beta", "mean": "mean", "var": "var"}  # in Gluon layers


def _values(program: Program, name: str, shape: tuple[int, ...], version: int = 0) -> np.ndarray:
    own = name[len("net_"):]
    draw = np.random.RandomState(zlib.crc32(f"{program.seed}{own}".encode()) + version)
    role = _ROLES.get(name.rpartition("_")[2], own.rstrip("0123456789"))
    fan_in = int(np.prod(shape[1:]))
    if role == "big":
        return np.full(shape, 1024.0)
    if program.mode == EXACT:
        chance = min(1.0, 6 / fan_in) if role == "w" else 1.0
        return draw.choice([-1, 1], shape) * (draw.uniform(size=shape) < chance)
    if role in ("gamma", "var"):
        return draw.uniform(0.5, 1.5, shape)
    return draw.normal(scale=(1.6 / fan_in) ** 0.5 if role == "w" else 0.2, size=shape)


def data(program: Program, shape: Shape | None = None) -> list[mx.nd.NDArray]:
    """Return the arguments of a call."""
    draw, shape = np.random.RandomState(program.seed), shape or shapes(program)[0]
    made = [draw.normal(size=(shape[0], kind.channels, *shape[1:])) for kind in program.inputs]
    return [array(np.clip(np.rint(one), -3, 3) if program.mode == EXACT else one) for one in made]


def some_ways(program: Program, dtype: str, count: int) -> dict[str, dict[str, Any] | None]:
    """Return some ways to run a network: with many programs each has its turn, which finds more than all of each."""
    names = random.Random(f"{program.seed}{dtype}").sample(list(WAYS), count)
    return {name: WAYS[name] for name in names}


@contextmanager
def native_operators(program: Program) -> Iterator[None]:
    """Let operators in C++ serve nearly every size, for half of the programs; they gain from some size on."""
    kept = dict(native.REPLACEMENTS), native_attention._LEAST, eager_native._LEAST
    try:
        if program.seed % 2:
            native.REPLACEMENTS.update({name: one._replace(least=0) for name, one in native.REPLACEMENTS.items()})
            native_attention._LEAST, eager_native._LEAST = 0, 2  # MXNet tells libraries no shape of a scalar
        yield
    finally:
        native.REPLACEMENTS.update(kept[0])
        native_attention._LEAST, eager_native._LEAST = kept[1:]


def hybridize(net: gluon.HybridBlock, flags: Mapping[str, Any] | None) -> None:
    """Hybridize a network in one of the ways: not, as a whole, or what is in it only."""
    flags = {"active": False} if flags is None else dict(flags)
    for block in net._children.values() if flags.pop("below", False) else [net]:
        block.hybridize(**flags)


def _listed(value: Any) -> list[mx.nd.NDArray]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def outputs(net: Callable, arguments: Sequence[mx.nd.NDArray]) -> list[np.ndarray]:
    """Run a network in inference."""
    return [one.asnumpy() for one in _listed(net(*arguments))]


def spoil_memory(sizes: Iterable[int]) -> None:
    """Fill memory for arrays of some sizes with large numbers, so that what reads it uninitialised is found."""
    arrays = [mx.nd.full((size,), 1e30) for size in set(sizes) for _ in range(12)]
    mx.nd.waitall()
    del arrays


def trains_batches(program: Program) -> bool:
    """Tell whether gradients are those of training; of some programs those of inference, which Dropout leaves alone."""
    return not any("ropout(" in step.text and "p=0.5" in step.text for step in program.steps)


def gradients(net: gluon.HybridBlock, program: Program, arguments: Sequence[mx.nd.NDArray], passes: int = 1,
              with_data: bool = True, unwritten: float = 0.0) -> dict[str, np.ndarray]:
    """Differentiate a weighted sum of the outputs with respect to parameters and data; add up over passes.

    With one pass the result also tells how far it moved the statistics of BatchNorm. Gradients hold ``unwritten``
    before.
    """
    request = "add" if passes > 1 else "write"
    found = {name: one for name, one in net.collect_params().items() if one.grad_req != "null"}
    moved = {name: one.data().asnumpy() for name, one in net.collect_params().items() if is_statistic(name)}
    for one in found.values():
        one.grad_req = request
        one.grad()[:] = unwritten
    for one in arguments if with_data else ():
        one.attach_grad(request)
        one.grad[:] = unwritten
    for _ in range(passes):
        spoil_memory(one.grad().size for one in found.values())
        with autograd.record(train_mode=trains_batches(program)):
            loss = _loss(net(*arguments), program.mode == EXACT)
        loss.backward()
    slopes = {name: one.grad().asnumpy() for name, one in found.items()}
    slopes.update((f"data{number}", one.grad.asnumpy()) for number, one in enumerate(arguments) if with_data)
    if passes == 1:
        still = set() if with_data else _still(program)
        slopes.update((name, net.collect_params()[name].data().asnumpy() - one) for name, one in moved.items()
                      if name not in still and _uses(program, name) <= 1)
    return slopes


def _moving(program: Program, net: gluon.HybridBlock) -> list[str]:
    """Name the statistics that move, and that one layer has."""
    return [name for name in net.collect_params() if is_statistic(name) and name not in _still(program)
            and _uses(program, name) <= 1]


def _uses(program: Program, name: str) -> int:
    return sum(name.endswith(f"_{own}") for step in program.steps for own, _ in step.parameters)


def _still(program: Program) -> set[str]:
    """Name the statistics that may not move: MXNet moves them in the backward pass, which frozen layers may lack."""
    return {f"net_{own}" for step in program.steps if len(step.parameters) == 4
            and all(f"net_{name}" in frozen(program) for name, _ in step.parameters[:2])
            for own, _ in step.parameters[2:]}


def _loss(outs: Any, exact: bool) -> mx.nd.NDArray:
    return sum((one * cotangent(one.shape, number, exact)).sum() for number, one in enumerate(_listed(outs)))


def cotangent(shape: tuple[int, ...], number: int, exact: bool) -> mx.nd.NDArray:
    """Return the fixed weights of an output in the loss."""
    draw = np.random.RandomState(number)
    if exact:
        return array(draw.choice([-1, 1], shape) * (draw.uniform(size=shape) < 0.05))
    return array(draw.normal(size=shape))


def trained(net: gluon.HybridBlock, program: Program, rate: float) -> dict[str, np.ndarray]:
    """Take three steps with two trainers, and return how far they moved the parameters and statistics.

    Under AMP the losses are scaled, and a step with infinite gradients comes in between, which is skipped.
    """
    fixed = frozen(replace(program, with_regions=True))  # in stock MXNet as well
    names = sorted(name for name, one in net.collect_params().items() if one.grad_req != "null" and name not in fixed)
    settings = {"learning_rate": rate, "momentum": 0.5 if program.seed % 2 else 0.0, "wd": 0.0}
    trainers = [gluon.Trainer({name: net.collect_params()[name] for name in some}, "sgd", settings,
                              update_on_kvstore=False) for some in (names[::2], names[1::2]) if some]
    moving = _moving(program, net) if trains_batches(program) else ()
    before = {name: net.collect_params()[name].data().asnumpy() for name in (*names, *moving)}
    scaler = amp.StaticLossScaler(2.0 ** (program.seed % 3 * 5))
    for trainer in trainers if amp.is_active() else ():
        amp.init_trainer(trainer, scaler)
    for is_bad in (False, False, True, False) if amp.is_active() else (False,) * 3:
        with autograd.record(train_mode=trains_batches(program)):
            loss = _loss(net(*data(program)), program.mode == EXACT)
            if amp.is_active():
                with amp.scale_loss(loss, trainers) as scaled:
                    autograd.backward(scaled)
        if not amp.is_active():
            loss.backward()
        for trainer in trainers:
            if is_bad:  # operators that make their own gradient would not pass on that of an infinite loss
                trainer._params[0].grad()[:] = np.inf
        for trainer in trainers:
            trainer.step(1)
    return {name: net.collect_params()[name].data().asnumpy() - one for name, one in before.items()}


def apply_amp(program: Program, dtype: str) -> None:
    """Switch AMP on, with the exclusions of a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amp.init(dtype)
    if program.excluded:
        amp.exclude(*program.excluded)


def reset_statistics(program: Program, net: gluon.HybridBlock) -> None:
    """Undo what training did to the statistics of batches."""
    for name, found in net.collect_params().items():
        if is_statistic(name):
            found.set_data(array(_values(program, name, found.shape)))
