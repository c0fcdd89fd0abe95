"""Run the processes of one job until all workers are done or one process fails, and leave none behind."""
from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import IO, Any, Iterator, Mapping, NamedTuple, Sequence

from . import start

TIMED_OUT = 124  # the exit code of timeout(1)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_SECONDS_TO_SHUT_DOWN = 5.0  # what servers get to end by themselves when the workers are done


def say(message: str) -> None:
    """Print a message of the launcher's own."""
    print(f"gluon-amp launch: {message}", file=sys.stderr, flush=True)


class Process:
    """A process that runs ``start.py``, in a group of its own."""

    def __init__(self, name: str, prefix: str, arguments: Sequence[str], environ: Mapping[str, str],
                 is_worker: bool = True):
        self.name = name  # as messages call it
        self.prefix = prefix  # of every line of its output
        self.arguments = list(arguments)  # of start.py
        self.environ = environ
        self.is_worker = is_worker  # whether the job waits for its end
        self.code: int | None = None
        self._threads: list[threading.Thread] = []

    def start(self, ended: Any) -> None:
        """Start it; ``ended(process)`` is called from another thread when it ends."""
        environ = {**self.environ, start.LAUNCHER_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._child = subprocess.Popen([sys.executable, start.__file__, *self.arguments], env=environ,
                                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       start_new_session=True)
        for source, target in ((self._child.stdout, sys.stdout), (self._child.stderr, sys.stderr)):
            self._spawn(_forward, source, target, self.prefix)
        self._spawn(self._watch, ended)

    def _spawn(self, function: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _watch(self, ended: Any) -> None:
        """Wait for the end, and kill what the process leaves behind before another group can get its number."""
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        self.send(signal.SIGKILL)
        returned = self._child.wait()
        self.code = returned if returned >= 0 else 128 - returned
        ended(self)

    def send(self, signum: int) -> None:
        """Send a signal to it and to the processes that it started."""
        if self._threads and self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signum)

    def join(self, deadline: float) -> bool:
        """Wait until it has ended and its output is forwarded, or for the deadline; return whether it ended."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def describe_end(self) -> str:
        """Word how it ended."""
        if self._child.returncode >= 0:
            return f"{self.name} ended with exit code {self.code}"
        return f"{self.name} was killed by {signal.Signals(-self._child.returncode).name}"


class Result(NamedTuple):
    """How a job ended: the launcher's exit code, and whether a process failed by itself."""

    code: int
    failed: bool = False


class Supervisor:
    """Runs processes once."""

    def __init__(self, processes: Sequence[Process], grace: float, timeout: float | None = None):
        self._processes = processes
        self._workers = [process for process in processes if process.is_worker]
        self._grace = grace
        self._timeout = timeout
        self._begin = time.monotonic()
        self._events: queue.SimpleQueue[Process | int] = queue.SimpleQueue()  # ends of processes, signals
        self._told_to_end = False

    def run(self) -> Result:
        """Start everything, wait, and end everything."""
        with self._signals():
            try:
                for process in self._processes:
                    process.start(self._events.put)
                return self._wait()
            finally:
                self._end(self._workers, signal.SIGTERM)
                self._end(self._processes, signal.SIGTERM)

    def _wait(self) -> Result:
        """Wait until all workers are done, or for the first reason to end them."""
        awaited = {process.name for process in self._workers}
        while awaited:
            event = self._next_event()
            if event is None:
                say(f"not done within {self._timeout:g} seconds; ending all processes")
                return Result(TIMED_OUT)
            if isinstance(event, int):
                return self._interrupted(event)
            if event.code:
                say(f"{event.describe_end()} after {time.monotonic() - self._begin:.1f} seconds; ending the others")
                return Result(event.code, failed=True)
            awaited.discard(event.name)
        for process in self._processes:
            process.join(time.monotonic() + _SECONDS_TO_SHUT_DOWN)
        return Result(0)

    def _next_event(self) -> Process | int | None:
        left = None if self._timeout is None else max(0.0, self._begin + self._timeout - time.monotonic())
        try:
            return self._events.get(timeout=left)
        except queue.Empty:
            return None

    def _interrupted(self, signum: int) -> Result:
        say(f"received {signal.Signals(signum).name}; passing it on and ending all processes")
        self._end(self._workers, signum)
        return Result(128 + signum)

    def _end(self, processes: Sequence[Process], signum: int) -> None:
        """Ask processes to end, and kill those that do not within the grace time."""
        deadline = time.monotonic() + self._grace
        for process in processes:
            process.send(signum)
        late = [process for process in processes if not process.join(deadline)]
        for process in late:
            process.send(signal.SIGKILL)
        for process in late:
            process.join(time.monotonic() + self._grace)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals to the launcher; Python only does that in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, self._receive) for signum in (*_ENDING, *_PASSED_ON)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if signum in _PASSED_ON:
            for process in self._workers:
                process.send(signum)
        elif self._told_to_end:  # told twice
            for process in self._processes:
                process.send(signal.SIGKILL)
        else:
            self._told_to_end = True
            self._events.put(signum)


_output_lock = threading.Lock()


def _forward(source: IO[bytes], target: IO[str], prefix: str) -> None:
    """Copy lines with a prefix, also those that a progress bar ends with a carriage return."""
    with io.TextIOWrapper(source, encoding="utf-8", errors="replace") as lines:  # type: ignore[type-var]
        for line in lines:
            with _output_lock, contextlib.suppress(BrokenPipeError):
                target.write(prefix + line.rstrip("\n") + "\n")
                target.flush()
