"""The recipe's advanced topics: gradients that add up, second order, several networks, several devices, own functions.

    python examples/torch_recipe/advanced.py                       # all sections
    python examples/torch_recipe/advanced.py gradient_penalty
"""
from __future__ import annotations

import argparse
from typing import Callable

import gluon_amp as amp  # before mxnet

# isort: split
import common
import mxnet as mx
from common import difference, loss_function, make_data, make_model, make_trainer
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn


def scaler() -> amp.LossScaler:
    """Make a scaler that shows what it does in bfloat16, too, where a scale of 1 would be enough."""
    return amp.DynamicLossScaler(init_scale=2.0 ** 10)


def accumulation(options: argparse.Namespace, parts: int = 4) -> None:
    """Gradients of several small batches add up, all in the same scale; the step comes after the last."""
    net, (inputs, target) = make_model(options), make_data(options)[0]
    parts = min(parts, len(inputs))  # none may be empty
    trainer, parameters = make_trainer(net), net.collect_params()
    parameters.setattr("grad_req", "add")
    amp.init()
    amp.init_trainer(trainer, scaler())

    for some, some_target in zip(*(gluon.utils.split_data(each, parts, even_split=False)
                                   for each in (inputs, target))):
        with autograd.record():
            loss = loss_function(net(some), some_target)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
    # Unscaling and clipping belong here, after the last part.
    trainer.step(len(inputs))
    parameters.zero_grad()

    whole = make_model(options)
    whole_trainer = make_trainer(whole)
    amp.init_trainer(whole_trainer, scaler())
    common.amp_step(whole, whole_trainer, inputs, target)
    print(f"{parts} parts and the whole batch give weights that differ by {difference(net, whole, options)}")


class Linear(nn.Block):
    """A linear layer made of batch_dot, whose second derivative MXNet has. That of FullyConnected is wrong."""

    def __init__(self, units: int, in_units: int):
        super().__init__()
        self.weight = self.params.get("weight", shape=(1, in_units, units))

    def forward(self, x: nd.NDArray) -> nd.NDArray:  # (1, batch, in_units)
        return nd.batch_dot(x, self.weight.data())


class Critic(nn.Sequential):
    """A network to differentiate twice. It cannot be hybridized: cached graphs have no second derivative."""

    def __init__(self, size: int):
        super().__init__()
        self.add(Linear(size, size), nn.Lambda("tanh"), Linear(1, size))


def gradient_penalty(options: argparse.Namespace) -> None:
    """A loss that contains a gradient: its backward pass differentiates twice."""
    critic = Critic(options.size)
    critic.initialize(mx.init.Normal(2 * options.size ** -0.5))
    mx.random.seed(3)
    inputs = nd.random.normal(shape=(1, options.batch_size, options.size))
    _train_critic(critic, inputs, second_order_penalty, options)


def penalty_by_differences(options: argparse.Namespace) -> None:
    """The same for every network, hybridized or not, with first derivatives only."""
    critic = nn.HybridSequential()
    critic.add(nn.Conv2D(options.size, 3, in_channels=4), nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Dense(1))
    critic.initialize(mx.init.Xavier())
    critic.hybridize(static_alloc=True)
    mx.random.seed(3)
    inputs = nd.random.normal(shape=(options.batch_size, 4, 8, 8))
    _train_critic(critic, inputs, difference_penalty, options)


