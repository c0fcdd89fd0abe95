"""Functions of MXNet 1.9.1 that give other results, or fail, with NumPy 2.

Nobody mends it there: apache/mxnet #21165 and #21224 ask for it. Names that are gone: :mod:`gluon_amp.machine.start`.
"""
from __future__ import annotations

import numbers
import struct
from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import _ctypes, metric, recordio

from ..machine.start import is_numpy_2


def mend() -> None:
    """Let MXNet's functions give the same with NumPy 2 as with NumPy 1; does nothing there."""
    if is_numpy_2(np):
        for owner, name, value in MENDS:
            setattr(owner, name, value)


def _written(value: Any) -> str:
    """Write an attribute of an operator: NumPy 2 writes ``(np.int64(2),)`` for a tuple of one of its numbers."""
    return str(_plain(value))


attribute_text: Callable[[Any], str] = _written if is_numpy_2(np) else str  # of an operator's attribute


def _plain(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


class _Sum:
    """The sum of a metric, in float64: 0.0 and a float32 number of NumPy 2 would give float32."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[self.name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}") from None

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = np.float64(value) if type(value) is float else value


def _pack(header: Any, s: bytes) -> bytes:
    """Pack a record: MXNet's function asks arrays for ``tostring``, which NumPy 2.3 dropped."""
    header = recordio.IRHeader(*header)
    if isinstance(header.label, numbers.Number):
        return struct.pack(recordio._IR_FORMAT, *header._replace(flag=0)) + s
    label = np.asarray(header.label, dtype=np.float32)
    return struct.pack(recordio._IR_FORMAT, *header._replace(flag=label.size, label=0)) + label.tobytes() + s


def _pack_img(header: Any, img: Any, quality: int = 95, img_fmt: str = ".jpg") -> bytes:
    """Pack an image: so does MXNet's function."""
    cv2 = recordio.cv2
    if cv2 is None:
        raise ImportError("mxnet.recordio.pack_img needs OpenCV.\nRun: python -m pip install opencv-python-headless")
    options = {".jpg": cv2.IMWRITE_JPEG_QUALITY, ".jpeg": cv2.IMWRITE_JPEG_QUALITY, ".png": cv2.IMWRITE_PNG_COMPRESSION}
    option = options.get(img_fmt.lower())
    written, encoded = cv2.imencode(img_fmt, img, None if option is None else [option, quality])
    if not written:
        raise ValueError(f"expected an image that OpenCV can write as {img_fmt!r}, received {img.dtype} {img.shape}")
    return _pack(header, encoded.tobytes())


def _as_array(array: mx.nd.NDArray, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """Give the values to functions of NumPy's, as ``np.all``: NumPy 1 took arrays of MXNet's for nested lists."""
    if copy is False:
        raise ValueError("expected copy=None or True: the values of an array of MXNet's are always copied")
    values = array.asnumpy()
    return values if dtype is None else values.astype(dtype, copy=False)


# The attributes of MXNet that are replaced.
MENDS: tuple[tuple[Any, str, Any], ...] = (
    (_ctypes.ndarray, "str", _written), (_ctypes.symbol, "str", _written),
    (metric.EvalMetric, "sum_metric", _Sum("sum_metric")),
    (metric.EvalMetric, "global_sum_metric", _Sum("global_sum_metric")),
    (mx.nd.NDArray, "__array__", _as_array),
    (recordio, "pack", _pack), (recordio, "pack_img", _pack_img),
)
