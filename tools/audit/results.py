"""The audit's JSON file.

It holds ``engine`` (what was audited, where) and ``operators``, by registered name::

    "relu": {"family": "Elementwise", "conditions": {"default": {
        "attrs": {}, "inputs": "low(2, 16, 6, 8)", "verdict": "ok", "error": 0.0, "bias": 0.0, "gradient": true,
        "modes": {"eager/plain/infer": "ok", ...}, "details": {text: [mode, ...]}, "fp32": {mode: verdict}}}}
    "_zeros": {"not_applicable": "creates an array: no data input"}

A mode is ``run/layout/grad``, see :class:`audit.modes.Mode`.

``error`` and ``bias`` are the worst of all modes but ``addlow``; ``verdict`` of a condition is that of its worst mode,
without errors that FP32 gives too and without ``addlow``, unless that ends the process. ``details`` and ``fp32`` are
there only where a mode is not ``ok``; ``fp32`` names modes in which FP32 fails the same test.
"""
from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import mxnet as mx
import numpy as np

from gluon_amp import native
from gluon_amp._machine import cpu_name
from gluon_amp._mxnet.invoke import registered_operators
from gluon_amp.dtypes import cpu_isa
from gluon_amp.files import replacing

from .samples import reason_of, samples_of
from .samples.excluded import is_backward

ONEDNN = "2.4.4"  # of the published CPU wheels; no function of MXNet tells it


def forward_operators() -> list[str]:
    """List the registered names of all operators that are not merely gradients of others, those in C++ among them."""
    return sorted({op for op in registered_operators().values() if not is_backward(op)} | native.OPERATORS)


def not_applicable() -> dict[str, dict]:
    """Entries of the operators that are not run."""
    return {op: {"not_applicable": reason_of(op)} for op in forward_operators() if not samples_of(op)}


def engine(dtype: str, device: str) -> dict[str, str]:
    """Describe what is audited and where."""
    return {"mxnet": mx.__version__, "oneDNN": ONEDNN, "numpy": np.__version__, "python": platform.python_version(),
            "dtype": dtype, "device": device, "cpu": cpu_name(), "isa": cpu_isa()}


def read(path: str | Path) -> dict:
    """Read an audit's JSON file."""
    return json.loads(Path(path).read_text())


def write(path: str | Path, audit: dict) -> None:
    """Write an audit's JSON file, with line breaks that make changes readable."""
    operators = (f"  {json.dumps(op)}: {_entry(entry)}" for op, entry in sorted(audit["operators"].items()))
    with replacing(path) as (temporary,):
        Path(temporary).write_text(f'{{"engine": {json.dumps(audit["engine"])},\n "operators": {{\n'
                                   + ",\n".join(operators) + "}}\n")


def _entry(entry: dict) -> str:
    if "conditions" not in entry:
        return json.dumps(entry)
    conditions = (f"    {json.dumps(condition)}: "
                  + re.sub(r', ("(?:modes|details|fp32)": \{)', r",\n      \1", json.dumps(result))
                  for condition, result in entry["conditions"].items())
    return f'{{"family": {json.dumps(entry["family"])}, "conditions": {{\n' + ",\n".join(conditions) + "}}"
