"""One epoch of training, validation, and what they measure."""
from __future__ import annotations

import argparse
import time
from itertools import islice
from typing import NamedTuple

import gluon_amp as amp  # before mxnet

# isort: split
import mxnet as mx
from image_data import Data
from mxnet import autograd, gluon, nd

loss_function = gluon.loss.SoftmaxCrossEntropyLoss()


class Scores(NamedTuple):
    """Means over the images of all processes."""

    loss: float
    top1: float
    top5: float


class Meter:
    """Adds up losses and hits where they are computed: only looking at them waits for MXNet."""

    def __init__(self, ctx: mx.Context):
        self.ctx = ctx
        self.reset()

    def reset(self) -> None:
        self.totals = nd.zeros(4, self.ctx)
        self.start = time.perf_counter()

    def update(self, loss: nd.NDArray, output: nd.NDArray, label: nd.NDArray) -> None:
        best = nd.topk(output, k=min(5, output.shape[1]))
        hits = nd.broadcast_equal(best, label.expand_dims(1))
        self.totals += nd.concat(nd.array([len(label)], self.ctx), loss.sum(), hits[:, :1].sum(), hits.sum(), dim=0)

    def read(self) -> tuple[Scores, float]:
        """Return the scores, and how many images all processes took a second; every process must call it."""
        count, loss, top1, top5 = amp.parallel.allreduce(self.totals).asnumpy().tolist()
        scores = Scores(loss / count, 100 * top1 / count, 100 * top5 / count)
        return scores, count / (time.perf_counter() - self.start)


def learning_rate(args: argparse.Namespace, epoch: int, step: int, steps: int) -> float:
    """Return the rate of a step: it grows to its value, then falls tenfold at each of ``lr_steps``."""
    images = args.batch_size * amp.parallel.size()
    rate = args.lr * images / 256 * 0.1 ** sum(epoch >= each for each in args.lr_steps)
    warmup = args.warmup_epochs * steps
    return rate * min(1.0, (1 + step + epoch * steps) / warmup) if warmup else rate


def train_step(net: gluon.Block, trainer: gluon.Trainer, images: nd.NDArray, label: nd.NDArray) -> tuple:
    """Train on a batch; return the losses and the outputs."""
    with autograd.record():
        output = net(images)
        loss = loss_function(output, label)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(len(images) * amp.parallel.size())
    return loss, output


def train_epoch(args: argparse.Namespace, net: gluon.Block, trainer: gluon.Trainer, data: Data, epoch: int,
                ctx: mx.Context) -> None:
    """Train for an epoch, printing now and then."""
    mx.random.seed(args.seed + 1 + epoch * amp.parallel.size() + amp.parallel.rank())  # dropout
    data.set_epoch(epoch)
    meter = Meter(ctx)
    for step, batch in enumerate(islice(data.train, data.steps)):
        trainer.set_learning_rate(learning_rate(args, epoch, step, data.steps))
        images, label = (part.as_in_context(ctx) for part in batch)
        loss, output = train_step(net, trainer, images, label)
        meter.update(loss, output, label)
        if (step + 1) % args.print_freq == 0 or step + 1 == data.steps:
            place = f"Epoch: [{epoch}][{step + 1}/{data.steps}]  lr {trainer.learning_rate:.4g}"
            report(args, place, meter)
            meter.reset()


def validate(args: argparse.Namespace, net: gluon.Block, data: Data, ctx: mx.Context) -> Scores:
    """Measure loss and accuracy on the images of all processes."""
    meter = Meter(ctx)
    for batch in islice(data.val, data.steps if args.synthetic else None):
        images, label = (part.as_in_context(ctx) for part in batch)
        output = net(images)
        meter.update(loss_function(output, label), output, label)
    return report(args, "Validation", meter)


def report(args: argparse.Namespace, place: str, meter: Meter) -> Scores:
    """Print the scores once, from the first process."""
    scores, speed = meter.read()
    if amp.parallel.rank() == 0:
        pace = "" if args.deterministic else f"  {speed:.1f} images/s"
        print(f"{place}  loss {scores.loss:.10g}  Prec@1 {scores.top1:.3f}  Prec@5 {scores.top5:.3f}{pace}", flush=True)
    return scores


def average_statistics(net: gluon.Block) -> None:
    """Give all processes the mean of their running statistics, which BatchNorm gathers in each on its own."""
    if amp.parallel.size() == 1:
        return
    for parameter in net.collect_params().values():
        if parameter.grad_req == "null":
            parameter.set_data(amp.parallel.allreduce(parameter.data(), average=True))
