"""The arguments of a conversion, each read once and under one name."""
from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence, Union

import mxnet as mx
from mxnet.gluon import Block

from .. import checks, passes
from .._mxnet.blocks import descendants
from ..dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FOREIGN_BFLOAT16,
    IMITATED_FLOAT16,
    INT8,
    Support,
    cuda_support,
    normalize,
    spelling,
)
from ..errors import DTypeError, PolicyError, closest, expected
from ..graph import Graph
from ..graph.attrs import REGION_OFF, region
from ..rules import Device, Policy
from ..state.blocks import can_be_target, is_named, is_target
from ..state.devices import device_supports, of_device, warn_once
from ..state.state import device_policies
from .assignment import Request

STEPS = {each.name: each.summary for each in passes.PASSES if each.is_step}
Names = Union[Iterable[str], None]
_OFFLINE = "cast_params_offline"


@dataclass(frozen=True)
class Options:
    """What the arguments of a conversion ask for."""

    target_dtype: str | None  # the type to convert to; None takes what the device runs fastest
    lists: Mapping[str, Any]  # the user's lists of operators, by the names that ``init`` gives them
    exclude: Exclusions  # what stays in FP32
    devices: tuple[mx.Context, ...]  # where the network will run; empty when the user leaves that open
    disabled_passes: frozenset[str]  # the passes that are off
    cast_outputs: bool  # whether outputs are cast back to FP32
    int8: Request | None  # what is to run in INT8; None for nothing

    @classmethod
    def read(cls, target_dtype: object, target_dtype_ops: Any, fp32_ops: Any, conditional_fp32_ops: Any,
             excluded_sym_names: Any, cast_optional_params: bool | None, *, exclude: Any, optimize: Any, device: Any,
             cast_params_offline: bool | None, cast_outputs: bool, disable_passes: Any,
             ctx: Any = None, int8: Mapping[str, Any] | None = None) -> Options:
        """Read the arguments of :func:`gluon_amp.convert_hybrid_block`, which describes them and their errors."""
        if isinstance(excluded_sym_names, str):
            raise PolicyError(expected("a list of names", "excluded_sym_names", excluded_sym_names))
        lists = {"target_precision_ops": target_dtype_ops, "fp32_ops": fp32_ops,
                 "conditional_fp32_ops": conditional_fp32_ops}
        offline = _one_of("cast_optional_params", cast_optional_params, "cast_params_offline", cast_params_offline)
        devices = _one_of("ctx", _devices("ctx", ctx), "device", _devices("device", device)) or ()
        target, request = _types(target_dtype, **(int8 or {}))
        return cls(target, lists, Exclusions.read(exclude, excluded_sym_names), devices,
                   disabled_passes("all" if optimize is None and request else optimize, offline, disable_passes),
                   cast_outputs, request)

    def policy(self, graph: Graph, devices: Sequence[mx.Context], block: Block | None = None) -> tuple[Policy, Device]:
        """Return the policy for a network on devices of one kind, and what it depends on of these."""
        device, chosen = _one_kind(self.target_dtype, devices)
        kind = f"gpu({device.device_id})" if device.device_type == "gpu" else "cpu"
        policies = device_policies({kind: chosen}, **self.lists)
        policy = replace(policies[kind], excluded=self.exclude.nodes(graph, block), training=False,
                         disabled_passes=self.disabled_passes)
        return policy, Device.of(chosen)


def data_may_come_second(function: Callable) -> Callable:
    """Let a conversion take its data behind the network, as MXNet 2's does: ``convert(net, data, 'float16')``."""
    @functools.wraps(function)
    def convert(block: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (mx.nd.NDArray, list, tuple)):
            return function(block, *args[1:], data_example=args[0], **kwargs)
        return function(block, *args, **kwargs)
    return convert


