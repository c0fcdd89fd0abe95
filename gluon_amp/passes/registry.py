"""The table of passes: what each does, where it runs, and which can be switched off.

To add a pass write it in a module of its own and give it a record in :data:`PASSES`, in the order of execution. One
that edits a graph by its policy alone (``run``) needs nothing more; conversion calls those that change parameters.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable

from ..errors import PolicyError, closest, expected
from ..graph import Graph
from ..policy import Policy
from . import (
    align_channels,
    assign_dtypes,
    cut_casts,
    dilate_pointwise,
    fold_stride,
    native_activations,
    place_casts,
    shape_operands,
)
from .context import Context

__all__ = ["PASSES", "GraphPass", "Run", "checked", "list_passes", "pipeline_of", "steps_of"]

Run = Callable[[Graph, Context], bool]
TRAINING, INFERENCE = "training", "inference"


def _always(policy: Policy) -> bool:
    return True


def _lowers(policy: Policy) -> bool:
    return policy.lowers


@dataclass(frozen=True)
class GraphPass:
    """A rewrite of graphs.

    Attributes
    ----------
    name : str
        What users switch it off by.
    summary : str
        What it does, in a line.
    run : callable or None
        Edits a graph and says whether it changed it; None for one that conversion or :func:`gluon_amp.passes.rewrite`
        calls itself, because it needs more than the policy.
    where : tuple of str
        ``'training'``, which is everything under ``init`` and ``autocast``, ``'inference'``, which is conversion.
    required : str
        Why it cannot be switched off; empty for one that can.
    applies : callable
        Whether it is for graphs of a policy.
    is_step : bool
        Whether the ``optimize`` argument of the conversions lists it.
    """

    name: str
    summary: str
    run: Run | None = None
    where: tuple[str, ...] = (TRAINING, INFERENCE)
    required: str = ""
    applies: Callable[[Policy], bool] = _always
    is_step: bool = False


PASSES: tuple[GraphPass, ...] = (
    GraphPass("drop_training", "operators that do nothing in inference are dropped (Dropout)", where=(INFERENCE,),
              is_step=True),
    GraphPass("fold_batch_norm", "BatchNorm is folded into the convolution or dense layer before it",
              where=(INFERENCE,), is_step=True),
    GraphPass("shape_operands", "what is computed for its shape only is not computed", shape_operands.run),
    GraphPass("assign_dtypes", "every operator gets a precision", assign_dtypes.run,
              required="without it nothing runs in low precision: leave amp.init() or the conversion out"),
    GraphPass("native_activations", "rectifiers run oneDNN's kernels, or less of MXNet's own", native_activations.run,
              where=(TRAINING,), applies=_lowers),
    GraphPass("cut_casts", "operators that may run in either precision take what costs least, casts included",
              cut_casts.run, applies=_lowers),
    GraphPass("align_channels", "convolutions are padded to the channel multiple that the fast kernels need",
              align_channels.run, is_step=True, applies=_lowers),
    GraphPass("fold_stride", "strided convolutions of few channels run on AMX; they stay in FP32 without it",
              fold_stride.run, where=(TRAINING,), applies=fold_stride.is_needed),
    GraphPass("place_casts", "a cast is inserted where producer and consumer differ", place_casts.run,
              required="without it operators would read types that they cannot run in"),
    GraphPass("dilate_pointwise", "pointwise convolutions avoid a kernel of AMX that is not sound; they stay in FP32 "
              "without it", dilate_pointwise.run, where=(INFERENCE,), applies=dilate_pointwise.is_needed),
    GraphPass("emulate", "a type that the device has no kernels for is imitated",
              required="without it the device would have to run a type that it has no kernels for"),
    GraphPass("cast_params_offline", "parameters that are read in low precision only are stored in it",
              where=(INFERENCE,), is_step=True),
    GraphPass("fuse", "oneDNN's fused operators (convolution, activation, sum) on the CPU", where=(INFERENCE,),
              is_step=True),
)


def steps_of(policy: Policy) -> tuple[GraphPass, ...]:
    """Return the passes that rewrite graphs by a policy, in order."""
    return tuple(each for each in PASSES
                 if each.run is not None and each.name not in policy.disabled_passes and each.applies(policy))


def pipeline_of(policy: Policy) -> tuple[Run, ...]:
    """Return what rewrites graphs by a policy, in order."""
    return tuple(each.run for each in steps_of(policy) if each.run is not None)


def checked(names: Iterable[str] | None, argument: str = "disable_passes") -> frozenset[str]:
    """Return the passes to switch off.

    Parameters
    ----------
    names : iterable of str, optional
        As the user gave them.
    argument : str
        What they were given as.

    Raises
    ------
    PolicyError
        A name is unknown, or that of a pass that is required.

    Examples
    --------
    >>> checked(['align_channels'])
    frozenset({'align_channels'})
    """
    if names is None:
        return frozenset()
    given = [] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if (not given and names) or not all(isinstance(name, str) for name in given):
        raise PolicyError(expected("a list of names of passes", argument, names))
    known = {each.name: each for each in PASSES}
    for name in given:
        if name not in known:
            raise PolicyError(f"{argument}: there is no pass {name!r}.{closest(name, list_passes())} Those that can be "
                              f"switched off are {', '.join(list_passes())}")
        if known[name].required:
            raise PolicyError(f"{argument}: {name!r} cannot be switched off: {known[name].required}")
    return frozenset(given)


def list_passes() -> dict[str, str]:
    """List the graph passes that can be switched off, in the order in which they run, with what each does.

    Their names are what ``disable_passes`` of :func:`init` and of the conversions takes.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.list_passes()['align_channels']
    'convolutions are padded to the channel multiple that the fast kernels need'
    """
    return {each.name: each.summary for each in PASSES if not each.required}
