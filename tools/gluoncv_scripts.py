"""Start GluonCV's training scripts unchanged, in FP32 and with gluon_amp, on small data made here; compare losses.

    python tools/gluoncv_scripts.py CHECKOUT [--scripts ssd yolo3 ...] [--dtype bfloat16] [--steps 4]

CHECKOUT is a copy of dmlc/gluon-cv, version 0.10; its folder ``scripts`` is enough. Scripts with ``--amp`` switch
AMP on themselves, through the stand-in for ``mxnet.contrib.amp``; for the others ``gluon-amp run`` does. Weights are
drawn where a script would download trained ones. The scripts of COCO need ``pycocotools``. The exit code is 1 if a
script fails or its losses leave FP32's.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

TOOLS = Path(__file__).resolve().parent
FIRST, LATER = 0.05, 0.35  # how far losses may be from FP32's: that of the first step, and the mean of all


class Script(NamedTuple):
    """A script below CHECKOUT/scripts, its arguments, whether it knows AMP, and whether it reads COCO."""

    path: str
    arguments: str
    knows_amp: bool
    reads_coco: bool = False


class Settings(NamedTuple):
    """Where the scripts and their data are, and how long they run."""

    checkout: Path
    home: Path
    dtype: str = "bfloat16"  # for scripts that do not know AMP
    steps: int = 4
    timeout: float = 900  # seconds for one run


SCRIPTS = {
    "imagenet": Script("classification/imagenet/train_imagenet.py",
                       "--model resnet18_v1 --mode hybrid --batch-size 4 -j 0 --num-epochs 1 --lr 0.01 --input-size 96 "
                       "--data-dir {data}/imagenet --log-interval 1", False),
    "ssd": Script("detection/ssd/train_ssd.py",
                  "--network mobilenet1.0 --data-shape 512 --batch-size 2 --gpus= -j 0 --epochs 1 "
                  "--log-interval 1", True),
    "yolo3": Script("detection/yolo/train_yolo3.py",
                    "--network mobilenet0.25 --data-shape 224 --no-random-shape --batch-size 2 --gpus= -j 0 --epochs 1 "
                    "--log-interval 1", True),
    "faster_rcnn": Script("detection/faster_rcnn/train_faster_rcnn.py",
                          "--network resnet50_v1b --batch-size 1 --gpus= -j 0 --epochs 1 --log-interval 1 "
                          "--kv-store local", True),
    "mask_rcnn": Script("instance/mask_rcnn/train_mask_rcnn.py",
                        "--network resnet18_v1b --use-fpn --batch-size 1 --gpus= -j 0 --epochs 1 --log-interval 1 "
                        "--kv-store local", True, reads_coco=True),
    "center_net": Script("detection/center_net/train_center_net.py",
                         "--network resnet18_v1b --data-shape 256 --batch-size 2 --gpus= -j 0 --epochs 1 "
                         "--log-interval 1", False),
    "segmentation": Script("segmentation/train.py",
                           "--model fcn --backbone resnet50 --dataset ade20k --base-size 130 --crop-size 96 "
                           "--batch-size 2 --test-batch-size 1 --workers 0 --epochs 1 --no-cuda --no-val "
                           "--log-interval 1", False),
    "pose": Script("pose/simple_pose/train_simple_pose.py",
                   "--model simple_pose_resnet18_v1b --mode hybrid --batch-size 2 -j 0 --num-joints 17 --num-epochs 1 "
                   "--lr 0.001 --input-size 128,96 --data-dir {data}/coco --log-interval 1", False, reads_coco=True),
}


def main() -> int:
    """Run the scripts and print how far their losses are from FP32's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a copy of dmlc/gluon-cv, version 0.10")
    parser.add_argument("--scripts", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16",
                        help="for scripts that do not know AMP (default: bfloat16)")
    parser.add_argument("--steps", type=int, default=4, help="training steps of each (default: 4)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run (default: 900)")
    arguments = parser.parse_args()
    missing = [SCRIPTS[name].path for name in arguments.scripts
               if not (arguments.checkout / "scripts" / SCRIPTS[name].path).is_file()]
    if missing:
        raise SystemExit(f"gluoncv_scripts: {arguments.checkout}/scripts lacks {', '.join(missing)}: expected a copy "
                         "of dmlc/gluon-cv, version 0.10")
    with tempfile.TemporaryDirectory(prefix="gluoncv-") as folder:
        from gluoncv_data import write_all
        write_all(Path(folder), 4 * arguments.steps)
        settings = Settings(arguments.checkout, Path(folder), arguments.dtype, arguments.steps, arguments.timeout)
        failures = [name for name in arguments.scripts if not _check(name, settings)]
    return bool(failures)


def _check(name: str, settings: Settings) -> bool:
    try:
        stock, found = both_losses(SCRIPTS[name], settings)
    except RuntimeError as error:
        print(f"{name}: FAILS\n{error}", flush=True)
        return False
    verdict = compared(stock, found)
    print(f"{name}: {verdict or 'follows FP32'}\n  FP32 {_shown(stock)}\n  AMP  {_shown(found)}", flush=True)
    return not verdict


def both_losses(script: Script, settings: Settings) -> tuple[list[float], list[float]]:
    """Run a script stock and with AMP; return the losses of both."""
    mode, flag = ("bare", " --amp") if script.knows_amp else (settings.dtype, "")
    return losses_of(script, "stock", "", settings), losses_of(script, mode, flag, settings)


def losses_of(script: Script, mode: str, flag: str, settings: Settings) -> list[float]:
    """Run a script in a process of its own; return the losses of its steps."""
    home = settings.home
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "losses.json"
        path = (settings.checkout / "scripts" / script.path).resolve()
        options = (script.arguments + flag).format(data=home / ".mxnet" / "datasets").split()
        environment = {**os.environ, "HOME": str(home), "MXNET_HOME": str(home / ".mxnet"), "MPLBACKEND": "agg",
                       "PYTHONPATH": os.pathsep.join([str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(TOOLS / "gluoncv_child.py"), str(noted), str(settings.steps), mode, str(path)]
        try:
            done = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True,
                                  timeout=settings.timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{script.path} ({mode}) took more than {settings.timeout:g} s") from None
        if done.returncode:
            raise RuntimeError(f"{script.path} ({mode}) ended with {done.returncode}:\n{done.stderr[-3000:]}")
        losses = json.loads(noted.read_text())["losses"]
    if not losses:
        raise RuntimeError(f"{script.path} ({mode}) took no step")
    return losses


def compared(stock: list[float], found: list[float]) -> str:
    """Say how losses leave FP32's; nothing if they do not.

    Examples
    --------
    >>> compared([2.0, 1.0], [2.01, 0.99])
    ''
    >>> compared([2.0, 1.0], [2.5, 1.0])
    'the first loss is 25 % off'
    """
    if len(stock) != len(found):
        return f"expected {len(stock)} losses, received {len(found)}"
    if not np.isfinite(found).all():
        return "a loss is not finite"
    first = abs(found[0] - stock[0]) / abs(stock[0])
    mean = abs(np.mean(found) - np.mean(stock)) / abs(np.mean(stock))
    if first > FIRST:
        return f"the first loss is {100 * first:.0f} % off"
    return f"the mean loss is {100 * mean:.0f} % off" if mean > LATER else ""


def _shown(losses: list[float]) -> str:
    return " ".join(f"{loss:.4g}" for loss in losses)


if __name__ == "__main__":
    sys.exit(main())
