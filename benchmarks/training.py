"""Measure training steps of several networks, in FP32 and in mixed precision, by MXNet and by PyTorch.

    python benchmarks/training.py
    python benchmarks/training.py --networks ssd512 --batch-sizes 8 --compare fp32,amp,torch-amp
"""

from __future__ import annotations

import sys
from typing import Sequence

import _suite

SUITE = _suite.Suite(
    "training",
    {
        "ssd512": (2, 8),
        "resnet50": (1, 4, 16),
        "mobilenet_v2": (1, 4, 16),
        "lstm": (1, 4, 16),
        "encoder": (1, 4, 16),
        "encoder_masked": (4,),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    return _suite.main(SUITE, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
