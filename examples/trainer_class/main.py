"""Train on handwritten digits, with a loss scaler that is made here and handed to the class that trains.

    python examples/trainer_class/main.py
    python examples/trainer_class/main.py --no-amp
"""
from __future__ import annotations

import gluon_amp as amp  # before mxnet

# isort: split
from digits import loaders, network, parser
from mxnet import gluon
from train_validation import TrainValidate


def main() -> None:
    args = parser(__doc__).parse_args()
    train_loader, validation_loader = loaders(args.batch_size)
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": args.lr, "momentum": 0.9})

    scaler = amp.DynamicLossScaler(init_scale=2.0 ** 10)  # one for the whole run
    traval = TrainValidate(net, trainer, gluon.loss.SoftmaxCrossEntropyLoss(), scaler, train_loader, validation_loader,
                           use_amp=not args.no_amp)
    for epoch in range(args.epochs):
        loss = traval.train()
        scaling = "" if args.no_amp else f", loss scale {scaler.loss_scale:g}, {scaler.num_skipped} steps skipped"
        print(f"Epoch {epoch}: loss {loss:.4f}, accuracy {traval.validate():.4f}{scaling}")


if __name__ == "__main__":
    main()
