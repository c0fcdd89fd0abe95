"""Child processes that are kept alive and told over their standard input what to do next."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Mapping, Sequence

from .errors import ChildFailed, NoTime, Refused

_TAIL_LINES = 20
_END_SECONDS = 10.0


@dataclass(frozen=True)
class ChildCommand:
    """How to start one implementation.

    Parameters
    ----------
    name : str
        The implementation.
    argv : sequence of str
        The program and its arguments.
    environment : mapping
        Variables set on top of this process's own.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A running child process that answers every command with one line of JSON.

    Parameters
    ----------
    command : ChildCommand
        What to run.
    timeout : float
        Seconds after which a child that does not answer is ended.
    """

    def __init__(self, command: ChildCommand, timeout: float = 1800.0):
        self.name = command.name
        self.timeout = timeout
        self._timed_out = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._process = subprocess.Popen(
            list(command.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **command.environment},
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the children
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(politely=error is None)

    def ready(self) -> dict[str, Any]:
        """Wait until the child is built and return what it says about itself.

        Raises
        ------
        Refused
            If the child refuses the request.
        ChildFailed
            If it ends or says something else.
        """
        return self._expect("ready")

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return the answer.

        Raises
        ------
        Refused
            If the child refuses it.
        ChildFailed
            If it ends, or does not answer in time.
        """
        self._send({"command": command, **arguments})
        return self._expect(command)

    def log(self) -> str:
        """Return all that the child and its libraries have printed so far, but for the answers."""
        position = self._stderr.tell()
        self._stderr.seek(0)
        text = self._stderr.read().decode("utf-8", errors="replace")
        self._stderr.seek(position)
        return text

    def end(self, politely: bool = True) -> None:
        """End the child: ask it first if `politely`, and wait until it is gone. Once is enough."""
        if self._stderr.closed:
            return
        if politely:
            with contextlib.suppress(ChildFailed):
                self._send({"command": "stop"})
        else:
            self._kill(signal.SIGTERM)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):  # closing flushes, and the reader may be gone
                if stream is not None:
                    stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        stdin = self._process.stdin
        try:
            if stdin is not None:
                stdin.write(json.dumps(message) + "\n")
                stdin.flush()
        except OSError as error:
            raise self._failure() from error

    def _expect(self, event: str) -> dict[str, Any]:
        line = self._read_line()
        try:
            message: dict[str, Any] = json.loads(line)
            received = message["event"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._failure(f"expected a JSON object with an event, received {line!r}") from error
        if received == "refused":
            raise Refused(self.name, message["message"])
        if received != event:
            raise self._failure(f"expected the event {event!r}, received {received!r}")
        return message

    def _read_line(self) -> str:
        timer = threading.Timer(self.timeout, self._give_up)
        timer.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout is not None else ""
        finally:
            timer.cancel()
        if not line:
            raise self._failure()
        return line

    def _give_up(self) -> None:
        self._timed_out = True
        self._kill()

    def _kill(self, number: int = signal.SIGKILL) -> None:
        """End the child and what it has started, such as compilers, which would disturb the others."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _failure(self, reason: str | None = None) -> ChildFailed:
        if self._timed_out:
            return NoTime(self.name, f"did not answer within {self.timeout:.0f} s", self._stderr_tail())
        return ChildFailed(self.name, reason or self._how_it_ended(), self._stderr_tail())

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _stderr_tail(self) -> str:
        return "\n".join(self.log().strip().splitlines()[-_TAIL_LINES:])
