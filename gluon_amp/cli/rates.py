"""Measure what kernels cost on this CPU, in two minutes: the row of it for ``rates.json``."""
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn

from .._mxnet.engine import interleaved
from ..base.files import replacing
from ..errors import StateError
from ..machine import host
from ..machine.costs import CALL, CAST, KERNELS, TRANSPOSE, Kernel, own_file, preferring
from ..machine.dtypes import BFLOAT16, FLOAT32, LOW_PRECISION, cpu_isa
from ..session import hooks
from ..state.devices import choose, device_supports
from ..state.in_force import under
from ..state.state import State, device_policies

_IMAGES, _UNITS = 4, 4
_ROUNDS, _SECONDS = (5, 40), 0.15  # at least and at most, and about how long: on small layers noise is larger
_ABSENT = 1e3  # milliseconds, of kernels that this CPU has not
# Side of the filters, groups, channels, and side of the maps: what networks consist of, of channels in whole blocks of
# 16 and of 8 and of others.
_LAYERS = (
    (1, 1, 16, 56), (1, 1, 64, 56), (1, 1, 256, 28), (1, 1, 256, 14), (1, 1, 1024, 14), (1, 1, 512, 7),
    (1, 1, 24, 56), (1, 1, 58, 28), (1, 1, 116, 14), (1, 1, 232, 7),
    (3, 1, 16, 56), (3, 1, 64, 56), (3, 1, 128, 28), (3, 1, 256, 14), (3, 1, 512, 7), (3, 1, 24, 56), (3, 1, 44, 28),
    (3, 16, 16, 112), (3, 64, 64, 56), (3, 128, 128, 28), (3, 256, 256, 14), (3, 512, 512, 7), (3, 72, 72, 28),
    (3, 58, 58, 28), (3, 116, 116, 14), (5, 72, 72, 28), (5, 240, 240, 14), (5, 672, 672, 7), (7, 44, 44, 28),
    (7, 88, 88, 28), (3, 32, 128, 56), (3, 32, 256, 28), (3, 32, 512, 14), (3, 32, 1024, 7), (3, 3, 60, 28))
_PLAIN = (1, 1, 64, 28)  # the layer that operators on maps are measured behind
_SMALL = (1, 1, 16, 4)  # hardly more than calls
_GAINED = ((3, 1, 64, 56), (3, 1, 128, 28), (3, 1, 256, 14))  # what the gain of low precision is measured by


