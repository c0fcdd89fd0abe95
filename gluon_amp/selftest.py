"""What ``gluon-amp check`` runs: a self-test of this machine's kernels, of overflow detection, training, and speed."""
from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn, rnn

from . import _cuda
from ._mxnet import gpus
from ._mxnet.timing import time_in_both
from .audit.judge import Judge, message_of
from .audit.modes import Mode
from .audit.processes import NORMALLY, isolated
from .audit.samples import sampled_operators, samples_of
from .dtypes import FLOAT32, Support
from .rules import LOWER, NEUTRAL, WIDEST, Policy
from .runtime.autocast import autocast, deinit, init
from .runtime.devices import support
from .training import init_trainer, scale_loss

__all__ = ["ERROR", "FAILED", "INFO", "OK", "SECTIONS", "SKIPPED", "WRONG", "Finding", "check"]

OK, WRONG, ERROR, SKIPPED, INFO = "ok", "wrong", "error", "skipped", "info"
FAILED = (WRONG, ERROR)
_STEPS = 20
_BATCH = 25  # operators that share a process: a GPU takes seconds to get ready in each
_LOSS_DISTANCE = 0.1  # of the first loss: how far the last losses may be apart
_SECONDS = 240.0
_NOT_FOR_GPUS = "is not implemented for GPU"  # MXNet's words: in no type
_TRUSTED = "cpu(0)"  # a device that is broken agrees with itself


@dataclass(frozen=True)
class Finding:
    """One line of a self-test."""

    # what was looked at
    section: str
    name: str
    verdict: str  # ``'ok'``, ``'wrong'``, ``'error'``, ``'skipped'`` or ``'info'``
    detail: str = ""  # for people
    data: Mapping[str, Any] = field(default_factory=dict)  # for programs; what JSON can hold

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


def check(device: mx.Context, sections: Sequence[str] = ()) -> Iterator[Finding]:
    """Run the self-test on a device, and yield what each part finds as it comes.

    Examples
    --------
    >>> [found.verdict for found in check(mx.cpu(), ['overflow'])]
    ['ok', 'ok']
    """
    runs = support("gpu" if device.device_type == "gpu" else "cpu", device.device_id)
    for name in sections or SECTIONS:
        try:
            with device:
                yield from SECTIONS[name](device, runs)
        except Exception as error:  # one part that fails must not hide the others
            yield Finding(name, name, ERROR, message_of(error))
        finally:
            deinit()


def _versions(device: mx.Context, runs: Support) -> Iterator[Finding]:
    yield Finding("versions", "software", INFO, f"MXNet {mx.__version__}, NumPy {np.__version__}, Python "
                  f"{platform.python_version()}; --json FILE names the libraries that are loaded",
                  {"libraries": _cuda.loaded_libraries()})
    yield Finding("versions", "device", INFO, f"{device}: {runs.dtype}, because {runs.reason}")
    if device.device_type == "gpu":
        driver, compiler = _cuda.driver_version(), _cuda.nvrtc_version()
        problem = gpus.problem() or _cuda.fusion_problem(driver, compiler)
        yield Finding("versions", "driver", WRONG if problem else OK,
                      problem or
                      f"CUDA {_cuda.dotted(driver)}; the run-time compiler (NVRTC) is of {_cuda.dotted(compiler)}")


def _fusion(device: mx.Context, runs: Support) -> Iterator[Finding]:
    """Run elementwise operators that MXNet compiles into one kernel on a GPU."""
    class Chain(HybridBlock):
        def hybrid_forward(self, F: Any, x: Any) -> Any:
            return F.relu(x * 3 - 1) * (x + 2) + F.tanh(x)

    values = np.linspace(-2, 2, 1000, dtype=np.float32).reshape(10, 100)
    net = Chain()
    net.hybridize(static_alloc=True, static_shape=True)
    wanted = np.maximum(values * 3 - 1, 0) * (values + 2) + np.tanh(values)
    yield _compared("fusion", "elementwise operators", net(mx.nd.array(values)).asnumpy(), wanted, 1e-5)


def _low_type(runs: Support) -> str | None:
    return runs.dtype if runs.dtype != FLOAT32 else runs.on_request


def _nothing_low(section: str, runs: Support) -> Finding:
    return Finding(section, "all", SKIPPED, f"nothing runs in low precision here: {runs.reason}")


def _operators(device: mx.Context, runs: Support) -> Iterator[Finding]:
    low = _low_type(runs)
    if low is None:
        yield _nothing_low("operators", runs)
        return
    policy = Policy(low)
    names = [name for name in sampled_operators() if _low_condition(name, policy) is not None]
    for start in range(0, len(names), _BATCH):
        group = names[start:start + _BATCH]
        results = _judged(group, low, str(device))
        for name in group:
            verdict, detail = results[name]
            yield Finding("operators", name, verdict, detail, {"dtype": low})


