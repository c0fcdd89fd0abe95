"""The operators in C++: each in the types that the CPU runs, against MXNet's own in FP32 where there is one."""
from __future__ import annotations

import mxnet as mx

from .. import native
from ..audit.judge import Judge
from ..audit.modes import Mode
from ..audit.samples import samples_of
from ..audit.verdicts import ERROR, OK, WRONG
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32, Support
from .isolation import SKIPPED, Found, Section
from .results import low_type


def _names(runs: Support) -> list[str]:
    """Name the operators that there are, and the libraries that are missing."""
    if low_type(runs) == FLOAT16:
        return []
    missing = [library.name for library in native.load() if library.missing]
    return [*sorted(native.operators()), *missing]


def _test(name: str, device: mx.Context, runs: Support) -> Found:
    missing = {library.name: library.missing for library in native.load()}.get(name)
    if missing:
        return SKIPPED, missing, {}
    item = samples_of(name)[0]
    mode = Mode("plain", "write" if item.gradient else "infer", "eager")
    types = (FLOAT32, BFLOAT16) if low_type(runs) == BFLOAT16 else (FLOAT32,)
    found = {dtype: Judge(item, dtype, dtype, str(device)).run(mode) for dtype in types}
    verdicts = {result.verdict for result in found.values()}
    verdict = OK if verdicts == {OK} else WRONG if verdicts <= {OK, WRONG} else ERROR
    said = "; ".join(f"{dtype}: {result.detail or f'error {result.error:.1g}'}" for dtype, result in found.items())
    return verdict, said, {"errors": {dtype: result.error for dtype, result in found.items()}}


NATIVE = Section(_names, _test, reason=lambda runs: "operators in C++ are for CPUs")
