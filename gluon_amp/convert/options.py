"""The arguments of conversions, each read once and under one name."""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import mxnet as mx
from mxnet.gluon import Block

from .. import passes
from .._mxnet.blocks import descendants
from ..base import checks
from ..base.aliases import NO_TUNING
from ..base.metrics import allowed
from ..errors import DTypeError, PolicyError, closest, expected
from ..graph import Graph
from ..graph.attrs import REGION_OFF, region
from ..machine.dtypes import FLOAT16, FLOAT32, FOREIGN, FOREIGN_BFLOAT16, INT8, Support, normalize, spelling
from ..rules import ConditionalOp, Device, Policy
from ..state.blocks import can_be_target, is_named, is_target
from ..state.devices import device_supports, of_device, warn_once
from ..state.state import device_policies

Names = Optional[Sequence[str]]
Conditions = Optional[Sequence[ConditionalOp]]
STEPS = {each.name: each.summary for each in passes.PASSES if each.is_step}
MODES = ("naive", "entropy")  # of choosing ranges
_OFFLINE = "cast_params_offline"
# Names that mean the same: MXNet's own, but for the first.
_ALIASES = {"dtype": "target_dtype", "ctx": "device", "cast_optional_params": _OFFLINE}
# What an argument for INT8 is where it is left out; None where nothing takes its place.
_INT8 = {"calib_data": None, "calib_mode": MODES[0], "calib_batches": None, "metric": None, "budget": None,
         "max_error": None, "greater_is_better": True, "dtypes": None}


