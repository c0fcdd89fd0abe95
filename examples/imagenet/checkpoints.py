"""Checkpoints: one zip file with weights, the trainer's states and its loss scaler's, and how far training has come."""
from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gluon_amp as amp  # before mxnet

# isort: split
import mxnet as mx
from mxnet import gluon

NET, TRAINER, PROGRESS = "net.params", "trainer.states", "progress.json"


def save(path: Path, net: gluon.Block, trainer: gluon.Trainer, progress: dict[str, Any]) -> None:
    """Write a checkpoint: the file is replaced when the new one is complete, and left alone otherwise."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        parts = Path(directory)
        net.save_parameters(str(parts / NET))
        amp.save_states(trainer, parts / TRAINER)
        (parts / PROGRESS).write_text(json.dumps(progress))
        with open(parts / "whole", "wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name in (NET, TRAINER, PROGRESS):
                    archive.write(parts / name, name)
            file.flush()
            os.fsync(file.fileno())
        os.replace(parts / "whole", path)


def copy(path: Path, target: Path) -> None:
    """Copy a checkpoint, to keep it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        os.replace(shutil.copy(path, directory), target)


def read_progress(path: Path, arch: str) -> dict[str, Any]:
    """Return how far training had come at a checkpoint of this network."""
    progress = json.loads(_read(path, PROGRESS))
    if progress["arch"] != arch:
        raise ValueError(f"{path}: expected a checkpoint of {arch}, received one of {progress['arch']}")
    return progress


def load(path: Path, net: gluon.Block, trainer: gluon.Trainer, ctx: mx.Context) -> None:
    """Read a checkpoint into a network and its trainer."""
    with tempfile.TemporaryDirectory() as directory:
        parts = Path(directory)
        for name in (NET, TRAINER):
            (parts / name).write_bytes(_read(path, name))
        net.load_parameters(str(parts / NET), ctx=ctx)
        amp.load_states(trainer, parts / TRAINER)


def _read(path: Path, name: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)  # checks that it is whole
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} is not a checkpoint of main_amp.py, or damaged: {error}") from error
