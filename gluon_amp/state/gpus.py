"""What has to be set for GPUs as long as AMP is on, in MXNet's environment variables."""
from __future__ import annotations

import os
from typing import Mapping

from .. import _machine
from ..dtypes import FLOAT16
from ..rules import FP32, Policy
from ..rules.tables import groups
from .devices import warn_once

SAFE_ACCUMULATION = "MXNET_SAFE_ACCUMULATION"  # 1: sums of float16 values are kept in FP32, those of FP32 in float64
# MXNet's own kernels of these add up in the type of their data, unless the variable is set.
_SUMMING = (*groups.SOFTMAX, *groups.NORMS, "softmin", *groups.SUMS, *groups.NUMPY_SUMS,
            *groups.NORMS_OF_TENSORS)
_before: dict[str, str | None] = {}  # what variables that this module has set were


def prepare(policies: Mapping[str, Policy]) -> None:
    """Make what policies ask of GPUs run, and say so; :func:`restore` undoes it."""
    # MXNet reads the variable for fusion as it sets a graph up, the other at each call: what ran before is as it was.
    on_gpus = [policy for device, policy in policies.items() if device.startswith("gpu")]
    if not on_gpus:
        return
    problem = _machine.fusion_problem(_machine.driver_version(), _machine.nvrtc_version())
    if problem and os.environ.get(_machine.NO_FUSION) != "0":
        _put(_machine.NO_FUSION, "0")
        warn_once(f"{_machine.NO_FUSION}=0 is set, so that elementwise operators on the GPU are not fused: {problem}, "
                  f"in FP32 as well. Update NVIDIA's driver, or set {_machine.NO_FUSION}=0 yourself for networks "
                  "without AMP")
    if SAFE_ACCUMULATION not in os.environ and any(map(_sums_in_float16, on_gpus)):
        _put(SAFE_ACCUMULATION, "1")


def restore() -> None:
    """Take back what :func:`prepare` set."""
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def _put(name: str, value: str) -> None:
    _before.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def _sums_in_float16(policy: Policy) -> bool:
    """Tell whether a user's list, or a level, lets an operator that adds up run in float16."""
    return policy.target_dtype == FLOAT16 and any(policy.decide(op, {}).rule != FP32 for op in _SUMMING)