def _types(target: object, dtypes: Iterable[object] | None = None, **given: Any) -> tuple[str | None, Request | None]:
    """Return the type beside INT8, or the only one, and what is asked of INT8."""
    named = spelling(target) == INT8
    known = {name: value for name, value in given.items() if value is not None}
    if not (named or "calib_data" in known):
        if known or dtypes is not None:
            raise PolicyError(f"{next(iter(known), 'dtypes')} is for conversions to INT8: give calib_data, too")
        return _target_of(target), None
    others = [normalize(each, "dtypes", or_float32=True) for each in dtypes or () if spelling(each) != INT8]
    if not named and target is not None:
        raise PolicyError(expected("'int8', or no type, beside calib_data", "target_dtype", target))
    low = [each for each in others if each != FLOAT32]
    if len(low) > 1:
        raise PolicyError(expected("at most one of 'bfloat16' and 'float16'", "dtypes", dtypes))
    only = dtypes is not None and not others
    return next(iter([*low, *others]), None), Request(known.pop("calib_data", None), only=only, **known)


def _target_of(value: object) -> str | None:
    if isinstance(value, (mx.nd.NDArray, list, tuple)):  # MXNet 2 takes example data as the second argument
        raise DTypeError(f"expected a data type as target_dtype, received {type(value).__name__}: pass example data as "
                         "data_example=")
    return None if value is None else normalize(value, or_float32=True)


def _one_of(first: str, value: Any, second: str, other: Any) -> Any:
    """Return an argument that has two names; raise ValueError where they contradict each other."""
    if value is not None and other is not None and value != other:
        raise ValueError(f"{first} and {second} mean the same: expected one of them, received {first}={value!r} and "
                         f"{second}={other!r}")
    return other if value is None else value


def _devices(name: str, value: Any) -> tuple[mx.Context, ...] | None:
    return None if value is None else tuple(checks.one_or_several(name, value, mx.Context, "a Context"))


def _one_kind(target: str | None, devices: Sequence[mx.Context]) -> tuple[mx.Context, Support]:
    """Return the first device and how it runs; raise DTypeError where another runs another type, or other graphs."""
    chosen = {device: _chosen(target, device) for device in devices}
    if len({(device.device_type == "gpu", own.dtype) for device, own in chosen.items()}) > 1:
        told = ", ".join(f"{device} ({own.dtype})" for device, own in chosen.items())
        raise DTypeError(f"expected devices that run one converted network, received {told}: convert it for each by "
                         "itself, with device=")
    return devices[0], chosen[devices[0]]


def _chosen(target: str | None, device: mx.Context) -> Support:
    """Return how a device runs a type, which need not be one that this machine's device runs."""
    kind = "gpu" if device.device_type == "gpu" else "cpu"
    here = of_device(device, device_supports()) or cuda_support(None)
    chosen = here if target is None else _as_run(target, kind, here)
    if chosen is None:
        raise DTypeError(f"expected a type that a {kind.upper()} runs, received {target!r}: MXNet has no {target} "
                         "kernels for it. Leave the type out to get the best one")
    warning = _drawback(str(target), chosen, here)
    if warning is not None:
        warn_once(warning)
    return chosen


def _drawback(dtype: str, chosen: Support, here: Support) -> str | None:
    """Say that this machine runs a network slower than FP32, or not at all; None where it does well."""
    if chosen is FOREIGN_BFLOAT16:
        return f"the {dtype} network cannot run on this machine, where {here.reason}: {chosen.reason}"
    if chosen.native:
        return None
    return f"the {dtype} network will be slower on this machine than one converted in float32: {chosen.reason}"


def _as_run(target: str, device_type: str, here: Support) -> Support | None:
    """Return how a device runs a type, or another machine's device of its kind where this one's does not."""
    foreign = {FLOAT16: cuda_support(None)} if device_type == "gpu" else {BFLOAT16: FOREIGN_BFLOAT16,
                                                                          FLOAT16: IMITATED_FLOAT16}
    return here.requested(target) or foreign.get(target)


