"""Graph rewrites, and the driver that runs them in order. No MXNet."""
from __future__ import annotations

from .context import Concern, Context, Facts, Int8, Shaped
from .driver import PASSES, Pass, checked, finish, list_passes, pipeline_of, run
from .inference import between, is_fusible, shield, unshield

__all__ = ["PASSES", "Concern", "Context", "Facts", "Int8", "Pass", "Shaped", "between", "checked", "finish",
           "is_fusible", "list_passes", "pipeline_of", "run", "shield", "unshield"]
