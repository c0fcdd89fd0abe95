"""What a device computes in training: fused kernels, updates of weights, and losses."""
from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn, rnn

from ..dtypes import FLOAT32, Support
from ..session.autocast import deinit, init
from ..training.scaling import init_trainer, scale_loss
from .isolation import OK, WRONG, Found, Section
from .kernels import error_of

_STEPS = 20
_LOSS_DISTANCE = 0.1  # of the first loss: how far the last losses may be apart
_FUSION_ERROR = 1e-5  # of the largest element


def _fusion(name: str, device: mx.Context, runs: Support) -> Found:
    """Run elementwise operators that MXNet compiles into one kernel on a GPU."""
    class Chain(HybridBlock):
        def hybrid_forward(self, F: Any, x: Any) -> Any:
            return F.relu(x * 3 - 1) * (x + 2) + F.tanh(x)

    values = np.linspace(-2, 2, 1000, dtype=np.float32).reshape(10, 100)
    net = Chain()
    net.hybridize(static_alloc=True, static_shape=True)
    wanted = np.maximum(values * 3 - 1, 0) * (values + 2) + np.tanh(values)
    error = error_of(net(mx.nd.array(values)).asnumpy(), wanted)
    return OK if error <= _FUSION_ERROR else WRONG, f"error {error:.1g}", {"error": error}


# The gradient, and whether a weight may change.
_GRADIENTS = {"an infinite gradient is left out": (np.inf, False), "a finite gradient is used": (1.0, True)}


def _overflow(name: str, device: mx.Context, runs: Support) -> Found:
    """Let a gradient overflow, and look at the update that must not happen; or at one that must."""
    value, changes = _GRADIENTS[name]
    net = nn.Dense(4, in_units=4)
    net.initialize()
    init(None if runs.dtype == FLOAT32 else runs.dtype)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    init_trainer(trainer)
    before = net.weight.data().asnumpy()
    with autograd.record():
        loss = net(mx.nd.ones((2, 4))).sum()
        with scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    mx.nd.full((4, 4), value, ctx=mx.cpu()).copyto(net.weight.grad())
    trainer.step(1)
    changed = bool((net.weight.data().asnumpy() != before).any())
    return OK if changed == changes else WRONG, f"the weight {'changed' if changed else 'stayed'}", {}


def _training(name: str, device: mx.Context, runs: Support) -> Found:
    losses = {}
    for mixed in (False, True):
        mx.random.seed(1)
        np.random.seed(1)
        wanted, losses[mixed] = _train(_NETWORKS[name], mixed, runs)
        deinit()
    (first, *_, plain), (*_, low) = losses[False], losses[True]
    near = np.isfinite(low) and abs(low - plain) <= _LOSS_DISTANCE * abs(wanted)
    learnt = plain < first and abs(first - wanted) <= _LOSS_DISTANCE * abs(wanted)
    said = (f"loss {first:.3g} to {plain:.3g} in FP32, to {low:.3g} with AMP, in {_STEPS} steps; the CPU's first is "
            f"{wanted:.3g}")
    return OK if near and learnt else WRONG, said, {"fp32": losses[False], "amp": losses[True], "cpu": wanted}


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

FUSION = Section(lambda runs: ["elementwise operators"], _fusion)
OVERFLOW = Section(lambda runs: list(_GRADIENTS), _overflow)
TRAINING = Section(lambda runs: list(_NETWORKS), _training)
