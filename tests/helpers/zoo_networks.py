"""The model zoo networks that test_zoo.py checks, small, with random weights and one batch of data each."""
from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn, rnn
from mxnet.gluon.model_zoo import vision

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gluoncv
    from gluoncv.model_zoo import get_model
    from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import get_faster_rcnn
    from gluoncv.model_zoo.rcnn.mask_rcnn.mask_rcnn import get_mask_rcnn
    from gluoncv.model_zoo.ssd.target import SSDTargetGenerator
    from gluoncv.model_zoo.yolo.yolo_target import YOLOV3PrefetchTargetGenerator
    from gluoncv.nn.feature import FPNFeatureExpander

from networks import Attention

CLASSES = 5


class Task(NamedTuple):
    """A network with its data; `infer` gives outputs to compare, `loss` a scalar to differentiate."""

    net: HybridBlock
    data: Any
    infer: Callable[[HybridBlock, Any], list]
    loss: Callable[[HybridBlock, Any], Any]
    learning_rate: float = 0.01


def flat(value: Any) -> list:
    """Return the arrays of nested lists and tuples."""
    return [array for item in value for array in flat(item)] if isinstance(value, (list, tuple)) else [value]


def outputs(net: HybridBlock, data: Any) -> list:
    return flat(net(data))


def images(pixels: int, batch: int) -> mx.nd.NDArray:
    return mx.nd.random.uniform(-1, 1, shape=(batch, 3, pixels, pixels))


@mx.init.register
class ZooWeights(mx.init.Xavier):
    """Weights that keep the size of activations, behind depthwise convolutions too."""

    def __init__(self) -> None:
        super().__init__(rnd_type="gaussian", factor_type="in", magnitude=2)
        self._kwargs = {}  # what MXNet makes it with again from its name

    def _init_weight(self, name: str, array: mx.nd.NDArray) -> None:
        if array.ndim > 1:
            super()._init_weight(name, array)
        else:  # networks made from symbols ask for scales and shifts too
            array[:] = float(str(name).endswith("gamma"))


def initialized(net: HybridBlock, data: Any) -> HybridBlock:
    net.initialize(ZooWeights(), force_reinit=True)
    net(data)
    return net


def pool_globally(net: HybridBlock) -> HybridBlock:
    """Let the last pooling of a classifier take small images."""
    def change(block: HybridBlock) -> None:
        if isinstance(block, nn.AvgPool2D) and min(block._kwargs["kernel"]) >= 7:
            block._kwargs["global_pool"] = True
    return net.apply(change)


def classifier(make: Callable[[], HybridBlock], pixels: int, batch: int = 4, learning_rate: float = 0.01) -> Task:
    data, labels = images(pixels, batch), mx.nd.arange(batch) % CLASSES
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    net = initialized(pool_globally(make()), data)
    return Task(net, data, outputs, lambda net, x: cross_entropy(net(x), labels).mean(), learning_rate)


def from_gluoncv(name: str, pixels: int, **options: Any) -> Callable[[], Task]:
    return lambda: classifier(lambda: get_model(name, pretrained=False, classes=CLASSES), pixels, **options)


def from_mxnet(name: str, pixels: int, **options: Any) -> Callable[[], Task]:
    return lambda: classifier(lambda: vision.get_model(name, pretrained=False, classes=CLASSES), pixels, **options)


def boxes(batch: int, pixels: int) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """Return three corner-encoded boxes per image, in pixels, and their classes."""
    random = np.random.RandomState(3)
    corner = random.uniform(0, 0.4, (batch, 3, 2))
    found = np.concatenate([corner, corner + random.uniform(0.2, 0.5, (batch, 3, 2))], axis=2) * pixels
    return mx.nd.array(found), mx.nd.array(random.randint(0, CLASSES, (batch, 3, 1)))


def names(count: int = CLASSES) -> list[str]:
    return [f"class{i}" for i in range(count)]


