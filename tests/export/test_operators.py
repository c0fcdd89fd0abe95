"""Operators that MXNet's converter writes wrong or not at all: their ONNX in onnxruntime beside MXNet's operator."""
import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import gluon_amp as amp

onnxruntime = pytest.importorskip("onnxruntime")


class Operator(nn.HybridBlock):
    """One operator of MXNet's."""

    def __init__(self, name, **attrs):
        super().__init__()
        self.name_, self.attrs = name, attrs

    def hybrid_forward(self, F, x):
        return getattr(F.contrib, self.name_)(x, **self.attrs)


def both(block, data, tmp_path, **options):
    """Return what MXNet gives, and what the file gives in onnxruntime."""
    block.initialize()
    expected = block(data).asnumpy()
    amp.export_onnx(block, tmp_path / "net.onnx", data, "float32", **options)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    return expected, session.run(None, {session.get_inputs()[0].name: data.asnumpy()})[0]


def boxes(samples, count, seed, centers):
    """Return rows of class, score and box; many overlap, and no two scores are near one another."""
    random = np.random.RandomState(seed)
    corner, size = random.uniform(0, 4, (samples, count, 2)), random.uniform(1, 3, (samples, count, 2))
    scores = np.stack([random.permutation(count) / count for _ in range(samples)])[..., None]
    second = size if centers else corner + size
    return np.concatenate([random.randint(-1, 3, (samples, count, 1)), scores, corner, second], -1).astype("float32")


@pytest.mark.parametrize("attrs", [
    {}, {"id_index": 0}, {"id_index": 0, "force_suppress": True}, {"id_index": 0, "topk": 12},
    {"id_index": 0, "valid_thresh": 0.4}, {"id_index": 0, "background_id": 1}, {"overlap_thresh": 0.9, "topk": 100},
    {"id_index": 0, "in_format": "center", "out_format": "center"}], ids=str)
def test_suppression_of_boxes(attrs, tmp_path):
    data = mx.nd.array(boxes(3, 40, 0, attrs.get("in_format") == "center"))
    attrs = {"overlap_thresh": 0.3, "coord_start": 2, "score_index": 1, **attrs}
    expected, found = both(Operator("box_nms", **attrs), data, tmp_path)
    assert 1 < (expected[..., 1] >= 0).sum() < 120
    np.testing.assert_array_equal(found, expected)


def test_suppression_where_no_box_is_left(tmp_path):
    data = mx.nd.array(boxes(2, 8, 0, centers=False))
    expected, found = both(Operator("box_nms", valid_thresh=2.0), data, tmp_path)
    assert (expected == -1).all()
    np.testing.assert_array_equal(found, expected)


def test_boxes_in_another_format_than_they_came_in_are_refused(tmp_path):
    block = Operator("box_nms", in_format="center", out_format="corner")
    with pytest.raises(amp.GraphError, match=r"\(_contrib_box_nms\) cannot be written in ONNX: expected out_format"):
        both(block, mx.nd.array(boxes(1, 4, 0, centers=True)), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [1, (1, 1), 3, (2, 5), (7, 6)])
def test_pooling_to_any_size(size, tmp_path):
    data = mx.nd.random.normal(shape=(2, 3, 7, 11))
    expected, found = both(Operator("AdaptiveAvgPooling2D", output_size=size), data, tmp_path, dynamic_batch=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
