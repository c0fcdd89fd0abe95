"""The precision that an operator of a graph runs in, and why."""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(str, Enum):
    """Why an operator runs in the precision that it runs in."""

    TABLE = "table"  # the operator table says so
    CHANNELS = "channels"  # it has too few input channels to gain
    LAYOUT = "layout"  # there are no fast kernels for its layout, or its neighbours share one
    USER_LIST = "user_list"  # it is in one of the user's lists
    NOT_LISTED = "not_listed"  # the user's list of low-precision operators leaves it out
    REGISTERED = "registered"  # the user's register_op says so
    EXCLUSION = "exclusion"  # the policy excludes its node
    REGION = "region"  # it is in a region without AMP, or in an excluded block
    OUTSIDE = "outside"  # it is outside of every region with AMP
    STORAGE = "storage"  # it reads sparse tensors
    CONSTANT = "constant"  # the low-precision type cannot hold a constant that it computes with
    SHAPE = "shape"  # there is no sound or fast kernel for its shape
    DEVICE = "device"  # the device is faster in FP32
    CONSUMERS = "readers"  # all that reads it runs in low precision
    INT8 = "int8"  # it runs in INT8
    DEFAULT = "default"  # nothing is known of it


# What the user wants, of one operator or of where it stands.
WISHES = (Cause.USER_LIST, Cause.NOT_LISTED, Cause.REGISTERED, Cause.EXCLUSION, Cause.REGION, Cause.OUTSIDE)


@dataclass(frozen=True)
class Decision:
    """The precision of one operator, and why."""

    rule: str  # ``'LOWER'``, ``'FP32'``, ``'WIDEST'``, ``'NEUTRAL'`` or ``'KEEP'``
    cause: Cause  # the kind of reason, for programs
    note: str  # the reason, for people
    fp32_inputs: tuple[int, ...] = ()  # positions of inputs that stay FP32 whatever the data runs in
    rounded_inputs: tuple[int, ...] = ()  # positions of inputs that stay FP32, with values of the target type
    safe: bool = True  # False where a low-precision kernel is missing or wrong
