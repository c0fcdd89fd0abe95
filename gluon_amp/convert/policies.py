"""The policy that a conversion follows, for the device that the network will run on."""
from __future__ import annotations

import warnings
from typing import Any, Mapping

from ..autocast import device_policies, tuned, usable_types
from ..dtypes import FLOAT16, FLOAT32, Support, cuda_support
from ..errors import DTypeError
from ..rules import Policy
from ..state import device_supports

__all__ = ["inference_policy"]


def inference_policy(target: str | None, device_type: str, lists: Mapping[str, Any], tuning: Any = None
                     ) -> Policy | None:
    """Make the policy for a device; None for FP32.

    Parameters
    ----------
    target : str or None
        ``'float32'``, ``'bfloat16'``, ``'float16'``; None takes what the device runs.
    device_type : str
        ``'cpu'`` or ``'gpu'``. A network may be converted for a GPU on a machine without one.
    lists : mapping
        The user's operator lists.
    tuning : Tuning, path or True, optional
        Measurements to heed.

    Raises
    ------
    DTypeError
        The device cannot run the type.
    PolicyError
        The lists contradict each other, or name unknown operators.
    """
    supports = {name: found for name, found in _supports(device_type).items() if name == device_type}
    usable = {} if target == FLOAT32 else usable_types(target, supports)
    policies = device_policies(usable, **lists)
    if not policies and target is None:
        warnings.warn(f"the network stays in FP32: {supports[device_type].reason}", stacklevel=4)
    if not policies:
        device_policies({device_type: Support(FLOAT16, True, "")}, **lists)  # the lists are checked nevertheless
        return None
    return tuned(policies, tuning)[device_type]


def _supports(device_type: str) -> dict[str, Support]:
    if device_type not in ("cpu", "gpu"):
        raise DTypeError(f"expected a CPU or a GPU to convert for, received a device of type {device_type!r}")
    found = device_supports()
    return found if device_type in found else {**found, "gpu": cuda_support(None)}
