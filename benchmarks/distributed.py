"""Measure what training in several processes on this machine costs: bytes and time per step, by engine.

    python benchmarks/distributed.py
    python benchmarks/distributed.py --workers 2 4 --engines kvstore --network resnet50_v1 --json distributed.json

Every row is a job of its own. `reduce` is the reduction of all gradients alone, `decide` the
exchange by which the processes decide on a step, `step` a whole training step with AMP. Bytes are what a process hands
to its engine per step, and what the loopback device carried for all processes together, which counts other programs on
the machine, too.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

from benchmarks.harness import machine

WIRES = {"float32": ("float32", False), "float16": ("float16", False), "float16, added in FP32": ("float16", True)}
MEGABYTE = 1e6
START = Path(__file__).resolve().parents[1] / "tests" / "helpers" / "start_processes.py"


def main() -> None:
    """Run the jobs, or one worker's part of one."""
    arguments = _arguments()
    if arguments.worker:
        _work(arguments)
        return
    print({**machine.describe(), **machine.versions()})
    jobs = [("none", 1)] + [(engine, size) for engine in arguments.engines for size in arguments.workers]
    results = {f"{engine} {size}": _job(engine, size, arguments) for engine, size in jobs}
    _show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def _arguments() -> argparse.Namespace:
    found = [name for name in ("kvstore", "horovod") if name == "kvstore" or importlib.util.find_spec(name)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=found, choices=["kvstore", "horovod"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2])
    parser.add_argument("--network", default="resnet18_v1", help="of MXNet's zoo (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="joint batch of all processes (default: %(default)s)")
    parser.add_argument("--size", type=int, default=64, help="edge of the images in pixels (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _job(engine: str, size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one job; return what its first process measured."""
    launch = [str(START), engine, str(size)] if engine != "none" else []
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        shared = [f"--{name}={getattr(arguments, name)}" for name in ("network", "batch", "size", "rounds")]
        environ = {**os.environ, "OMP_NUM_THREADS": str(max(1, machine.physical_cores() // size))}
        done = subprocess.run([sys.executable, *launch, __file__, f"--worker={engine}", f"--out={out}", *shared],
                              env=environ, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        return json.loads(out.read_text())


def _work(arguments: argparse.Namespace) -> None:
    import mxnet as mx

    import gluon_amp as amp
    mx.random.seed(0)
    amp.init()
    result = {"step": _step(arguments)}
    if arguments.worker != "none":
        result.update({wire: _reduce(arguments, *options) for wire, options in WIRES.items()})
        result["decide"] = _decide(arguments)
    if amp.parallel.rank() == 0:
        arguments.out.write_text(json.dumps(result))


def _network(arguments: argparse.Namespace) -> Any:
    import mxnet as mx
    net = mx.gluon.model_zoo.vision.get_model(arguments.network, classes=10)
    net.initialize()
    net(mx.nd.zeros((1, 3, arguments.size, arguments.size)))
    return net


def _trainer(parameters: Any, **options: Any) -> Any:
    import mxnet as mx

    import gluon_amp as amp
    trainer = mx.gluon.Trainer(parameters, "sgd", {"learning_rate": 1e-3, "multi_precision": True},
                               kvstore=amp.parallel.kvstore())
    amp.init_trainer(trainer, **options)
    return trainer


def _step(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure training steps on this process's share of the joint batch."""
    import mxnet as mx

    import gluon_amp as amp
    net = _network(arguments)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = _trainer(net.collect_params())
    share = arguments.batch // amp.parallel.size()
    data = mx.nd.random.uniform(shape=(share, 3, arguments.size, arguments.size))
    label = mx.nd.zeros(share)
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def step() -> None:
        with mx.autograd.record(), amp.scale_loss(loss_function(net(data), label), trainer) as loss:
            mx.autograd.backward(loss)
        trainer.step(arguments.batch)
    found = _measure(step, arguments.rounds)
    reduction = trainer._amp_loss_scaler.reduction
    return {**found, "bytes": reduction.num_bytes if amp.parallel.size() > 1 else 0}


def _reduce(arguments: argparse.Namespace, dtype: str, always_fp32: bool) -> dict[str, float]:
    """Measure the reduction of gradients of a type."""
    net = _network(arguments)
    net.cast(dtype)
    trainer = _trainer(net.collect_params(), allreduce_always_fp32=always_fp32)
    reduction = trainer._amp_loss_scaler.reduction

    def reduce() -> None:
        reduction.forget()
        trainer.allreduce_grads()
    return {**_measure(reduce, arguments.rounds), "bytes": reduction.num_bytes}


def _decide(arguments: argparse.Namespace) -> dict[str, float]:
    import mxnet as mx

    import gluon_amp as amp
    vector = mx.nd.ones(len(_network(arguments).collect_params().keys()))
    return {**_measure(lambda: amp.parallel.allreduce(vector), arguments.rounds), "bytes": 4 * vector.size}


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


def _show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    table = Table("engine, processes", "what", *(f"{name}" for name in ("ms", "MB from a process", "MB on loopback")))
    for job, parts in results.items():
        for part, found in parts.items():
            what = f"reduce {part}" if part in WIRES else part
            table.add_row(job, what, f"{found['seconds'] * 1e3:.2f}", f"{found['bytes'] / MEGABYTE:.3f}",
                          f"{found['loopback'] / MEGABYTE:.3f}")
    Console(width=max(100, Console().width)).print(table)


if __name__ == "__main__":
    main()