def _train_critic(critic: gluon.Block, inputs: nd.NDArray, penalty: Callable, options: argparse.Namespace) -> None:
    trainer = gluon.Trainer(critic.collect_params(), "adam", {"learning_rate": 1e-2})
    amp.init()
    amp.init_trainer(trainer, scaler())
    penalties = []
    for _ in range(options.batches):
        with autograd.record():
            loss = 0.01 * (critic(inputs) ** 2).mean()  # under autocast
            penalties.append(penalty(critic, inputs))
            with amp.scale_loss(loss + penalties[-1], trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(1)
    print(f"The penalty falls from {penalties[0].asscalar():.4f} to {penalties[-1].asscalar():.4f}")


def second_order_penalty(critic: gluon.Block, inputs: nd.NDArray) -> nd.NDArray:
    """Return how far the gradient's norm is from 1, squared, averaged over the batch.

    MXNet's amp_cast has no second derivative, so this part runs in FP32. The inner gradient is that of an unscaled
    value and needs no unscaling.
    """
    inputs = inputs.copy()
    inputs.attach_grad()
    with amp.autocast(enabled=False):
        gradient, = autograd.grad(critic(inputs), [inputs], create_graph=True, retain_graph=True)
        norm = (gradient ** 2).sum(axis=2).sqrt()
        return ((norm - 1) ** 2).mean()


def difference_penalty(critic: gluon.Block, inputs: nd.NDArray, step: float = 0.01) -> nd.NDArray:
    """Return the same, for a gradient's norm is the slope along the gradient.

    While weights change a little, the slope along the old direction changes as the norm does: held fixed, the direction
    gives the right derivative. Differences need FP32's resolution.
    """
    inputs = inputs.copy()
    inputs.attach_grad()
    with amp.autocast(enabled=False):
        with autograd.record():
            output = critic(inputs)
        gradient, = autograd.grad(output, [inputs], retain_graph=True)
        direction = nd.L2Normalization(gradient).detach()
        slope = (critic(inputs + step * direction) - critic(inputs - step * direction)) / (2 * step)
        return ((slope - 1) ** 2).mean()


def several_models(options: argparse.Namespace) -> None:
    """Two networks with a trainer each, and two losses that both of them contribute to."""
    nets = [make_model(options), make_model(options)]
    trainers = [make_trainer(net) for net in nets]
    shared = scaler()  # trainers whose parameters get gradients from the same loss share one
    amp.init()
    for trainer in trainers:
        amp.init_trainer(trainer, shared)

    for inputs, target in make_data(options):
        with autograd.record():
            first, second = (net(inputs) for net in nets)
            losses = [loss_function(2 * first + 3 * second, target), loss_function(3 * first - 5 * second, target)]
            with amp.scale_loss(losses, trainers) as scaled_losses:
                autograd.backward(scaled_losses)
        for trainer in trainers:
            trainer.step(len(inputs))
    print("Losses", *(f"{loss.mean().asscalar():.3f}" for loss in losses))


def several_contexts(options: argparse.Namespace) -> None:
    """A batch split over devices: one decision about the step, and one loss scale, for all of them."""
    ctx = [mx.gpu(i) for i in range(mx.context.num_gpus())] or [mx.cpu(0), mx.cpu(1)]
    ctx = ctx[:options.batch_size]  # a part of the batch for each
    net, single = make_model(options, ctx), make_model(options, ctx[:1])
    trainer, single_trainer = make_trainer(net), make_trainer(single)
    amp.init()
    amp.init_trainer(trainer, scaler())
    amp.init_trainer(single_trainer, scaler())

    for inputs, target in make_data(options):
        parts = zip(*(gluon.utils.split_and_load(each, ctx, even_split=False) for each in (inputs, target)))
        with autograd.record():
            losses = [loss_function(net(some), some_target) for some, some_target in parts]
            with amp.scale_loss(losses, trainer) as scaled_losses:
                autograd.backward(scaled_losses)
        trainer.step(len(inputs))  # adds the devices' gradients up first
        common.amp_step(single, single_trainer, inputs.as_in_context(ctx[0]), target.as_in_context(ctx[0]))
    devices = ", ".join(map(str, ctx))
    print(f"Weights trained on {devices} differ from those trained on one device by {difference(net, single, options)}")


class Scale(autograd.Function):
    """x * exp(y): a function with its own gradient, which must not run in low precision.

    Without the decorators it would get FP32, too; they say so, and let one ask for another type.
    """

    @amp.custom_fwd(cast_inputs="float32")
    def forward(self, x: nd.NDArray, y: nd.NDArray) -> nd.NDArray:
        factor = nd.exp(y)
        self.save_for_backward(x, factor)
        return x * factor

    @amp.custom_bwd
    def backward(self, gradient: nd.NDArray) -> tuple[nd.NDArray, nd.NDArray]:
        x, factor = self.saved_tensors
        return gradient * factor, gradient * x * factor


class Project(autograd.Function):
    """x times a matrix, written for low precision: the products run in it, forward and backward."""

    @amp.custom_fwd
    def forward(self, x: nd.NDArray, weight: nd.NDArray) -> nd.NDArray:
        self.save_for_backward(x, weight)
        return nd.FullyConnected(x, weight, no_bias=True, num_hidden=weight.shape[0])

    @amp.custom_bwd
    def backward(self, gradient: nd.NDArray) -> tuple[nd.NDArray, nd.NDArray]:
        x, weight = self.saved_tensors
        return (nd.FullyConnected(gradient, weight.T, no_bias=True, num_hidden=weight.shape[1]),
                nd.FullyConnected(gradient.T, x.T, no_bias=True, num_hidden=x.shape[1]))


@amp.float32_function
def log_of_sum(x: nd.NDArray) -> nd.NDArray:
    """A function of plain operators that is to run in FP32 wherever it is called."""
    return nd.log(nd.exp(x).sum(axis=1))


def custom_functions(options: argparse.Namespace) -> None:
    """Own functions next to the operators that AMP knows."""
    expected = _through_custom_functions(options)
    amp.init()
    found = _through_custom_functions(options)
    error = max(float(((a - b).norm() / a.norm()).asscalar()) for a, b in zip(expected, found))
    print(f"The loss and the gradients differ from FP32's by {error:.2%} at most")


def _through_custom_functions(options: argparse.Namespace) -> tuple[nd.NDArray, ...]:
    mx.random.seed(2)
    x, y = (nd.random.normal(scale=0.1, shape=(options.batch_size, options.size)) for _ in range(2))
    weight = nd.random.normal(scale=options.size ** -0.5, shape=(options.size, options.size))
    for each in (x, y, weight):
        each.attach_grad()
    with autograd.record():
        loss = log_of_sum(Scale()(Project()(x, weight), y))
    loss.backward()
    return loss, x.grad, y.grad, weight.grad


SECTIONS = {each.__name__: each for each in (
    accumulation, gradient_penalty, penalty_by_differences, several_models, several_contexts, custom_functions)}

if __name__ == "__main__":
    common.run(SECTIONS, __doc__)
