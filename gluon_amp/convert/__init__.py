"""Conversion of trained FP32 networks for mixed-precision inference."""
from .block import ConvertedBlock, calibrate, convert_hybrid_block, traced_network
from .calibration import Calibration, batches_of
from .convert import Conversion, analyse_network, conversion_of, memory_flags, uniquely_named
from .model import convert_bucketing_module, convert_model, convert_symbol
from .options import MODES, STEPS, ConversionOptions, drawback_here
from .parameters import check_names, check_parameters, flat, load_model, save_model, shapes_in

__all__ = ["MODES", "STEPS", "Calibration", "Conversion", "ConversionOptions", "ConvertedBlock", "analyse_network",
           "batches_of", "calibrate", "check_names", "check_parameters", "conversion_of", "convert_bucketing_module",
           "convert_hybrid_block", "convert_model", "convert_symbol", "drawback_here", "flat", "load_model",
           "memory_flags", "save_model", "shapes_in", "traced_network", "uniquely_named"]
