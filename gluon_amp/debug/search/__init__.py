"""``amp.search_exclusions``: which operators have to stay in FP32."""
from .exclusions import search_exclusions

__all__ = ["search_exclusions"]
