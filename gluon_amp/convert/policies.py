"""The policy that a conversion follows, for the device that the network will run on."""
from __future__ import annotations

from typing import Any, Mapping

from ..dtypes import BFLOAT16, FLOAT16, FOREIGN_BFLOAT16, IMITATED_FLOAT16, Support, cuda_support
from ..errors import DTypeError
from ..rules import Policy
from ..runtime.autocast import device_policies, tuned
from ..runtime.devices import device_supports, warn_once

__all__ = ["inference_policy"]


def inference_policy(target: str | None, device_type: str, lists: Mapping[str, Any], tuning: Any = None) -> Policy:
    """Make the policy for a device.

    Parameters
    ----------
    target : str or None
        ``'float32'``, ``'bfloat16'``, ``'float16'``; None takes what the device runs fastest.
    device_type : str
        ``'cpu'`` or ``'gpu'``. A network may be converted for another machine than this one.
    lists : mapping
        The user's operator lists.
    tuning : Tuning, path or True, optional
        Measurements to heed.

    Raises
    ------
    DTypeError
        No device of the kind runs the type.
    PolicyError
        The lists contradict each other, or name unknown operators.
    """
    found = _support(device_type)
    chosen = found if target is None else found.requested(target) or _foreign(target, device_type)
    if chosen is None:
        raise DTypeError(f"expected a type that a {device_type.upper()} runs, received {target!r}: MXNet has no "
                         f"{target} kernels for it. Leave the type out to get the best one")
    if chosen is FOREIGN_BFLOAT16:
        warn_once(f"the {target} network cannot run on this machine, where {found.reason}: {chosen.reason}")
    elif not chosen.native:
        warn_once(f"the {target} network will be slower than FP32 on this machine: {chosen.reason}")
    return tuned(device_policies({device_type: chosen}, **lists), tuning)[device_type]


def _support(device_type: str) -> Support:
    if device_type not in ("cpu", "gpu"):
        raise DTypeError(f"expected a CPU or a GPU to convert for, received a device of type {device_type!r}")
    return device_supports().get(device_type) or cuda_support(None)


def _foreign(target: str, device_type: str) -> Support | None:
    """Return how another machine's device of a kind runs a type that this one's does not; None when none does."""
    if device_type == "gpu":
        return cuda_support(None) if target == FLOAT16 else None
    return {BFLOAT16: FOREIGN_BFLOAT16, FLOAT16: IMITATED_FLOAT16}.get(target)
