"""Worker processes and the handing out of requests to them."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Callable, Iterable, Iterator, Mapping, TypeVar

__all__ = ["Pool", "Worker", "malloc_checks"]

RUNNER = "gluon_amp.audit.worker:run_request"
_MALLOC_DEBUG = ("/usr/lib/x86_64-linux-gnu/libc_malloc_debug.so.0", "/usr/lib64/libc_malloc_debug.so.0",
                 "/lib/x86_64-linux-gnu/libc_malloc_debug.so.0")
T = TypeVar("T")


def malloc_checks() -> dict[str, str]:
    """Environment in which glibc overwrites freed memory and checks every block when it is freed.

    Since glibc 2.34 the checks live in a library of their own, which may not be installed.
    """
    found = next((path for path in _MALLOC_DEBUG if Path(path).exists()), None)
    environment = {"MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    return {**environment, "LD_PRELOAD": found} if found else environment


class Worker:
    """A process that runs requests, each in a fork of its own. Replaced when it dies itself.

    Parameters
    ----------
    environment : mapping
        Added to this process's own.
    runner : str
        ``module:function`` that runs a request.
    """

    def __init__(self, environment: Mapping[str, str], runner: str = RUNNER):
        self._environment, self._runner = dict(environment), runner
        self._process: subprocess.Popen | None = None

    def _start(self) -> subprocess.Popen:
        reader, writer = os.pipe()
        # One thread: the workers are to be many and results the same everywhere.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MXNET_SUBGRAPH_VERBOSE": "0", **self._environment}
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        process = subprocess.Popen([sys.executable, "-c", "import sys; from gluon_amp.audit.worker import main; "
                                    "main(sys.argv)", str(writer), self._runner],
                                   stdin=subprocess.PIPE, pass_fds=(writer,), env=environment, text=True)
        os.close(writer)
        self._answers = os.fdopen(reader)
        return process

    def ask(self, request: dict) -> dict:
        """Run a request and return its outcome, see :func:`gluon_amp.audit.worker.isolated`."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._start()
        if self._process.stdin is None:
            raise RuntimeError("the worker has no standard input")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answers.readline()
        if answer:
            return json.loads(answer)
        code = self._process.wait()
        return {"records": [], "ended": f"the worker itself ended with code {code}", "said": ""}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait()
            self._answers.close()
            self._process = None


class Pool:
    """Several workers.

    Parameters
    ----------
    jobs : int
        How many.
    environment : mapping
        Added to the workers' environment.
    runner : str
        ``module:function`` that runs a request.

    Examples
    --------
    >>> with Pool(1) as pool:  # doctest: +SKIP
    ...     outcome = pool.ask({"op": "relu", ...})
    """

    def __init__(self, jobs: int, environment: Mapping[str, str] | None = None, runner: str = RUNNER):
        self.jobs = jobs
        self._workers = [Worker(environment or {}, runner) for _ in range(jobs)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.close()

    def ask(self, request: dict) -> dict:
        """Run a request on the next free worker; threads may call this at the same time."""
        worker = self._free.get()
        try:
            return worker.ask(request)
        finally:
            self._free.put(worker)

    def map(self, function: Callable[[str], T], names: Iterable[str]) -> Iterator[T]:
        """Apply a function that asks the pool to every name, as many at a time as there are workers."""
        with ThreadPoolExecutor(self.jobs) as threads:
            yield from threads.map(function, names)
