"""The number of GPUs that MXNet finds, and the error of a driver that does not work."""
from __future__ import annotations

import mxnet as mx

__all__ = ["count", "problem"]


def count() -> int:
    """Return the number of GPUs; 0 where the driver does not work: that must not break what runs on the CPU."""
    try:
        return mx.context.num_gpus()
    except mx.MXNetError:
        return 0


def problem() -> str | None:
    """Return CUDA's message where its driver does not work; None where it does, or there is none."""
    try:
        mx.context.num_gpus()
    except mx.MXNetError as error:
        return str(error).strip().splitlines()[-1].split("CUDA: ")[-1]
    return None
