"""Measurements of operators on this machine, and the file that keeps them."""
from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Sequence

from ..errors import PolicyError
from ..files import replacing
from ..graph.attrs import parameters

# Low precision has to lose by this factor before an operator is kept in FP32, which costs casts around it.
_CLEARLY_SLOWER = 1.1
# A step with a chain has to gain or lose by this factor: less is the machine's noise, and the table of costs decides.
_CLEARLY_OTHER = 1.03
CHAIN = "chain"  # what the keys of chains of operators begin with, which are no operator's name


def signature(op: str, attrs: Mapping[str, str], shape: Sequence[int]) -> str:
    """Return a key that is equal for uses of an operator that cost the same."""
    told = ", ".join(f"{name}={value}" for name, value in sorted(parameters(attrs).items()))
    return f"{op}({told}) on {tuple(shape)}"


def default_cache() -> Path:
    """Return the file that measurements are kept in when the user names none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gluon_amp" / "tuning.json"


@dataclass(frozen=True)
class Tuning:
    """How long operators take in FP32 and in low precision, and networks with chains in C++ or without, on one machine.

    Attributes
    ----------
    machine : str
        CPU, instruction set and number of threads, or GPU and driver; MXNet version; low-precision type. Measurements
        hold for equal ones only.
    milliseconds : mapping of str to (float, float)
        An operator's :func:`signature` to its time in FP32 and in low precision. The key of a chain of convolutions to
        a training step of its network with that chain in MXNet's operators, and in those in C++.

    Examples
    --------
    >>> Tuning('a', {'fast': (2.0, 1.0), 'slow': (1.0, 2.0), 'even': (1.0, 1.05)}).slow
    frozenset({'slow'})
    """

    machine: str
    milliseconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def slow(self) -> frozenset[str]:
        """The operators that low precision makes slower, by signature, and the chains that C++ does, by key."""
        return frozenset(name for name, (fp32, other) in self.milliseconds.items()
                         if other > (_CLEARLY_OTHER if name.startswith(CHAIN) else _CLEARLY_SLOWER) * fp32)

    @property
    def fast(self) -> frozenset[str]:
        """The chains of convolutions with which a training step is faster where they run in C++, by key."""
        return frozenset(name for name, (in_mxnet, in_cpp) in self.milliseconds.items()
                         if name.startswith(CHAIN) and in_mxnet > _CLEARLY_OTHER * in_cpp)

    def save(self, path: str | os.PathLike) -> None:
        """Add the measurements to a file, which keeps those of other machines.

        Raises
        ------
        PolicyError
            The file exists and is not a file of measurements; it is left as it is.
        OSError
            The file cannot be written.
        """
        known = _read(path) if os.path.exists(path) else {}
        known[self.machine] = {**known.get(self.machine, {}), **self.milliseconds}
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with replacing(path) as (temporary,):
            Path(temporary).write_text(json.dumps(known, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike, machine: str) -> Tuning:
        """Read a machine's measurements from a file.

        Raises
        ------
        PolicyError
            The file is not a file of measurements, or holds none of this machine.
        OSError
            The file cannot be read.
        """
        tunings = {tuning.machine: tuning for tuning in cls.load_all(path)}
        if machine not in tunings:
            raise PolicyError(f"{os.fspath(path)!r} has no measurements of this machine ({machine}): call "
                              f"amp.tune(net, data) on it. It has those of: {'; '.join(tunings) or 'none'}")
        return tunings[machine]

    @classmethod
    def load_all(cls, path: str | os.PathLike) -> list[Tuning]:
        """Read the measurements of every machine, device and type from a file.

        Raises
        ------
        PolicyError
            The file does not hold measurements.
        OSError
            The file cannot be read.
        """
        return [cls(machine, entries) for machine, entries in _read(path).items()]


def _read(path: str | os.PathLike) -> dict[str, dict[str, tuple[float, float]]]:
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))
        return {machine: {name: (float(fp32), float(low)) for name, (fp32, low) in entries.items()}
                for machine, entries in known.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise PolicyError(f"{os.fspath(path)!r} is not a file of measurements, as amp.tune writes it: {error}"
                          ) from error
