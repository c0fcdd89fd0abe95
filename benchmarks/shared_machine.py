"""What OpenMP's settings give while other programs use the machine, and while none does.

A training step is timed under each setting, in a process of its own, in turns: on a quiet machine, beside one busy
process, and beside as many as there are processors. The settings are read when MXNet is imported, by GNU's OpenMP.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import Any, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.harness import cli, machine, report
from benchmarks.harness.stats import spread

CPUS = len(os.sched_getaffinity(0))
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "nothing set": {},
    f"OMP_NUM_THREADS={CPUS}": {"OMP_NUM_THREADS": str(CPUS)},
    "and OMP_WAIT_POLICY=passive": {"OMP_NUM_THREADS": str(CPUS), "OMP_WAIT_POLICY": "passive"},
    "and GOMP_SPINCOUNT=1000": {"OMP_NUM_THREADS": str(CPUS), "GOMP_SPINCOUNT": "1000"},
    "and GOMP_SPINCOUNT=20000": {"OMP_NUM_THREADS": str(CPUS), "GOMP_SPINCOUNT": "20000"},  # set on busy machines
    "and GOMP_SPINCOUNT=300000": {"OMP_NUM_THREADS": str(CPUS), "GOMP_SPINCOUNT": "300000"},  # OpenMP's own
}
NETWORKS = ("mobilenetv2_1.0", "resnet50_v1")
_BUSY = "while True: pass"
_STEP = """
import json, sys, time
name, steps, has_amp = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "gluon_amp"
if has_amp:
    import gluon_amp as amp
import mxnet as mx
from mxnet.gluon.model_zoo import vision
if has_amp:
    amp.init()
net = vision.get_model(name)
net.initialize()
net.hybridize(static_alloc=True, static_shape=True)
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
data, label = mx.nd.random.uniform(shape=(4, 3, 224, 224)), mx.nd.arange(4)
loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
seconds = []
for _ in range(2 + steps):
    begin = time.perf_counter()
    with mx.autograd.record():
        loss = loss_function(net(data), label)
    loss.backward()
    trainer.step(4)
    mx.nd.waitall()
    seconds.append(time.perf_counter() - begin)
print(json.dumps(seconds[2:]))
"""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep processes busy beside the body."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds(network: str, implementation: str, setting: Mapping[str, str], steps: int) -> list[float]:
    """Return the seconds of training steps in a process of its own."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _STEP, network, str(steps), implementation],
                          env={**unset, **setting}, capture_output=True, text=True, check=True)
    return list(map(float, json.loads(done.stdout.splitlines()[-1])))


def measured(network: str, implementation: str, rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Time every setting beside every number of busy processes, in turns."""
    for others in sorted({0, 1, CPUS}):
        found: dict[str, list[float]] = {name: [] for name in SETTINGS}
        with busy(others):
            for _ in range(rounds):
                for name, setting in SETTINGS.items():
                    found[name] += seconds(network, implementation, setting, steps)
        for name, times in found.items():
            yield {"network": network, "implementation": implementation, "busy": others, "setting": name,
                   **vars(spread(times))}


def run(argv: Sequence[str] | None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="of MXNet's model zoo")
    parser.add_argument("--implementations", nargs="+", default=["gluon_amp", "mxnet"], choices=["gluon_amp", "mxnet"])
    parser.add_argument("--rounds", type=cli.positive, default=2, help="processes for each row (default: 2)")
    parser.add_argument("--steps", type=cli.positive, default=5, help="timed steps of each (default: 5)")
    parser.add_argument("--json", type=cli.writable, help="a file for the figures")
    args = parser.parse_args(argv)
    table = Table(title="seconds of a training step, batch 4: median (range)")
    for name in ("network", "", "setting", *(f"{others} busy" for others in sorted({0, 1, CPUS}))):
        table.add_column(name, no_wrap=True)
    rows: list[dict[str, Any]] = []
    for network in args.networks:
        for implementation in args.implementations:
            rows += measured(network, implementation, args.rounds, args.steps)
            for name in SETTINGS:
                own = [row for row in rows if (row["network"], row["implementation"], row["setting"]) ==
                       (network, implementation, name)]
                table.add_row(network, implementation, name,
                              *(f"{row['median']:.3f} ({row['low']:.3f}-{row['high']:.3f})" for row in own))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(report.machine_text(), highlight=False)
    cli.write_json(args.json, {"machine": machine.describe(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(cli.main(run))
