"""Measure inference of several networks: FP32, converted by MXNet, and converted by gluon_amp.

    python benchmarks/inference.py
    python benchmarks/inference.py --networks resnet50,encoder --batch-sizes 8

A step is a request: from inputs in memory to outputs in NumPy. Errors are shares of the largest FP32 output.
"""

import sys

from benchmarks.harness import cli, suites

run = suites.program(suites.INFERENCE, __doc__)

if __name__ == "__main__":
    sys.exit(cli.main(run))
