"""``gluon-amp compare``: an FP32 network against its conversion, on images or random data."""
from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np

from .._mxnet.symbols import first_line
from .._mxnet.timing import interleaved
from ..convert.model_files import load_model
from ..dtypes import FLOAT32
from ..errors import GraphError
from . import models
from .convert import converted
from .words import counted, print_facts, write_json

HELP = "compare an FP32 network with its conversion: errors, top-1 agreement, speed"

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp"}
# Of ImageNet, which the networks of the model zoos were trained on.
_MEAN, _STD = "0.485,0.456,0.406", "0.229,0.224,0.225"
_NOTHING_IN_COMMON = 0.5  # a relative error from which on two networks do not compute the same
_NOTICEABLE = 0.02  # parts of a time that two measurements differ by anyway
TOO_LARGE = 1  # the exit code for an error above --max-error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    models.add_file_arguments(parser)
    models.add_conversion_arguments(parser)
    parser.add_argument("--converted", nargs=2, metavar=("SYMBOL.json", "PARAMS"),
                        help="the converted network (default: convert now)")
    parser.add_argument("--images", metavar="DIR", help="a directory of images, searched to any depth (default: random "
                                                        "data)")
    parser.add_argument("--mean", type=_numbers, default=_MEAN, help=f"mean of the colour channels (default: {_MEAN})")
    parser.add_argument("--std", type=_numbers, default=_STD, help=f"and their deviation (default: {_STD})")
    parser.add_argument("--batches", type=models.count, default=8, metavar="N",
                        help="how many batches at most (default: %(default)s)")
    parser.add_argument("--rounds", type=models.count, default=10, metavar="N",
                        help="how many timed rounds (default: %(default)s)")
    parser.add_argument("--max-error", type=_positive, metavar="E",
                        help="end with exit status 1 where the relative error of the outputs is larger, as in 0.01")


def run(args: argparse.Namespace) -> int:
    """Compare, and print the figures."""
    model = load_model(args.symbol, args.params)
    models.refuse_converted(args, model)
    shapes = models.required_shapes(args, model)
    changed = _converted(args, model)
    batches = _batches(args, shapes)
    files = [args.symbol, *(args.converted[:1] if args.converted else [])]
    with models.named_errors(*files):
        before, after = models.runnable(model, list(shapes)), models.runnable(changed, list(shapes))
        errors = _errors(before, after, batches)
    runs = [partial(_outputs, block, batches[0]) for block in (before, after)]
    slow, fast = interleaved(runs, args.rounds, warm_up=0)
    record = models.record_of(changed)
    figures = {"fp32_type": FLOAT32, "converted_type": record.types if record else "unknown",
               "conversion": record.summary() if record else "not converted by gluon_amp",
               **errors, "fp32_ms": slow, "converted_ms": fast, "speed_ratio": slow / fast}
    failed = args.max_error is not None and not figures["relative_error"] <= args.max_error
    if write_json({**figures, "max_error_exceeded": failed}, args.json):
        _print(args, figures, shapes)
    return TOO_LARGE if failed else 0


