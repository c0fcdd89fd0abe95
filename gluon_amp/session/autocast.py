"""Switch mixed precision on and off: for the process (``init``), a region (``autocast``), a block (``exclude``)."""
from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Callable, Iterable, Mapping, Sequence

from mxnet import Context
from mxnet.gluon import Block

from .. import checks, passes
from ..aliases import NO_TUNING, also, answers
from ..context import ContextStack
from ..dtypes import FLOAT32, normalize
from ..errors import DTypeError, PolicyError, StateError, expected, shown
from ..graph.attrs import REGION_ON
from ..rules import ConditionalOp, Policy
from ..state import gpus
from ..state.blocks import block_settings
from ..state.devices import announce, choose, device_supports, warn_if_slow
from ..state.exclusions import can_be_target
from ..state.frame import frame
from ..state.in_force import in_force, region
from ..state.policies import custom_ops, device_policies, devices_of, policies_of, rewrites
from ..state.state import State
from . import hooks
from .steps import run_in

_logger = logging.getLogger("gluon_amp")


@also(dtype="target_dtype")
@answers(enabled="call amp.init() to switch AMP on and amp.deinit() to switch it off",
         device_type="every device runs in its own type: leave it out",
         opt_level="that is for amp.initialize(net, trainer, opt_level=...)", tuning=NO_TUNING)
def init(target_dtype: object = None, target_precision_ops: Sequence[str] | None = None,
         conditional_fp32_ops: Sequence[ConditionalOp] | None = None, fp32_ops: Sequence[str] | None = None,
         layout_optimization: bool = False, *, disable_passes: Iterable[str] | None = None,
         policy: Policy | None = None) -> None:
    """Switch automatic mixed precision on.

    May come before or after the network is created: networks that are hybridized already are rewritten at
    their next call.

    Parameters
    ----------
    target_dtype : {'float16', 'bfloat16', 'float32'}, numpy dtype or None
        None takes what is fastest, device by device: bfloat16 on a CPU that has instructions for it, float16 on a GPU,
        and FP32 elsewhere, made faster by everything that does not depend on precision. ``'bfloat16'`` on a CPU
        with AVX512 but without BF16 instructions is emulated, slower than FP32. ``'float16'`` without a GPU is
        imitated on the CPU, exactly and slowly, for tests of numerics.
    target_precision_ops : list of str, optional
        The operators that run in ``target_dtype``, in place of the table's own.
    conditional_fp32_ops : list of (str, str, list of str), optional
        Operator, attribute, and the attribute's values that force the operator to FP32.
    fp32_ops : list of str, optional
        Operators forced to FP32, beside those that the table names.
    layout_optimization : bool
        Accepted for MXNet 2's signature. Only False has a meaning on MXNet 1.9.1.
    disable_passes : list of str, optional
        Graph passes to switch off, by their names in :func:`list_passes`.
    policy : Policy, optional
        Decides everything that the arguments above are for, which must then be left out. The operators it excludes by
        name are those of graphs: of hybridized blocks, symbols and ``Module``.

    Raises
    ------
    DTypeError
        The type is unknown, or the machine cannot run it.
    PolicyError
        A list names an unknown operator or pass, an operator is in two lists, a pass cannot be switched off, or
        ``policy`` is not alone.
    StateError
        AMP is on already, with other settings than those named: nothing is changed. Without arguments what is on stays.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.init()
    >>> amp.is_active()
    True
    >>> amp.deinit()
    """
    if layout_optimization:
        raise StateError("layout_optimization=True needs MXNet 2: its graph pass does not exist in MXNet 1.9.1. "
                         "Leave it at False")
    requested = None if target_dtype is None else normalize(target_dtype, or_float32=True)
    lists = {"target_precision_ops": target_precision_ops, "conditional_fp32_ops": conditional_fp32_ops,
             "fp32_ops": fp32_ops}
    disabled = passes.checked(disable_passes)
    others = {"target_dtype": target_dtype, **lists, "disable_passes": disable_passes}
    if policy is not None:
        requested = _type_of(policy, others)
    given = {name: value for name, value in {**others, "policy": policy}.items() if value is not None}
    if not given and is_switched_on():
        _logger.info("AMP is on already: amp.init() without arguments keeps its settings")
        return
    chosen = choose(requested, device_supports())
    policies = device_policies(chosen, disabled, **lists) if policy is None else policies_of(policy, chosen)
    state = State(policies, devices_of(chosen))
    if in_force.state == state:
        return
    if is_switched_on():
        raise StateError(_already_on(given))
    hooks.install()
    gpus.prepare(policies)
    in_force.begin()
    in_force.state = state
    announce(chosen, requested, rewrites(policies, state.devices))


