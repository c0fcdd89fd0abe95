"""Average precision of a trained SSD."""

from __future__ import annotations

import warnings
from typing import Sequence

import gluon_amp  # noqa: F401  first: it lets MXNet 1.9.1 import under newer NumPy

# isort: split
import mxnet as mx
from mxnet import gluon
from tqdm import tqdm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from gluoncv.data.batchify import Pad, Stack, Tuple
    from gluoncv.data.transforms.presets.ssd import SSDDefaultValTransform
    from gluoncv.model_zoo.ssd.ssd import SSD
    from gluoncv.utils.metrics.voc_detection import VOCMApMetric

_BATCH_SIZE = 32


def evaluate(
    net: gluon.HybridBlock, dataset: gluon.data.Dataset, classes: Sequence[str], side: int, device: mx.Context,
    hidden: bool | None = True,
) -> tuple[float, dict[str, float]]:
    """Return the mean average precision, and that of every class that the dataset shows.

    Parameters
    ----------
    net : gluoncv.model_zoo.SSD, or what was made of one by conversion
        Runs in the precision that is in force, or in its own.
    dataset : gluon.data.Dataset
        Gives (image, label), as `samples.open_set` does.
    classes : sequence of str
        Names of what it shows.
    side : int
        Side of the network's square input in pixels.
    device : mx.Context
        Where the network is.
    hidden : bool or None
        Hide the progress bar; None hides it unless standard error is a terminal.
    """
    if isinstance(net, SSD):
        net.set_nms(nms_thresh=0.45, nms_topk=400)
    net.hybridize(static_alloc=True, static_shape=True)
    # the area metric: the eleven-point one of VOC07 jumps by 0.09 a class when one detection changes
    metric = VOCMApMetric(iou_thresh=0.5, class_names=list(classes))
    loader = gluon.data.DataLoader(
        dataset.transform(SSDDefaultValTransform(side, side)),
        _BATCH_SIZE,
        last_batch="keep",
        batchify_fn=Tuple(Stack(), Pad(pad_val=-1)),
    )
    for images, labels in tqdm(loader, desc="mAP", unit="batch", disable=hidden):
        ids, scores, boxes = net(images.as_in_context(device))
        truth = labels.asnumpy()
        metric.update(boxes.clip(0, side), ids, scores, truth[..., :4], truth[..., 4:5], truth[..., 5:6])
    precision = {name: float(value) for name, value in zip(*metric.get())}
    mean_ap = precision.pop("mAP")
    # not a number: the dataset does not show the class
    return mean_ap, {name: value for name, value in precision.items() if value == value}
