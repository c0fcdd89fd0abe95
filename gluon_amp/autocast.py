"""Switch mixed precision on and off: for the process (``init``), a region (``autocast``), a block (``exclude``)."""
from __future__ import annotations

import logging
import os
import warnings
from contextlib import ContextDecorator, ExitStack
from dataclasses import replace
from typing import Any, Iterable, Mapping, Sequence

from mxnet.gluon import Block

from . import passes
from ._mxnet import hooks
from ._mxnet.eager import outermost
from ._mxnet.operators import registered_operators
from .dtypes import BFLOAT16, FLOAT16, IMITATED_FLOAT16, Support, normalize
from .errors import DTypeError, PolicyError, StateError, expected
from .graph.attrs import REGION_ON
from .rules import ConditionalOp, Policy, make_policy
from .state import State, controller, device_supports, machine, region
from .rules.tuning import Tuning, default_cache

__all__ = ["active_dtype", "autocast", "deinit", "device_policies", "exclude", "init", "is_active", "tuned",
           "usable_types"]

_logger = logging.getLogger("gluon_amp")


def init(target_dtype: object = None, target_precision_ops: Sequence[str] | None = None,
         conditional_fp32_ops: Sequence[ConditionalOp] | None = None, fp32_ops: Sequence[str] | None = None,
         layout_optimization: bool = False, *, tuning: Tuning | str | os.PathLike | bool | None = None,
         disable_passes: Iterable[str] | None = None, policy: Policy | None = None) -> None:
    """Switch automatic mixed precision on.

    May come before or after the network is created: networks that are hybridized already are rewritten at
    their next call.

    Parameters
    ----------
    target_dtype : {'float16', 'bfloat16'}, numpy dtype or None
        The low-precision type. None takes bfloat16 for arrays on a CPU and float16 for those on a GPU, where
        the device runs it. ``'float16'`` without a GPU imitates it on the CPU, exactly and slowly, for tests of
        numerics.
    target_precision_ops : list of str, optional
        The operators that run in ``target_dtype``, in place of the table's own.
    conditional_fp32_ops : list of (str, str, list of str), optional
        Operator, attribute, and the attribute's values that force the operator to FP32.
    fp32_ops : list of str, optional
        Operators forced to FP32, beside those that the table names.
    layout_optimization : bool
        Accepted for MXNet 2's signature. Only False has a meaning on MXNet 1.9.1.
    tuning : Tuning, path or True, optional
        Measurements of :func:`tune`: operators that are slower in low precision here stay in FP32. True reads those
        that ``tune`` kept.
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
        AMP is on already, with other settings.

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
    requested = None if target_dtype is None else normalize(target_dtype)
    lists = {"target_precision_ops": target_precision_ops, "conditional_fp32_ops": conditional_fp32_ops,
             "fp32_ops": fp32_ops}
    disabled = passes.checked(disable_passes)
    if policy is not None:
        requested = _type_of(policy, {"target_dtype": target_dtype, **lists, "tuning": tuning,
                                      "disable_passes": disable_passes})
    arguments = (requested, repr(lists), repr(tuning), disabled, policy)
    if controller.state is not None:
        if arguments == controller.state.arguments:
            return
        raise StateError("AMP is on already with other settings: call amp.deinit() before another amp.init()")
    supports = device_supports()
    usable = usable_types(requested, supports)
    policies = (tuned(device_policies(usable, disabled, **lists), tuning) if policy is None
                else policies_of(policy))
    state = State(policies, arguments)
    hooks.install(controller)
    controller.state = state
    announce(usable, supports)


def _type_of(policy: Policy, others: Mapping[str, object]) -> str:
    if not isinstance(policy, Policy):
        raise TypeError(expected("a Policy", "policy", policy))
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise PolicyError(f"expected policy alone, received {', '.join(given)} as well: a policy decides those")
    return normalize(policy.target_dtype, "policy.target_dtype")


def deinit() -> None:
    """Switch mixed precision off and restore MXNet exactly; does nothing when AMP is off.

    Networks run in FP32 from their next call on. Exclusions and registered functions are forgotten.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.deinit()
    """
    hooks.uninstall()
    controller.reset()


def is_active() -> bool:
    """Whether AMP is on here: ``init`` is in force, or an ``autocast`` region says so.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.is_active()
    False
    """
    current = controller.current()
    return current is not None and current.enabled


def active_dtype(device_type: str = "cpu") -> str | None:
    """Name the low-precision type in use for arrays on a kind of device, None for FP32.

    Parameters
    ----------
    device_type : str
        ``'cpu'`` or ``'gpu'``, as in ``Context.device_type``.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.active_dtype('cpu') is None
    True
    """
    state = controller.current()
    policy = state.policy(device_type) if state is not None and state.enabled else None
    return policy.target_dtype if policy else None


class autocast(ContextDecorator):
    """Switch mixed precision on or off for a region: a context manager, and a decorator.

    Regions nest, the innermost counts, and each belongs to its thread. They work with and without :func:`init`. Inside
    a ``hybrid_forward`` that is being traced, the operators keep the region's setting, so that the hybridized block
    obeys it whenever it runs.

    Parameters
    ----------
    enabled : bool
        False runs the region in FP32.
    dtype : {'float16', 'bfloat16'}, numpy dtype or None
        The low-precision type; None takes the one of ``init``, or the device's.

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

    def __init__(self, enabled: bool = True, dtype: object = None):
        if not isinstance(enabled, bool):
            raise TypeError(expected("True or False", "enabled", enabled))
        self._dtype = None if dtype is None else normalize(dtype, "dtype")
        self._enabled = enabled
        self._entered: list[ExitStack] = []
        if enabled and self._dtype is not None:
            usable_types(self._dtype, device_supports())

    def __enter__(self) -> autocast:
        stack = ExitStack()
        hooks.install(controller)  # they stay, for what is traced here
        if self._enabled:
            if not is_active():
                stack.enter_context(outermost())  # the code around does not know low precision
            stack.enter_context(region(self._state(), self._dtype or REGION_ON))
        else:
            stack.enter_context(controller.off())
        self._entered.append(stack)
        return self

    def __exit__(self, *details: Any) -> None:
        self._entered.pop().__exit__(*details)

    def _recreate_cm(self) -> autocast:
        # A decorated function may run in several threads at once: each call gets a region of its own.
        return autocast(self._enabled, self._dtype)

    def _state(self) -> State:
        """Return the state around that fits, or make one."""
        around = controller.current()
        around = around if around is not None and around.enabled else controller.state
        wanted = self._dtype
        if around is not None and wanted in (None, *(policy.target_dtype for policy in around.policies.values())):
            return around
        disabled = around.disabled_passes if around is not None else frozenset()
        policies = device_policies(usable_types(wanted, device_supports()), disabled)
        if controller.marked is None:
            controller.marked = State(policies, enabled=False)
        return State(policies)


