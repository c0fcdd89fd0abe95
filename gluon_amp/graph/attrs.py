"""Read the attributes of nodes, which are text in symbol JSON."""
from __future__ import annotations

import re
from typing import Mapping
from uuid import uuid4

from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32

Attrs = Mapping[str, str]

# Attributes of symbols rather than of operators: type, shape and storage of a variable, and what this package notes.
DTYPE, SHAPE, STORAGE = "__dtype__", "__shape__", "__storage_type__"
REGION = "__amp__"  # on operators made inside a region: see `region_mark`
REGION_ON, REGION_OFF = "on", "off"  # the settings of regions; or a data type
CONVERSION = "__gluon_amp__"  # on the nodes that give the outputs: how the symbol was converted for inference
MADE = "__gluon_amp_made__"  # on parameters that a conversion made: of what
NOTE = "__gluon_amp_note__"  # on layers of a network with INT8: why they run in it, or not
INFERENCE = "__gluon_amp_inference__"  # on variables whose gradients a conversion spoils: by what

# MXNet's numbers of the data types, as `__dtype__` gives them.
TYPE_FLAGS = {FLOAT32: 0, FLOAT16: 2, BFLOAT16: 12}
LOW_FLAGS = frozenset((TYPE_FLAGS[FLOAT16], TYPE_FLAGS[BFLOAT16]))

# Operators of MXNet's that turn FP32 into INT8, or back.
INT8_CASTS = ("_contrib_quantize_v2", "_contrib_dequantize", "_contrib_requantize")

_PROCESS = uuid4().hex[:12]

CHANNELS_LAST = ("NHWC", "NWC", "NDHWC")


def parameters(attrs: Attrs) -> dict[str, str]:
    """Return the operator's own parameters, without the attributes of its symbol."""
    return {name: value for name, value in attrs.items() if not name.startswith("__")}


def symbol_attributes(attrs: Attrs) -> dict[str, str]:
    """Return the attributes of an operator's symbol, without its parameters."""
    return {name: value for name, value in attrs.items() if name.startswith("__")}


def integers(attrs: Attrs, name: str) -> list[int]:
    """Return the numbers of a tuple, or the one number; none where the parameter is not given."""
    return [int(number) for number in re.findall(r"-?\d+", str(attrs.get(name, "")))]


def integer(attrs: Attrs, name: str, default: int) -> int:
    """Return a whole number."""
    return int(attrs.get(name, default))


def is_set(attrs: Attrs, name: str, default: bool = False) -> bool:
    """Return a parameter that is true or false."""
    return str(attrs.get(name, default)) in ("True", "true", "1")


def is_in_int8(op: str, attrs: Attrs) -> bool:
    """Tell whether an operator computes in INT8."""
    return is_set(attrs, "quantized") or op.startswith("_contrib_quantized_")


def region_mark(setting: str) -> dict[str, str]:
    """Return the mark of an operator that is made in a region. In other processes, as from a file, it says nothing."""
    return {REGION: f"{setting} {_PROCESS}"}


def region(attrs: Attrs) -> str | None:
    """Return the setting of the region of this process that an operator was made in; None outside of all."""
    setting, _, process = attrs.get(REGION, "").partition(" ")
    return setting if process == _PROCESS else None


def region_of(attrs: Attrs) -> dict[str, str]:
    """Return the mark of an operator, for one that takes its place or serves it."""
    return {REGION: attrs[REGION]} if REGION in attrs else {}


def is_channels_last(attrs: Attrs) -> bool:
    """Tell whether the layout has channels behind the axes of the map."""
    return str(attrs.get("layout")) in CHANNELS_LAST
