"""Conversion of trained FP32 networks for mixed-precision inference."""
from .api import convert_bucketing_module, convert_hybrid_block, convert_model, convert_symbol
from .block import ConvertedBlock
from .settings import STEPS, Conversion

__all__ = ["STEPS", "Conversion", "ConvertedBlock", "convert_bucketing_module", "convert_hybrid_block", "convert_model",
           "convert_symbol"]