def exclude(*targets: Block | type | str) -> None:
    """Keep blocks in FP32, with everything inside them, until :func:`deinit`.

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
        if not (isinstance(target, (Block, str)) or (isinstance(target, type) and issubclass(target, Block))):
            raise TypeError(expected("a Block, a class of blocks or a name with wildcards", "target", target))
    controller.exclude(targets)


def device_policies(usable: Mapping[str, Support], disabled_passes: frozenset[str] = frozenset(),
                    **lists: Any) -> dict[str, Policy]:
    """Make the policy of each kind of device, with the user's lists (those of :func:`make_policy`)."""
    known = registered_operators()
    return {device: replace(make_policy(found.dtype, known, custom_ops=controller.custom_ops, imitated=found.imitated,
                                        **lists), channel_multiple=found.channel_multiple, amx=found.amx,
                            disabled_passes=disabled_passes)
            for device, found in usable.items() if found.dtype}


def policies_of(policy: Policy) -> dict[str, Policy]:
    """Fit a policy to the devices of this machine that run its type.

    Raises
    ------
    DTypeError
        None of them does.
    PolicyError
        It switches off a pass that there is not, or that is required.
    """
    passes.checked(policy.disabled_passes, "policy.disabled_passes")
    usable = usable_types(policy.target_dtype, device_supports())
    return {device: replace(policy, imitated=found.imitated, channel_multiple=found.channel_multiple, amx=found.amx)
            for device, found in usable.items()}


def tuned(policies: Mapping[str, Policy], tuning: Tuning | str | os.PathLike | bool | None) -> dict[str, Policy]:
    """Give policies the measurements of this machine that the user named.

    Raises
    ------
    PolicyError
        They are of another machine, or the file holds none.
    """
    if tuning is None or tuning is False:
        return dict(policies)
    if not isinstance(tuning, Tuning):
        tuning = Tuning.load(default_cache() if tuning is True else tuning, machine())
    if tuning.machine != machine():
        raise PolicyError(f"the measurements are of another machine ({tuning.machine}), this is {machine()}: call "
                          "amp.tune(net, data) here")
    return {device: replace(policy, slow=tuning.slow) for device, policy in policies.items()}


def usable_types(requested: str | None, supports: Mapping[str, Support]) -> dict[str, Support]:
    """Return the devices that run the type asked for, or any; raise when there is none for an explicit one."""
    usable = {name: found for name, found in supports.items() if found.dtype and requested in (None, found.dtype)}
    if usable or requested is None:
        return usable
    if requested == FLOAT16 and "gpu" not in supports:
        return {"cpu": IMITATED_FLOAT16}
    others = [found.dtype for found in supports.values() if found.dtype]
    needs = {BFLOAT16: "a CPU with AVX512", FLOAT16: "a CUDA GPU"}[requested]
    advice = f"Use target_dtype='{others[0]}', or leave it out" if others else f"It needs {needs}"
    raise DTypeError(f"this machine cannot run {requested} ({_reasons(supports)}). {advice}")


def _reasons(supports: Mapping[str, Support]) -> str:
    return "; ".join(f"{name}: {found.reason}" for name, found in supports.items())


def announce(usable: Mapping[str, Support], supports: Mapping[str, Support]) -> None:
    """Say what runs where; warn where that is slow, or nothing does."""
    if not usable:
        warnings.warn(f"AMP stays in FP32: {_reasons(supports)}", stacklevel=3)
    for name, found in usable.items():
        if not found.native:
            warnings.warn(f"AMP will be slow on the {name}: {found.reason}", stacklevel=3)
    chosen = "; ".join(f"{found.dtype} on the {name}, {found.reason}" for name, found in usable.items())
    _logger.info("Using AMP: %s", chosen or f"float32 ({_reasons(supports)})")