def _already_on(given: Mapping[str, object]) -> str:
    """Word the error about another ``init`` than the one in force."""
    received = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
    if in_force.state is None:
        return (f"amp.initialize switched AMP on for its networks: expected no amp.init after it, received {received}. "
                "Leave amp.init out, or call amp.deinit() first")
    types = ", ".join(f"{policy.target_dtype} on the {device}" for device, policy in in_force.state.policies.items())
    return (f"AMP is on already: {types}. amp.init was called with other settings: received {received}. Leave this "
            "call out, or call amp.deinit() before it")


def _type_of(policy: Policy, others: Mapping[str, object]) -> str:
    if not isinstance(policy, Policy):
        raise TypeError(expected("a Policy", "policy", policy))
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise PolicyError(f"expected policy alone, received {', '.join(given)} as well: a policy decides those")
    return normalize(policy.target_dtype, "policy.target_dtype", or_float32=True)


def deinit() -> None:
    """Switch mixed precision off and restore MXNet exactly; does nothing when AMP is off.

    Networks run in FP32 from their next call on. Exclusions and registered functions are forgotten.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.deinit()
    """
    hooks.uninstall()
    gpus.restore()
    in_force.end()
    block_settings.clear()
    custom_ops.clear()


def is_switched_on() -> bool:
    """Tell whether ``init``, or ``initialize`` for some networks, is in force."""
    return in_force.state is not None or block_settings.networks.have_states()


def is_active() -> bool:
    """Whether AMP is on here: ``init`` is in force, or an ``autocast`` region says so.

    It is on, too, where every device is faster in FP32: :func:`active_dtype` says what runs.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.is_active()
    False
    """
    current = in_force.current()
    return current is not None and current.enabled


# The kinds of device that Context.device_type names, and torch's name for one.
_DEVICES = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "cpu_pinned": "cpu", "cpu_shared": "cpu"}


def active_dtype(device_type: str | Context = "cpu") -> str | None:
    """Name the low-precision type in use for arrays on a device; None for FP32, and for a GPU where there is none.

    Parameters
    ----------
    device_type : str or Context
        ``'cpu'`` or ``'gpu'``, as in ``Context.device_type``; ``'cuda'`` is the GPU. One device, as ``mx.gpu(1)``,
        where GPUs differ.

    Raises
    ------
    ValueError
        There is no such kind of device.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.active_dtype('cpu') is None
    True
    """
    kind = device_type.device_type if isinstance(device_type, Context) else _DEVICES.get(device_type)
    if kind is None:
        raise ValueError(expected(f"one of {', '.join(map(repr, _DEVICES))}, or a Context", "device_type", device_type))
    policy = in_force.policy(device_type if isinstance(device_type, Context) else Context(kind))
    return policy.target_dtype if policy is not None and policy.lowers else None


# The regions that were entered and not left, with what was done then: one object may be entered several times.
_entered: ContextStack[tuple[autocast, region, int]] = ContextStack("gluon_amp_autocast")


