"""Graph rewrites: one module for each pass, and the driver that runs them in order. No MXNet."""
from __future__ import annotations

from .context import Context, Int8
from .driver import PASSES, Pass, checked, finish, list_passes, pipeline_of, run
from .facts import Facts
from .fuse import is_fusible, unshield
from .prepare_int8 import between

__all__ = ["PASSES", "Context", "Facts", "Int8", "Pass", "between", "checked", "finish", "is_fusible",
           "list_passes", "pipeline_of", "run", "unshield"]
