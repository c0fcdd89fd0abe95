"""Exceptions raised by gluon_amp, and the helpers that word them."""
from __future__ import annotations

import difflib
import re
import sys
import warnings
from typing import Iterable, Sequence

_INSIDE = ("gluon_amp", "mxnet", "contextlib")  # packages whose code is not the user's
_LONGEST = 160  # characters of a value in an error; a network's would fill the screen


class AmpError(Exception):
    """Base of every exception that gluon_amp raises on purpose."""


class DTypeError(AmpError, ValueError):
    """A data type is unknown, or the device at hand cannot run it."""


class GraphError(AmpError, ValueError):
    """A symbol graph is malformed, or a rewrite of it broke an invariant."""


class PolicyError(AmpError, ValueError, AssertionError):
    """The operator lists or rules given by the user contradict each other or name unknown things.

    It is an AssertionError too because scripts written for ``mxnet.contrib.amp`` expect one.
    """


class StateError(AmpError, RuntimeError):
    """A call came at the wrong time: before ``init``, twice, or on the wrong trainer."""


def closest(name: str, candidates: Iterable[str]) -> str:
    """Word a suggestion of the closest known names, else of some that contain the name, or a part close to it."""
    lowered = {candidate.lower(): candidate for candidate in candidates}
    bare = name.lower().strip("*?")
    found = difflib.get_close_matches(bare, lowered)
    if not found and len(bare) > 2:
        found = [key for key in lowered if bare in key][:3]
    if not found:
        parts = {part: key for key in reversed(list(lowered)) for part in re.split(r"[._]", key)}
        found = list(dict.fromkeys(parts[part] for part in difflib.get_close_matches(bare, parts, cutoff=0.7)))
    names = [lowered[key] for key in found]
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""


def expected(what: str, name: str, value: object) -> str:
    """Word "expected X, received name=value (of type T)"."""
    return f"expected {what}, received {name}={shown(value)} (of type {type(value).__name__})"


def shown(value: object) -> str:
    """Show a value in one line, and not more of it than helps."""
    text = re.sub(r"\s*\n\s*", " ", repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST - 20]}...{text[-17:]}"


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Name the first few, and say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def warn(text: str) -> None:
    """Warn the user's code: what called into this package, be it through MXNet."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
