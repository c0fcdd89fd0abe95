"""Read the attributes of nodes, which are text in symbol JSON."""
from __future__ import annotations

import re
from typing import Mapping

from ..dtypes import BFLOAT16, FLOAT16, FLOAT32

Attrs = Mapping[str, str]

# Attributes of symbols rather than of operators: type, shape and storage of a variable, and what this package notes.
DTYPE, SHAPE, STORAGE = "__dtype__", "__shape__", "__storage_type__"
REGION = "__amp__"  # on operators traced inside an autocast region: one of these two, or a data type
REGION_ON, REGION_OFF = "on", "off"
CONVERSION = "__gluon_amp__"  # on the nodes that give the outputs: how the symbol was converted for inference
MADE = "__gluon_amp_made__"  # on parameters that a conversion made: of what
INFERENCE = "__gluon_amp_inference__"  # on variables whose gradients a conversion spoils: by what

# MXNet's numbers of the data types, as `__dtype__` gives them.
TYPE_FLAGS = {FLOAT32: 0, FLOAT16: 2, BFLOAT16: 12}

CHANNELS_LAST = ("NHWC", "NWC", "NDHWC")


def parameters(attrs: Attrs) -> dict[str, str]:
    """Return the operator's own parameters, without the attributes of its symbol."""
    return {name: value for name, value in attrs.items() if not name.startswith("__")}


def integers(attrs: Attrs, name: str) -> list[int]:
    """Return the numbers of a tuple, or the one number; none where the parameter is not given."""
    return [int(number) for number in re.findall(r"-?\d+", str(attrs.get(name, "")))]


def integer(attrs: Attrs, name: str, default: int) -> int:
    """Return a whole number."""
    return int(attrs.get(name, default))


def is_set(attrs: Attrs, name: str, default: bool = False) -> bool:
    """Return a parameter that is true or false."""
    return str(attrs.get(name, default)) in ("True", "true", "1")


def region_of(attrs: Attrs) -> dict[str, str]:
    """Return the mark of the region that an operator was traced in, for one that takes its place or serves it."""
    return {REGION: attrs[REGION]} if REGION in attrs else {}


def is_channels_last(attrs: Attrs) -> bool:
    """Tell whether the layout has channels behind the axes of the map."""
    return str(attrs.get("layout")) in CHANNELS_LAST
