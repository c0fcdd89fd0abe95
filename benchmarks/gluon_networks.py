"""The networks in Gluon, and their training and inference. MXNet must be importable: start a backend first."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any, Callable, Iterable, Mapping, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn, rnn
from mxnet.gluon.model_zoo import vision

from .harness import UsageError, forget_peak_memory, unknown
from .networks import JOBS, MEMBERS, TUTORIAL, batch, side_of, ssd_batch

_WITH_BASE = ("detection", "segmentation", "pose", "action")  # whose first layers are another network's


class LanguageModel(HybridBlock):
    """Word embedding, LSTM layers, and a score for each word: ``(length, batch, vocabulary)``."""

    def __init__(self, layers: int, units: int, length: int, vocabulary: int, **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embedding = nn.Embedding(vocabulary, units)
            self.lstm = rnn.LSTM(units, layers, input_size=units)
            self.decoder = nn.Dense(vocabulary, flatten=False, in_units=units)

    def hybrid_forward(self, F: Any, tokens: Any) -> Any:
        return self.decoder(self.lstm(self.embedding(tokens)))


class SelfAttention(HybridBlock):
    """Attention of several heads within a sequence, ``(batch, length, units)``."""

    def __init__(self, units: int, heads: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.heads, self.scale = heads, (units // heads) ** -0.5
        with self.name_scope():
            self.queries_keys_values = nn.Dense(3 * units, flatten=False, in_units=units)
            self.out = nn.Dense(units, flatten=False, in_units=units)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        split = F.split(self.queries_keys_values(x), num_outputs=3, axis=2)
        queries, keys, values = (self._by_head(F, each) for each in split)
        scores = F.batch_dot(queries * self.scale, keys, transpose_b=True)
        mixed = F.batch_dot(F.softmax(scores, axis=-1), values)
        mixed = F.reshape(mixed, (-1, self.heads, 0, 0), reverse=True)
        return self.out(F.reshape(F.transpose(mixed, (0, 2, 1, 3)), (0, 0, -1)))

    def _by_head(self, F: Any, x: Any) -> Any:
        heads = F.transpose(F.reshape(x, (0, 0, self.heads, -1)), (0, 2, 1, 3))
        return F.reshape(heads, (-1, 0, 0), reverse=True)


class EncoderLayer(HybridBlock):
    """Attention and a feed-forward network, each added to its input and normalised."""

    def __init__(self, units: int, heads: int, hidden: int, **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.attention = SelfAttention(units, heads)
            self.widen = nn.Dense(hidden, flatten=False, in_units=units)
            self.narrow = nn.Dense(units, flatten=False, in_units=hidden)
            self.norm1, self.norm2 = nn.LayerNorm(in_channels=units), nn.LayerNorm(in_channels=units)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.narrow(F.LeakyReLU(self.widen(x), act_type="gelu")))


class Encoder(HybridBlock):
    """A transformer encoder of BERT's shape with a classifier on the first token; no dropout."""

    def __init__(self, layers: int, units: int, heads: int, hidden: int, length: int, vocabulary: int, classes: int,
                 **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.words = nn.Embedding(vocabulary, units)
            self.segments = nn.Embedding(2, units)
            self.positions = self.params.get("positions", shape=(1, length, units))
            self.norm = nn.LayerNorm(in_channels=units)
            self.layers = nn.HybridSequential()
            for _ in range(layers):
                self.layers.add(EncoderLayer(units, heads, hidden))
            self.pooler = nn.Dense(units, activation="tanh", in_units=units)
            self.classifier = nn.Dense(classes, in_units=units)

    def hybrid_forward(self, F: Any, tokens: Any, segments: Any, positions: Any) -> Any:
        x = self.norm(F.broadcast_add(self.words(tokens) + self.segments(segments), positions))
        x = self.layers(x)
        first = F.squeeze(F.slice_axis(x, axis=1, begin=0, end=1), axis=1)
        return self.classifier(self.pooler(first))


def _from_gluoncv(name: str, family: str, **options: Any) -> HybridBlock:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gluoncv import model_zoo
        options = {**({"pretrained_base": False} if family in _WITH_BASE else {}), **options}
        if family == "segmentation":  # results have the size of what it is trained with
            options["crop_size"] = MEMBERS[name].size[-1]
        return model_zoo.get_model(name, pretrained=False, **options)


def _from_gluonnlp(name: str) -> HybridBlock:
    import gluonnlp

    layers, units, heads, hidden, length = (4, 256, 4, 1024, 128) if name == "bert" else (4, 512, 8, 2048, 64)
    kind = gluonnlp.model.BERTEncoder if name == "bert" else gluonnlp.model.TransformerEncoder
    return kind(num_layers=layers, units=units, num_heads=heads, hidden_size=hidden, max_length=length, dropout=0.1)


def _made(name: str) -> HybridBlock:
    if name in JOBS:
        kinds = {"lstm": LanguageModel, "encoder": Encoder}
        return ssd(TUTORIAL) if name == "ssd512" else kinds[name](**JOBS[name].numbers)
    member = MEMBERS[name]
    if member.source == "mxnet":
        return vision.get_model(name, pretrained=False)
    return _from_gluonnlp(name) if member.source == "gluonnlp" else _from_gluoncv(name, member.family)


def create(name: str, seed: int, mode: str) -> HybridBlock:
    """Return a network with random weights.

    Parameters
    ----------
    name : str
        A key of `networks.NETWORKS`.
    seed : int
        Of the weights.
    mode : str
        ``'static'``, ``'plain'`` (hybridized without static memory) or ``'eager'``.
    """
    mx.random.seed(seed)
    net = _made(name)
    # Detectors made from symbols ask for scales of BatchNorm, which Xavier's refuses.
    detects = name == "ssd512" or (name in MEMBERS and MEMBERS[name].family == "detection")
    net.initialize(mx.init.Uniform() if detects else
                   mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    if mode != "eager":
        net.hybridize(**({"static_alloc": True, "static_shape": True} if mode == "static" else {}))
    return net


def ssd(name: str, pretrained_base: bool = False) -> HybridBlock:
    """Create an SSD of GluonCV as the tutorial does, not yet initialized."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gluoncv.model_zoo.model_zoo import get_model_list
    known = sorted(each for each in get_model_list()
                   if each.startswith("ssd_") and not each.endswith(("_custom", "_int8")))
    if name not in known:
        raise unknown("network", name, known)
    try:
        return _from_gluoncv(name, "detection", pretrained_base=pretrained_base, norm_layer=nn.BatchNorm)
    except (OSError, RuntimeError) as error:
        if not pretrained_base:
            raise
        raise UsageError(f"--pretrained-base: the weights of {name} cannot be loaded: {error}") from error


def _count_anchors(net: HybridBlock, side: int) -> int:
    """Return how many boxes the network predicts for square images of this side in pixels."""
    try:
        # MXNet prints the arguments of a failed inference to standard output
        with contextlib.redirect_stdout(io.StringIO()), autograd.train_mode():
            anchors = net(mx.sym.var("data"))[2]
            _, shapes, _ = anchors.infer_shape(data=(1, 3, side, side))
    except mx.base.MXNetError as error:
        reason = str(error).splitlines()[0].split("Check failed:")[-1].strip()
        raise UsageError(f"data shape {side} is not possible for this network: {reason}") from error
    return int(shapes[0][1])


def floats(outputs: Any) -> Iterable[mx.nd.NDArray]:
    """Yield the floating-point arrays of nested outputs that a loss may be of: not anchors, which are constants."""
    if isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from floats(each)
    elif outputs.dtype != "int32" and outputs.ndim > 1:
        yield outputs


class _Task(NamedTuple):
    """A network, its data and how it is trained on them."""

    net: HybridBlock
    inputs: list[mx.nd.NDArray]
    labels: list[mx.nd.NDArray]
    losses: Callable[..., Mapping[str, mx.nd.NDArray]]  # of outputs and labels
    optimizer: tuple[str, dict[str, float]]
    divisor: int  # that the gradients of an update are divided by
    about: Mapping[str, Any]


def _arrays(data: Iterable[np.ndarray]) -> list[mx.nd.NDArray]:
    return [mx.nd.array(each, dtype=each.dtype) for each in data]


def _mean_square(outputs: Any) -> Mapping[str, mx.nd.NDArray]:
    return {"loss": sum(mx.nd.square(output).mean() for output in floats(outputs))}


def _cross_entropy(scores: mx.nd.NDArray, labels: mx.nd.NDArray) -> Mapping[str, mx.nd.NDArray]:
    return {"CrossEntropy": gluon.loss.SoftmaxCrossEntropyLoss()(scores, labels)}


def _task(settings: Mapping[str, Any]) -> _Task:
    name, size, seed = settings["network"], int(settings["batch_size"]), settings["seed"]
    if name == "ssd512" or "data_shape" in settings:
        return _ssd_task(settings)
    inputs, labels = batch(name, size, seed)
    optimizer = ("adam", {"learning_rate": 2e-5}) if name == "encoder" else (
        "sgd", {"learning_rate": 1e-4 if name in MEMBERS else 1e-3, "momentum": 0.9})
    return _Task(create(name, seed, settings["mode"]), _arrays(inputs), _arrays(labels),
                 _mean_square if name in MEMBERS else _cross_entropy, optimizer, size, {})


def _ssd_task(settings: Mapping[str, Any]) -> _Task:
    """Return the job of MXNet's AMP tutorial: synthetic data, SSDMultiBoxLoss, SGD."""
    name = TUTORIAL if settings["network"] == "ssd512" else settings["network"]
    net, side = ssd(name, settings.get("pretrained_base", False)), settings.get("data_shape") or side_of(name)
    anchors = _count_anchors(net, side)
    inputs, labels = ssd_batch(settings["batch_size"], side, anchors, settings["seed"])
    mx.random.seed(settings["seed"])
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    import gluoncv

    loss_function = gluoncv.loss.SSDMultiBoxLoss()

    def losses(outputs: Any, classes: mx.nd.NDArray, boxes: mx.nd.NDArray) -> Mapping[str, mx.nd.NDArray]:
        _, cls, box = loss_function([outputs[0]], [outputs[1]], [classes], [boxes])
        return {"CrossEntropy": cls[0], "SmoothL1": box[0]}

    optimizer = ("sgd", {"learning_rate": 0.001, "wd": 0.0005, "momentum": 0.9})
    return _Task(net, _arrays(inputs), _arrays(labels), losses, optimizer, 1, {"data_shape": side, "anchors": anchors})


class Training:
    """Training steps on one random batch.

    Parameters
    ----------
    backend : implementations.Mxnet
        Switched on already.
    settings : mapping
        ``network``, ``batch_size``, ``seed`` and ``mode``; with ``data_shape`` (None for the network's own) and
        ``pretrained_base`` the network is an SSD of GluonCV, trained as the tutorial does.
    """

    def __init__(self, backend: Any, settings: Mapping[str, Any]):
        self.backend = backend
        with backend.context:
            self.task = _task(settings)
            self.net = self.task.net
            if settings["network"] in MEMBERS and "data_shape" not in settings:
                self.net(*self.task.inputs)  # parameters get their shapes
        mx.nd.waitall()
        name, options = self.task.optimizer
        self.trainer = gluon.Trainer(self.net.collect_params(), name, dict(options), **backend.trainer_options)
        backend.init_trainer(self.trainer)
        self.about = {"dtype": backend.dtype, "notes": backend.notes, "samples": int(settings["batch_size"]),
                      **self.task.about}

    def step(self) -> dict[str, float]:
        """Train on the batch, wait for the end, and return the losses."""
        with autograd.record():
            losses = self.task.losses(self.net(*self.task.inputs), *self.task.labels)
            first, *others = losses.values()
            with self.backend.scale_loss(sum(others, first), self.trainer) as scaled:
                autograd.backward(scaled)
        self.trainer.step(self.task.divisor, ignore_stale_grad=True)  # detectors have parts for inference alone
        of = np.sum if "anchors" in self.about else np.mean  # the tutorial's metrics are sums
        result = {name: float(of(loss.asnumpy())) for name, loss in losses.items()}
        mx.nd.waitall()
        return result


class Inference:
    """Requests to a network that an implementation has converted."""

    def __init__(self, backend: Any, settings: Mapping[str, Any]):
        name, size, seed = settings["network"], int(settings["batch_size"]), settings["seed"]
        inputs = ssd_batch(size, 512, 1, seed)[0] if name == "ssd512" else batch(name, size, seed)[0]
        with backend.context:
            self.inputs = _arrays(inputs)
            net = create(name, seed, settings["mode"])
            net(*self.inputs)
            mx.nd.waitall()
            self.net = backend.convert(net, self.inputs)
        del net  # a server has the converted network alone
        forget_peak_memory()
        self.about = {"dtype": backend.dtype, "notes": backend.notes, "samples": size}

    def step(self) -> dict[str, float]:
        """Answer a request; return the first value of the first output."""
        outputs = self.net(*self.inputs)
        first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
        mx.nd.waitall()
        return {"output": float(first.reshape((-1,))[0].asscalar())}
