"""The ways in which a benchmark can end early."""

from __future__ import annotations

import difflib
from typing import Iterable


class UsageError(Exception):
    """The request cannot be carried out on this machine: one line for the user, exit code 2."""


class Refused(UsageError):
    """A child process says that it cannot carry out the request.

    Parameters
    ----------
    name : str
        The implementation.
    message : str
        Its reason.
    """

    def __init__(self, name: str, message: str):
        self.name = name
        super().__init__(message)


class ChildFailed(Exception):
    """A child process died, hung or broke the protocol.

    Parameters
    ----------
    name : str
        The implementation that the child ran.
    reason : str
        What happened, for example ``"ended with exit code 1"``.
    stderr_tail : str
        The last lines that the child wrote to its standard error.
    """

    def __init__(self, name: str, reason: str, stderr_tail: str = ""):
        self.name = name
        self.reason = reason
        self.stderr_tail = stderr_tail
        super().__init__(f"{name}: {reason}")


class NoTime(ChildFailed):
    """A child process would have run, had there been the time for it."""


def reason(failure: Exception) -> str:
    """Return why a child could not go on, with the last line that it wrote to its standard error."""
    last_line = getattr(failure, "stderr_tail", "").rpartition("\n")[2]
    return f"{failure}: {last_line}" if last_line else str(failure)


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that is not among the known ones.

    Parameters
    ----------
    kind : str
        What the name stands for, such as ``"network"``.
    name : str
        The name that was given.
    known : iterable of str
        The accepted names.

    Examples
    --------
    >>> str(unknown("implementation", "am", ["fp32", "amp"]))
    "unknown implementation 'am'; did you mean amp?"
    >>> str(unknown("implementation", "torch", ["fp32", "amp"]))
    "unknown implementation 'torch'; known: fp32, amp"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
    return UsageError(f"unknown {kind} {name!r}; {hint}")
