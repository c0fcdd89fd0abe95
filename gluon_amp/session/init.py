"""Switch mixed precision on and off for the process (``init``), and keep blocks in FP32 (``exclude``)."""
from __future__ import annotations

import logging
from typing import Iterable, Sequence

from mxnet import Context
from mxnet.gluon import Block

from .. import passes
from ..base import checks
from ..base.aliases import NO_TUNING, answers
from ..errors import PolicyError, StateError, expected, shown
from ..machine.dtypes import normalize
from ..rules import ConditionalOp, Policy
from ..state.blocks import block_settings, can_be_target
from ..state.devices import announce, choose, device_supports, prepare_gpus, restore_gpus
from ..state.in_force import in_force
from ..state.state import State, custom_ops, device_policies, policies_of
from . import hooks

_logger = logging.getLogger("gluon_amp")


@answers(dtype="it is called target_dtype",
         enabled="call amp.init() to switch AMP on and amp.deinit() to switch it off",
         device_type="every device runs in its own type: leave it out",
         opt_level="that is for amp.initialize(net, trainer, opt_level=...)", tuning=NO_TUNING)
def init(target_dtype: object = None, target_precision_ops: Sequence[str] | None = None,
         conditional_fp32_ops: Sequence[ConditionalOp] | None = None, fp32_ops: Sequence[str] | None = None,
         layout_optimization: bool = False, *, disable_passes: Iterable[str] | None = None,
         policy: Policy | None = None) -> None:
    """Switch automatic mixed precision on.

    May come before or after the network is created: networks that are hybridized already are rewritten at their next
    call. Raises DTypeError for a type that the machine cannot run, PolicyError for lists that name what is unknown or
    contradict each other, and StateError, and changes nothing, where AMP is on with other settings than those named.

    Parameters
    ----------
    target_dtype : {'float16', 'bfloat16', 'float32'}, numpy dtype or None
        None takes the fastest type, device by device: bfloat16 on a CPU that has instructions for it, float16 on a GPU,
        and FP32 elsewhere, made faster by all rewrites that do not depend on precision. ``'bfloat16'`` on a CPU
        with AVX512 but without BF16 instructions is emulated, slower than FP32. ``'float16'`` without a GPU is
        imitated on the CPU, exactly and slowly, for tests of numerics.
    target_precision_ops : list of str, optional
        The operators that run in ``target_dtype``, in place of the table's own.
    conditional_fp32_ops : list of (str, str, list of str), optional
        Operator, attribute, and the attribute's values that force the operator to FP32.
    fp32_ops : list of str, optional
        Operators forced to FP32, beside the table's own.
    layout_optimization : bool
        Accepted for MXNet 2's signature. Only False has a meaning on MXNet 1.9.1.
    disable_passes : list of str, optional
        Graph passes to switch off, by their names in :func:`list_passes`.
    policy : Policy, optional
        Decides everything that the arguments above are for, which must then be left out. The operators it excludes by
        name are operators of graphs: of hybridized blocks, symbols and ``Module``.

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
    given = {name: value for name, value in {"target_dtype": target_dtype, **lists, "disable_passes": disable_passes,
                                             "policy": policy}.items() if value is not None}
    if policy is not None:
        checks.instance("policy", policy, Policy, "a Policy")
        if len(given) > 1:
            raise PolicyError(f"expected policy alone, received {', '.join(given)}: a policy decides those as well")
        requested = normalize(policy.target_dtype, "policy.target_dtype", or_float32=True)
    if not given and is_switched_on():
        _logger.info("AMP is on already: amp.init() without arguments keeps its settings")
        return
    chosen = choose(requested, device_supports())
    policies = device_policies(chosen, disabled, **lists) if policy is None else policies_of(policy, chosen)
    state = State.on(chosen, policies)
    if in_force.state == state:
        return
    if is_switched_on():
        received = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
        if in_force.state is None:
            raise StateError("amp.initialize switched AMP on for its networks: expected no amp.init after it, received "
                             f"{received}. Leave amp.init out, or call amp.deinit() first")
        types = ", ".join(f"{own.target_dtype} on the {device}" for device, own in in_force.state.policies.items())
        raise StateError(f"AMP is on already: {types}. amp.init was called with other settings: received {received}. "
                         "Leave this call out, or call amp.deinit() before it")
    hooks.install()
    prepare_gpus(policies)
    in_force.begin()
    in_force.state = state
    announce(chosen, requested)


def deinit() -> None:
    """Switch mixed precision off and restore MXNet exactly; does nothing when AMP is off.

    Networks run in FP32 from their next call on. Exclusions and registered functions are forgotten.
    """
    hooks.uninstall()
    restore_gpus()
    in_force.end()
    block_settings.clear()
    custom_ops.clear()


def is_switched_on() -> bool:
    """Tell whether ``init``, or ``initialize`` for some networks, is in force."""
    return in_force.state is not None or block_settings.have_states()


def is_active() -> bool:
    """Whether AMP is on here: ``init`` is in force, or an ``autocast`` region says so.

    It is on, too, where every device is faster in FP32: :func:`active_dtype` says which type runs.
    """
    current = in_force.current()
    return current is not None and current.enabled


def active_dtype(device_type: str | Context = "cpu") -> str | None:
    """Name the low-precision type in use for arrays on a device; None for FP32, and for a GPU where there is none.

    Parameters
    ----------
    device_type : str or Context
        ``'cpu'`` or ``'gpu'``, as in ``Context.device_type``; ``'cuda'`` is the GPU. One device, as ``mx.gpu(1)``,
        where GPUs differ.
    """
    kinds = {**{kind: kind for kind in Context.devstr2type}, "cuda": "gpu"}
    if not isinstance(device_type, Context):
        if device_type not in kinds:
            names = ", ".join(map(repr, kinds))
            raise ValueError(expected(f"one of {names}, or a Context", "device_type", device_type))
        device_type = Context(kinds[device_type])
    policy = in_force.policy(device_type)
    return policy.target_dtype if policy is not None and policy.lowers else None


def exclude(*targets: Block | type | str) -> None:
    """Keep blocks in FP32, with everything inside them, until :func:`deinit`.

    It does not matter how the blocks inside are called: a container may be iterated. A warning tells of a name that no
    block has when a network runs.

    Parameters
    ----------
    *targets : Block, class of blocks, or str
        Strings are names of blocks and may hold wildcards, as in ``'ssd0_*'``.
    """
    for target in targets:
        if not can_be_target(target):
            raise TypeError(expected("a Block, a class of blocks or a name with wildcards", "target", target))
    block_settings.exclude(targets)