class autocast:
    """Switch mixed precision on or off for a region: a context manager, and a decorator.

    Regions nest, the innermost counts, and each belongs to its thread, and to its asyncio task. They work with and
    without :func:`init`. Inside a ``hybrid_forward`` that is being traced, the operators keep the region's setting, so
    that the hybridized block obeys it whenever it runs. A decorated generator or coroutine is in the region while its
    own code runs, not while it waits.

    Parameters
    ----------
    enabled : bool
        False runs the region in FP32.
    dtype : {'float16', 'bfloat16', 'float32'}, numpy dtype or None
        The low-precision type; None takes the one of ``init``, or the device's. ``'float32'`` runs the region in FP32,
        as ``enabled=False`` does.

    Raises
    ------
    DTypeError
        The type is unknown, or the machine cannot run it.
    TypeError
        ``enabled`` is not a bool.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> with amp.autocast(enabled=False):
    ...     amp.is_active()
    False
    """

    @also(target_dtype="dtype")
    @answers(device_type="the device of the arrays decides: leave it out, as in amp.autocast(dtype='float16')",
             cache_enabled="a graph casts each parameter once: leave it out")
    def __init__(self, enabled: bool = True, dtype: object = None):
        _refuse_device_or_type(enabled)
        wanted = None if dtype is None else normalize(dtype, "dtype", or_float32=True)
        self._enabled = checks.true_or_false("enabled", enabled) and wanted != FLOAT32
        self._dtype = wanted if self._enabled else None
        if self._dtype is not None:
            choose(self._dtype, device_supports())

    def __enter__(self) -> autocast:
        hooks.install()  # they stay, for what is traced here
        hidden = 0
        if self._enabled:
            entered = region(self._state(), self._dtype or REGION_ON)
            if in_force.current() is None:
                hidden = frame.hybrid_blocks  # the code around does not know low precision; that in FP32 does
        else:
            entered = in_force.off()
        frame.hybrid_blocks -= hidden
        entered.__enter__()
        _entered.enter((self, entered, hidden))
        return self

    def __exit__(self, *details: Any) -> None:
        left = _entered.leave_last(lambda entered: entered[0] is self)
        if left is not None:  # asyncio may end an asynchronous generator elsewhere: nothing is to be undone there
            _, entered, hidden = left
            entered.__exit__(*details)
            frame.hybrid_blocks += hidden  # a generator may begin in a call of a block and end outside of it

    def __call__(self, function: Callable) -> Callable:
        """Return a function, generator or coroutine function that runs in the region."""
        return run_in(lambda: self, function)

    def _state(self) -> State:
        """Return the state around that fits, or make one."""
        around = in_force.current()
        around = around if around is not None and around.enabled else in_force.state
        wanted = self._dtype
        if around is not None and wanted in (None, *(policy.target_dtype for policy in around.policies.values())):
            return around if wanted is None else _of_one_type(around, wanted)
        disabled = around.disabled_passes if around is not None else frozenset()
        settings = wanted, disabled, frozenset(custom_ops.items())
        return in_force.remembered(settings, lambda: _region_state(wanted, disabled))


def _refuse_device_or_type(enabled: object) -> None:
    """Answer ``autocast('cuda')`` and ``autocast('bfloat16')``, as they are written elsewhere."""
    if isinstance(enabled, bool):
        return
    try:
        remedy = f"a type goes by name: amp.autocast(dtype={normalize(enabled, or_float32=True)!r})"
    except DTypeError:
        remedy = "the device of the arrays decides, not an argument: amp.autocast(), or amp.autocast(dtype='float16')"
    raise TypeError(f"{expected('True or False', 'enabled', enabled)}: {remedy}")


def _of_one_type(state: State, wanted: str) -> State:
    """Return a state in which devices of another low-precision type run FP32, as under ``init`` with the type."""
    others = [device for device, policy in state.policies.items() if policy.lowers and policy.target_dtype != wanted]
    return in_force.remembered((wanted, state), lambda: _kept_in_fp32(state, others, wanted)) if others else state


def _kept_in_fp32(state: State, devices: Iterable[str], wanted: str) -> State:
    chosen = choose(wanted, device_supports())
    others = {device: chosen[device] for device in devices}
    in_fp32 = {device: replace(policy, disabled_passes=state.policies[device].disabled_passes)
               for device, policy in device_policies(others).items()}
    return State({**state.policies, **in_fp32}, {**state.devices, **devices_of(others)})


def _region_state(wanted: str | None, disabled: frozenset[str]) -> State:
    chosen = choose(wanted, device_supports())
    warn_if_slow(chosen)
    state = State(device_policies(chosen, disabled), devices_of(chosen))
    if in_force.marked is None:
        in_force.marked = state.disabled()
    return state


def exclude(*targets: Block | type | str) -> None:
    """Keep blocks in FP32, with everything inside them, until :func:`deinit`.

    It does not matter how the blocks inside are called: a container may be iterated. What matches nothing in a network
    that runs is told by a warning.

    Parameters
    ----------
    *targets : Block, class of blocks, or str
        Strings are names of blocks and may hold wildcards, as in ``'ssd0_*'``.

    Raises
    ------
    TypeError
        For anything else.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> from mxnet.gluon import nn
    >>> head = nn.Dense(10)
    >>> amp.exclude(head, nn.BatchNorm, 'ssd0_*')
    >>> amp.deinit()
    """
    for target in targets:
        if not can_be_target(target):
            raise TypeError(expected("a Block, a class of blocks or a name with wildcards", "target", target))
    block_settings.exclude(targets)
