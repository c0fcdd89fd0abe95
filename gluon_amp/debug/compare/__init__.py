"""``amp.compare``: how far every operator is from FP32."""
from .comparison import Comparison, compare
from .differences import OperatorError

__all__ = ["Comparison", "OperatorError", "compare"]
