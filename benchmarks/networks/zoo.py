"""The networks of the model zoos, with random weights, data and a plain loss. Start a backend before importing it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock
from mxnet.gluon.model_zoo import vision

from ..harness import machine
from .zoo_table import MEMBERS

if TYPE_CHECKING:
    from ..harness.backends import Backend, Converter

_SGD = {"learning_rate": 1e-4, "momentum": 0.9}
_WITH_BASE = ("detection", "segmentation", "pose", "action")  # whose first layers are another network's


def _from_mxnet(name: str) -> HybridBlock:
    return vision.get_model(name, pretrained=False)


def _from_gluoncv(name: str) -> HybridBlock:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gluoncv import model_zoo
        family = MEMBERS[name].family
        options: dict[str, Any] = {"pretrained_base": False} if family in _WITH_BASE else {}
        if family == "segmentation":  # results have the size of what it is trained with
            options["crop_size"] = MEMBERS[name].size[-1]
        return model_zoo.get_model(name, pretrained=False, **options)


def _from_gluonnlp(name: str) -> HybridBlock:
    import gluonnlp

    layers, units, heads, hidden, length = (4, 256, 4, 1024, 128) if name == "bert" else (4, 512, 8, 2048, 64)
    kind = gluonnlp.model.BERTEncoder if name == "bert" else gluonnlp.model.TransformerEncoder
    return kind(num_layers=layers, units=units, num_heads=heads, hidden_size=hidden, max_length=length, dropout=0.1)


_SOURCES: Mapping[str, Callable[[str], HybridBlock]] = {
    "mxnet": _from_mxnet, "gluoncv": _from_gluoncv, "gluonnlp": _from_gluonnlp}


def create(name: str, seed: int, mode: str) -> HybridBlock:
    """Return a network of the zoo with random weights.

    Parameters
    ----------
    name : str
        A key of `zoo_table.MEMBERS`.
    seed : int
        Of the weights.
    mode : str
        ``'static'``, ``'plain'`` (hybridized without static memory) or ``'eager'``.
    """
    mx.random.seed(seed)
    net = _SOURCES[MEMBERS[name].source](MEMBERS[name].model or name)
    # Detectors made from symbols ask for scales of BatchNorm, which Xavier's refuses.
    net.initialize(mx.init.Uniform() if MEMBERS[name].family == "detection" else
                   mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    if mode != "eager":
        net.hybridize(**({"static_alloc": True, "static_shape": True} if mode == "static" else {}))
    return net


def floats(outputs: Any) -> Iterable[mx.nd.NDArray]:
    """Yield the floating-point arrays of nested outputs that a loss may be of: not anchors, which are constants."""
    if isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from floats(each)
    elif outputs.dtype != "int32" and outputs.ndim > 1:
        yield outputs


class Training:
    """Training steps on one random batch, with the mean square of all outputs as the loss.

    Parameters
    ----------
    backend : Backend
        The implementation, already switched on.
    settings : mapping
        ``network``, ``batch_size``, ``seed`` and ``mode``.
    """

    def __init__(self, backend: Backend, settings: Mapping[str, Any]):
        self.backend, self.samples_per_step = backend, int(settings["batch_size"])
        with backend.context:
            self.data = mx.nd.random.uniform(-1, 1, MEMBERS[settings["network"]].shape(self.samples_per_step))
            self.net = create(settings["network"], settings["seed"], settings["mode"])
            self.net(self.data)
        mx.nd.waitall()
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", dict(_SGD), **backend.trainer_options)
        backend.init_trainer(self.trainer)
        self.about = {"dtype": backend.dtype, "notes": backend.notes}

    def step(self) -> dict[str, float]:
        """Train on the batch, wait for the end, and return the loss."""
        with autograd.record():
            loss = sum(mx.nd.square(output).mean() for output in floats(self.net(self.data)))
            with self.backend.scale_loss(loss, self.trainer) as scaled:
                autograd.backward(scaled)
        self.trainer.step(self.samples_per_step, ignore_stale_grad=True)  # detectors have parts for inference alone
        result = {"loss": float(loss.asscalar())}
        mx.nd.waitall()
        return result


class Inference:
    """Requests to a network that an implementation has converted."""

    def __init__(self, backend: Converter, settings: Mapping[str, Any]):
        self.samples_per_step = int(settings["batch_size"])
        with backend.context:
            self.data = mx.nd.random.uniform(-1, 1, MEMBERS[settings["network"]].shape(self.samples_per_step))
            net = create(settings["network"], settings["seed"], settings["mode"])
            net(self.data)
            mx.nd.waitall()
            self.net = backend.convert(net, [self.data])
        del net  # a server has what was converted alone
        machine.forget_peak_memory()
        self.about = {"dtype": backend.dtype, "notes": backend.notes}

    def step(self) -> dict[str, float]:
        """Answer a request; return the first value of the first output."""
        outputs = self.net(self.data)
        first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
        mx.nd.waitall()
        return {"output": float(first.reshape((-1,))[0].asscalar())}
