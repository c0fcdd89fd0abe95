"""Batch normalization whose statistics are those of the batches of all contexts and processes together.

``api``       convert a network
``operator``  the operator behind the converted blocks
``meeting``   sums over the contexts of this process, and over processes
"""
from __future__ import annotations

from .api import convert_sync_batchnorm

__all__ = ["convert_sync_batchnorm"]
