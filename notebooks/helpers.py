"""What the notebooks share. Import it before MXNet: it sets the number of threads and finds `benchmarks`.

``GLUON_AMP_NOTEBOOKS=small`` in the environment makes every size as small as the notebook's point allows.
"""

from __future__ import annotations

import html
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Sequence, TypeVar

PROJECT = Path(__file__).resolve().parents[1]
BUILD = PROJECT / "build"
sys.path[:0] = [] if str(PROJECT) in sys.path else [str(PROJECT)]

from benchmarks.harness import machine, sizes  # noqa: E402

# MXNet alone would use half of the logical processors, and reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", str(machine.physical_cores()))

SMALL = os.environ.get("GLUON_AMP_NOTEBOOKS") == "small"
SMALL_SIZES = "small sizes"  # in the first output of a run that is not of full size
SAMPLE_GFLOP = {"ssd512": 180.0}  # 1e9 floating-point operations of a training step for each sample
MIME = "application/vnd.gluon-amp.findings+json"

Size = TypeVar("Size")


def size(small: Size, cpu: Size, gpu: Size) -> Size:
    """Return the size for this run: small, or the one for the device.

    Parameters
    ----------
    small, cpu, gpu : any
        What to use with ``GLUON_AMP_NOTEBOOKS=small``, on a CPU, and on a GPU.
    """
    if SMALL:
        return small
    return gpu if device().device_type == "gpu" else cpu


def device() -> Any:
    """Return the first GPU, the CPU without one."""
    import mxnet as mx

    return mx.gpu(0) if mx.context.num_gpus() else mx.cpu()


def device_for(dtype: str) -> Any:
    """Return the device to run a type on, None when no device runs it.

    Parameters
    ----------
    dtype : {'float32', 'float16', 'bfloat16'}
        bfloat16 runs on CPUs with AVX512; float16 on a GPU, imitated on the CPU where there is none.
    """
    import mxnet as mx

    from gluon_amp.runtime.devices import support

    if dtype == "bfloat16":
        return mx.cpu() if support("cpu").requested(dtype) else None
    return device()


def fast_dtype() -> str | None:
    """Name the low-precision type that is faster than FP32 on the device, None when there is none."""
    import gluon_amp
    from gluon_amp.runtime.devices import support

    found = support(device().device_type).dtype
    active = gluon_amp.active_dtype(device().device_type)
    return found if found != "float32" and active in (None, found) else None


def why_float32() -> str:
    """Say why AMP keeps the device in float32."""
    from gluon_amp.runtime.devices import support

    return f"AMP runs in float32 here, because {support(device().device_type).reason}."


def affordable_batch_size(network: str, seconds: float) -> int:
    """Return a batch size, 8 at most, that fits the memory and a few FP32 steps in so many seconds.

    Parameters
    ----------
    network : str
        One of `SAMPLE_GFLOP`.
    seconds : float
        For seven training steps in FP32 on the CPU.
    """
    size, _ = sizes.largest_batch(sizes.COSTS[network], machine.available_memory(), [1.0], preferred=8)
    sample_seconds = SAMPLE_GFLOP[network] / machine.matmul_gflops()
    while size > 1 and 7 * size * sample_seconds > seconds:
        size //= 2
    return size


def has_pretrained(name: str) -> bool:
    """Whether a model's weights are on this machine already, or their server answers within five seconds.

    With small sizes the server is not asked.

    Parameters
    ----------
    name : str
        A model of GluonCV's zoo.
    """
    import mxnet as mx
    import requests
    from gluoncv.model_zoo import model_store

    file = f"{name}-{model_store.short_hash(name)}"
    if Path(mx.base.data_dir(), "models", f"{file}.params").exists():
        return True
    server = os.environ.get("MXNET_GLUON_REPO", model_store.apache_repo_url).rstrip("/")
    try:
        return not SMALL and requests.head(f"{server}/gluon/models/{file}.zip", timeout=5).ok
    except requests.RequestException:
        return False


def conditions() -> str:
    """Return in one line what the notebook runs on."""
    about = machine.describe()
    where = "one CUDA GPU" if device().device_type == "gpu" else f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    extent = [SMALL_SIZES] if SMALL else []
    sets = ", ".join(about["instruction_sets"]) or "no AVX2"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    return "; ".join([f"{about['cpu']} ({sets})", where, f"Python {about['python']}, {versions}", *extent])


@dataclass(frozen=True)
class Finding:
    """One claim of a notebook and what its run measured.

    Attributes
    ----------
    claim : str
        What the text says.
    measured : str
        The figures, in words.
    holds : bool or None
        None when the claim is not about this machine.
    """

    claim: str
    measured: str
    holds: bool | None


class Findings:
    """The claims of a notebook, displayed as a table; tests read them from the same output.

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
