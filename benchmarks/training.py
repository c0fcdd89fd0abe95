"""Measure training steps of several networks, in FP32 and in mixed precision, by MXNet and by PyTorch.

    python benchmarks/training.py
    python benchmarks/training.py --networks ssd512 --batch-sizes 8 --compare fp32,amp,torch-amp
"""

import sys

from benchmarks.harness import cli, suites

run = suites.program(suites.TRAINING, __doc__)

if __name__ == "__main__":
    sys.exit(cli.main(run))
