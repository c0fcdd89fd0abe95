"""Export of trained networks for what MXNet does not run on."""
from .onnx_file import OnnxExport, export_onnx

__all__ = ["OnnxExport", "export_onnx"]
