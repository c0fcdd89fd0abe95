"""What can be measured: implementations and workloads, as two tables of data.

A row names the module that does the work, and that module is imported only in the process that runs it, so
that the process which compares them stays free of MXNet (and of any other framework a row may need).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Mapping, Protocol

from _errors import unknown


class Session(Protocol):
    """A workload that is ready to run under one implementation."""

    samples_per_step: int
    about: Mapping[str, Any]

    def step(self) -> dict[str, float]:
        """Run one step to its real end and return the figures that show what it computed."""


@dataclass(frozen=True)
class Implementation:
    """One side of a comparison.

    Parameters
    ----------
    name : str
        The name used on the command line.
    label : str
        The name used in tables and plots.
    backend : str
        ``module:class`` that switches the implementation on, imported in the process that runs it.
    is_reference : bool
        Whether the others are reported as a ratio to this one.
    memory_share : float
        Peak memory as a share of FP32's; a guess used to choose sizes that fit.
    """

    name: str
    label: str
    backend: str
    is_reference: bool = False
    memory_share: float = 1.0


IMPLEMENTATIONS = (
    Implementation("fp32", "MXNet FP32", "_backends:Float32", is_reference=True),
    Implementation("amp", "gluon_amp", "_backends:GluonAmp", memory_share=0.75),
    Implementation(
        "mxnet-amp", "mxnet.contrib.amp", "_backends:ContribAmp", is_reference=True, memory_share=0.75
    ),
)

# workload name -> module:function; the function takes a started backend and the workload's settings
WORKLOADS = {"ssd": "_ssd:build"}


def implementation(name: str) -> Implementation:
    """Return the row of a name.

    Raises
    ------
    UsageError
        If no implementation has this name; the closest names are suggested.
    """
    by_name = {row.name: row for row in IMPLEMENTATIONS}
    if name not in by_name:
        raise unknown("implementation", name, by_name)
    return by_name[name]


def load(reference: str) -> Any:
    """Import and return what a ``module:attribute`` reference points to."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


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
    backend = load(implementation(name).backend)(settings["device"], settings["dtype"])
    session: Session = load(WORKLOADS[workload])(backend, settings)
    return session