class _Unit(HybridBlock):
    """A convolution, and operators behind it."""

    def __init__(self, side: int, groups: int, channels: int, operators: Sequence[str]):
        super().__init__()
        self.operators = operators
        self.layer = nn.Conv2D(channels, side, padding=side // 2, groups=groups, use_bias=False, in_channels=channels)
        if "norm" in operators:
            self.norm = nn.BatchNorm(in_channels=channels)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Run them in order."""
        y = self.layer(x)
        for name in self.operators:
            y = self.norm(y) if name == "norm" else _OPERATORS[name](F, y, x)
        return y


_OPERATORS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "activation": lambda F, y, x: F.Activation(y, act_type="relu"),
    "clip": lambda F, y, x: F.clip(y, 0, 6),
    "swish": lambda F, y, x: y * (F.clip(y + 3, 0, 6) / 6),
    "scale": lambda F, y, x: F.broadcast_mul(y, F.sigmoid(F.Pooling(y, kernel=(1, 1), global_pool=True,
                                                                    pool_type="avg"))),
    "add": lambda F, y, x: y + x,
    TRANSPOSE: lambda F, y, x: F.transpose(F.transpose(y, (0, 2, 3, 1)), (0, 3, 1, 2)),
    CAST: lambda F, y, x: F.amp_cast(F.amp_cast(y, dtype=BFLOAT16), dtype=FLOAT32),
}


def measure() -> dict[str, Any]:
    """Return the row of this CPU; raise StateError while other programs run, which would be measured with it."""
    others = host.others_running()
    if others:
        raise StateError(f"expected a machine on which nothing else runs, found {others} busy threads: measure again "
                         "when they have ended")
    with hooks.kept_in_place():
        layers: list[list[Any]] = []
        for layer in _LAYERS:
            whole = _alone(layer, ("norm", "activation"))
            convolution = list(map(min, _alone(layer, ()), whole))
            layers.append([*layer[:3], _IMAGES * layer[3] ** 2, convolution,
                           [round(both - alone, 4) for both, alone in zip(whole, convolution)]])
        maps = _maps()
    gained = [row for row, layer in zip(layers, _LAYERS) if layer in _GAINED]
    fp32, low = (sum(row[4][number] + row[5][number] for row in gained) for number in (0, 2))  # in MXNet's kernels
    return {"cpu": list(host.cpu_kind()), "isa": cpu_isa(), "threads": host.threads(),
            "gain": round(fp32 / low, 2), "layers": layers, "maps": maps}


def keep(row: dict[str, Any]) -> str:
    """Keep a row for this user, in the place of one of the same CPU; return the name of the file."""
    path = own_file()
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    others = [each for each in rows if (each["cpu"], each["isa"]) != (row["cpu"], row["isa"])]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as (temporary,), open(temporary, "w") as file:
        json.dump({"rows": [*others, row]}, file)
    return str(path)


def _maps() -> dict[str, list[float]]:
    """Return milliseconds for a million values of operators on maps, and of an operator's call."""
    million = _IMAGES * _PLAIN[2] * _PLAIN[3] ** 2 / 1e6
    bare = _in_each(_PLAIN, ())
    normed = _in_each(_PLAIN, ("norm", "activation"))

    def behind(base: Sequence[float], *operators: str) -> list[float]:
        return [round(max(cost - alone, 0.0) / million, 4) for cost, alone in zip(_in_each(_PLAIN, operators), base)]

    def conversion(layer: tuple[int, int, int, int], name: str) -> float:  # each there and back
        return max(_unit(layer, (name,), KERNELS[0]) - _unit(layer, (), KERNELS[0]), 0.0) / 2

    scale = behind(normed, "norm", "activation", "scale")
    return {"activation": behind(bare, "activation"), "clip": behind(normed, "norm", "clip"),
            "swish": behind(normed, "norm", "swish"), "add": behind(normed, "norm", "add", "activation"),
            "scale": scale, "mean": [round(each / 3, 4) for each in scale],  # whose part of it was not measured
            **{name: [round(conversion(_PLAIN, name) / million, 4)] for name in (TRANSPOSE, CAST)},
            CALL: [round(conversion(_SMALL, TRANSPOSE), 4)]}


def _alone(layer: tuple[int, int, int, int], operators: Sequence[str]) -> list[float]:
    """Return milliseconds of a layer in each kernel, without the pointwise one before a convolution in groups."""
    both, (_, groups, channels, pixels) = _in_each(layer, operators), layer
    before = _in_each((1, 1, channels, pixels), operators) if groups > 1 else [0.0] * len(both)
    return [whole if whole == _ABSENT else round(max(whole - part, 0.01 * whole), 4)
            for whole, part in zip(both, before)]


def _in_each(layer: tuple[int, int, int, int], operators: Sequence[str]) -> list[float]:
    """Return milliseconds of a unit in each kernel."""
    return [_unit(layer, operators, kernel) for kernel in KERNELS]


def _unit(layer: tuple[int, int, int, int], operators: Sequence[str], kernel: Kernel) -> float:
    """Return milliseconds of a unit in a kernel."""
    _, _, channels, pixels = layer
    data, state = mx.nd.random.normal(shape=(_IMAGES, channels, pixels, pixels)), _state(kernel)
    if state is None:
        return _ABSENT
    with under(state):
        steps = [_step(layer, operators, count, data) for count in (1, 1 + _UNITS)]
        once = sum(interleaved(steps, 1)) / 1e3
        few, many = interleaved(steps, min(max(int(_SECONDS / once), _ROUNDS[0]), _ROUNDS[1]), of=min)
    return round(max(many - few, 0.0) / _UNITS, 4)


def _state(kernel: Kernel) -> State | None:
    """Return the setting in which every operator runs in a kernel where it can."""
    supports = device_supports()
    dtype = next((each for each in LOW_PRECISION if supports["cpu"].requested(each)), None) if kernel.low else FLOAT32
    if dtype is None:
        return None
    chosen = choose(dtype, supports)
    policies = device_policies(chosen)
    devices = {name: replace(each, mixes=False, measured=preferring(kernel))
               for name, each in State.on(chosen, policies).devices.items()}
    return State(policies, devices)


def _step(layer: tuple[int, int, int, int], operators: Sequence[str], count: int,
          data: mx.nd.NDArray) -> Callable[[], None]:
    """Return a training step of some units of a layer behind a pointwise one."""
    side, groups, channels, _ = layer
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels, 1, use_bias=False, in_channels=channels))
    for _ in range(count):
        net.add(*([_Unit(1, 1, channels, operators)] if groups > 1 else []), _Unit(side, groups, channels, operators))
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)

    def step() -> None:
        with autograd.record():
            out = net(data)
        out.backward(data)
        mx.nd.waitall()
    return step