def _judged(names: list[str], low: str, device: str) -> dict[str, tuple[str, str]]:
    """Judge operators in a process of their own; each alone where that ends badly."""
    outcome = isolated(_judge, (names, low, device), _SECONDS)
    if outcome.ended == NORMALLY:
        return outcome.value
    if len(names) == 1:
        return {names[0]: (ERROR, f"its process ended with {outcome.ended}")}
    return {name: each for single in names for name, each in _judged([single], low, device).items()}


def _judge(names: list[str], low: str, device: str) -> dict[str, tuple[str, str]]:
    policy, results = Policy(low), {}
    for name in names:
        item = _low_condition(name, policy)
        judge = Judge(item, low, low, device, reference=_TRUSTED)
        grad = "write" if item.gradient else "infer"
        result = judge.run(Mode("plain", grad, "eager"))
        verdict = {"ok": OK, "wrong": WRONG, "not applicable": SKIPPED}.get(result.verdict, ERROR)
        verdict = SKIPPED if _NOT_FOR_GPUS in result.detail else verdict
        results[name] = verdict, result.detail or f"error {result.error:.1g}"
    return results


def _low_condition(name: str, policy: Policy) -> Any:
    """Return the first sample of an operator that runs in low precision, None without."""
    return next((item for item in samples_of(name)
                 if policy.decide(name, item.attrs, item.inputs[0].shape if item.inputs else None).rule
                 in (LOWER, NEUTRAL, WIDEST)), None)


def _overflow(device: mx.Context, runs: Support) -> Iterator[Finding]:
    """Let a gradient overflow, and look at the update that must not happen; then at one that must."""
    net = nn.Dense(4, in_units=4)
    net.initialize()
    init(None if runs.dtype == FLOAT32 else runs.dtype)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    init_trainer(trainer)
    for value, changes in ((np.inf, False), (1.0, True)):
        before = net.weight.data().asnumpy()
        with autograd.record():
            loss = net(mx.nd.ones((2, 4))).sum()
            with scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        mx.nd.full((4, 4), value, ctx=mx.cpu()).copyto(net.weight.grad())
        trainer.step(1)
        changed = bool((net.weight.data().asnumpy() != before).any())
        name = "a finite gradient is used" if changes else "an infinite gradient is not"
        yield Finding("overflow", name, OK if changed == changes else WRONG,
                      f"the weight {'changed' if changed else 'stayed'}")


def _training(device: mx.Context, runs: Support) -> Iterator[Finding]:
    for name, make in _NETWORKS.items():
        losses = {}
        for mixed in (False, True):
            mx.random.seed(1)
            np.random.seed(1)
            wanted, losses[mixed] = _train(make, mixed, runs)
            deinit()
        (first, *_, plain), (*_, low) = losses[False], losses[True]
        near = np.isfinite(low) and abs(low - plain) <= _LOSS_DISTANCE * abs(wanted)
        learnt = plain < first and abs(first - wanted) <= _LOSS_DISTANCE * abs(wanted)
        yield Finding("training", name, OK if near and learnt else WRONG,
                      f"loss {first:.3g} to {plain:.3g} in FP32, to {low:.3g} with AMP, in {_STEPS} steps; the CPU's "
                      f"first is {wanted:.3g}", {"fp32": losses[False], "amp": losses[True], "cpu": wanted})


def _train(make: Callable[[], tuple[HybridBlock, Any]], mixed: bool, runs: Support) -> tuple[float, list[float]]:
    """Return the first loss that the CPU gives in FP32, and the losses of some steps."""
    net, shape = make()
    random, function = np.random.RandomState(3), gluon.loss.SoftmaxCrossEntropyLoss()
    data, labels = mx.nd.array(random.normal(size=shape)), mx.nd.array(random.randint(0, 4, size=shape[0]))
    # Random numbers of the CPU: devices have generators of their own.
    net.initialize(mx.init.Xavier(), ctx=mx.cpu())
    with mx.cpu(), autograd.train_mode():
        wanted = float(function(net(data.as_in_context(mx.cpu())), labels.as_in_context(mx.cpu())).mean().asscalar())
    net.collect_params().reset_ctx(data.context)
    net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
    if mixed:
        init(None if runs.dtype == FLOAT32 else runs.dtype)
        init_trainer(trainer)
    losses = []
    for _ in range(_STEPS):
        with autograd.record():
            loss = function(net(data), labels).mean()
            if mixed:
                with scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
        if not mixed:
            loss.backward()
        trainer.step(1)
        losses.append(float(loss.asscalar()))
    return wanted, losses


