"""What all sections share: a simple network, data, one training step, and a stopwatch."""
from __future__ import annotations

import argparse
import gc
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Dict, Iterator, Tuple

import gluon_amp as amp  # before mxnet

# isort: split
import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

Batch = Tuple[nd.NDArray, nd.NDArray]
Sections = Dict[str, Callable[[argparse.Namespace], None]]
loss_function = gluon.loss.L2Loss()

KINDS = {"conv": lambda size: nn.Conv2D(size, 3, padding=1, in_channels=size),
         "dense": lambda size: nn.Dense(size, in_units=size)}
SHAPES = {"conv": lambda size: (size, 32, 32), "dense": lambda size: (size,)}


def make_model(options: argparse.Namespace, ctx: list[mx.Context] | None = None) -> nn.HybridSequential:
    """Make layers with ReLUs in between, always with the same first weights."""
    # Optimizer states are saved in the order of the parameters' names. With a prefix of its own a network made anew has
    # the same names; without, conv9 and conv10 come in another order than conv11 and conv12.
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(options.layers - 1):
            net.add(KINDS[options.kind](options.size), nn.Activation("relu"))
        net.add(KINDS[options.kind](options.size))
    mx.random.seed(0)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def make_trainer(net: gluon.Block) -> gluon.Trainer:
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})


def make_data(options: argparse.Namespace) -> list[Batch]:
    """Make batches in FP32. Inputs never have to be cast by hand."""
    mx.random.seed(1)
    shape = (options.batch_size, *SHAPES[options.kind](options.size))
    return [(nd.random.normal(shape=shape), nd.random.normal(shape=shape)) for _ in range(options.batches)]


def amp_step(net: gluon.Block, trainer: gluon.Trainer, data: nd.NDArray, target: nd.NDArray) -> nd.NDArray:
    """Train on one batch: forward under autocast, backward of the scaled loss, update."""
    with autograd.record():
        with amp.autocast():
            loss = loss_function(net(data), target)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(len(data))
    return loss


def weights_of(net: gluon.Block) -> nd.NDArray:
    """Join all weights into one vector, to compare networks."""
    return nd.concat(*(value.data().reshape(-1) for value in net.collect_params().values()), dim=0)


def difference(one: gluon.Block, other: gluon.Block, options: argparse.Namespace) -> str:
    """Say how far the weights of two networks are apart, against how far training has moved them."""
    first = weights_of(make_model(options))
    trained = weights_of(one).as_in_context(first.context)
    apart = (trained - weights_of(other).as_in_context(first.context)).norm() / (trained - first).norm()
    return f"{apart.asscalar():.2%} of what training changed" if apart.asscalar() else "nothing"


def warm_up(net: gluon.Block, data: list[Batch]) -> None:
    """Run a batch forward and backward before time is measured: the first call builds the graph."""
    inputs, target = data[0]
    with autograd.record():
        loss = loss_function(net(inputs), target)
    loss.backward()


@contextmanager
def measured(message: str) -> Iterator[None]:
    """Print how long the body takes, and the most memory that the process holds meanwhile (on Linux)."""
    gc.collect()
    mx.nd.waitall()  # MXNet computes in the background: wait before looking at the clock
    _forget_peak_memory()
    start = time.perf_counter()
    yield
    mx.nd.waitall()
    print(f"{message}: {time.perf_counter() - start:.3f} s{_peak_memory()}")


def _forget_peak_memory() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> str:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return ""
    kilobytes = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    return f", at most {kilobytes / 1024:.0f} MB in memory" if kilobytes else ""


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, received {number}")
    return number


def run(sections: Sections, description: str | None) -> None:
    """Run the sections named on the command line, or all, each from a clean state."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"one of {', '.join(sections)} (default: all)")
    parser.add_argument("--kind", choices=KINDS, default="conv", help="the kind of layers (default: %(default)s)")
    parser.add_argument("--size", type=at_least_one, default=128, help="channels, or units, of every layer; try "
                        "multiples of 16, and others (default: %(default)s)")
    parser.add_argument("--layers", type=at_least_one, default=3, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=at_least_one, default=32, help="(default: %(default)s)")
    parser.add_argument("--batches", type=at_least_one, default=5, help="batches an epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=at_least_one, default=2,
                        help="epochs where time is measured (default: %(default)s)")
    options = parser.parse_args()
    unknown = [name for name in options.sections if name not in sections]
    if unknown:
        parser.error(f"expected sections out of {', '.join(sections)}, received {', '.join(unknown)}")
    for name in options.sections or sections:
        print(f"\n{name}\n{'-' * len(name)}")
        sections[name](options)
        amp.deinit()
