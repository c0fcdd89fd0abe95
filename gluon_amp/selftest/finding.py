"""One line of a self-test, and the errors that say nothing of what was tested."""
from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Mapping

OK, WRONG, ERROR, SKIPPED, INFO = "ok", "wrong", "error", "skipped", "info"
FAILED = (WRONG, ERROR)
# The words of CUDA, cuDNN and cuBLAS, of MXNet on a CPU, and of Python.
_OUT_OF_MEMORY = re.compile(r"out of memory|_ALLOC_FAILED|Failed to allocate CPU Memory|bad_alloc|MemoryError")


@dataclass(frozen=True)
class Finding:
    """One line of a self-test."""

    # what was looked at
    section: str
    name: str
    verdict: str  # ``'ok'``, ``'wrong'``, ``'error'``, ``'skipped'`` or ``'info'``
    detail: str = ""  # for people
    data: Mapping[str, Any] = field(default_factory=dict)  # for programs; what JSON can hold

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


def is_out_of_memory(said: str) -> bool:
    """Tell whether an engine's words are about memory that ran out."""
    return _OUT_OF_MEMORY.search(said) is not None
