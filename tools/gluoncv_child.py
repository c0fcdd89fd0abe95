"""Run one of GluonCV's scripts for a few steps without downloads, and write its losses, for tools/gluoncv_scripts.py.

    python tools/gluoncv_child.py LOSSES STEPS MODE SCRIPT ARGUMENT...

MODE is ``stock``, or what ``gluon-amp run`` gets: ``bare`` (the script switches AMP on), or a type.
"""
from __future__ import annotations

import json
import os
import random
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, Callable

import gluoncv.model_zoo.model_store
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluon_amp.cli import main
from gluon_amp.training.trainer_scaler import attached_scalers

NO_FILE = "weights that are drawn, not read"


class Enough(BaseException):
    """As many steps were taken as were asked for."""


def prepare(losses: list[float], steps: int) -> None:
    """Draw weights where the script would load trained ones, and note the loss of every backward pass."""
    gluoncv.model_zoo.model_store.get_model_file = lambda *_, **__: NO_FILE
    load = gluon.Block.load_parameters

    def load_parameters(self: gluon.Block, filename: str, ctx: Any = None, *others: Any, **options: Any) -> None:
        if filename != NO_FILE:
            load(self, filename, ctx, *others, **options)
        else:
            self.initialize(mx.init.Xavier(), ctx=ctx or mx.cpu())

    gluon.Block.load_parameters = load_parameters
    draw_in_fp32()
    zero_masked_regions()
    autograd.backward = noting(autograd.backward, losses)
    mx.nd.NDArray.backward = noting(mx.nd.NDArray.backward, losses)
    step = gluon.Trainer.step

    def counted(self: gluon.Trainer, *arguments: Any, **options: Any) -> None:
        step(self, *arguments, **options)
        counted.taken += 1
        if counted.taken >= steps:
            raise Enough

    counted.taken = 0
    gluon.Trainer.step = counted


def draw_in_fp32() -> None:
    """Give float16 parameters FP32's random weights, rounded: MXNet draws other numbers for each type."""
    initialize = mx.init.Initializer.__call__

    def drawn(self: mx.init.Initializer, description: Any, array: mx.nd.NDArray) -> None:
        if array.dtype != np.float16:
            initialize(self, description, array)
            return
        full = mx.nd.zeros(array.shape, ctx=array.ctx)
        initialize(self, description, full)
        array[:] = full.astype("float16")

    mx.init.Initializer.__call__ = drawn


def zero_masked_regions() -> None:
    """Let ROIAlign give zeros for regions of a negative image: MXNet's CPU kernel leaves their memory as it was."""
    def zeroing(namespace: Any, align: Callable) -> Callable:
        def zeroed(features: Any, regions: Any, *arguments: Any, **options: Any) -> Any:
            pooled = align(features, namespace.maximum(regions, 0), *arguments, **options)
            image = namespace.slice_axis(regions, axis=1, begin=0, end=1).reshape((-1,))
            return namespace.where(image >= 0, pooled, namespace.zeros_like(pooled))
        return zeroed

    for namespace in (mx.nd, mx.sym):
        namespace.contrib.ROIAlign = zeroing(namespace, namespace.contrib.ROIAlign)


def noting(backward: Callable, losses: list[float]) -> Callable:
    """Make a backward function that notes the sum of the losses it begins from, without their scale."""
    def noted(heads: Any, *arguments: Any, **options: Any) -> None:
        scalers = attached_scalers()
        scale = scalers[0].applied if scalers else 1.0
        values = heads if isinstance(heads, (list, tuple)) else [heads]
        losses.append(sum(float(value.asnumpy().astype("float64").mean()) for value in values) / scale)
        backward(heads, *arguments, **options)
    return noted


def run(mode: str, command: list[str]) -> None:
    """Run the script, with the same random numbers in every mode."""
    run_path = runpy.run_path

    def seeded(*arguments: Any, **options: Any) -> dict:
        random.seed(7)
        np.random.seed(7)
        mx.random.seed(7)
        return run_path(*arguments, **options)

    runpy.run_path = seeded
    if mode == "stock":
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
    else:
        code = main(["run", *(["--no-init"] if mode == "bare" else ["--dtype", mode]), *command])
        if code:
            raise SystemExit(code)


if __name__ == "__main__":
    _, losses_file, most_steps, how, *script = sys.argv
    losses_file = os.path.abspath(losses_file)
    noted: list[float] = []
    prepare(noted, int(most_steps))
    code = 0
    try:
        run(how, script)
    except Enough:
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    Path(losses_file).write_text(json.dumps({"losses": noted}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that the script left waiting would keep the process
