"""Start a program in several processes on this machine, as docs/distributed.md does.

    python tests/helpers/start_processes.py kvstore 2 SCRIPT ARGUMENT...
    python tests/helpers/start_processes.py horovod 2 SCRIPT ARGUMENT...

When one process fails the others are killed: workers of a KVStore wait forever for one that is gone.
"""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

LOOPBACK = "127.0.0.1"
SECONDS = 500
SERVE = ["-c", "import gluon_amp"]  # MXNet serves as scheduler or server while it is imported


def kvstore(size, command):
    """Run a scheduler, a server and workers; return the exit code of the first process that fails, 0 without one."""
    root, *ports = free_ports(1 + size)
    shared = {**os.environ, "DMLC_PS_ROOT_URI": LOOPBACK, "DMLC_NODE_HOST": LOOPBACK, "DMLC_PS_ROOT_PORT": root,
              "DMLC_NUM_WORKER": str(size), "DMLC_NUM_SERVER": "1", "OMP_NUM_THREADS": threads(size)}
    services = [subprocess.Popen([sys.executable, *SERVE], env={**shared, "DMLC_ROLE": role})
                for role in ("scheduler", "server")]
    # The scheduler numbers workers in the order of their ports.
    workers = [subprocess.Popen(command, env={**shared, "DMLC_ROLE": "worker", "PORT": port}) for port in ports]
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            codes = [process.poll() for process in workers + services]
            failed = next(filter(None, codes), 0)
            if failed or None not in codes[:size]:
                return failed
            time.sleep(0.05)
        return f"not done within {SECONDS} seconds"
    finally:
        for process in workers + services:
            process.kill()
            process.wait()


def horovod(size, command):
    """Run workers under ``horovodrun``; return its exit code."""
    start = [Path(sys.executable).with_name("horovodrun"), "-np", str(size), "--gloo", "-H", f"localhost:{size}"]
    return subprocess.run([*start, *command], env={**os.environ, "OMP_NUM_THREADS": threads(size)}, timeout=SECONDS,
                          check=False).returncode


def threads(size):
    return str(max(1, (os.cpu_count() or 1) // size))


def free_ports(count):
    """Return ports that nobody listens on, in ascending order."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [str(port) for port in sorted(probe.getsockname()[1] for probe in probes)]


if __name__ == "__main__":
    sys.exit({"kvstore": kvstore, "horovod": horovod}[sys.argv[1]](int(sys.argv[2]), [sys.executable, *sys.argv[3:]]))
