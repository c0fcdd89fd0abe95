"""The PyTorch recipe "Automatic Mixed Precision" in Gluon, section by section.

    python examples/torch_recipe/recipe.py                      # all sections
    python examples/torch_recipe/recipe.py clipping resuming    # some
    python examples/torch_recipe/recipe.py --kind dense --size 2048 --batch-size 512
"""
from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import gluon_amp as amp  # before mxnet

# isort: split
import common
from common import amp_step, difference, loss_function, make_data, make_model, make_trainer, measured, warm_up
from mxnet import autograd, gluon


def default_precision(options: argparse.Namespace) -> None:
    """Every operator runs in FP32."""
    net, data = make_model(options), make_data(options)
    trainer = make_trainer(net)

    warm_up(net, data)
    with measured("Default precision"):
        for _ in range(options.epochs):
            for inputs, target in data:
                with autograd.record():
                    loss = loss_function(net(inputs), target)
                loss.backward()
                trainer.step(len(inputs))


def autocast(options: argparse.Namespace) -> None:
    """A region whose operators run in low precision where that is fast and safe."""
    net, data = make_model(options), make_data(options)
    trainer = make_trainer(net)

    for inputs, target in data:
        with autograd.record(), amp.autocast():
            output = net(inputs)
            loss = loss_function(output, target)
            inside = amp.active_dtype()
        # The region ends before backward: gradients are computed in the types of the forward pass anyway.
        loss.backward()
        trainer.step(len(inputs))

    print(f"The layers ran in {inside or 'float32, for this machine has nothing faster'}")
    # Low precision stays inside of blocks: what a network returns is FP32, as without AMP.
    print(f"The network's output is {output.dtype.__name__}, the loss {loss.dtype.__name__}")


def scaler(options: argparse.Namespace) -> None:
    """Loss scaling on its own: gradients too small for float16 do not vanish."""
    plain, net, data = *(make_model(options) for _ in range(2)), make_data(options)
    plain_trainer, trainer = make_trainer(plain), make_trainer(net)
    # One scaler for the whole run; left out, init_trainer makes the one that fits the type: dynamic for float16, and a
    # scale of 1 for bfloat16, whose range is FP32's.
    loss_scaler = amp.DynamicLossScaler(init_scale=2.0 ** 10)
    amp.init()
    amp.init_trainer(trainer, loss_scaler)

    for inputs, target in data:
        with autograd.record():
            with amp.autocast(enabled=False):
                loss, plain_loss = (loss_function(each(inputs), target) for each in (net, plain))
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward([scaled_loss, plain_loss])
        # Divides the scale out, updates unless a gradient is infinite or NaN, and adapts the scale.
        trainer.step(len(inputs))
        plain_trainer.step(len(inputs))

    print(f"Loss scale {loss_scaler.loss_scale:g}, {loss_scaler.num_skipped} steps skipped")
    print(f"Weights differ from those trained without by {difference(net, plain, options)}")


def all_together(options: argparse.Namespace, use_amp: bool = True) -> None:
    """Automatic mixed precision; `enabled` switches it off without if and else."""
    net, data = make_model(options), make_data(options)
    trainer = make_trainer(net)
    if use_amp:
        amp.init()  # the whole script runs under autocast from here on
        amp.init_trainer(trainer)

    warm_up(net, data)
    with measured("Mixed precision" if use_amp else "Mixed precision, switched off"):
        for _ in range(options.epochs):
            for inputs, target in data:
                with autograd.record():
                    with amp.autocast(enabled=use_amp):
                        loss = loss_function(net(inputs), target)
                    with amp.scale_loss(loss, trainer, enabled=use_amp) as scaled_loss:
                        autograd.backward(scaled_loss)
                trainer.step(len(inputs))


def switched_off(options: argparse.Namespace) -> None:
    """The same loop in default precision."""
    all_together(options, use_amp=False)


def clipping(options: argparse.Namespace) -> None:
    """Gradients carry the loss scale: unscale them before reading or changing them."""
    net, data = make_model(options), make_data(options)
    trainer = make_trainer(net)
    amp.init()
    amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=2.0 ** 10))
    parameters = net.collect_params().values()

    for inputs, target in data:
        with autograd.record():
            loss = loss_function(net(inputs), target)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.allreduce_grads()
        amp.unscale(trainer)
        # Clips as it would without AMP. amp.clip_global_norm(trainer, max_norm) is shorter and needs no unscale.
        norm = gluon.utils.clip_global_norm([each.grad() for each in parameters], max_norm=0.1 * len(inputs))
        trainer.update(len(inputs))

    print(f"The last gradient had the norm {norm / len(inputs):.4g} before clipping to 0.1")


def resuming(options: argparse.Namespace) -> None:
    """Weights, the optimizer's states and the loss scaler's: with all three a run continues bit for bit."""
    net, data = make_model(options), make_data(options)
    trainer = make_trainer(net)
    amp.init()
    amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=2.0 ** 10, growth_interval=2))

    with tempfile.TemporaryDirectory() as directory:
        for number, (inputs, target) in enumerate(data):
            amp_step(net, trainer, inputs, target)
            if number == 0:  # after a step, as here, or before a forward pass
                net.save_parameters(f"{directory}/net.params")
                amp.save_states(trainer, f"{directory}/trainer.states")  # with the scaler
        resumed = _resumed(options, Path(directory), data[1:])
    print(f"Weights of the resumed run differ from the uninterrupted one's by {difference(resumed, net, options)}")


def _resumed(options: argparse.Namespace, directory: Path, data: list[common.Batch]) -> gluon.Block:
    net = make_model(options)
    trainer = make_trainer(net)
    amp.init_trainer(trainer, amp.DynamicLossScaler(growth_interval=2))
    net.load_parameters(str(directory / "net.params"))
    # A file of Trainer.save_states, from a run without AMP, loads as well: the scaler then starts afresh. A trainer
    # without a scaler reads a file with one, and ignores it.
    amp.load_states(trainer, directory / "trainer.states")
    for inputs, target in data:
        amp_step(net, trainer, inputs, target)
    return net


def inference(options: argparse.Namespace) -> None:
    """autocast alone: there is no gradient to scale."""
    net, (inputs, _) = make_model(options), make_data(options)[0]
    expected = net(inputs)
    with amp.autocast():
        output = net(inputs)
    error = (output - expected).norm() / expected.norm()
    print(f"Outputs differ from FP32's by {error.asscalar():.2%}")


SECTIONS = {each.__name__: each for each in (
    default_precision, autocast, scaler, all_together, switched_off, clipping, resuming, inference)}

if __name__ == "__main__":
    common.run(SECTIONS, __doc__)
