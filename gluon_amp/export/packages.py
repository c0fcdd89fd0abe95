"""The packages that only exports need."""
from __future__ import annotations

import importlib
from typing import Any


def onnx_package() -> Any:
    """Return the package ``onnx``, with what is used of it."""
    onnx = _package("onnx")
    for name in ("checker", "defs", "helper", "numpy_helper", "shape_inference"):
        importlib.import_module(f"onnx.{name}")
    return onnx


def runtime_package() -> Any:
    """Return the package ``onnxruntime``."""
    return _package("onnxruntime")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"an export to ONNX needs the packages onnx and onnxruntime ({error}).\n"
                          "Run: python -m pip install onnx onnxruntime") from error
