"""The calls of blocks that a thread is in."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Container, Iterator, Mapping

from mxnet.gluon import Block
from mxnet.ndarray import NDArray


class Frame(threading.local):
    """The current thread's calls of blocks."""

    def __init__(self) -> None:
        self.blocks = 0  # how many calls of blocks are under way
        self.hybrid_blocks = 0  # how many of them are of hybrid blocks
        # Casts of parameters made since the outermost block that MXNet could trace was called, so that each is made
        # once; None outside of such a call. They must not live longer: two losses that share a recorded cast cannot
        # both be differentiated.
        self.casts: dict[tuple[int, str], tuple[NDArray, NDArray]] | None = None
        self.excluded: Container[Block] = ()  # what is excluded in the outermost block's call, for what is around it
        # the blocks inside networks that were given to ``initialize``, where the outermost block is none of those
        self.parts: Mapping[Any, Any] = {}
        self.data_gradients = False  # whether gradients of the data of the outermost block's call are recorded
        self.imitates = False  # whether the casts that are made now imitate a type


frame = Frame()


@contextmanager
def outermost() -> Iterator[None]:
    """Treat the body as code outside of all blocks, whose results are FP32."""
    around, frame.hybrid_blocks = frame.hybrid_blocks, 0
    try:
        yield
    finally:
        frame.hybrid_blocks = around