def _print(args: argparse.Namespace, figures: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    new = figures["converted_type"] if args.converted is None else args.converted[0]
    data = " and ".join(f"{name} of shape {shape}" for name, shape in shapes.items())
    agreement = figures["top1_agreement"]
    print_facts([
        ("networks", f"{args.symbol} in float32, and {new}"),
        ("data", f"{counted(figures['batches'], 'batch')} of "
                 f"{'images' if args.images else 'random numbers'}, {data}"),
        ("relative error", f"{figures['relative_error']:.2%} of the outputs (2-norm)"),
        ("largest difference", f"{figures['max_error']:.3g}, where the largest output is "
                               f"{figures['largest_output']:.3g}"),
        ("mean difference", f"{figures['mean_error']:.3g}"),
        *([] if agreement is None else [("same class", f"{agreement:.1%} of the samples (top-1)")]),
        ("time of a batch", f"{figures['fp32_ms']:.3g} ms in float32, {figures['converted_ms']:.3g} ms converted "
                            f"(median of {args.rounds})"),
        ("verdict", _verdict(args, figures)),
    ])


def _verdict(args: argparse.Namespace, figures: dict[str, Any]) -> str:
    ratio, error = figures["speed_ratio"], figures["relative_error"]
    speed = (f"{ratio:.2f} times as fast" if ratio > 1 + _NOTICEABLE else
             f"slower than float32: {ratio:.2f} times as fast" if ratio < 1 - _NOTICEABLE else "as fast as float32")
    told = [f"The converted network is {speed}"]
    if not error < _NOTHING_IN_COMMON:
        told.append("Its outputs have little to do with those in float32: are the files of the same network?")
    if args.max_error is not None:
        told.append(f"Its error is {'within' if error <= args.max_error else 'above'} --max-error "
                    f"{args.max_error:g}")
    return ". ".join(told)


def _converted(args: argparse.Namespace, model: models.Model) -> models.Model:
    """Return the converted network: from its files, which must fit the first network, or made now."""
    if args.converted is None:
        return converted(args, model)
    other = load_model(*args.converted)
    names, others = set(model[1]) | set(model[2]), set(other[1]) | set(other[2])
    alike = models.inputs_of(model) == models.inputs_of(other)
    if not alike or len(model[0].list_outputs()) != len(other[0].list_outputs()) or (
            names and others and not names & others):
        raise GraphError(f"{args.converted[0]} is not made from {args.symbol}: expected the same inputs and outputs "
                         "and some of the same parameters")
    return other


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number, 0 or above, received {text!r}")
    return value


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, received {text!r}") from None


def _batches(args: argparse.Namespace, shapes: dict[str, tuple[int, ...]]) -> list[list[mx.nd.NDArray]]:
    if args.images is not None:
        return list(_image_batches(args, shapes))
    mx.random.seed(0)
    return [[mx.nd.random.uniform(shape=shape) for shape in shapes.values()] for _ in range(args.batches)]


def _image_batches(args: argparse.Namespace, shapes: dict[str, tuple[int, ...]]) -> Iterator[list[mx.nd.NDArray]]:
    if len(shapes) != 1 or len(next(iter(shapes.values()))) != 4:
        raise GraphError("--images needs a network with one input of 4 dimensions (batch, colours, height, width)")
    size, *sample = next(iter(shapes.values()))
    for option, values in (("--mean", args.mean), ("--std", args.std)):
        if len(values) != 1 and len(values) < sample[0]:
            raise GraphError(f"{option}: expected 1 number or {sample[0]}, received {len(values)}")
    files = _image_files(args.images)[:args.batches * size]
    if len(files) < size:
        raise GraphError(f"too few images: {args.images} holds {len(files)}, a batch takes {size}. Give --data a "
                         "smaller batch")
    for start in range(0, len(files) - size + 1, size):
        yield [mx.nd.stack(*(_image(path, sample, args) for path in files[start:start + size]))]


def _image_files(folder: str) -> list[Path]:
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"--images: expected a directory, and there is none at {folder!r}")
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not files:
        raise FileNotFoundError(f"{folder}: no images ({', '.join(sorted(_SUFFIXES))}) in it")
    return files


def _image(path: Path, sample: Sequence[int], args: argparse.Namespace) -> mx.nd.NDArray:
    colours, height, width = sample
    try:
        pixels = mx.image.imread(str(path), flag=int(colours == 3))
        pixels = mx.image.imresize(pixels, width, height).astype("float32").transpose((2, 0, 1)) / 255
        pixels.wait_to_read()
    except mx.MXNetError as error:
        raise GraphError(f"{path}: expected an image, found something else ({first_line(error)})") from error
    mean, std = (mx.nd.array(values[:colours]).reshape((-1, 1, 1)) for values in (args.mean, args.std))
    return (pixels - mean) / std


def _outputs(block: Any, batch: Sequence[mx.nd.NDArray]) -> list[np.ndarray]:
    outputs = block(*batch)
    return [array.asnumpy() for array in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]


def _errors(before: Any, after: Any, batches: Sequence[Sequence[mx.nd.NDArray]]) -> dict[str, Any]:
    """Compare all outputs; the class of the highest score where the first output is a matrix of scores."""
    largest = total = scale = squares = norm = 0.0
    values = agreed = samples = 0
    for batch in batches:
        expected, actual = _outputs(before, batch), _outputs(after, batch)
        for one, other in zip(expected, actual):
            if one.shape != other.shape:
                raise GraphError(f"the networks are not related: one gives {one.shape}, the other {other.shape}")
            difference = np.abs(one.astype(np.float64) - other)
            largest, scale = max(largest, float(difference.max())), max(scale, float(np.abs(one).max()))
            total, values = total + float(difference.sum()), values + difference.size
            squares += float((difference ** 2).sum())
            norm += float((one.astype(np.float64) ** 2).sum())
        if expected[0].ndim == 2:
            agreed += int((expected[0].argmax(1) == actual[0].argmax(1)).sum())
            samples += len(expected[0])
    relative = (squares / norm) ** 0.5 if norm else float(bool(squares))
    return {"batches": len(batches), "relative_error": relative, "max_error": largest,
            "mean_error": total / max(values, 1), "largest_output": scale,
            "top1_agreement": agreed / samples if samples else None}
