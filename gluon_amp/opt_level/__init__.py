"""Training by opt levels: ``initialize`` and what it makes of its arguments."""
from __future__ import annotations

from .initialize import initialize

__all__ = ["initialize"]
