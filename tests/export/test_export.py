"""amp.export_onnx and gluon-amp export-onnx: files that onnxruntime runs as MXNet runs the network."""
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn, rnn
from networks import sequential

import gluon_amp as amp

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gluon_networks import create, floats
from benchmarks.networks import MEMBERS

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
FAST = ("squeezenet1.1", "cifar_resnet20_v1", "center_net_resnet18_v1b_coco", "shufflenet_v1", "bert")


class Moderate(mx.init.Xavier):
    """Weights with which no network overflows in float16: those of trained ones do not."""

    def __init__(self):
        super().__init__(rnd_type="gaussian", factor_type="in", magnitude=1)

    def _init_weight(self, name, arr):
        if arr.ndim > 1:
            super()._init_weight(name, arr)
        else:
            arr[:] = 1


class Net(gluon.HybridBlock):
    """A function of data and of a layer, if there is one."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.function = function
        self.layer = layer

    def hybrid_forward(self, F, *data):
        return self.function(F, *([] if self.layer is None else [self.layer]), *data)


def given(path, *arrays):
    """Run a file on arrays."""
    run = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return run.run(None, {each.name: array.asnumpy() for each, array in zip(run.get_inputs(), arrays)})


def normal(*shape):
    return mx.nd.array(np.random.RandomState(0).normal(size=shape))


def assert_same(net, path, *arrays, **tolerance):
    """Compare what a file gives with what MXNet gives."""
    expected = net(*arrays)
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    found = given(path, *arrays)
    assert [each.shape for each in found] == [each.shape for each in expected]
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other.asnumpy(), **tolerance)


@pytest.fixture
def small():
    """Return a network with a dense layer and a softmax, and data for it."""
    net = sequential(lambda: [nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(5),
                              nn.HybridLambda(lambda F, x: F.softmax(x))], Moderate(), "net_", active=False)
    data = normal(2, 3, 8, 8)
    net(data)
    return net, data


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
                                  for name in MEMBERS])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("float16", 1e-2)])
def test_networks_of_the_zoos(name, dtype, most, tmp_path):
    net = create(name, 0, "static")
    data = mx.nd.array(np.random.RandomState(0).normal(size=MEMBERS[name].shape(1)).clip(-2.1, 2.6))
    net(data)
    mx.random.seed(0)
    net.initialize(Moderate(), force_reinit=True)
    if name == "simple_pose_resnet18_v1b" and dtype == "float16":  # rounding adds up in heat maps of random weights
        most = 5e-2
    record = amp.export_onnx(net, tmp_path / "net.onnx", data, dtype, max_error=most)
    assert 0 <= max(record.errors.values()) < most
    assert (record.low_precision > 0) is (dtype == "float16")
    model = onnx.load(str(tmp_path / "net.onnx"))
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == record.opset == 15
    assert [each.shape for each in given(tmp_path / "net.onnx", data)] == [each.shape for each in floats(net(data))]


def test_the_decisions_of_the_table(small, tmp_path):
    net, data = small
    record = amp.export_onnx(net, tmp_path / "net.onnx", data)
    graph = onnx.load(str(tmp_path / "net.onnx")).graph
    types = {each.name: each.data_type for each in graph.initializer}
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    conv, norm = (next(node for node in graph.node if node.op_type == op) for op in ("Conv", "BatchNormalization"))
    assert [types[name] for name in conv.input[1:]] == [half] * 2
    assert [types[name] for name in norm.input[1:]] == [single] * 4
    assert next(types[node.input[1]] for node in graph.node if node.op_type == "Gemm") == half
    casts = [(node.input[0], node.attribute[0].i) for node in graph.node if node.op_type == "Cast"]
    softmax = next(node for node in graph.node if node.op_type == "Softmax")
    assert casts[0] == ("data", half)
    assert softmax.input[0] in [node.output[0] for node in graph.node if node.op_type == "Cast"]
    assert record.casts == len(casts) == 2
    assert record.inputs == {"data": "float32"}
    assert list(record.outputs.values()) == ["float32"]


@pytest.mark.parametrize("by", ["exclude", "fp32_ops"])
def test_what_stays_in_fp32_on_request(small, by, tmp_path):
    net, data = small
    amp.export_onnx(net, tmp_path / "net.onnx", data, **{by: [net[0]] if by == "exclude" else ["Convolution"]})
    graph = onnx.load(str(tmp_path / "net.onnx")).graph
    types = {each.name: each.data_type for each in graph.initializer}
    found = {node.op_type: types[node.input[1]] for node in graph.node if node.op_type in ("Conv", "Gemm")}
    assert found == {"Conv": onnx.TensorProto.FLOAT, "Gemm": onnx.TensorProto.FLOAT16}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_batch_size(small, dtype, tmp_path):
    amp.export_onnx(*small[:1], tmp_path / "net.onnx", small[1], dtype, dynamic_batch=True)
    assert_same(small[0], tmp_path / "net.onnx", normal(7, 3, 8, 8), atol=2e-3)


def tanh_rnn(*args, **options):
    return rnn.RNN(*args, activation="tanh", **options)


@pytest.mark.parametrize("kind", [rnn.LSTM, rnn.GRU, rnn.RNN, tanh_rnn])
@pytest.mark.parametrize("options", [
    {}, {"num_layers": 2, "layout": "NTC"}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_recurrent_layers(kind, options, tmp_path):
    layer = kind(5, input_size=6, **options)
    layer.initialize(mx.init.Uniform(0.5))
    for bias in layer.collect_params(".*bias").values():
        bias.initialize(mx.init.Uniform(0.5), force_reinit=True)
    words = mx.nd.array(np.random.RandomState(0).randint(0, 50, (4, 3)))
    embedded = sequential([nn.Embedding(50, 6), layer, nn.Dense(3, flatten=False)], active=False)
    for net, data in ((layer, normal(4, 3, 6)), (embedded, words)):
        for dtype, most in (("float32", 1e-6), ("float16", 1e-2)):
            record = amp.export_onnx(net, tmp_path / "net.onnx", data, dtype)
            assert max(record.errors.values()) < most


STATES = {
    "given": lambda F, layer, x, h, c: (lambda y, states: (y, *states))(*layer(x, [h, c])),
    "zeros and given": lambda F, layer, x, c: layer(x, [F.zeros((2, 3, 5)), c])[0],
    "given and zeros": lambda F, layer, x, h: layer(x, [h, F.zeros((2, 3, 5))])[0],
    "zeros like": lambda F, layer, x, c: layer(x, [F.zeros_like(c), c])[0]}


@pytest.mark.parametrize("layout", ["TNC", "NTC"])
@pytest.mark.parametrize("states", STATES)
def test_states_of_recurrent_layers(states, layout, tmp_path):
    net = Net(STATES[states], rnn.LSTM(5, num_layers=2, input_size=6, layout=layout))
    net.initialize(mx.init.Uniform(0.5))
    any_batch = "zeros" not in states or states == "zeros like"  # F.zeros tells the size of a batch
    for batch in (3, 7) if any_batch else (3,):
        shape = (4, batch, 6) if layout == "TNC" else (batch, 4, 6)
        arrays = [normal(*shape), *[normal(2, batch, 5)] * (2 if states == "given" else 1)]
        if batch == 3:
            record = amp.export_onnx(net, tmp_path / "net.onnx", arrays, "float32", dynamic_batch=any_batch)
            assert max(record.errors.values()) < 1e-6
        if batch == 3 or layout == "NTC":
            assert_same(net, tmp_path / "net.onnx", *arrays, atol=1e-6)


def test_bert_with_masks(tmp_path):
    nlp = pytest.importorskip("gluonnlp")
    encoder = nlp.model.BERTEncoder(num_layers=2, units=32, hidden_size=64, max_length=16, num_heads=4, dropout=0.0)
    net = nlp.model.BERTModel(encoder, vocab_size=100, token_type_vocab_size=2, units=32, embed_size=32,
                              use_classifier=False, use_decoder=False)
    net.initialize(mx.init.Normal(0.1))
    words = mx.nd.array(np.random.RandomState(0).randint(0, 100, (2, 16)))
    arrays = [words, mx.nd.zeros((2, 16)), mx.nd.array([16, 9])]
    for dtype, most in (("float32", 1e-4), ("float16", 1e-2)):
        record = amp.export_onnx(net, tmp_path / "net.onnx", arrays, dtype)
        assert len(record.errors) == 2
        assert max(record.errors.values()) < most


def test_outputs_keep_their_order_and_may_be_inputs_and_come_twice(tmp_path):
    net = Net(lambda F, a, b: (lambda twice: (F.concat(b, a, dim=1), a, twice, a * 2, twice, a))(F.exp(b)))
    arrays = [normal(2, 3), normal(2, 4)]
    amp.export_onnx(net, tmp_path / "net.onnx", arrays)
    assert_same(net, tmp_path / "net.onnx", *arrays, rtol=1e-3)


def test_a_network_in_float16_and_one_under_amp(small, tmp_path):
    net, data = small
    expected = net(data).asnumpy()
    amp.init("float16")
    amp.export_onnx(net, tmp_path / "under.onnx", data, "float32")
    amp.deinit()
    np.testing.assert_allclose(given(tmp_path / "under.onnx", data)[0], expected, atol=1e-6)
    net.cast("float16")
    record = amp.export_onnx(net, tmp_path / "half.onnx", data.astype("float16"))
    assert record.inputs == {"data": "float32"}
    np.testing.assert_allclose(given(tmp_path / "half.onnx", data)[0], expected, atol=5e-3)


def identity(F, layer, x):
    """Let a layer that changes nothing bring data into float16."""
    return layer(x)


def dense():
    layer = nn.Dense(50, in_units=50, use_bias=False, flatten=False)
    layer.initialize()
    layer.weight.set_data(mx.nd.array(np.eye(50)))
    return layer


class TestFloat16:
    """Values that float16 does not hold are seen, though onnxruntime computes in FP32 on a CPU."""

    @pytest.mark.parametrize("function", [
        lambda F, y: (y * F.identity(y)).sum(axis=1) * 1e-6, lambda F, y: F.mean(y * F.identity(y) * 1e-3, axis=1),
        lambda F, y: y * 400 / 400], ids=["sum", "mean", "product"])
    def test_overflow(self, function, tmp_path):
        net = Net(lambda F, layer, x: function(F, layer(x)), dense())
        with pytest.raises(amp.GraphError, match="is inf off MXNet in FP32"):
            amp.export_onnx(net, tmp_path / "net.onnx", normal(4, 50) * 300)
        amp.export_onnx(net, tmp_path / "net.onnx", normal(4, 50))

    def test_values_below_what_it_holds(self, tmp_path):
        net = Net(lambda F, layer, x: layer(layer(x) * 1e-6) * 1e6, dense())
        with pytest.raises(amp.GraphError, match=r"is 0\.\d+ off MXNet in FP32"):
            amp.export_onnx(net, tmp_path / "net.onnx", normal(4, 50) * 0.1)


class TestDecisions:
    """What follows from a comparison is compared, too, and a difference in the last bit is no error."""

    @pytest.mark.parametrize("wrong", [
        lambda F, y: F.contrib.BilinearResize2D(y, height=24, width=24, align_corners=False),
        lambda F, y: F.mean(y, axis=1, exclude=True)], ids=["resize", "exclude"])
    def test_what_is_wrong_behind_one_is_seen(self, wrong, tmp_path):
        net = Net(lambda F, layer, x: (lambda y: wrong(F, y * (y > 0)))(layer(x)), nn.Conv2D(3, 1, in_channels=3))
        net.initialize()
        with pytest.raises(amp.GraphError, match="off MXNet in FP32"):
            amp.export_onnx(net, tmp_path / "net.onnx", normal(1, 3, 16, 16), "float32")

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("function", [
        lambda F, y: y * (y > 0.1), lambda F, y: F.broadcast_equal(y, F.max(y, axis=1, keepdims=True)) * y,
        lambda F, y: F.one_hot(F.argmax(y, axis=1), 50) * 3, lambda F, y: F.floor(y * 3) + F.ceil(y),
        lambda F, y: F.take(y, F.topk(F.mean(y, axis=1), k=2, axis=0)), lambda F, y: F.topk(y, k=3, ret_typ="both"),
        lambda F, y: (lambda z: z * F.broadcast_greater(z, F.mean(z, axis=1, keepdims=True)))(y * (y > 0))],
        ids=["mask", "maximum", "class", "rounded", "rows", "sorted", "masks behind masks"])
    def test_what_is_right_is_written(self, function, dtype, tmp_path):
        net = Net(lambda F, layer, x: function(F, layer(x)), dense())
        net.layer.weight.set_data(net.layer.weight.data() + normal(50, 50) * 0.1)
        record = amp.export_onnx(net, tmp_path / "net.onnx", normal(4, 50), dtype)
        outputs = onnx.load(str(tmp_path / "net.onnx")).graph.output
        names = {each.name for each in outputs if not each.name.endswith("topk01")}  # among equal values any is right
        assert names <= set(record.errors)
        assert max(record.errors.values()) < (1e-5 if dtype == "float32" else 5e-3)


def boxes(samples, count, seed, centers):
    """Return rows of class, score and box; many overlap, and no two scores are near one another."""
    random = np.random.RandomState(seed)
    corner, size = random.uniform(0, 4, (samples, count, 2)), random.uniform(1, 3, (samples, count, 2))
    scores = np.stack([random.permutation(count) / count for _ in range(samples)])[..., None]
    second = size if centers else corner + size
    return mx.nd.array(np.concatenate([random.randint(-1, 3, (samples, count, 1)), scores, corner, second], -1))


class TestOperators:
    """Operators that MXNet's converter writes wrong or not at all."""

    @pytest.mark.parametrize("attrs", [
        {}, {"id_index": 0}, {"id_index": 0, "force_suppress": True}, {"id_index": 0, "topk": 12},
        {"id_index": 0, "valid_thresh": 0.4}, {"id_index": 0, "background_id": 1},
        {"overlap_thresh": 0.9, "topk": 100}, {"id_index": 0, "in_format": "center", "out_format": "center"},
        {"valid_thresh": 2.0}], ids=str)
    def test_suppression_of_boxes(self, attrs, tmp_path):
        data = boxes(3, 40, 0, attrs.get("in_format") == "center")
        options = {"overlap_thresh": 0.3, "coord_start": 2, "score_index": 1, **attrs}
        net = Net(lambda F, x: F.contrib.box_nms(x, **options))
        assert (1 < (net(data)[..., 1] >= 0).sum() < 120) or "valid_thresh" in attrs
        amp.export_onnx(net, tmp_path / "net.onnx", data, "float32")
        assert_same(net, tmp_path / "net.onnx", data, rtol=0)

    def test_boxes_in_another_format_than_they_came_in_are_refused(self, tmp_path):
        block = Net(lambda F, x: F.contrib.box_nms(x, in_format="center", out_format="corner"))
        with pytest.raises(amp.GraphError, match=r"_contrib_box_nms\) cannot be written in ONNX: expected out_format"):
            amp.export_onnx(block, tmp_path / "net.onnx", boxes(1, 4, 0, centers=True), "float32")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("size", [1, (1, 1), 3, (2, 5), (7, 6)])
    def test_pooling_to_any_size(self, size, tmp_path):
        net, data = Net(lambda F, x: F.contrib.AdaptiveAvgPooling2D(x, output_size=size)), normal(2, 3, 7, 11)
        amp.export_onnx(net, tmp_path / "net.onnx", data, "float32", dynamic_batch=True)
        assert_same(net, tmp_path / "net.onnx", data, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(("shape", "options"), [
        ((0, -4, 2, 3, -2), {}), ((-3, 0, 0), {}), ((-1, 25), {}), ((0, 0, -1), {}), ((-2,), {}), ((0, -3, 0), {}),
        ((-1, 0, 0, 0), {"reverse": True}), ((-4, -1, 2, -2), {})], ids=str)
    def test_reshaping(self, shape, options, tmp_path):
        net = Net(lambda F, x: F.reshape(x * 2, shape, **options))
        amp.export_onnx(net, tmp_path / "net.onnx", normal(4, 6, 5, 5), "float32", dynamic_batch=True)
        assert_same(net, tmp_path / "net.onnx", normal(4, 6, 5, 5))


def test_what_mxnets_converter_prints_is_not_printed(tmp_path, capfd):
    net = Net(lambda F, layer, x: 1 - layer(x), nn.Dense(4))
    net.initialize()
    amp.export_onnx(net, tmp_path / "net.onnx", mx.nd.ones((2, 5)))
    assert capfd.readouterr().out == ""


class TestErrors:
    def refused(self, tmp_path, error, match, net, data, *args, **options):
        (tmp_path / "net.onnx").write_text("as it was")
        with pytest.raises(error, match=match):
            amp.export_onnx(net, tmp_path / "net.onnx", data, *args, **options)
        assert (tmp_path / "net.onnx").read_text() == "as it was"
        assert len(list(tmp_path.iterdir())) == 1

    def test_unknown_operator(self, tmp_path):
        net = Net(lambda F, x: F.linalg.gelqf(x))
        self.refused(tmp_path, amp.GraphError, r"\(_linalg_gelqf\) cannot be written in ONNX.*Leave it out of", net,
                     mx.nd.ones((2, 3)))

    @pytest.mark.parametrize("shape", [(2, 12), (-4, 2, 1, 0, 0)])
    def test_a_batch_size_that_the_network_fixes(self, shape, tmp_path):
        self.refused(tmp_path, amp.GraphError, "cannot run", Net(lambda F, x: F.reshape(x, shape)),
                     mx.nd.ones((2, 3, 4)), "float32", dynamic_batch=True)

    def test_too_large_an_error(self, small, tmp_path):
        self.refused(tmp_path, amp.GraphError, r"off MXNet in FP32, where max_error=1e-09 is allowed", *small,
                     max_error=1e-9)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_data_for_which_nothing_is_a_number(self, value, tmp_path):
        self.refused(tmp_path, amp.GraphError, "data_example for which the network gives numbers",
                     Net(lambda F, x: x * 2), mx.nd.ones((2, 3)) * value, "float32")

    def test_a_converted_network(self, small, tmp_path):
        net, data = small
        self.refused(tmp_path, amp.GraphError, "already converted to float32: export the FP32 network that",
                     amp.convert_hybrid_block(net, "float32"), data)

    @pytest.mark.parametrize(("options", "error", "match"), [
        ({"target_dtype": "bfloat16"}, amp.DTypeError, "expected 'float16' or 'float32', received 'bfloat16'"),
        ({"max_error": -1}, ValueError, "max_error"),
        ({"fp32_ops": ["Convolutoin"]}, amp.PolicyError, "Did you mean 'Convolution'")])
    def test_arguments(self, small, options, error, match, tmp_path):
        self.refused(tmp_path, error, match, *small, **options)

    @pytest.mark.parametrize("data", [None, [], np.ones((2, 3, 8, 8))])
    def test_data(self, small, data, tmp_path):
        self.refused(tmp_path, TypeError, "expected an NDArray, or several in a list", small[0], data)

    def test_a_network_without_values(self, tmp_path):
        net = nn.Dense(3, in_units=2)
        self.refused(tmp_path, amp.StateError, "parameters have no values yet", net, mx.nd.ones((1, 2)))

    def test_missing_packages(self, small, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnx", None)
        self.refused(tmp_path, ImportError, r"Run: python -m pip install 'gluon_amp\[onnx\]'", *small)


class TestCommand:
    @pytest.fixture
    def files(self, small, tmp_path):
        net, data = small
        net.hybridize()
        net(data)
        net.export(str(tmp_path / "net"))
        return [tmp_path / "net-symbol.json", tmp_path / "net-0000.params"], data

    def run(self, *arguments):
        return subprocess.run([sys.executable, "-m", "gluon_amp", "export-onnx", *map(str, arguments)],
                              capture_output=True, text=True, timeout=300)

    def test_writes_and_says_what(self, files, small, tmp_path):
        names, data = files
        np.savez(tmp_path / "data.npz", data=data.asnumpy())
        done = self.run(*names, "--check-data", tmp_path / "data.npz", "-o", tmp_path / "net.onnx", "--dynamic-batch")
        assert done.returncode == 0, done.stderr
        assert "ONNX opset 15" in done.stdout
        assert "off MXNet in FP32, on --check-data" in " ".join(done.stdout.split())
        assert_same(small[0], tmp_path / "net.onnx", data, atol=2e-3)

    def test_errors_are_one_line(self, files, tmp_path):
        done = self.run(*files[0], "-o", tmp_path / "net.onnx")
        assert done.returncode == 1
        assert done.stderr.startswith("gluon-amp export-onnx: ")
        assert "Add --data data:1,3,224,224" in " ".join(done.stderr.split())
        assert not (tmp_path / "net.onnx").exists()
