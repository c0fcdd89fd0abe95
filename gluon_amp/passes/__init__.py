"""Graph rewrites, and the driver that runs them in order. No MXNet."""
from __future__ import annotations

from .context import Concern, Context, Facts, Shaped
from .driver import PASSES, Pass, checked, finish, list_passes, pipeline_of, run
from .inference import is_fusible

__all__ = ["PASSES", "Concern", "Context", "Facts", "Pass", "Shaped", "checked", "finish", "is_fusible", "list_passes",
           "pipeline_of", "run"]
