"""Conversion of trained FP32 networks for mixed-precision inference."""
from .block import ConvertedBlock, calibrate, convert_hybrid_block
from .calibration import Calibration
from .convert import Conversion
from .model import convert_bucketing_module, convert_model, convert_symbol
from .options import STEPS

__all__ = ["STEPS", "Calibration", "Conversion", "ConvertedBlock", "calibrate", "convert_bucketing_module",
           "convert_hybrid_block", "convert_model", "convert_symbol"]
