"""Train a network on ImageNet, in FP32 or mixed precision; `python examples/imagenet/main_amp.py --help` tells how."""
from __future__ import annotations

import argparse
import os
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import gluon_amp as amp  # before mxnet

# isort: split
import checkpoints
import command_line
import mxnet as mx
from classifier import make_network
from epochs import average_statistics, train_epoch, train_step, validate
from image_data import Data, UnreadableImage, open_data
from mxnet import gluon

WARM_UP_STEPS = 2  # before profiling


def main() -> None:
    args = command_line.parse()
    if args.deterministic:
        os.environ.update(MXNET_ENFORCE_DETERMINISM="1", MXNET_CUDNN_AUTOTUNE_DEFAULT="0")
    if args.prof:
        os.environ["MXNET_EXEC_BULK_EXEC_TRAIN"] = "0"  # operators run one by one: else many share a line of the table
    ctx = connect()
    try:
        latest(args).parent.mkdir(parents=True, exist_ok=True)
        progress = begin(args)
        data = open_data(args)
        net, trainer = prepare(args, data, ctx)
        if args.resume:
            checkpoints.load(Path(args.resume), net, trainer, ctx)
    except (amp.AmpError, OSError, ValueError) as error:  # what the command line asks for cannot be had
        raise SystemExit(f"main_amp.py: error: {error}") from error
    if args.resume:
        say(f"Resuming from {args.resume}, after {progress['epoch']} of {args.epochs} epochs")
    try:
        work(args, net, trainer, data, ctx, progress)
    except UnreadableImage as error:
        raise SystemExit(f"main_amp.py: error: {error}") from error


def work(args: argparse.Namespace, net: gluon.Block, trainer: gluon.Trainer, data: Data, ctx: mx.Context,
         progress: dict[str, Any]) -> None:
    """Do what the command line asks for."""
    if args.evaluate:
        validate(args, net, data, ctx)
    elif args.prof:
        profile(args, net, trainer, data, ctx)
    else:
        train(args, net, trainer, data, ctx, progress)


def say(text: str) -> None:
    """Print from the first process."""
    if amp.parallel.rank() == 0:
        print(text, flush=True)


def connect() -> mx.Context:
    """Find the other processes, if there are any, and this one's device."""
    if "HOROVOD_RANK" in os.environ:
        import horovod.mxnet as hvd
        hvd.init()
    gpus = mx.context.num_gpus()
    return mx.gpu(amp.parallel.rank() % gpus) if gpus else mx.cpu()


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """Return how far training has come, and settle on a seed: the checkpoint's, or the first process's."""
    progress = {"epoch": 0, "best": 0.0, "arch": args.arch}
    if args.resume == "auto":
        args.resume = latest(args) if latest(args).exists() else None
    if args.resume:
        progress = checkpoints.read_progress(Path(args.resume), args.arch)
        args.seed = progress["seed"] if args.seed is None else args.seed
    if args.start_epoch is not None:
        progress["epoch"] = args.start_epoch
    progress["seed"] = args.seed = agreed(command_line.random_seed() if args.seed is None else args.seed)
    return progress


def agreed(seed: int) -> int:
    """Return the first process's seed in all of them."""
    return int(amp.parallel.allreduce(mx.nd.array([seed if amp.parallel.rank() == 0 else 0])).asscalar())


def prepare(args: argparse.Namespace, data: Data, ctx: mx.Context) -> tuple[gluon.Block, gluon.Trainer]:
    """Return the network and its trainer, in the precision asked for."""
    net = make_network(args, data.classes, ctx)
    if args.sync_bn:
        net = amp.convert_sync_batchnorm(net)  # before initialize
    # Adds the gradients of all processes up; the batch that trainer.step is told is that of all of them.
    kvstore = amp.parallel.kvstore() if amp.parallel.size() > 1 else None
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": args.momentum, "wd": args.wd}, kvstore=kvstore)
    return amp.initialize(net, trainer, args.opt_level, keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                          loss_scale=args.loss_scale, verbosity=int(amp.parallel.rank() == 0))


def train(args: argparse.Namespace, net: gluon.Block, trainer: gluon.Trainer, data: Data, ctx: mx.Context,
          progress: dict[str, Any]) -> None:
    """Train epoch by epoch, with a checkpoint after each."""
    if progress["epoch"] >= args.epochs:
        say(f"All {args.epochs} epochs are done: nothing is left to train. Give more with --epochs")
    for epoch in range(progress["epoch"], args.epochs):
        train_epoch(args, net, trainer, data, epoch, ctx)
        average_statistics(net)
        top1 = validate(args, net, data, ctx).top1
        is_best = top1 > progress["best"]
        progress.update(epoch=epoch + 1, best=max(top1, progress["best"]))
        if amp.parallel.rank() == 0:
            checkpoints.save(latest(args), net, trainer, progress)
            if is_best:
                checkpoints.copy(latest(args), latest(args).with_name("best.zip"))


def latest(args: argparse.Namespace) -> Path:
    """Return where the latest checkpoint is, or will be."""
    return Path(args.output) / "checkpoint.zip"


def profile(args: argparse.Namespace, net: gluon.Block, trainer: gluon.Trainer, data: Data, ctx: mx.Context) -> None:
    """Print the time of every operator over some steps, and write a timeline for chrome://tracing."""
    mx.profiler.set_config(profile_symbolic=True, profile_imperative=True, aggregate_stats=True,
                           filename=str(latest(args).with_name(f"profile{amp.parallel.rank() or ''}.json")))
    batches = chain.from_iterable(repeat(data.train))  # over and over, if there are few
    for step, batch in enumerate(islice(batches, WARM_UP_STEPS + args.prof)):
        if step == WARM_UP_STEPS:
            mx.nd.waitall()
            mx.profiler.set_state("run")
        train_step(net, trainer, *(part.as_in_context(ctx) for part in batch))
    mx.nd.waitall()
    mx.profiler.set_state("stop")
    print(mx.profiler.dumps())
    mx.profiler.dump()


if __name__ == "__main__":
    main()
