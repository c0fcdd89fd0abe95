"""The command line of main_amp.py."""
from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Callable, Sequence

EPOCHS, SYNTHETIC_EPOCHS = 90, 1
SEEDS = 2 ** 24  # FP32, in which processes tell each other theirs, holds them exactly

# Options, the condition on their values, and how it is worded.
_LIMITS: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (("batch_size", "image_size", "print_freq", "epochs", "steps", "prof", "classes"), lambda value: value >= 1,
     "a number of at least 1"),
    (("workers", "start_epoch", "warmup_epochs", "wd"), lambda value: value >= 0, "a number of at least 0"),
    (("lr",), lambda value: value > 0, "a number above 0"),
    (("momentum",), lambda value: 0 <= value < 1, "a number from 0 to below 1"),
    (("min_area",), lambda value: 0 < value <= 1, "a number above 0, and 1 at most"),
    (("seed",), lambda value: 0 <= value < SEEDS, f"a seed from 0 to {SEEDS - 1}"),
)

DESCRIPTION = """Train a network of MXNet's or GluonCV's zoo on ImageNet, in FP32 or mixed precision.

    python examples/imagenet/main_amp.py -a resnet50_v1 --opt-level O1 /data/imagenet
    horovodrun -np 2 python examples/imagenet/main_amp.py -a resnet50_v1 --opt-level O1 /data/imagenet
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, complete and checked."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    for add in (_add_data, _add_network, _add_optimization, _add_precision, _add_run):
        add(parser)
    args = parser.parse_args(arguments)
    problem = next(filter(None, (_problem_of_paths(args), _problem_of_numbers(args))), None)
    if problem:
        parser.error(problem)
    if args.epochs is None:
        args.epochs = SYNTHETIC_EPOCHS if args.synthetic else EPOCHS
    if args.deterministic and args.seed is None:
        args.seed = 0
    return args


def _problem_of_paths(args: argparse.Namespace) -> str | None:
    if bool(args.data) == args.synthetic:
        received = f"{args.data} and --synthetic" if args.data else "neither"
        return f"expected a directory with train and val, or --synthetic, received {received}"
    if args.data and not Path(args.data).is_dir():
        return f"expected a directory with train and val, received {args.data}, which is not a directory"
    files = {"--resume": None if args.resume == "auto" else args.resume,
             "--pretrained": None if args.pretrained is True else args.pretrained}
    for option, path in files.items():
        if path is not None and not Path(path).is_file():
            kinds = "a checkpoint, or auto" if option == "--resume" else "a file of weights"
            return f"expected {kinds}, received {option} {path}, which is not a file"
    return None


def _problem_of_numbers(args: argparse.Namespace) -> str | None:
    given = {name: value for name, value in vars(args).items() if value is not None}
    for names, holds, expected in _LIMITS:
        for name in names:
            if name in given and not holds(given[name]):
                return f"expected {expected}, received --{name.replace('_', '-')} {given[name]}"
    return None


def random_seed() -> int:
    """Draw a seed."""
    return random.randrange(SEEDS)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("data", nargs="?", metavar="DIR",
                       help="holds train/ and val/ with a folder of images for each class, or train.rec and val.rec "
                       "with their .idx files")
    group.add_argument("--synthetic", action="store_true", help="random images made once: training without its input")
    group.add_argument("-j", "--workers", type=int, default=4, help="processes that load images (default: %(default)s)")
    group.add_argument("-b", "--batch-size", type=int, default=64, help="of each process (default: %(default)s)")
    group.add_argument("--image-size", type=int, default=224, metavar="PIXELS", help="(default: %(default)s)")
    group.add_argument("--min-area", type=float, default=0.08, metavar="PART",
                       help="the least part of an image that a random crop keeps (default: %(default)s)")
    group.add_argument("--no-flip", action="store_true", help="do not mirror images at random")
    group.add_argument("--classes", type=int, help="(default: the folders of train/, otherwise 1000)")


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("-a", "--arch", default="resnet50_v1", help="a network of MXNet's or GluonCV's zoo (default: "
                       "%(default)s)")
    group.add_argument("--pretrained", nargs="?", const=True, metavar="FILE",
                       help="start from the zoo's weights, or from FILE")
    group.add_argument("--sync_bn", "--sync-bn", action="store_true", help="BatchNorm over all processes")


def _add_optimization(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimization")
    group.add_argument("--epochs", type=int, help=f"(default: {EPOCHS}, or {SYNTHETIC_EPOCHS} of --synthetic)")
    group.add_argument("--start-epoch", type=int, help="number of the first (default: 0, or where --resume goes on)")
    group.add_argument("--lr", type=float, default=0.1, metavar="RATE",
                       help="learning rate for 256 images a step; scaled by the images that all processes take a step "
                       "(default: %(default)s)")
    group.add_argument("--lr-steps", type=int, nargs="*", default=[30, 60, 80], metavar="EPOCH",
                       help="divide the rate by 10 at these epochs (default: 30 60 80)")
    group.add_argument("--warmup-epochs", type=int, default=5, help="the rate grows from 0 (default: %(default)s)")
    group.add_argument("--momentum", type=float, default=0.9, help="(default: %(default)s)")
    group.add_argument("--wd", "--weight-decay", type=float, default=1e-4, help="(default: %(default)s)")


def _add_precision(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("precision, handed through to amp.initialize")
    group.add_argument("--opt-level", type=str.upper, choices=("O0", "O1", "O2", "O3"), default="O1",
                       help="(default: %(default)s)")
    group.add_argument("--keep-batchnorm-fp32", type=str.capitalize, choices=("True", "False"),
                       help="for O2, in which it is True in any case")
    group.add_argument("--loss-scale", type=_loss_scale, metavar="SCALE", help="a number above 0, or dynamic")


def _loss_scale(text: str) -> str:
    try:
        valid = text == "dynamic" or 0 < float(text) < float("inf")
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"expected a number above 0, or dynamic, received {text}")
    return text


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("-p", "--print-freq", type=int, default=10, metavar="STEPS", help="(default: %(default)s)")
    group.add_argument("--output", "--checkpoints", default="main_amp_output", metavar="DIR",
                       help="where checkpoint.zip and best.zip are written after every epoch, and profile.json "
                       "(default: %(default)s)")
    group.add_argument("--resume", metavar="FILE", help="go on from a checkpoint; auto: from the "
                       "latest of --output, if there is one")
    group.add_argument("-e", "--evaluate", action="store_true", help="measure the accuracy on val only")
    group.add_argument("--steps", type=int, help="end every epoch after so many steps (default: all, or 20 of "
                       "--synthetic)")
    group.add_argument("--prof", type=int, metavar="STEPS", help="profile so many steps, and end")
    group.add_argument("--seed", type=int, help="of weights, order and augmentation (default: any)")
    group.add_argument("--deterministic", action="store_true",
                       help="the same output, bit for bit, in every run: a fixed seed, no algorithms chosen by their "
                       "speed, and no times in the output")