def drawback_here(dtype: str) -> str | None:
    """Say that this machine runs files of a type slower than FP32, or not at all; None where it does well."""
    supports = device_supports()
    cpu = supports["cpu"]
    if any(each.dtype == dtype for each in supports.values()):
        return None
    if dtype == FLOAT16:
        return "this machine has no GPU that runs float16, and its CPU runs float16 much slower than FP32"
    return _drawback(dtype, _as_run(dtype, "cpu", cpu) or cpu, cpu)


def disabled_passes(optimize: str | Iterable[str] | None, cast_params_offline: bool | None,
                    disable_passes: Iterable[str] | None = None) -> frozenset[str]:
    """Name the passes that are off, by the three arguments that switch passes off."""
    disabled = passes.checked(disable_passes)
    if cast_params_offline and _OFFLINE in disabled:
        raise PolicyError(f"disable_passes: {_OFFLINE!r} is switched off, and asked for by {_OFFLINE}=True")
    return frozenset(set(STEPS) - _named_steps(optimize, cast_params_offline)) | disabled


def _named_steps(optimize: str | Iterable[str] | None, cast_params_offline: bool | None) -> set[str]:
    named: set[str] | None
    if isinstance(optimize, Iterable) and not isinstance(optimize, str):
        named = set(optimize)
    else:
        named = {"all": set(STEPS), "none": set(), None: set()}.get(optimize)
    if named is None or not named <= set(STEPS):
        wrong = next((step for step in sorted(map(str, named or ())) if step not in STEPS), str(optimize))
        raise PolicyError(expected(f"'all', 'none' or some of {', '.join(STEPS)}", "optimize", optimize)
                          + closest(wrong, STEPS))
    if cast_params_offline is not None:
        named = named | {_OFFLINE} if cast_params_offline else named - {_OFFLINE}
    return named


@dataclass(frozen=True)
class Exclusions:
    """The operators that stay in FP32."""

    names: tuple[str, ...] = ()  # of operator nodes or blocks; they may hold wildcards
    blocks: tuple[Any, ...] = ()  # blocks, and classes of blocks

    @classmethod
    def read(cls, *arguments: Any) -> Exclusions:
        """Read names, blocks, classes of blocks, policies for what they exclude, and sequences of such."""
        targets = [target for argument in arguments for target in _listed(argument)]
        for target in targets:
            if not can_be_target(target):
                raise PolicyError(expected("names of nodes or blocks, blocks, or classes of blocks", "exclude", target))
        return cls(tuple(target for target in targets if isinstance(target, str)),
                   tuple(target for target in targets if not isinstance(target, str)))

    def match(self, block: Block) -> bool:
        """Tell whether a block is excluded by itself."""
        return any(is_target(block, target) for target in (*self.names, *self.blocks))

    def nodes(self, graph: Graph, block: Block | None = None) -> frozenset[str]:
        """Name the operators to keep in FP32; tracing has marked those in excluded blocks."""
        inside = [] if block is None else list(descendants(block))
        operators = [node.name for node in graph.operators()]
        chosen = {node.name for node in graph.operators() if region(node.attrs) == REGION_OFF}
        for name in self.names:
            matching = [operator for operator in operators if is_named(operator, name)]
            if not matching and not any(is_target(inner, name) for inner in inside):
                raise PolicyError(f"exclude: the network has no node or block {name!r}.{closest(name, operators)}")
            chosen.update(matching)
        for target in self.blocks:
            if not any(is_target(inner, target) for inner in inside):
                what = target.__name__ if isinstance(target, type) else target.name
                raise PolicyError(f"exclude: the network holds no block {what!r}, or it runs none of its operators")
        return frozenset(chosen)


def _listed(target: Any) -> Iterator[Any]:
    if isinstance(target, Policy):
        yield from target.excluded
    elif isinstance(target, Iterable) and not isinstance(target, (str, Block)):
        yield from target
    elif target is not None:
        yield target
