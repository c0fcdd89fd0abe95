"""Measure what training in several processes on this machine costs: bytes and time per step, by engine.

    python benchmarks/distributed.py
    python benchmarks/distributed.py --workers 4 --engines kvstore --network resnet50_v1 --json distributed.json

Every row is a job of its own. `reduce` is the reduction of all gradients alone, `decide` the exchange by which the
processes decide on a step, `step` a whole training step with AMP. Bytes are those that a process hands to its engine
per step, and those that the loopback device carried for all processes together, which counts other programs, too.
"""
from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Sequence

from benchmarks import harness
from benchmarks.harness import ChildFailed

WIRES = {"float32": ("float32", False), "float16": ("float16", False), "float16, added in FP32": ("float16", True)}
ENGINES = ("kvstore", "horovod")
LOOPBACK = "127.0.0.1"


def job(engine: str, workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one job; return what its first process measured."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        # in one word: horovodrun takes --network for a short form of its own options
        command = [sys.executable, __file__, "--job", json.dumps({**vars(args), "engine": engine, "out": str(out)})]
        environ = {**os.environ, "OMP_NUM_THREADS": str(max(1, harness.physical_cores() // workers))}
        if engine == "horovod":
            horovodrun = Path(sys.executable).with_name("horovodrun")
            command = [str(horovodrun), "-np", str(workers), "--gloo", "-H", f"localhost:{workers}", *command]
        started = _of_kvstore(command, workers, environ) if engine == "kvstore" else [_start(command, environ)]
        try:
            for process in started[-workers if engine == "kvstore" else -1:]:
                if process.wait(args.timeout):
                    raise ChildFailed(engine, f"ended with exit code {process.returncode}")
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(engine, f"did not end within {args.timeout:.0f} s") from error
        finally:
            for process in started:  # the others wait forever for one that has failed
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _start(command: Sequence[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environ, start_new_session=True)


def _of_kvstore(command: Sequence[str], workers: int, environ: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Start a scheduler and a server, which serve while they import MXNet, and workers of MXNet's KVStore."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    shared = {**environ, "DMLC_PS_ROOT_URI": LOOPBACK, "DMLC_PS_ROOT_PORT": str(port), "DMLC_NODE_HOST": LOOPBACK,
              "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": "1"}
    service = [sys.executable, "-c", "import gluon_amp"]
    return [_start(service if role != "worker" else command, {**shared, "DMLC_ROLE": role})
            for role in ("scheduler", "server", *["worker"] * workers)]


def work(args: argparse.Namespace) -> None:
    """Measure, as one process of a job."""
    import mxnet as mx

    import gluon_amp as amp
    mx.random.seed(0)
    amp.init()
    result = {"step": _step(args)}
    if args.engine != "none":
        result.update({wire: _reduce(args, *options) for wire, options in WIRES.items()})
        result["decide"] = _decide(args)
    if amp.parallel.rank() == 0:
        Path(args.out).write_text(json.dumps(result))


def _network(args: argparse.Namespace) -> Any:
    import mxnet as mx
    net = mx.gluon.model_zoo.vision.get_model(args.network, classes=10)
    net.initialize()
    net(mx.nd.zeros((1, 3, args.size, args.size)))
    return net


def _trainer(parameters: Any, **options: Any) -> Any:
    import mxnet as mx

    import gluon_amp as amp
    trainer = mx.gluon.Trainer(parameters, "sgd", {"learning_rate": 1e-3, "multi_precision": True},
                               kvstore=amp.parallel.kvstore())
    amp.init_trainer(trainer, **options)
    return trainer


def _step(args: argparse.Namespace) -> dict[str, float]:
    """Measure training steps on this process's share of the joint batch."""
    import mxnet as mx

    import gluon_amp as amp
    net = _network(args)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = _trainer(net.collect_params())
    share = args.batch // amp.parallel.size()
    data = mx.nd.random.uniform(shape=(share, 3, args.size, args.size))
    label = mx.nd.zeros(share)
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def step() -> None:
        with mx.autograd.record(), amp.scale_loss(loss_function(net(data), label), trainer) as loss:
            mx.autograd.backward(loss)
        trainer.step(args.batch)
    found = _measure(step, args.rounds)
    reduction = trainer._amp_loss_scaler.reduction
    return {**found, "bytes": reduction.num_bytes if amp.parallel.size() > 1 else 0}


def _reduce(args: argparse.Namespace, dtype: str, always_fp32: bool) -> dict[str, float]:
    """Measure the reduction of gradients of a type."""
    net = _network(args)
    net.cast(dtype)
    trainer = _trainer(net.collect_params(), allreduce_always_fp32=always_fp32)
    trainer.allreduce_grads()  # makes the KVStore
    reduction = trainer._amp_loss_scaler.reduction
    return {**_measure(reduction.reduce, args.rounds), "bytes": reduction.num_bytes}


def _decide(args: argparse.Namespace) -> dict[str, float]:
    import mxnet as mx

    import gluon_amp as amp
    vector = mx.nd.ones(len(_network(args).collect_params().keys()))
    return {**_measure(lambda: amp.parallel.allreduce(vector), args.rounds), "bytes": 4 * vector.size}


def _measure(work: Callable[[], None], rounds: int) -> dict[str, float]:
    """Return the median seconds of a call, and what the loopback device carried per call."""
    import mxnet as mx
    import psutil
    for _ in range(3):
        work()
    mx.nd.waitall()
    before, seconds = psutil.net_io_counters(pernic=True)["lo"].bytes_sent, []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        mx.nd.waitall()
        seconds.append(time.perf_counter() - begin)
    after = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    return {"seconds": statistics.median(seconds), "loopback": (after - before) / rounds}


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """Return the table."""
    lines = [[job, f"reduce {part}" if part in WIRES else part,
              *(f"{value:.3f}" for value in (found["seconds"] * 1e3, found["bytes"] / 1e6, found["loopback"] / 1e6))]
             for job, parts in results.items() for part, found in parts.items()]
    return harness.table(["engine, processes", "", "ms", "MB from a process", "MB on loopback"], lines)


def run(argv: Sequence[str] | None) -> None:
    found = [name for name in ENGINES if name == "kvstore" or importlib.util.find_spec(name)]
    parser = harness.Parser(__doc__)
    add = parser.add_argument
    add("--engines", nargs="+", default=found, choices=ENGINES)
    add("--workers", type=harness.integer(1), default=2, help="processes (default: %(default)s)")
    add("--network", default="resnet18_v1", help="of MXNet's zoo (default: %(default)s)")
    add("--batch", type=harness.integer(1), default=16, help="joint batch of all processes (default: %(default)s)")
    add("--size", type=harness.integer(1), default=64, help="edge of the images in pixels (default: %(default)s)")
    add("--rounds", type=harness.integer(1), default=15, help="steps that are timed (default: %(default)s)")
    add("--timeout", type=harness.above_zero, default=600.0, help="seconds for a job (default: %(default)s)")
    add("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.job:
        work(argparse.Namespace(**args.job))
        return
    results = {"none, 1": job("none", 1, args)}
    results.update({f"{engine}, {args.workers}": job(engine, args.workers, args) for engine in args.engines})
    print(markdown(results), harness.machine_line(), sep="\n")
    harness.write_json(args.json, {"results": results})


if __name__ == "__main__":
    sys.exit(harness.main(run))
