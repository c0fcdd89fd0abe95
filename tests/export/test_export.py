"""amp.export_onnx and gluon-amp export-onnx: files that onnxruntime runs as MXNet runs the network."""
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn, rnn

import gluon_amp as amp

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gluon_networks import create, floats
from benchmarks.networks import MEMBERS

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
FAST = ("squeezenet1.1", "cifar_resnet20_v1", "center_net_resnet18_v1b_coco", "bert")


class Moderate(mx.init.Xavier):
    """Weights with which no network overflows in float16: those of trained ones do not."""

    def __init__(self):
        super().__init__(rnd_type="gaussian", factor_type="in", magnitude=1)

    def _init_weight(self, name, arr):
        if arr.ndim > 1:
            super()._init_weight(name, arr)
        else:
            arr[:] = 1


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def given(path, *arrays):
    """Run a file on arrays."""
    run = session(path)
    return run.run(None, {each.name: array.asnumpy() for each, array in zip(run.get_inputs(), arrays)})


@pytest.fixture
def small():
    """Return a network with a dense layer and a softmax, and data for it."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(5),
                nn.HybridLambda(lambda F, x: F.softmax(x)))
    net.initialize(Moderate())
    data = mx.nd.random.normal(shape=(2, 3, 8, 8))
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
    record = amp.export_onnx(net, tmp_path / "net.onnx", data, dtype)
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


def test_inputs_and_outputs_in_float16(small, tmp_path):
    net, data = small
    record = amp.export_onnx(net, tmp_path / "net.onnx", data, io_dtype="float16")
    found, = given(tmp_path / "net.onnx", data.astype("float16"))
    assert found.dtype == np.float16
    assert {*record.inputs.values(), *record.outputs.values()} == {"float16"}
    np.testing.assert_allclose(found, net(data).asnumpy(), atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_batch_size(small, dtype, tmp_path):
    net, data = small
    amp.export_onnx(net, tmp_path / "net.onnx", data, dtype, dynamic_batch=True)
    more = mx.nd.random.normal(shape=(7, 3, 8, 8))
    np.testing.assert_allclose(given(tmp_path / "net.onnx", more)[0], net(more).asnumpy(), atol=2e-3)


def test_a_batch_size_that_the_network_fixes_is_refused(tmp_path):
    net = nn.HybridLambda(lambda F, x: F.reshape(x, (2, 12)))
    with pytest.raises(amp.GraphError, match="cannot run the exported network"):
        amp.export_onnx(net, tmp_path / "net.onnx", mx.nd.ones((2, 3, 4)), "float32", dynamic_batch=True)
    assert not list(tmp_path.iterdir())


class Recurrent(gluon.HybridBlock):
    """A recurrent layer on embedded words."""

    def __init__(self, kind, **options):
        super().__init__()
        with self.name_scope():
            self.words = nn.Embedding(50, 6)
            self.layer = kind(5, **options)
            self.dense = nn.Dense(3, flatten=False)

    def hybrid_forward(self, F, x):
        return self.dense(self.layer(self.words(x)))


def tanh_rnn(*args, **options):
    return rnn.RNN(*args, activation="tanh", **options)


@pytest.mark.parametrize("kind", [rnn.LSTM, rnn.GRU, rnn.RNN, tanh_rnn])
@pytest.mark.parametrize("options", [
    {}, {"num_layers": 2, "layout": "NTC"}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_recurrent_layers(kind, options, tmp_path):
    net = Recurrent(kind, **options)
    net.initialize(mx.init.Uniform(0.5))
    for bias in net.collect_params(".*bias").values():
        bias.initialize(mx.init.Uniform(0.5), force_reinit=True)
    words = mx.nd.array(np.random.RandomState(0).randint(0, 50, (4, 3)))
    for dtype, most in (("float32", 1e-6), ("float16", 1e-2)):
        record = amp.export_onnx(net, tmp_path / "net.onnx", words, dtype)
        assert max(record.errors.values()) < most


class States(gluon.HybridBlock):
    """An LSTM that is given its states and gives them back."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.layer = rnn.LSTM(5, num_layers=2)

    def hybrid_forward(self, F, x, h, c):
        y, (h, c) = self.layer(x, [h, c])
        return y, h, c