def _convolutional() -> tuple[HybridBlock, Any]:
    net = nn.HybridSequential()
    for channels in (16, 32, 32):
        net.add(nn.Conv2D(channels, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(4))
    return net, (16, 16, 12, 12)


def _dense() -> tuple[HybridBlock, Any]:
    net = nn.HybridSequential()
    for units in (128, 128):
        net.add(nn.Dense(units), nn.LayerNorm(), nn.Activation("relu"))
    net.add(nn.Dense(4))
    return net, (32, 64)


def _recurrent() -> tuple[HybridBlock, Any]:
    net = nn.HybridSequential()
    net.add(rnn.LSTM(32, layout="NTC"), nn.Dense(4))
    return net, (16, 6, 24)


_NETWORKS = {"convolutional": _convolutional, "dense": _dense, "recurrent": _recurrent}


def _timing(device: mx.Context, runs: Support) -> Iterator[Finding]:
    low = _low_type(runs)
    if low is None:
        yield _nothing_low("timing", runs)
        return
    for name, (op, attrs, shapes) in _KERNELS.items():
        timer = partial(time_in_both, op, attrs, shapes, low, True, 5, device)
        yield _timed(name, low, timer)
    yield _timed("SSD step", low, partial(_time_detector, device, low))


def _timed(name: str, low: str, timer: Callable[[], tuple[float, float]]) -> Finding:
    try:
        fp32, lower = timer()
    except mx.MXNetError as error:
        return Finding("timing", name, SKIPPED, f"MXNet does not run it in {low}, and AMP does not either",
                       {"dtype": low, "error": message_of(error)})
    said = f"{fp32:.3g} ms in FP32, {lower:.3g} ms in {low}: {fp32 / lower:.2f} times as fast"
    return Finding("timing", name, INFO, said,
                   {"dtype": low, "milliseconds": {FLOAT32: fp32, low: lower}})


def _time_detector(device: mx.Context, low: str) -> tuple[float, float]:
    """Time a training step of a small detector, both ways in turns."""
    net = nn.HybridSequential()
    for channels in (32, 64, 128):
        net.add(nn.Conv2D(channels, 3, strides=2, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Conv2D(4 * 25, 3, padding=1))  # four anchors, each with 21 classes and a box
    net.initialize(ctx=device)
    net.hybridize(static_alloc=True, static_shape=True)
    data, times = mx.nd.ones((4, 3, 128, 128), ctx=device), {False: [], True: []}  # type: ignore[var-annotated]
    for number in range(4):
        for mixed, kept in times.items():
            begin = time.perf_counter()
            with autocast(mixed, *([low] if mixed else [])), autograd.record():
                loss = net(data).square().mean()
            loss.backward()
            mx.nd.waitall()
            if number:
                kept.append((time.perf_counter() - begin) * 1e3)
    return float(np.median(times[False])), float(np.median(times[True]))


def _convolution(filters: int) -> tuple[str, dict[str, str], list[tuple[int, ...]]]:
    attrs = {"kernel": "(3, 3)", "pad": "(1, 1)", "num_filter": str(filters), "no_bias": "True"}
    return "Convolution", attrs, [(8, 64, 28, 28), (filters, 64, 3, 3)]


# The last two are what alignment of channels would change: 60 filters as they are, and padded to 64.
_KERNELS: dict[str, tuple[str, dict[str, str], list[tuple[int, ...]]]] = {
    "convolution": _convolution(128),
    "dense": ("FullyConnected", {"num_hidden": "512", "no_bias": "True"}, [(256, 512), (512, 512)]),
    "batched product": ("batch_dot", {}, [(32, 64, 64), (32, 64, 64)]),
    "LSTM": ("RNN", {"mode": "lstm", "state_size": "128", "num_layers": "1"},
             [(16, 16, 128), (4 * 128 * (128 + 128 + 2),), (1, 16, 128), (1, 16, 128)]),
    "60 channels": _convolution(60),
    "60 channels padded to 64": _convolution(64),
}


def _compared(section: str, name: str, actual: np.ndarray, wanted: np.ndarray, limit: float) -> Finding:
    error = float(np.abs(actual - wanted).max() / np.abs(wanted).max())
    return Finding(section, name, OK if error <= limit else WRONG, f"error {error:.1g}", {"error": error})


SECTIONS: Mapping[str, Callable[[mx.Context, Support], Iterator[Finding]]] = {
    "versions": _versions, "fusion": _fusion, "operators": _operators, "overflow": _overflow, "training": _training,
    "timing": _timing,
}
