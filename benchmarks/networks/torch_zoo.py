"""The zoos' architectures by torchvision and timm, trained as `networks.zoo` trains Gluon's."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Iterable, Mapping

import torch

from ..harness.errors import UsageError
from ..harness.torch_backends import Float32
from .tasks import Batch
from .torch_training import Losses, Training
from .zoo_table import MEMBERS

# Operators that torchvision compiles, which its wheel lacks beside a build of torch for CPUs: the networks need none.
_COMPILED = ("nms(Tensor dets, Tensor scores, float threshold) -> Tensor",
             "qnms(Tensor dets, Tensor scores, float threshold) -> Tensor",
             "roi_align(Tensor input, Tensor rois, float scale, SymInt height, SymInt width, int ratio, bool aligned)"
             " -> Tensor")


_declared: list[torch.library.Library] = []  # what is declared lives as long as these


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except RuntimeError:  # of a wheel without them
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _COMPILED:
            library.define(schema)
        _declared.append(library)
        return importlib.import_module(module)


def create(peer: str, options: Mapping[str, Any]) -> torch.nn.Module:
    """Return an architecture with random weights.

    Parameters
    ----------
    peer : str
        ``module:name``, of torchvision or timm, as `zoo_table.Member.peer` has it.
    options : mapping
        What else it is made with.

    Raises
    ------
    UsageError
        If the package is not installed.
    """
    package, _, name = peer.partition(":")
    try:
        if package == "timm":
            return _imported("timm").create_model(name, pretrained=False, **options)
        models = _imported("torchvision.models")
    except ImportError as error:
        raise UsageError(f"{package} cannot be imported: {error}: install it where torch is") from error
    for part in name.split("."):
        models = getattr(models, part)
    without = {"weights": None, "weights_backbone": None} if "." in name else {"weights": None}
    return models(**without, **options)


def _floats(outputs: Any) -> Iterable[torch.Tensor]:
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from _floats(each)
    elif outputs is not None:
        yield outputs


def mean_square(outputs: Any) -> Losses:
    """Return the sum of the mean squares of all outputs, as `networks.zoo.Training` has it."""
    return {"loss": sum((output.float().square().mean() for output in _floats(outputs)), torch.zeros(()))}


def build(backend: Float32, settings: Mapping[str, Any]) -> Training:
    """Build an architecture of the zoo and its training.

    Raises
    ------
    UsageError
        For one that neither torchvision nor timm has.
    """
    member = MEMBERS[settings["network"]]
    if not member.peer:
        raise UsageError(f"neither torchvision nor timm has {settings['network']!r}")
    torch.manual_seed(settings["seed"])
    net = backend.placed(create(member.peer, member.peer_options)).train()
    data = torch.rand(member.shape(settings["batch_size"])) * 2 - 1
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, fused=backend.fused)
    return Training(backend, net, Batch((data.numpy(),), ()), settings["batch_size"], mean_square, optimizer)
