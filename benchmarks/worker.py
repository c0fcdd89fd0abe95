"""One side of a benchmark, in a process of its own that is told what to do; see `benchmarks.harness.worker`."""

import sys

from benchmarks.harness import worker

if __name__ == "__main__":
    sys.exit(worker.main())