def ssd(name: str, pixels: int, batch: int = 2, learning_rate: float = 0.001) -> Task:
    data, (box, label) = images(pixels, batch), boxes(batch, pixels)
    net = get_model(name, pretrained_base=False, classes=names(), transfer=None)
    net = initialized(net, data)
    net.set_nms(nms_thresh=0)  # all boxes in order, rather than the few that rounding chooses
    with autograd.train_mode():
        anchors = net(data)[2]
    targets = SSDTargetGenerator(negative_mining_ratio=-1)(anchors, None, box / pixels, label)
    multi_box_loss = gluoncv.loss.SSDMultiBoxLoss()

    def loss(net: HybridBlock, x: mx.nd.NDArray) -> mx.nd.NDArray:
        cls, offsets, _ = net(x)
        return multi_box_loss([cls], [offsets], [targets[0]], [targets[1]])[0][0].sum() / batch
    return Task(net, data, outputs, loss, learning_rate)


def yolo3(name: str, pixels: int, batch: int = 2) -> Task:
    data, (box, label) = images(pixels, batch), boxes(batch, pixels)
    net = initialized(get_model(name, pretrained_base=False, classes=names(), transfer=None), data)
    net.set_nms(nms_thresh=0)
    for output in net.yolo_outputs:
        # Box sizes are exponentials of scores: of random ones without normalisation one box outweighs all others.
        output.prediction.weight.set_data(output.prediction.weight.data() * 0.01)
    with autograd.train_mode():
        _, anchors, offsets, maps, *_ = net(data)
    generate = YOLOV3PrefetchTargetGenerator(num_class=CLASSES)
    each = [generate(data[:1], maps, anchors, offsets, box[i:i + 1], label[i:i + 1]) for i in range(batch)]
    targets = [mx.nd.concat(*parts, dim=0) for parts in zip(*each)]

    def loss(net: HybridBlock, x: mx.nd.NDArray) -> mx.nd.NDArray:
        return sum(part.mean() for part in net(x, box, *targets))
    return Task(net, data, outputs, loss, learning_rate=0.0005)


def rcnn_settings(batch: int) -> dict[str, Any]:
    return {"dataset": "custom", "pretrained": False, "classes": names(), "roi_mode": "align", "alloc_size": (64, 64),
            "rpn_channel": 64, "scales": (2, 4, 8), "rpn_train_post_nms": 64, "rpn_test_post_nms": 32,
            "rpn_min_size": 1, "num_sample": 16, "max_num_gt": 3, "per_device_batch_size": batch, "clip": 4.14}


def rcnn_with_one_scale(batch: int, make: Callable[..., HybridBlock] = get_faster_rcnn,
                        **settings: Any) -> HybridBlock:
    base = get_model("resnet18_v1b", pretrained=False, use_global_stats=True)
    features, top = nn.HybridSequential(), nn.HybridSequential()
    for layer in ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3"):
        features.add(getattr(base, layer))
    top.add(base.layer4)
    return make("resnet18", features=features, top_features=top, roi_size=(7, 7), **rcnn_settings(batch), **settings)


def rcnn_with_masks(batch: int) -> HybridBlock:
    return rcnn_with_one_scale(batch, get_mask_rcnn, mask_channels=32, rcnn_max_dets=8, target_roi_scale=2)


def rcnn_with_pyramid(batch: int) -> HybridBlock:
    base = get_model("resnet18_v1b", pretrained=False, use_global_stats=True)
    features = FPNFeatureExpander(
        network=base, outputs=["layers1_relu3_fwd", "layers2_relu3_fwd", "layers3_relu3_fwd", "layers4_relu3_fwd"],
        num_filters=[64] * 4, use_1x1=True, use_upsample=True, use_elewadd=True, use_p6=True, no_bias=False,
        pretrained=False)
    box_features = nn.HybridSequential()
    box_features.add(nn.Dense(128), nn.Activation("relu"))
    # ROIAlign reads memory that is not its own where GluonCV marks boxes of other levels by -1, in FP32 too.
    settings = {**rcnn_settings(batch), "scales": (2, 4, 8, 16, 32), "roi_mode": "pool"}
    return get_faster_rcnn("fpn", features=features, top_features=None, box_features=box_features, min_stage=2,
                           max_stage=6, strides=(4, 8, 16, 32, 64), roi_size=(7, 7), **settings)


