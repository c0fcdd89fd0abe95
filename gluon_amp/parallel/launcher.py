"""Start the processes of a training run on this machine, and start them anew when they fail."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
from dataclasses import dataclass
from typing import Iterator, Mapping, Sequence

from .. import _cpus, checks
from ..errors import StateError, closest, expected
from . import start
from .supervisor import Process, Supervisor, say

LOOPBACK = "127.0.0.1"
RESTARTS = "GLUON_AMP_RESTARTS"


@dataclass(frozen=True)
class Job:
    """What to run."""

    command: Sequence[str]  # A Python script and its arguments, or ``-m``, a module and its arguments
    workers: int  # how many processes run it, at least 1
    engine: str = "kvstore"  # ``'kvstore'`` or ``'horovod'``
    servers: int = 1  # parameter servers of the KVStore, at least 1
    grace: float = 10.0  # seconds between asking a process to end (SIGTERM) and killing it
    timeout: float | None = None  # seconds after which everything is ended
    max_restarts: int = 0  # how many times to start all over when a process failed


def launch(job: Job) -> int:
    """Run a job to its end."""
    # The output of every process is forwarded line by line, behind the rank of the worker. SIGUSR1 and SIGUSR2 are
    # passed on to the workers; SIGINT, SIGTERM and SIGHUP are, too, and end the job. When one process fails, the others
    # are ended. No process outlives the launcher, even when that is killed.
    # Workers find their rank and number as the engine tells them, how often the job was restarted in
    # ``GLUON_AMP_RESTARTS``, and in ``OMP_NUM_THREADS``, unless it is set already, their share of the processors.
    _check(job)
    threads = max(1, _cpus.allowed() // job.workers)
    for restart in range(job.max_restarts + 1):
        environ = {"OMP_NUM_THREADS": str(threads), **_cpus.as_users_set_it(), RESTARTS: str(restart)}
        with ENGINES[job.engine](job, environ) as processes:
            result = Supervisor(processes, job.grace, job.timeout).run()
        if not result.failed:
            break
        if restart < job.max_restarts:
            say(f"starting again: restart {restart + 1} of {job.max_restarts}")
    return result.code


def _check(job: Job) -> None:
    if job.engine not in ENGINES:
        raise ValueError(expected(f"one of {', '.join(ENGINES)}", "engine", job.engine) + closest(job.engine, ENGINES))
    for name, least in (("workers", 1), ("servers", 1), ("grace", 0), ("max_restarts", 0)):
        if getattr(job, name) < least:
            raise ValueError(expected(f"a number of at least {least}", name, getattr(job, name)))
    if job.timeout is not None:
        checks.above_zero("timeout", job.timeout)
    script = job.command[0] if job.command else ""
    if not script or job.command == ["-m"]:
        raise ValueError(expected("a script, or -m and a module", "command", list(job.command)))
    if script != "-m" and not os.path.isfile(script):
        what = "is a directory" if os.path.isdir(script) else "does not exist"
        raise FileNotFoundError(f"the script {script!r} {what}: expected a Python file, or -m and a module")


@contextlib.contextmanager
def _kvstore(job: Job, environ: Mapping[str, str]) -> Iterator[list[Process]]:
    """Yield a scheduler, servers and workers of MXNet's KVStore."""
    root, *ports = _free_ports(1 + job.workers)
    shared = {**environ, "DMLC_PS_ROOT_URI": LOOPBACK, "DMLC_PS_ROOT_PORT": root, "DMLC_NODE_HOST": LOOPBACK,
              "DMLC_NUM_WORKER": str(job.workers), "DMLC_NUM_SERVER": str(job.servers)}
    names = ["scheduler", *(f"server {rank}" for rank in range(job.servers))]
    services = [Process(name, f"[{name}] ", [start.SERVICE], {**shared, "DMLC_ROLE": name.split()[0]}, is_worker=False)
                for name in names]
    # The scheduler numbers workers in the order of their ports.
    yield services + [_worker(job, rank, {**shared, "DMLC_ROLE": "worker", "PORT": port})
                      for rank, port in enumerate(ports)]


def _free_ports(count: int) -> list[str]:
    """Return ports that nobody listens on, in ascending order."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [str(port) for port in sorted(probe.getsockname()[1] for probe in probes)]


@contextlib.contextmanager
def _horovod(job: Job, environ: Mapping[str, str]) -> Iterator[list[Process]]:
    """Yield workers that find each other through Horovod's rendezvous server, which runs here."""
    if importlib.util.find_spec("horovod") is None:
        raise StateError("Horovod is not installed: tools/install_horovod.sh builds it, see docs/distributed.md")
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer
    slots = get_host_assignments(parse_hosts(f"localhost:{job.workers}"), job.workers)
    server = RendezvousServer()
    shared = {**environ, **create_run_env_vars(LOOPBACK, ["lo"], str(server.start()))}
    server.init(slots)
    try:
        yield [_worker(job, slot.rank, {**shared, **create_slot_env_vars(slot)}) for slot in slots]
    finally:
        server.stop()


def _worker(job: Job, rank: int, environ: Mapping[str, str]) -> Process:
    return Process(f"worker {rank}", f"[{rank}] ", job.command, environ)


ENGINES = {"kvstore": _kvstore, "horovod": _horovod}
