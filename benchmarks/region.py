"""What a C++ operator for a whole region of convolutions could gain: a ResNet-50 stage in oneDNN 3 alone.

    pip install onednn-cpu-gomp==2023.2.0
    pip download --no-deps onednn-devel-cpu-gomp==2023.2.0 && unzip onednn_devel_cpu_gomp-*.whl -d onednn
    python benchmarks/region.py --headers onednn/onednn_devel_cpu_gomp-2023.2.0.data/data/include --batch-sizes 4,8

The stage has four bottleneck blocks of 512 channels; its step is forward and backward, without an update.
`region/stage.cc` keeps blocked layouts from one operator to the next, and casts and reorders weights once a step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from benchmarks.harness import cli
from benchmarks.harness.errors import UsageError

SOURCE = Path(__file__).parent / "region" / "stage.cc"
TYPES = {"float32": "f32", "bfloat16": "bf16"}
ROUNDS = 5


def compiled(headers: str, folder: str) -> Path:
    """Compile the stage and return the program."""
    from gluon_amp.native.loader import onednn_files

    library = next(onednn_files(), None)
    if library is None or not (Path(headers) / "dnnl.hpp").exists():
        raise UsageError(f"expected oneDNN 3.2's library, which onednn-cpu-gomp brings, and dnnl.hpp in {headers}")
    program = Path(folder) / "stage"
    subprocess.run(["c++", "-std=c++17", "-O2", f"-I{headers}", str(SOURCE), str(library),
                    f"-Wl,-rpath,{library.parent}", "-o", str(program)], check=True)
    return program


def gluon_step(batch: int, dtype: str | None) -> Callable[[], float]:
    """Return what runs the stage in Gluon and returns milliseconds; no type is MXNet without AMP."""
    import gluon_amp as amp

    # isort: split
    import mxnet as mx
    from mxnet import autograd
    from mxnet.gluon import nn
    from mxnet.gluon.model_zoo.vision.resnet import BottleneckV1

    net = nn.HybridSequential()
    for number in range(4):
        net.add(BottleneckV1(512, 1 if number else 2, not number, in_channels=512 if number else 256))
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    data, gradient = mx.nd.random.normal(shape=(batch, 256, 56, 56)), mx.nd.ones((batch, 512, 28, 28))

    def once() -> float:
        begin = time.perf_counter()
        with autograd.record():
            result = net(data)
        result.backward(gradient)
        mx.nd.waitall()
        return (time.perf_counter() - begin) * 1e3

    def measured() -> float:
        if dtype:
            amp.init(dtype)
        once()
        milliseconds = once()
        amp.deinit()
        return milliseconds

    return measured


def compare(program: Path, batch: int) -> dict[str, Any]:
    """Measure all implementations in turns; return medians in milliseconds, and those of the C++ stage's parts."""
    steps = {"MXNet FP32": gluon_step(batch, None),
             **{f"gluon_amp {dtype}": gluon_step(batch, dtype) for dtype in TYPES}}
    times: dict[str, list[float]] = {name: [] for name in steps}
    parts: dict[str, list[Mapping[str, float]]] = {dtype: [] for dtype in TYPES}
    for number in range(1 + ROUNDS):
        for name, step in steps.items():
            milliseconds = step()
            times[name] += [milliseconds] if number else []
        for dtype, short in TYPES.items() if number else ():
            parts[dtype].append(json.loads(subprocess.check_output([str(program), str(batch), short, "3"])))
    return {"batch": batch, "gluon": {name: statistics.median(values) for name, values in times.items()},
            "oneDNN": {dtype: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                       for dtype, runs in parts.items()}}


def table(measured: Mapping[str, Any]) -> str:
    """Return the results as text."""
    lines = []
    for row in measured["rows"]:
        lines.append(f"batch {row['batch']}: "
                     + ", ".join(f"{name} {value:.0f} ms" for name, value in row["gluon"].items()))
        for dtype, parts in row["oneDNN"].items():
            share = parts["weight_gradient_gflops"] / parts["ceiling_gflops"]
            ratio = row["gluon"][f"gluon_amp {dtype}"] / parts["step"]
            lines.append(f"  oneDNN alone, {dtype}: {parts['step']:.0f} ms, {ratio:.2f}x as fast as gluon_amp; weight "
                         f"gradients {parts['weight gradient']:.0f} ms, at {share:.0%} of a large product's speed")
    return "\n".join(lines)


def program(argv: Sequence[str] | None = None) -> None:
    """Compile, measure and print."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--headers", required=True, help="the folder of oneDNN 3.2's dnnl.hpp")
    parser.add_argument("--batch-sizes", type=cli.integers, default=(4, 8), help="default: 4,8")
    args = parser.parse_args(argv)
    cli.use_threads(args)
    with tempfile.TemporaryDirectory() as folder:
        stage = compiled(args.headers, folder)
        rows = [compare(stage, batch) for batch in args.batch_sizes]
    cli.show(args, {"rows": rows}, table)


if __name__ == "__main__":
    sys.exit(cli.main(program))
