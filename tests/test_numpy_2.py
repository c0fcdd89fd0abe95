"""What of MXNet gives other results with NumPy 2: mended, also where another NumPy is installed."""
import mxnet as mx
import numpy as np
import pytest

from gluon_amp._mxnet import numpy_2


@pytest.fixture(autouse=True)
def mended(monkeypatch):
    """Let MXNet run as with NumPy 2."""
    for owner, name, value in numpy_2.MENDS:
        monkeypatch.setattr(owner, name, value, raising=False)


@pytest.mark.parametrize(("value", "expected"), [
    ((np.int64(2), 3), "(2, 3)"), ([np.int32(1)], "[1]"), (((np.float32(0.5),), None), "((0.5,), None)"),
    (np.float64(0.25), "0.25"), (np.bool_(True), "True"), ("None", "None"), (mx.nd.NDArray, str(mx.nd.NDArray))])
def test_attributes_are_written_without_types(value, expected):
    assert numpy_2._written(value) == expected


def test_shapes_may_be_numbers_of_numpy():
    shape = tuple(np.array([2, 3]))
    assert mx.nd.zeros(shape).shape == mx.np.zeros(shape).shape == (2, 3)
    assert mx.nd.random.uniform(shape=shape).reshape(shape[::-1]).shape == (3, 2)
    assert mx.np.zeros(shape).mean(axis=(np.int64(1),)).shape == (2,)
    assert mx.sym.zeros(shape).infer_shape()[1] == [(2, 3)]


@pytest.mark.parametrize("metric", [mx.metric.Loss(), mx.metric.MAE(), mx.metric.create("ce")])
def test_metrics_sum_in_float64(metric):
    metric.sum_metric = metric.global_sum_metric = 2.0 ** 26  # float32 has steps of 8 here
    ones = mx.nd.ones((1, 1))
    for _ in range(4):
        metric.update([ones * 0 if metric.name == "cross-entropy" else ones * 2],
                      [ones * np.exp(-1) if metric.name == "cross-entropy" else ones])
    assert metric.sum_metric == pytest.approx(2.0 ** 26 + 4, abs=1e-3)
    assert metric.global_sum_metric == metric.sum_metric
    metric.reset()
    assert metric.sum_metric == 0


@pytest.mark.parametrize("make", [mx.nd.array, mx.np.array])
def test_functions_of_numpy_take_arrays(make):
    array = make([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(np.array(array), [[1, 2], [3, 4]])
    assert np.asarray([array, array], dtype="int32").tolist() == [[[1, 2], [3, 4]]] * 2
    assert np.all(array == array)
    assert (2 * np.float32(2) * array).shape == (np.ones((2, 2), "float32") * array.asnumpy()).shape


@pytest.mark.parametrize("label", [4, 2.5, np.float32(3), [1, 2, 3], np.arange(3.0)])
def test_records_hold_labels(label):
    packed = mx.recordio.pack((0, label, 7, 0), b"data")
    header, data = mx.recordio.unpack(packed)
    np.testing.assert_array_equal(header.label, np.asarray(label, "float32"))
    assert (header.id, data) == (7, b"data")


@pytest.mark.parametrize("kind", [".png", ".jpg"])
def test_records_hold_images(kind):
    image = np.full((8, 8, 3), 128, "uint8")
    header, found = mx.recordio.unpack_img(mx.recordio.pack_img((0, [1, 2], 7, 0), image, img_fmt=kind))
    np.testing.assert_allclose(found, image, atol=2)
    assert header.label.tolist() == [1, 2]
