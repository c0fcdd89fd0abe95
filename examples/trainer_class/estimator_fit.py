"""Train on handwritten digits with `gluon.contrib.estimator`: one event handler adds mixed precision.

    python examples/trainer_class/estimator_fit.py
    python examples/trainer_class/estimator_fit.py --no-amp
    python examples/trainer_class/estimator_fit.py --checkpoints DIRECTORY    # saves there, and resumes from there
"""
from __future__ import annotations

import argparse
from pathlib import Path

import gluon_amp as amp  # before mxnet

# isort: split
import mxnet as mx
from digits import loaders, network, parser
from mxnet import gluon
from mxnet.gluon.contrib.estimator import CheckpointHandler, Estimator
from mxnet.gluon.contrib.estimator.event_handler import EventHandler


def handlers(args: argparse.Namespace) -> list[EventHandler]:
    """Return the event handlers; the first makes `fit` train in mixed precision."""
    found: list[EventHandler] = [] if args.no_amp else [amp.AmpHandler(loss_scaler="dynamic", max_norm=5.0)]
    if args.checkpoints:
        kind = CheckpointHandler if args.no_amp else amp.AmpCheckpointHandler  # the latter keeps the loss scale, too
        found.append(kind(args.checkpoints, "digits", resume_from_checkpoint=True))
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--checkpoints", metavar="DIRECTORY", help="save after every epoch, and resume")
    args = options.parse_args()
    if args.checkpoints and Path(args.checkpoints).is_file():
        options.error(f"expected a directory, received --checkpoints {args.checkpoints}, which is a file")
    train_loader, validation_loader = loaders(args.batch_size)
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": args.lr, "momentum": 0.9})

    estimator = Estimator(net, gluon.loss.SoftmaxCrossEntropyLoss(), train_metrics=mx.metric.Accuracy(),
                          trainer=trainer, context=mx.cpu())
    estimator.fit(train_loader, val_data=validation_loader, epochs=args.epochs, event_handlers=handlers(args))


if __name__ == "__main__":
    main()