def rcnn(build: Callable[[int], HybridBlock], pixels: int, batch: int = 2, learning_rate: float = 0.002,
         masks: bool = False) -> Task:
    data, (box, label) = images(pixels, batch), boxes(batch, pixels)
    net = build(batch)
    net.initialize(ZooWeights(), force_reinit=True)

    def train(net: HybridBlock, x: mx.nd.NDArray) -> tuple[list, list]:
        """Return what Faster R-CNN gives in training, and the masks that Mask R-CNN gives beside it."""
        result = list(net(x, box, label))
        return result, [result.pop(2)] if masks else []

    with autograd.train_mode():
        result, stencils = train(net, data)
    objects, *stencils = (mx.nd.random.uniform(shape=each.shape) > 0.7 for each in (result[5], *stencils))
    binary = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    cross_entropy, huber = gluon.loss.SoftmaxCrossEntropyLoss(), gluon.loss.HuberLoss()

    def infer(net: HybridBlock, x: mx.nd.NDArray) -> list:
        assert all(np.isfinite(part.asnumpy()).all() for part in net(x[:1]))
        net.hybridize(net._active, **dict(net._flags))  # a graph is traced for training or for inference
        with autograd.train_mode():  # the outputs that depend on no choice of boxes
            return train(net, x)[0][5:7]

    def loss(net: HybridBlock, x: mx.nd.NDArray) -> mx.nd.NDArray:
        result, shapes = train(net, x)
        scores, offsets, proposals, shifts = *result[:2], *result[5:7]
        targets, shift_targets, chosen = result[8:11]
        weight = (targets >= 0).expand_dims(-1)
        total = (binary(proposals, objects).mean() + cross_entropy(scores, targets * (targets > 0), weight).mean()
                 + huber(shifts * objects, shifts * 0).mean() + huber(offsets * chosen, shift_targets).mean())
        return sum((binary(each, stencil).mean() for each, stencil in zip(shapes, stencils)), total)
    return Task(net, data, infer, loss, learning_rate)


def without_dropout(block: gluon.Block) -> None:
    """Let nothing be dropped: in C++ other values are, for the same seed, than by MXNet's operator."""
    if isinstance(block, nn.Dropout):
        block._rate = 0


def segmentation(model: str, pixels: int, batch: int = 2) -> Task:
    data = images(pixels, batch)
    net = getattr(gluoncv.model_zoo, model)(nclass=CLASSES, backbone="resnet50", pretrained_base=False,
                                            crop_size=pixels, aux=True)
    net.apply(without_dropout)
    target = mx.nd.random.randint(-1, CLASSES, shape=(batch, pixels, pixels)).astype("float32")
    mixed_loss = gluoncv.loss.MixSoftmaxCrossEntropyLoss(aux=True, aux_weight=0.5)
    return Task(initialized(net, data), data, outputs, lambda net, x: mixed_loss(*net(x), target).mean(), 0.002)