def test_states_of_recurrent_layers(tmp_path):
    net = States()
    net.initialize(mx.init.Uniform(0.5))
    arrays = [mx.nd.random.normal(shape=shape) for shape in ((4, 3, 6), (2, 3, 5), (2, 3, 5))]
    record = amp.export_onnx(net, tmp_path / "net.onnx", arrays, "float32")
    assert len(record.errors) == 3
    assert max(record.errors.values()) < 1e-6
    for expected, found in zip(net(*arrays), given(tmp_path / "net.onnx", *arrays)):
        np.testing.assert_allclose(found, expected.asnumpy(), atol=1e-6)


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


def test_outputs_keep_their_order_and_may_be_inputs(tmp_path):
    class Several(gluon.HybridBlock):
        def hybrid_forward(self, F, a, b):
            return F.concat(b, a, dim=1), a, F.exp(b), a * 2

    arrays = [mx.nd.random.normal(shape=(2, 3)), mx.nd.random.normal(shape=(2, 4))]
    amp.export_onnx(Several(), tmp_path / "net.onnx", arrays)
    expected = Several()(*arrays)
    for wanted, found in zip(expected, given(tmp_path / "net.onnx", *arrays)):
        np.testing.assert_allclose(found, wanted.asnumpy(), rtol=1e-3)


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


class TestErrors:
    def refused(self, tmp_path, error, match, net, data, *args, **options):
        (tmp_path / "net.onnx").write_text("as it was")
        with pytest.raises(error, match=match):
            amp.export_onnx(net, tmp_path / "net.onnx", data, *args, **options)
        assert (tmp_path / "net.onnx").read_text() == "as it was"
        assert len(list(tmp_path.iterdir())) == 1

    def test_unknown_operator(self, tmp_path):
        net = nn.HybridLambda(lambda F, x: F.linalg.gelqf(x))
        self.refused(tmp_path, amp.GraphError, r"knows no _linalg_gelqf \(.*gelqf0\): leave such operators out", net,
                     mx.nd.ones((2, 3)))

    def test_too_large_an_error(self, small, tmp_path):
        self.refused(tmp_path, amp.GraphError, r"off MXNet in FP32, where max_error=1e-09 is allowed", *small,
                     max_error=1e-9)

    def test_a_converted_network(self, small, tmp_path):
        net, data = small
        self.refused(tmp_path, amp.GraphError, "already converted to float32: export the FP32 network that",
                     amp.convert_hybrid_block(net, "float32"), data)

    @pytest.mark.parametrize(("options", "error", "match"), [
        ({"target_dtype": "bfloat16"}, amp.DTypeError, "expected 'float16' or 'float32', received 'bfloat16'"),
        ({"target_dtype": "float32", "io_dtype": "float16"}, amp.PolicyError, "io_dtype='float16' is for"),
        ({"max_error": -1}, ValueError, "max_error"),
        ({"target_dtype": "float16", "dtype": "float32"}, TypeError, "expected target_dtype or dtype"),
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
        self.refused(tmp_path, ImportError, "Run: python -m pip install onnx onnxruntime", *small)


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
        np.testing.assert_allclose(given(tmp_path / "net.onnx", data)[0], small[0](data).asnumpy(), atol=2e-3)

    def test_json_of_float32(self, files, tmp_path):
        done = self.run(*files[0], "--data", "data:1,3,8,8", "-o", tmp_path / "net.onnx", "--dtype", "float32",
                        "--json", "-")
        assert done.returncode == 0, done.stderr
        assert '"target_dtype": "float32"' in done.stdout

    def test_errors_are_one_line(self, files, tmp_path):
        done = self.run(*files[0], "-o", tmp_path / "net.onnx")
        assert done.returncode == 1
        assert done.stderr.startswith("gluon-amp export-onnx: ")
        assert "Add --data data:1,3,224,224" in " ".join(done.stderr.split())
        assert not (tmp_path / "net.onnx").exists()
