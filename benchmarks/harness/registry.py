"""What can be measured: implementations and workloads, as two tables of data.

A row names the modules that do the work, and they are imported only in the process that runs them, so that the
process which compares them stays free of MXNet and of PyTorch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any, Mapping, Protocol

from .errors import UsageError, unknown

TRAINING, INFERENCE = "training", "inference"
MXNET, TORCH = "mxnet", "torch"
IPEX = "ipex"  # an interpreter of its own, as it needs another PyTorch
BFLOAT16, AMX = "bfloat16", "amx"
OURS, REFERENCE = "amp", "fp32"  # what every comparison is about
CONTRIB = "mxnet-amp"


class Session(Protocol):
    """A workload that is ready to run under one implementation."""

    samples_per_step: int
    about: Mapping[str, Any]

    def step(self) -> dict[str, float]:
        """Run one step to its real end and return the figures that show what it computed."""


class SavingSession(Session, Protocol):
    """One that can also write down what it is and what it computes."""

    def save(self, folder: str) -> dict[str, Any]:
        """Write ``outputs.npz`` into a folder and return figures about the network."""


@dataclass(frozen=True)
class Implementation:
    """One side of a comparison.

    Parameters
    ----------
    name : str
        The name used on the command line. ``~fuse`` behind it switches a graph pass off, ``@1`` sets the number of
        threads.
    label : str
        The name used in tables and plots.
    backends : mapping of str to str
        For each kind of workload the ``module:class`` that switches the implementation on, imported in the process
        that runs it.
    framework : str
        Which of a workload's builders it needs.
    is_reference : bool
        Whether the others are reported as a ratio to this one.
    memory_share : float
        Peak memory as a share of FP32's; a guess used to choose sizes that fit.
    interpreter : str, optional
        Which of `commands.PEERS` it runs in, where that is not this interpreter.
    needs : str, optional
        ``"bfloat16"`` or ``"amx"``: what the CPU must have for this row to be among those measured by default.
    compiles : bool
        Whether it compiles for minutes before its first step.
    threads : int, optional
        OpenMP threads, where they differ from those of the whole comparison.
    has_passes : bool
        Whether it rewrites graphs by passes that can be switched off.
    disabled_pass : str, optional
        The one that is.
    """

    name: str
    label: str
    backends: Mapping[str, str]
    framework: str = MXNET
    is_reference: bool = False
    memory_share: float = 1.0
    interpreter: str | None = None
    needs: str | None = None
    compiles: bool = False
    threads: int | None = None
    has_passes: bool = False
    disabled_pass: str | None = None


IMPLEMENTATIONS = (
    Implementation("fp32", "MXNet FP32", dict.fromkeys((TRAINING, INFERENCE), "harness.backends:Float32"),
                   is_reference=True),
    Implementation("fp32-optimized", "gluon_amp, FP32", {INFERENCE: "harness.amp_backends:Optimisation"},
                   has_passes=True),
    Implementation(
        "amp",
        "gluon_amp",
        {TRAINING: "harness.amp_backends:GluonAmp", INFERENCE: "harness.amp_backends:Conversion"},
        memory_share=0.75,
        has_passes=True,
    ),
    Implementation("amp-int8", "gluon_amp, INT8", {INFERENCE: "harness.amp_backends:Int8"}),
    Implementation("mxnet-int8", "MXNet's quantizer", {INFERENCE: "harness.backends:ContribQuantization"},
                   is_reference=True),
    Implementation(
        CONTRIB,
        "mxnet.contrib.amp",
        {TRAINING: "harness.backends:ContribAmp", INFERENCE: "harness.backends:ContribConversion"},
        is_reference=True,
        memory_share=0.75,
    ),
    Implementation(
        "mxnet-amp-amx",
        "mxnet.contrib.amp on AMX",
        {TRAINING: "harness.amp_backends:ContribAmpOnAmx", INFERENCE: "harness.amp_backends:ContribConversionOnAmx"},
        memory_share=0.75,
        needs=AMX,
    ),
    *(
        Implementation(name, label, {TRAINING: f"harness.torch_backends:{backend}"}, TORCH, name == "torch-amp", share,
                       interpreter, needs, name.endswith("-compiled"))
        for name, label, backend, share, interpreter, needs in (
            ("torch", "PyTorch FP32", "Float32", 1.2, TORCH, None),
            ("torch-compiled", "PyTorch FP32, compiled", "Compiled", 1.2, TORCH, None),
            ("torch-amp", "PyTorch autocast", "Autocast", 0.9, TORCH, BFLOAT16),
            ("torch-amp-compiled", "PyTorch autocast, compiled", "AutocastCompiled", 0.9, TORCH, BFLOAT16),
            ("ipex", "PyTorch with IPEX", "Extension", 1.0, IPEX, None),
        )
    ),
)


@dataclass(frozen=True)
class Workload:
    """What an implementation is made to do.

    Parameters
    ----------
    kind : str
        Which of an implementation's backends it needs.
    builders : mapping of str to str
        For each framework the ``module:function`` that takes a started backend and the workload's settings.
    """

    kind: str
    builders: Mapping[str, str]


WORKLOADS = {
    "ssd": Workload(TRAINING, {MXNET: "networks.ssd:SSDTraining", TORCH: "networks.torch_training:build_ssd"}),
    "training": Workload(TRAINING, {MXNET: "networks.training:Training", TORCH: "networks.torch_training:build"}),
    "inference": Workload(INFERENCE, {MXNET: "networks.inference:Inference"}),
    "zoo-training": Workload(TRAINING, {MXNET: "networks.zoo:Training", TORCH: "networks.torch_zoo:build"}),
    "zoo-inference": Workload(INFERENCE, {MXNET: "networks.zoo:Inference"}),
    "ceilings": Workload(INFERENCE, {MXNET: "harness.ceilings:Ceilings"}),
}


def implementation(name: str) -> Implementation:
    """Return the row of a name.

    Raises
    ------
    UsageError
        If no implementation has this name; the closest names are suggested.

    Examples
    --------
    >>> implementation("amp@1").label, implementation("amp~fuse").label
    ('gluon_amp, 1 thread', 'gluon_amp, without fuse')
    """
    by_name = {row.name: row for row in IMPLEMENTATIONS}
    head, at, threads = name.partition("@")
    base, tilde, disabled = head.partition("~")
    if base not in by_name:
        raise unknown("implementation", base, by_name)
    row = by_name[base]
    if tilde:
        if not row.has_passes or not disabled:
            raise UsageError(f"expected the name of a pass of gluon_amp, received {head!r}")
        row = replace(row, name=name, label=f"{row.label}, without {disabled}", disabled_pass=disabled)
    if not at:
        return row
    if not threads.isdigit() or int(threads) < 1:
        raise UsageError(f"expected a number of threads behind {head}@, received {threads!r}")
    return replace(row, name=name, label=f"{row.label}, {threads} thread{'s' * (threads != '1')}", threads=int(threads))


def names(workload: str) -> list[str]:
    """Return the names of the implementations that can run a workload."""
    kind, frameworks = WORKLOADS[workload].kind, WORKLOADS[workload].builders
    return [row.name for row in IMPLEMENTATIONS if kind in row.backends and row.framework in frameworks]


def check(workload: str, name: str) -> None:
    """Refuse an implementation that there is not for this workload.

    Raises
    ------
    UsageError
        If there is none.
    """
    if implementation(name).name.partition("@")[0].partition("~")[0] not in names(workload):
        raise UsageError(f"{name} is not for {WORKLOADS[workload].kind}; known: {', '.join(names(workload))}")


def load(reference: str) -> Any:
    """Import and return what a ``module:attribute`` reference points to, within `benchmarks`."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), attribute)


def build(workload: str, name: str, settings: Mapping[str, Any]) -> Session:
    """Switch an implementation on in this process and build a workload under it.

    Parameters
    ----------
    workload : str
        A key of `WORKLOADS`.
    name : str
        The name of an implementation.
    settings : mapping
        The workload's settings; ``device`` and ``dtype`` (None for the default) are read here too.

    Returns
    -------
    Session

    Raises
    ------
    UsageError
        If the machine cannot run it.
    """
    check(workload, name)
    row, work = implementation(name), WORKLOADS[workload]
    options = {"disable_passes": [row.disabled_pass]} if row.disabled_pass else {}
    backend = load(row.backends[work.kind])(settings["device"], settings["dtype"], **options)
    session: Session = load(work.builders[row.framework])(backend, settings)
    return session
