"""``gluon-amp check``: what this machine runs and why, and training steps on it: to be attached to a report."""
from __future__ import annotations

import argparse
import json
import os
import platform
import re
from importlib import metadata
from typing import Callable, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .. import native
from .._mxnet import gpus
from .._mxnet.engine import interleaved
from .._mxnet.symbols import first_line
from ..base.files import replacing
from ..errors import AmpError, expected
from ..machine import host
from ..machine.dtypes import FORMATS, cpu_isa
from ..session.autocast import autocast
from ..session.init import deinit, init
from ..state.devices import device_supports, support, verdict
from ..training.scaling import init_trainer, scale_loss, unscale
from .files import filled
from .rates import keep, measure

_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
OK, WRONG, INFO = "ok", "wrong", "info"
_STEPS, _ROUNDS = 10, 10
_SCALE = 1024.0  # of losses in each type: no gradient here overflows float16
_ROUNDOFFS = 64.0  # how far gradients may be off, of their norm
_FP32_ERROR = 1e-3  # likewise in FP32, where a GPU may round products to TF32
_LOSS_DISTANCE = 0.1  # of the first loss
_SAID = ("skipped", "taken")


def declare(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command and its arguments."""
    parser = command("check", run, "show what this machine runs in, and why; then test training steps, and their speed")
    parser.add_argument("--device", metavar="DEVICE", default="gpu(0)" if gpus.count() else "cpu",
                        help="cpu, or a GPU, as in gpu(0) (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="measure what kernels cost on this CPU, for the choices "
                        "that amp.init() makes: two minutes, on a machine that does nothing else")
    parser.add_argument("--json", metavar="FILE", help="write all of it into a file, too, for a report of a problem")


def run(args: argparse.Namespace) -> int:
    """Describe the machine and test it, or measure it; return 1 when something is wrong."""
    if args.measure:
        row = measure()
        print(f"bfloat16: {row['gain']} times as fast as FP32. What kernels cost is in {keep(row)}")
        return 0

    def say(name: str, text: str) -> None:
        print(filled(f"{name:<26}{text}", 26), flush=True)

    device, machine, findings = _device(args.device), environment(), []
    for name, text in machine.items():
        say(name, text)
    for found in tested(device):
        findings.append(found._asdict())
        say(f"{found.verdict}: {found.name}", found.detail)
    wrong = sum(found["verdict"] == WRONG for found in findings)
    say(str(device), f"{wrong} of {len(findings)} lines are wrong" if wrong else "nothing is wrong")
    if args.json is not None:
        with replacing(args.json) as (temporary,), open(temporary, "w", encoding="utf-8") as file:
            json.dump({**machine, "device": str(device), "wrong": wrong, "findings": findings,
                       "libraries": host.loaded_libraries()}, file, indent=2)
    return 1 if wrong else 0


def environment() -> dict[str, str]:
    """Describe the machine and MXNet's build in words."""
    flags, threads = host.cpu_flags(), os.environ.get("OMP_NUM_THREADS")
    obstacle = host.memory_obstacle(os.environ)
    _, fit = host.threads_advice()
    return {
        "verdict": f"amp.init() runs {verdict(device_supports())}.",
        "versions": f"gluon_amp {metadata.version('gluon_amp')}, MXNet {mx.__version__}, NumPy {np.__version__}, "
                    f"Python {platform.python_version()}",
        "CPU": f"{host.cpu_fields().get('model name', 'unknown')}, {os.cpu_count()} logical processors, "
               f"{host.allowed_cpus()} for this process",
        "its instructions": ", ".join(name for name in _INSTRUCTION_SETS if name in flags) or "none that matter here",
        "oneDNN uses": cpu_isa() + (f", limited by {host.MAX_ISA}" if os.environ.get(host.MAX_ISA) else ""),
        "AMX tiles": host.amx_outcome() or ("not asked for" if "amx_tile" in flags else "none"),
        "threads": (f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set: MXNet takes half of the "
                    "logical processors") + f". {fit}".rstrip(". "),
        "freed memory": f"goes back to the system: {obstacle}" if obstacle else "stays for the next step's arrays",
        "GPUs": ", ".join(host.gpu(number)[0] or "" for number in range(gpus.count())) or gpus.problem() or "none",
        **{f"C++ operators, {library.name}": library.missing or "loaded" for library in native.load()},
    }


def _device(text: str) -> mx.Context:
    named = re.fullmatch(r"(cpu|gpu)(?:\((\d+)\))?", text)
    if named is None:
        raise AmpError(expected("cpu, gpu or a number in brackets, as in gpu(0)", "--device", text))
    device = mx.Context(named[1], int(named[2] or 0))
    if device.device_type == "gpu" and device.device_id >= gpus.count():
        raise AmpError(f"--device: MXNet finds {gpus.count()} GPUs here, and no {device}. {gpus.problem() or ''}")
    return device


class Finding(NamedTuple):
    """One line about training steps."""

    name: str
    verdict: str  # OK, WRONG or INFO
    detail: str


def tested(device: mx.Context) -> Iterator[Finding]:
    """Train a small network in each type that a device runs, and yield what is found as it comes."""
    if device.device_type == "gpu":
        driver, compiler = host.driver_version(), host.nvrtc_version()
        problem = gpus.problem() or host.fusion_problem(driver, compiler)
        found = f"CUDA {host.dotted(driver)}, and the run-time compiler (NVRTC) of {host.dotted(compiler)}"
        yield Finding("driver", WRONG if problem else OK, problem or found)
    runs = support(device.device_type, device.device_id)
    reference = _Training(mx.cpu(), has_amp=False)
    gradients = reference.gradients()
    losses = [reference.step() for _ in range(_STEPS)]
    for dtype in dict.fromkeys(filter(None, (runs.dtype, runs.on_request))):
        try:
            init(dtype)
            yield from _compared(dtype, device, gradients, losses)
        except Exception as error:
            yield Finding(dtype, WRONG, first_line(error))
        finally:
            deinit()


def _compared(dtype: str, device: mx.Context, gradients: np.ndarray, losses: list[float]) -> Iterator[Finding]:
    """Train in the type that is in force, and compare with the gradients of the first step and all losses in FP32."""
    training = _Training(device, has_amp=True)
    error = float(np.linalg.norm(training.gradients() - gradients) / np.linalg.norm(gradients))
    limit = _ROUNDOFFS * FORMATS[dtype].roundoff if dtype in FORMATS else _FP32_ERROR
    yield Finding(f"{dtype} gradients", OK if error <= limit else WRONG, f"{error:.2g} of their norm off FP32, at most "
                  f"{limit:.2g} is allowed")
    found = [training.step() for _ in range(_STEPS)]
    distance = np.abs(np.subtract(found, losses)).max() / losses[0]
    yield Finding(f"{dtype} losses", OK if distance <= _LOSS_DISTANCE and found[-1] < found[0] else WRONG,
                  f"{found[0]:.3g} to {found[-1]:.3g} in {_STEPS} steps, in FP32 {losses[0]:.3g} to {losses[-1]:.3g}")
    changed = [training.changes_weights(value) for value in (np.inf, 1.0)]
    yield Finding(f"{dtype} overflow", OK if changed == [False, True] else WRONG, "a step with infinite "
                  f"gradients is {_SAID[changed[0]]}, one with finite gradients {_SAID[changed[1]]}")
    plain = _Training(device, has_amp=False)
    without, under = interleaved([plain.step, training.step], _ROUNDS, warm_up=2, of=min)
    yield Finding(f"{dtype} speed", INFO, f"{under:.3g} ms a step, without AMP {without:.3g} ms: {without / under:.2f} "
                  "times as fast")


class _Training:
    """A small network and what it is trained with; alike in each instance."""

    def __init__(self, device: mx.Context, has_amp: bool):
        random = np.random.RandomState(3)
        mx.random.seed(1)
        self.net = nn.HybridSequential()
        for channels in (64, 128):
            # MXNet compiles Swish at run time on a GPU.
            self.net.add(nn.Conv2D(channels, 3, padding=1), nn.BatchNorm(), nn.Swish(), nn.AvgPool2D())
        self.net.add(nn.Flatten(), nn.Dense(64, activation="relu"), nn.Dense(4))
        self.net.initialize(mx.init.Xavier(), ctx=mx.cpu())  # devices have generators of their own
        data = mx.nd.array(random.normal(size=(32, 16, 16, 16)), ctx=mx.cpu())
        self.net(data)  # for the shapes of the weights
        parameters = self.net.collect_params()
        parameters.reset_ctx(device)
        self.net.hybridize(static_alloc=True, static_shape=True)
        self._data, self._labels = data.as_in_context(device), mx.nd.array(random.randint(0, 4, size=32), ctx=device)
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self.trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.005, "momentum": 0.9})
        self._has_amp = has_amp
        if has_amp:
            init_trainer(self.trainer, _SCALE)

    def _backward(self) -> mx.nd.NDArray:
        with autocast(enabled=self._has_amp), autograd.record():
            loss = self._loss(self.net(self._data), self._labels).mean()
            with scale_loss(loss, self.trainer, enabled=self._has_amp) as scaled:
                autograd.backward(scaled)
        return loss

    def step(self) -> float:
        """Take a step; return its loss."""
        loss = self._backward()
        self.trainer.step(1)
        return float(loss.asscalar())

    def gradients(self) -> np.ndarray:
        """Take a step; return all its gradients as one vector."""
        self._backward()
        if self._has_amp:
            unscale(self.trainer)
        found = [value.grad().asnumpy().ravel() for value in self.net.collect_params().values()
                 if value.grad_req != "null"]
        self.trainer.step(1)
        return np.concatenate(found)

    def changes_weights(self, gradient: float) -> bool:
        """Tell whether a step changes the weights of the last layer when all their gradients are a value."""
        self._backward()
        weight = self.net[-1].weight
        before = weight.data().asnumpy()
        weight.grad()[:] = gradient
        self.trainer.step(1)
        return bool((weight.data().asnumpy() != before).any())
