"""Training by opt levels: ``initialize`` and its options."""
from __future__ import annotations

from .initialize import initialize

__all__ = ["initialize"]