@dataclass
class ConversionOptions:
    """The keyword arguments of the conversions.

    They take some under MXNet's names, too: ``ctx`` is ``device``, ``cast_optional_params`` is ``cast_params_offline``,
    ``excluded_sym_names`` is ``exclude``.

    Parameters
    ----------
    target_dtype : {'float16', 'bfloat16', 'float32', 'int8'}, numpy dtype or None
        None takes the device's fastest; ``'float32'`` optimises without lowering precision. ``'int8'`` lets
        convolutions and dense layers run in INT8, and the rest as None does; it needs ``calib_data``.
    target_dtype_ops : list of str, optional
        The operators that run in ``target_dtype``, in place of the table's own.
    fp32_ops : list of str, optional
        Operators forced to FP32, beside those that the table names.
    conditional_fp32_ops : list of (str, str, list of str), optional
        Operator, attribute, and the attribute's values that force the operator to FP32.
    exclude : str, Block, class of blocks, or a sequence of them, optional
        What stays in FP32: operators or blocks by name, with wildcards, blocks with all inside them, classes of blocks.
    optimize : 'all', 'none' or sequence of str
        Optimisations, exact up to rounding: ``drop_training``, ``fold_weights``, ``fold_batch_norm``, ``fold_padding``,
        ``shape_operands``, ``align_channels``, ``cast_params_offline`` and ``fuse``; the default is each function's.
    disable_passes : list of str, optional
        Graph passes to switch off, of :func:`list_passes`; the optimisations are among them.
    cast_params_offline : bool, optional
        Whether parameters that are read in low precision only are stored in it; part of ``optimize`` by default.
    cast_outputs : bool
        Whether outputs are FP32, or left in the type that they are computed in.
    device : Context or list of Context, optional
        Where the converted network is to live: where a block does, or the current context, by default.
    data_example : NDArray or sequence of NDArray, or dict of str to NDArray or shape, optional
        Arguments of a call of a block: needed where parameters wait for their shape, or the signature does not tell
        their number. Of a symbol data or shapes by input name, which passes can use.
    data_names : list of str, optional
        The inputs of a symbol that are data; labels of losses need no mention.
    calib_data : DataLoader, DataIter, NDArray, sequence, path or Calibration, optional
        For INT8, a hundred examples to learn the ranges of values from, with labels or without; the path of an ``.npz``
        file or of a directory of them; or what :func:`calibrate` returned, beside ``data_example`` with arrays.
    calib_mode : {'naive', 'entropy'}, optional
        Whether INT8 holds all values that were seen (the default), or the range that loses least information.
    calib_batches : int, optional
        How many batches to take; all of them by default.
    metric : callable, optional
        Takes a block and returns a number, such as its accuracy on validation data. The fastest assignment of types to
        layers within ``budget`` of FP32 is searched then.
    budget : float, optional
        How much worse than in FP32 the metric may be.
    max_error : float, optional
        In place of ``metric``: the most that an output may differ from FP32 on the first batch of ``calib_data``, in
        the relative 2-norm. 0.05 where neither is given, but for outputs in order, as detections, and with
        ``dtypes=('int8',)``.
    greater_is_better : bool, optional
        False for metrics that are to be small, such as a loss.
    dtypes : sequence of str, optional
        Restricts the types: ``('int8', 'float32')`` leaves bfloat16 out, ``('int8',)`` all others where INT8 is right.
    """

    target_dtype: Any = None  # behind the checks: the type beside INT8, or the only one; None for the device's fastest
    target_dtype_ops: Any = None
    fp32_ops: Any = None
    conditional_fp32_ops: Any = None
    exclude: Any = None  # behind the checks: a tuple of names, blocks and classes of blocks
    optimize: Any = None
    disable_passes: Any = None  # behind the checks: all passes that are off
    cast_params_offline: Any = None
    cast_outputs: bool = True
    device: Any = None  # behind the checks: a list, empty where the user leaves that open
    data_example: Any = None
    data_names: Any = None
    calib_data: Any = None
    calib_mode: Any = None
    calib_batches: Any = None
    metric: Any = None
    budget: Any = None
    max_error: Any = None
    greater_is_better: Any = None
    dtypes: Any = None

    @classmethod
    def of(cls, function: str, given: Mapping[str, Any], without: Sequence[str] = (), **defaults: Any
           ) -> ConversionOptions:
        """Read the local variables that a function begins with: MXNet's arguments, and ``options``, others by name."""
        known = {each.name for each in fields(cls)}.difference(without)
        for name in given["options"]:
            if name not in known and name not in _ALIASES:
                hint = f": {NO_TUNING}" if name == "tuning" else f".{closest(name, known)}"
                raise TypeError(f"amp.{function} has no argument {name!r}{hint}")
        asked = {name: value for name, value in {**given, **defaults, **given["options"]}.items()
                 if name in known or name in _ALIASES}
        for alias, own in _ALIASES.items():
            value = asked.pop(alias, None)
            if value is not None and asked.get(own) not in (None, value):
                raise ValueError(f"{alias} and {own} mean the same: expected one of them, received {alias}={value!r} "
                                 f"and {own}={asked[own]!r}")
            asked[own] = asked.get(own) if value is None else value
        asked["exclude"] = [*_listed(asked.get("exclude")), *_listed(given["excluded_sym_names"])]
        return cls(**asked)

    def __post_init__(self) -> None:
        self.only_int8 = False  # whether layers that may run in INT8 do, however slow
        self.is_int8 = spelling(self.target_dtype) == INT8 or self.calib_data is not None
        beside = self._read_int8()
        if self.is_int8 or self.target_dtype is not None:
            self.target_dtype = beside if self.is_int8 else normalize(self.target_dtype, or_float32=True)
        self.exclude = tuple(_listed(self.exclude))
        for target in self.exclude:
            if not can_be_target(target):
                raise PolicyError(expected("names of nodes or blocks, blocks, or classes of blocks", "exclude", target))
        self.device = () if self.device is None else checks.one_or_several("device", self.device, mx.Context,
                                                                           "a Context")
        optimize = "all" if self.optimize is None and self.is_int8 else self.optimize
        self.disable_passes = disabled_passes(optimize, self.cast_params_offline, self.disable_passes)

    def policy(self, graph: Graph, devices: Sequence[mx.Context], block: Block | None = None) -> tuple[Policy, Device]:
        """Return the policy for a network, and where it runs; raise DTypeError where devices run other types."""
        chosen = {device: _chosen(self.target_dtype, device) for device in devices}
        if len({(device.device_type == "gpu", own.dtype) for device, own in chosen.items()}) > 1:
            told = ", ".join(f"{device} ({own.dtype})" for device, own in chosen.items())
            raise DTypeError(f"expected devices that run one converted network, received {told}: convert it for each "
                             "by itself, with device=")
        own = chosen[devices[0]]
        policy = device_policies({"": own}, self.disable_passes, target_precision_ops=self.target_dtype_ops,
                                 fp32_ops=self.fp32_ops, conditional_fp32_ops=self.conditional_fp32_ops)[""]
        return replace(policy, excluded=self._excluded(graph, block), training=False), Device.of(own)

    def _excluded(self, graph: Graph, block: Block | None) -> frozenset[str]:
        """Name the operators to keep in FP32; tracing has marked those in excluded blocks."""
        inside = [] if block is None else list(descendants(block))
        operators = [node.name for node in graph.operators()]
        chosen = {node.name for node in graph.operators() if region(node.attrs) == REGION_OFF}
        for target in self.exclude:
            matching = [name for name in operators if isinstance(target, str) and is_named(name, target)]
            chosen.update(matching)
            if matching or any(is_target(inner, target) for inner in inside):
                continue
            name = target if isinstance(target, str) else getattr(target, "__name__", None) or target.name
            raise PolicyError(f"exclude: the network has no node or block {name!r} that runs an operator."
                              f"{closest(name, operators)}")
        return frozenset(chosen)

    def _read_int8(self) -> str | None:
        """Check what is asked of INT8, fill in what is left out, and return the type beside it."""
        given = [name for name in _INT8 if getattr(self, name) is not None]
        if given and not self.is_int8:
            raise PolicyError(f"{given[0]} is for conversions to INT8: give calib_data, too")
        vars(self).update({name: value for name, value in _INT8.items() if name not in given})
        if self.calib_mode not in MODES:
            raise PolicyError(expected(f"one of {', '.join(map(repr, MODES))}", "calib_mode", self.calib_mode))
        self.limit = allowed(self.max_error, self.metric, self.budget)
        if self.is_int8 and self.target_dtype is not None and spelling(self.target_dtype) != INT8:
            raise PolicyError(expected("'int8', or no type, beside calib_data", "target_dtype", self.target_dtype))
        others = [normalize(each, "dtypes", or_float32=True) for each in self.dtypes or () if spelling(each) != INT8]
        low = [each for each in others if each != FLOAT32]
        if len(low) > 1:
            raise PolicyError(expected("at most one of 'bfloat16' and 'float16'", "dtypes", self.dtypes))
        self.only_int8 = self.dtypes is not None and not others
        return next(iter([*low, *others]), None)