class LanguageModel(HybridBlock):
    """Embedding, fused LSTM and decoder, as in Gluon's word language model; states go in and come out.

    Dropout is before the LSTM: between its layers graphs draw other values than MXNet's operator for the same seed
    (tests/passes/test_native_dropout.py).
    """

    def __init__(self, words: int = 200, units: int = 32, tied: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.encoder = nn.Embedding(words, units)
            self.dropout = nn.Dropout(0.2)
            self.rnn = rnn.LSTM(units, 2, input_size=units)
            shared = {"params": self.encoder.params} if tied else {}
            self.decoder = nn.Dense(words, flatten=False, in_units=units, **shared)

    def hybrid_forward(self, F, words, first, second):  # (length, batch), and the state of the LSTM
        output, state = self.rnn(self.dropout(self.encoder(words)), [first, second])
        return self.decoder(output), state


def language_model(tied: bool) -> Task:
    net = LanguageModel(tied=tied)
    text = mx.nd.random.randint(0, 200, shape=(13, 4)).astype("float32")
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    state = mx.nd.random.normal(shape=(2, 2, 4, 32))

    def infer(net: HybridBlock, state: mx.nd.NDArray) -> list:
        return flat(net(text[:-1], *state))

    def loss(net: HybridBlock, state: mx.nd.NDArray) -> mx.nd.NDArray:
        scores, carried = net(text[:6], *state)
        more, _ = net(text[6:12], *(array.detach() for array in carried))
        return (cross_entropy(scores, text[1:7]).mean() + cross_entropy(more, text[7:]).mean()) / 2
    net.initialize(mx.init.Xavier(magnitude=2))
    return Task(net, state, infer, loss, learning_rate=1.0)


class Encoder(HybridBlock):
    """Embedding, two blocks of attention, and a classifier of the mean."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed, self.first, self.second = nn.Embedding(100, 32), Attention(), Attention()
            self.head = nn.Dense(CLASSES, in_units=32)

    def hybrid_forward(self, F, words):
        return self.head(F.mean(self.second(self.first(self.embed(words))), axis=1))


def sequence_classifier(net: HybridBlock, numpy: bool) -> Task:
    random = np.random.RandomState(5)
    array = mx.np.array if numpy else mx.nd.array
    words, labels = array(random.randint(0, 100, (4, 12)).astype("float32")), array(np.arange(4) % CLASSES)
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    net.initialize(mx.init.Xavier(magnitude=2))
    net(words)
    return Task(net, None, lambda net, _: [net(words)], lambda net, _: cross_entropy(net(words), labels).mean(), 0.02)


class NumpyAttention(HybridBlock):
    """A transformer encoder block written with mx.np and mx.npx."""

    def __init__(self, units: int = 32, heads: int = 4, **kwargs: Any):
        super().__init__(**kwargs)
        self.heads, self.scale = heads, (units // heads) ** -0.5
        with self.name_scope():
            self.qkv = nn.Dense(3 * units, flatten=False, in_units=units)
            self.out = nn.Dense(units, flatten=False, in_units=units)
            self.wide = nn.Dense(4 * units, flatten=False, in_units=units, activation="relu")
            self.narrow = nn.Dense(units, flatten=False, in_units=4 * units)
            self.norm1, self.norm2 = nn.LayerNorm(in_channels=units), nn.LayerNorm(in_channels=units)
            self.dropout = nn.Dropout(0.1)

    def hybrid_forward(self, F, x):  # (batch, length, units)
        parts = F.np.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (F.np.transpose(F.npx.reshape(part, (-2, -2, self.heads, -1)), (0, 2, 1, 3)) for part in parts)
        weights = F.npx.softmax(F.np.matmul(q * self.scale, F.np.swapaxes(k, 2, 3)), axis=-1)
        z = F.np.einsum("bhqk,bhkd->bqhd", self.dropout(weights), v)
        x = x + self.dropout(self.out(F.npx.reshape(z, (-2, -2, -1))))
        return x + self.dropout(self.narrow(self.wide(self.norm2(x))))


class NumpyEncoder(HybridBlock):
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed, self.first, self.second = nn.Embedding(100, 32), NumpyAttention(), NumpyAttention()
            self.head = nn.Dense(CLASSES, in_units=32)

    def hybrid_forward(self, F, words):
        x = self.second(self.first(self.embed(words)))
        pooled = F.np.concatenate([F.np.mean(x, axis=1), F.np.max(x, axis=1)], axis=1)
        return self.head(F.npx.relu(F.np.dot(pooled, F.np.ones((64, 32)) / 8) + F.np.tanh(pooled[:, :32])))


# Those whose long chains of sums need normalisation.
# Their inference gives boxes chosen by scores that lie close together: Task.infer looks at what training computes.
DETECTS_IN_TRAINING_ONLY = {"faster_rcnn", "faster_rcnn_fpn", "mask_rcnn"}
NEED_STATISTICS = {"yolo3_darknet53"}

# Those that need mx.npx.set_np() before anything is made.
NUMPY = {"transformer_numpy"}

NETWORKS: dict[str, Callable[[], Task]] = {
    "resnet18_v1": from_gluoncv("resnet18_v1", 64),
    "resnet50_v1": from_gluoncv("resnet50_v1", 96),
    "resnet50_v1b": from_gluoncv("resnet50_v1b", 64),
    "resnet18_v2": from_mxnet("resnet18_v2", 64),
    "resnet50_v2": from_mxnet("resnet50_v2", 64),
    "mobilenet0.5": from_mxnet("mobilenet0.5", 64),
    "mobilenet1.0": from_gluoncv("mobilenet1.0", 64),
    "mobilenetv2_1.0": from_gluoncv("mobilenetv2_1.0", 64),
    "mobilenetv3_small": from_gluoncv("mobilenetv3_small", 64),
    "mobilenetv3_large": from_gluoncv("mobilenetv3_large", 64),
    "densenet121": from_gluoncv("densenet121", 64),
    "inceptionv3": from_gluoncv("inceptionv3", 139),
    # Dropout of so few values is MXNet's: in C++ it draws other ones for the same seed.
    "squeezenet1.1": from_gluoncv("squeezenet1.1", 64, batch=3, learning_rate=0.003),
    "vgg11": from_mxnet("vgg11", 64, batch=2, learning_rate=0.001),
    "vgg11_bn": from_gluoncv("vgg11_bn", 64, batch=2, learning_rate=0.001),
    "resnext50_32x4d": from_gluoncv("resnext50_32x4d", 64),
    "se_resnet18_v1": from_gluoncv("se_resnet18_v1", 64),
    "ssd_512_resnet50_v1": partial(ssd, "ssd_512_resnet50_v1_custom", 128),
    "ssd_512_mobilenet1.0": partial(ssd, "ssd_512_mobilenet1.0_custom", 128),
    "ssd_300_vgg16_atrous": partial(ssd, "ssd_300_vgg16_atrous_custom", 300, batch=1, learning_rate=0.00001),
    "yolo3_mobilenet0.25": partial(yolo3, "yolo3_mobilenet0.25_custom", 96),
    "yolo3_darknet53": partial(yolo3, "yolo3_darknet53_custom", 96),
    "faster_rcnn": partial(rcnn, rcnn_with_one_scale, 128),
    "faster_rcnn_fpn": partial(rcnn, rcnn_with_pyramid, 128, learning_rate=0.0003),
    "mask_rcnn": partial(rcnn, rcnn_with_masks, 128, masks=True),
    "fcn": partial(segmentation, "FCN", 64),
    "deeplab": partial(segmentation, "DeepLabV3", 64),
    "lstm_plain": partial(language_model, tied=False),
    "lstm_tied": partial(language_model, tied=True),
    "transformer": lambda: sequence_classifier(Encoder(), numpy=False),
    "transformer_numpy": lambda: sequence_classifier(NumpyEncoder(), numpy=True),
}


def make_task(name: str) -> Task:
    """Build a network and its data, from fixed seeds."""
    if name in NUMPY:
        mx.npx.set_np()
    mx.random.seed(7)
    np.random.seed(7)
    return NETWORKS[name]()
