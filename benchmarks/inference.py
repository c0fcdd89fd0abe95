"""Measure inference of several networks: FP32, converted by MXNet, and converted by gluon_amp.

    python benchmarks/inference.py
    python benchmarks/inference.py --networks resnet50,encoder --batch-sizes 8

A step is a request: from inputs in memory to outputs in NumPy. Errors are shares of the largest FP32 output.
"""

from __future__ import annotations

import sys
from typing import Sequence

import _suite

SUITE = _suite.Suite(
    "inference",
    dict.fromkeys(("resnet50", "mobilenet_v2", "vgg16", "ssd512", "lstm", "encoder", "encoder_masked"), (1, 8)),
    inspects=True,
    memory_share=0.5,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    return _suite.main(SUITE, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