def _chosen(target: str | None, device: mx.Context) -> Support:
    """Return how a device runs a type, or another machine's device of its kind where this one's does not."""
    kind = "gpu" if device.device_type == "gpu" else "cpu"
    here = of_device(device, device_supports()) or FOREIGN["gpu", FLOAT16]
    chosen = here if target is None else here.requested(target) or FOREIGN.get((kind, target))
    if chosen is None:
        raise DTypeError(f"expected a type that a {kind.upper()} runs, received {target!r}: MXNet has no {target} "
                         "kernels for it. Leave the type out to get the best one")
    drawback = _drawback(str(target), chosen, here)
    if drawback:
        warn_once(drawback)
    return chosen


def _drawback(dtype: str, chosen: Support, here: Support) -> str:
    """Say that this machine runs a network slower than FP32, or not at all; nothing where it does well."""
    if chosen is FOREIGN_BFLOAT16:
        return f"the {dtype} network cannot run on this machine, where {here.reason}: {chosen.reason}"
    return "" if chosen.native else (f"the {dtype} network will be slower on this machine than one converted in "
                                     f"float32: {chosen.reason}")


def drawback_here(dtype: str) -> str:
    """Say that this machine runs files of a type slower than FP32, or not at all; nothing where it does well."""
    supports = device_supports()
    cpu = supports["cpu"]
    return "" if any(each.dtype == dtype for each in supports.values()) else _drawback(
        dtype, cpu.requested(dtype) or FOREIGN.get(("cpu", dtype), cpu), cpu)


def disabled_passes(optimize: str | Iterable[str] | None, cast_params_offline: bool | None,
                    disable_passes: Iterable[str] | None = None) -> frozenset[str]:
    """Name the passes that are off, by the three arguments that switch passes off."""
    disabled = passes.checked(disable_passes)
    if cast_params_offline and _OFFLINE in disabled:
        raise PolicyError(f"disable_passes: {_OFFLINE!r} is switched off, and asked for by {_OFFLINE}=True")
    words: dict[Any, Iterable[Any]] = {"all": STEPS, "none": (), None: ()}
    is_list = isinstance(optimize, Iterable) and not isinstance(optimize, str)
    named = set(optimize or () if is_list else words.get(optimize, [optimize]))
    wrong = sorted(map(str, named.difference(STEPS)))
    if wrong:
        raise PolicyError(expected(f"'all', 'none' or some of {', '.join(STEPS)}", "optimize", optimize)
                          + closest(wrong[0], STEPS))
    if cast_params_offline is not None:
        named = named | {_OFFLINE} if cast_params_offline else named - {_OFFLINE}
    return frozenset(set(STEPS) - named) | disabled


def _listed(target: Any) -> Iterator[Any]:
    """Yield names, blocks and classes of blocks, of a policy the names that it excludes."""
    if isinstance(target, Policy):
        yield from target.excluded
    elif isinstance(target, Iterable) and not isinstance(target, (str, Block)):
        yield from target
    elif target is not None:
        yield target
