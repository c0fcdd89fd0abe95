"""``amp.search_exclusions``: which operators have to stay in FP32."""
from .searching import search_exclusions

__all__ = ["search_exclusions"]
