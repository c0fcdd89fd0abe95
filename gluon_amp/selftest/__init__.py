"""What ``gluon-amp check`` runs: a self-test of this machine's kernels, of overflow detection, training, and speed."""
from __future__ import annotations

import platform
from typing import Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np

from .. import _cuda, native
from .._mxnet import gpus
from ..dtypes import Support
from ..state.devices import support
from .isolation import ERROR, FAILED, INFO, OK, SKIPPED, WRONG, Finding, Section, findings
from .kernels import OPERATORS, TIMING
from .results import FUSION, OVERFLOW, TRAINING

__all__ = ["ERROR", "FAILED", "INFO", "OK", "SECTIONS", "SKIPPED", "WRONG", "Finding", "check"]

_VERSIONS = "versions"
_TESTS: Mapping[str, Section] = {
    "fusion": FUSION, "operators": OPERATORS, "overflow": OVERFLOW, "training": TRAINING, "timing": TIMING}
SECTIONS = (_VERSIONS, *_TESTS)


def check(device: mx.Context, sections: Sequence[str] = ()) -> Iterator[Finding]:
    """Run the self-test on a device, and yield what each part finds as it comes.

    Examples
    --------
    >>> [found.verdict for found in check(mx.cpu(), ['overflow'])]
    ['ok', 'ok']
    """
    runs = support("gpu" if device.device_type == "gpu" else "cpu", device.device_id)
    for name in sections or SECTIONS:
        if name == _VERSIONS:
            yield from _versions(device, runs)
        elif not _TESTS[name].names(runs):
            yield Finding(name, "all", SKIPPED, f"nothing runs in low precision here: {runs.reason}")
        else:
            yield from findings(name, _TESTS[name], device, runs)


def _versions(device: mx.Context, runs: Support) -> Iterator[Finding]:
    yield Finding(_VERSIONS, "software", INFO, f"MXNet {mx.__version__}, NumPy {np.__version__}, Python "
                  f"{platform.python_version()}; --json FILE names the libraries that are loaded",
                  {"libraries": _cuda.loaded_libraries()})
    yield Finding(_VERSIONS, "device", INFO, f"{device}: {runs.dtype}, because {runs.reason}")
    if device.device_type == "gpu":
        driver, compiler = _cuda.driver_version(), _cuda.nvrtc_version()
        problem = gpus.problem() or _cuda.fusion_problem(driver, compiler)
        yield Finding(_VERSIONS, "driver", WRONG if problem else OK,
                      problem or
                      f"CUDA {_cuda.dotted(driver)}; the run-time compiler (NVRTC) is of {_cuda.dotted(compiler)}")
        return
    for library in native.load():
        yield Finding(_VERSIONS, library.name, SKIPPED if library.missing else INFO,
                      library.missing or f"{len(library.operators)} operators in C++")
