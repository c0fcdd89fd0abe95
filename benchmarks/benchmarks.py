"""Make this folder the package `benchmarks` for the scripts in it: Python searches their own folder, not its parent."""

from pathlib import Path

__path__ = [str(Path(__file__).parent)]
