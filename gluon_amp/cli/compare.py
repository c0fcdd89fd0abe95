"""``gluon-amp compare``: an FP32 network against its conversion, on images or random data."""
from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from .._mxnet.symbols import to_graph
from ..convert.convert import conversion_of
from ..convert.files import load_model
from ..errors import GraphError
from .convert import converted
from .models import add_model_arguments, data_shapes, read_model, runnable

NAME = "compare"
HELP = "compare an FP32 network with its conversion: errors, top-1 agreement, speed"

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp"}
# Of ImageNet, which the networks of the model zoos were trained on.
_MEAN, _STD = "0.485,0.456,0.406", "0.229,0.224,0.225"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("--converted", nargs=2, metavar=("SYMBOL.json", "PARAMS"),
                        help="the converted network (default: convert now)")
    parser.add_argument("--images", metavar="DIR", help="a directory of images, searched to any depth (default: random "
                                                        "data)")
    parser.add_argument("--mean", type=_numbers, default=_MEAN, help=f"of the colour channels (default: {_MEAN})")
    parser.add_argument("--std", type=_numbers, default=_STD, help=f"of the colour channels (default: {_STD})")
    parser.add_argument("--batches", type=int, default=8, metavar="N", help="how many batches at most (default: 8)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="how many timed rounds (default: 10)")


def run(args: argparse.Namespace) -> int:
    """Compare, and print the figures."""
    shapes = data_shapes(args)
    if not shapes:
        raise GraphError("the data's name and shape are needed: pass --data, as in --data data:1,3,224,224")
    model, changed = read_model(args), _converted(args)
    before, after = runnable(model, list(shapes)), runnable(changed, list(shapes))
    record = conversion_of(to_graph(changed[0]))
    batches = list(_batches(args, shapes))
    figures = {"conversion": record.summary() if record else "not converted by gluon_amp",
               **_errors(before, after, batches), **_speed(before, after, batches[0], args.rounds)}
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    table = Table("", "", title="FP32 against converted")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    return 0


def _converted(args: argparse.Namespace) -> Any:
    return load_model(*args.converted) if args.converted else converted(args)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, received {text!r}") from None


def _batches(args: argparse.Namespace, shapes: dict[str, tuple[int, ...]]) -> Iterator[list[mx.nd.NDArray]]:
    if args.images is None:
        mx.random.seed(0)
        for _ in range(args.batches):
            yield [mx.nd.random.uniform(shape=shape) for shape in shapes.values()]
        return
    if len(shapes) != 1 or len(next(iter(shapes.values()))) != 4:
        raise GraphError("--images needs a network with one input of 4 dimensions (batch, colours, height, width)")
    size, *sample = next(iter(shapes.values()))
    files = _image_files(args.images)[:args.batches * size]
    for start in range(0, len(files) - size + 1, size):
        yield [mx.nd.stack(*(_image(path, sample, args) for path in files[start:start + size]))]


def _image_files(folder: str) -> list[Path]:
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not files:
        raise FileNotFoundError(f"no images ({', '.join(sorted(_SUFFIXES))}) in {folder!r}")
    return files


def _image(path: Path, sample: Sequence[int], args: argparse.Namespace) -> mx.nd.NDArray:
    colours, height, width = sample
    pixels = mx.image.imread(str(path), flag=int(colours == 3))
    pixels = mx.image.imresize(pixels, width, height).astype("float32").transpose((2, 0, 1)) / 255
    mean, std = (mx.nd.array(values[:colours]).reshape((-1, 1, 1)) for values in (args.mean, args.std))
    return (pixels - mean) / std


def _outputs(block: Any, batch: Sequence[mx.nd.NDArray]) -> list[np.ndarray]:
    found = block(*batch)
    return [array.asnumpy() for array in (found if isinstance(found, (list, tuple)) else [found])]


def _errors(before: Any, after: Any, batches: Sequence[Sequence[mx.nd.NDArray]]) -> dict[str, Any]:
    """Compare all outputs; the class of the highest score where the first output is a matrix of scores."""
    largest = total = 0.0
    count = agreed = samples = 0
    scale = 0.0
    for batch in batches:
        expected, found = _outputs(before, batch), _outputs(after, batch)
        for one, other in zip(expected, found):
            difference = np.abs(one.astype(np.float64) - other)
            largest, scale = max(largest, float(difference.max())), max(scale, float(np.abs(one).max()))
            total, count = total + float(difference.sum()), count + difference.size
        if expected[0].ndim == 2:
            agreed += int((expected[0].argmax(1) == found[0].argmax(1)).sum())
            samples += len(expected[0])
    return {"batches": len(batches), "max_error": largest, "mean_error": total / max(count, 1),
            "largest_output": scale, "top1_agreement": agreed / samples if samples else None}


def _speed(before: Any, after: Any, batch: Sequence[mx.nd.NDArray], rounds: int) -> dict[str, float]:
    """Time both in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for block, kept in zip((before, after), times):
            start = time.perf_counter()
            _outputs(block, batch)
            kept.append(time.perf_counter() - start)
    slow, fast = (median(kept) * 1e3 for kept in times)
    return {"fp32_ms": slow, "converted_ms": fast, "speed_ratio": slow / fast}
