"""What the last cell of a notebook shows: the claims of its text, and what its run measured. Tests read it, too."""
from __future__ import annotations

import html
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Sequence

SMALL_SIZES = "small sizes"  # in the last output of a run that is not of full size
MIME = "application/vnd.gluon-amp.findings+json"
PACKAGES = ("gluoncv", "numpy")  # MXNet's goes by several names


def conditions() -> str:
    """Return in one line what the notebook runs on."""
    import mxnet as mx

    import gluon_amp

    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    where = "one CUDA GPU" if mx.context.num_gpus() else f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    extent = [SMALL_SIZES] if os.environ.get("GLUON_AMP_NOTEBOOKS") == "small" else []
    return "; ".join([names[0] if names else platform.processor(), where, f"Python {platform.python_version()}",
                      f"gluon_amp {gluon_amp.__version__}, mxnet {mx.__version__}, {versions}", *extent])


@dataclass(frozen=True)
class Finding:
    """A claim, the figures in words, and whether it holds: None when the claim is not about this machine."""

    claim: str
    measured: str
    holds: bool | None


class Findings:
    """The claims of a notebook, displayed as a table.

    Examples
    --------
    >>> findings = Findings()
    >>> findings.add("AMP is faster", "1.9 times as fast", 1.9 > 1)
    >>> findings
    AMP is faster: 1.9 times as fast (holds)
    """

    def __init__(self) -> None:
        self._found: list[Finding] = []

    def add(self, claim: str, measured: str, holds: bool, about_this_machine: bool = True) -> None:
        """Add a claim with what was measured."""
        self._found.append(Finding(claim, measured, bool(holds) if about_this_machine else None))

    def __repr__(self) -> str:
        return "\n".join(f"{each.claim}: {each.measured} ({_verdict(each)})" for each in self._found)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        rows = [(each.claim, each.measured, _verdict(each)) for each in self._found]
        table = _table(("claim", "in this run", ""), rows)
        return {"text/plain": repr(self), "text/html": table, MIME: [asdict(each) for each in self._found]}


def _verdict(finding: Finding) -> str:
    return {True: "holds", False: "DOES NOT HOLD", None: "not on this machine"}[finding.holds]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_line("th", head), *(_line("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _line(tag: str, texts: Sequence[str]) -> str:
    cells = (f"<{tag} style='text-align:left'>{html.escape(text)}</{tag}>" for text in texts)
    return f"<tr>{''.join(cells)}</tr>"
