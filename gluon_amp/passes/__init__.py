"""Graph rewrites: one module for each pass, and the driver that runs them in order. No MXNet."""
from __future__ import annotations

from .context import Context
from .driver import PASSES, Pass, checked, finish, list_passes, pipeline_of, run
from .facts import Facts
from .fuse import is_fusible

__all__ = ["PASSES", "Context", "Facts", "Pass", "checked", "finish", "is_fusible", "list_passes", "pipeline_of", "run"]
