"""Operators in C++ in inference: hybridized networks, executors and converted networks, whose files stay MXNet's."""
from __future__ import annotations

import pickle

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import SymbolBlock
from native_cases import assert_close, requires_core
from native_networks import BATCH, FLAGS, distance, inputs, network, requires_onednn
from networks import differentiate

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.plan.cached_op import prepared_operations

requires_rnn = pytest.mark.skipif(not native.is_available("_gluon_amp_rnn"), reason=native.load()[1].missing)


def latest(net):
    ((_, operation),) = prepared_operations(net)
    return operation.latest.graph.operators()


def kinds(net):
    return {node.op for node in latest(net)}


@requires_core
class TestHybridized:
    @pytest.mark.parametrize("flags", FLAGS, ids=["dynamic", "static memory", "static"])
    def test_training_and_inference_in_turns(self, flags):
        def results():
            net = network(flags=flags)
            found = []
            for seed in range(3):
                (x,) = inputs(seed=seed)
                out = differentiate(net, x)
                found += [out.asnumpy(), net(x).asnumpy(), net.lstm.l0_i2h_weight.grad().asnumpy()]
            return found, net

        expected, _ = results()
        amp.init("float32")
        received, net = results()
        for one, other in zip(received, expected):
            assert_close(one, other, 2e-6)
        assert "_gluon_amp_layer_norm" in kinds(net)


def small_symbol():
    x = mx.sym.LayerNorm(mx.sym.FullyConnected(mx.sym.var("x"), num_hidden=64, name="fc"), name="ln")
    return mx.sym.LinearRegressionOutput(mx.sym.clip(x, -1, 1, name="limit"), mx.sym.var("label"), name="out")


def values(symbol, batch, inputs=16):
    random = np.random.RandomState(1)
    shapes, _, _ = symbol.infer_shape(x=(batch, inputs))
    return {name: mx.nd.array(random.normal(size=shape)) for name, shape in zip(symbol.list_arguments(), shapes)}


@requires_core
class TestExecutors:
    @pytest.mark.parametrize("grad_req", ["write", "add", "null"])
    @pytest.mark.parametrize("simple", [True, False])
    def test_values_and_gradients(self, simple, grad_req):
        symbol = small_symbol()
        arrays = values(symbol, 300)

        def results():
            if simple:
                executor = symbol.simple_bind(mx.cpu(), grad_req, x=(300, 16))
                executor.copy_params_from(arrays)
            else:
                grads = {name: mx.nd.zeros(array.shape) for name, array in arrays.items()}
                executor = symbol.bind(mx.cpu(), arrays, None if grad_req == "null" else grads, grad_req)
            found = []
            for _ in range(2):
                found.append(executor.forward(is_train=grad_req != "null")[0].asnumpy())
                if grad_req != "null":
                    executor.backward()
            return [*found, *(grad.asnumpy() for grad in executor.grad_arrays or [] if grad is not None)], executor

        expected, _ = results()
        amp.init("float32")
        received, executor = results()
        assert executor.plan.is_native
        assert len(received) == len(expected)
        for one, other in zip(received, expected):
            assert_close(one, other, 2e-6)

    @pytest.mark.parametrize("simple", [True, False])
    def test_reshaped(self, simple):
        """MXNet infers shapes of parameters again, which would end the process with operators of a library."""
        symbol = small_symbol()
        arrays = values(symbol, 300)

        def results():
            if simple:
                executor = symbol.simple_bind(mx.cpu(), "null", x=(300, 16), label=(300, 64))
                executor.copy_params_from(arrays)
            else:
                executor = symbol.bind(mx.cpu(), arrays)
            found = []
            for batch in (200, 40, 300, 500):
                executor = executor.reshape(allow_up_sizing=True, x=(batch, 16), label=(batch, 64))
                executor.arg_dict["x"][:] = values(symbol, batch)["x"]
                found.append(executor.forward()[0].asnumpy())
            return found

        expected = results()
        amp.init("float32")
        for one, other in zip(results(), expected):
            assert_close(one, other, 2e-6)

    @pytest.mark.parametrize("simple", [True, False])
    def test_parameters_that_are_reshaped(self, simple):
        amp.init("float32")
        symbol = mx.sym.LayerNorm(mx.sym.var("x"), mx.sym.var("gamma"), mx.sym.var("beta"))
        if simple:
            executor = symbol.simple_bind(mx.cpu(), x=(64, 64))
        else:
            executor = symbol.bind(mx.cpu(), [mx.nd.ones((64, 64)), mx.nd.ones(64), mx.nd.ones(64)])
        executor.reshape(x=(32, 64)).forward()[0].wait_to_read()

    def test_a_shape_that_was_not_given_and_changes(self):
        symbol = small_symbol()
        amp.init("float32")
        executor = symbol.simple_bind(mx.cpu(), x=(300, 16))
        with pytest.raises(mx.MXNetError, match="label changes, which was not given"):
            executor.reshape(x=(200, 16))
        assert executor.reshape(partial_shaping=True, x=(200, 16)).forward()[0].shape == (200, 64)
        with pytest.raises(mx.MXNetError):
            executor.reshape(x=(200, 17))

    def test_sparse_arrays_keep_mxnets_operators(self):
        symbol = mx.sym.clip(mx.sym.var("x", stype="row_sparse"), -1, 1)
        amp.init("float32")
        executor = symbol.simple_bind(mx.cpu(), x=(300, 100))
        assert not executor.plan.is_native
        dense = mx.nd.ones((300, 100)) * 9
        for array in (dense, dense.tostype("row_sparse")):
            executor = mx.sym.clip(mx.sym.var("x"), -1, 6).bind(mx.cpu(), {"x": array})
            assert executor.plan.is_native == (array is dense)
            assert executor.forward()[0].asnumpy().max() == 6

    def test_a_module_trains_and_predicts(self):
        symbol = small_symbol()
        random = np.random.RandomState(0)
        inputs, labels = random.normal(size=(90, 16)), random.normal(size=(90, 64))

        def results():
            mx.random.seed(1)
            module = mx.mod.Module(symbol, ["x"], ["label"])
            module.fit(mx.io.NDArrayIter({"x": inputs}, {"label": labels}, 40, last_batch_handle="discard"),
                       eval_metric="mse", num_epoch=2, initializer=mx.init.Xavier())
            batch = mx.io.DataBatch([mx.nd.array(inputs[:50])], [mx.nd.array(labels[:50])])
            module.forward(batch, is_train=False)  # another shape: reshapes
            return module.get_outputs()[0].asnumpy()

        expected = results()
        amp.init("float32")
        assert_close(results(), expected, 1e-5)


# "apart" has no use for a bias, of which MXNet warns.
pytestmark = pytest.mark.filterwarnings("ignore:The 1-th input to HybridBlock is not used by any computation")
ATTENTION = [pytest.param(kind, "bfloat16", marks=[pytest.mark.bf16, requires_onednn])
             for kind in ("lengths", "mask", "memory", "joint", "apart")]
TYPES = [("everything", "float32"), pytest.param("everything", "bfloat16", marks=pytest.mark.bf16)]


def traced(kind="everything"):
    """Return a network that ran once, and its inputs."""
    net, arrays = network(kind), inputs(kind, 40 if kind == "everything" else BATCH, seed=7)
    net(*arrays)
    return net, arrays


def types_of_attention(net):
    return [node.dtypes[0] for node in latest(net) if node.op == "_gluon_amp_attention"]


@requires_core
class TestConverted:
    @pytest.mark.parametrize(("kind", "target"), TYPES + ATTENTION)
    def test_values(self, kind, target):
        net, arrays = traced(kind)
        converted = amp.convert_hybrid_block(net, target, data_example=arrays)
        plain = amp.convert_hybrid_block(net, target, data_example=arrays, disable_passes=["native_operators"])
        for batch in (40, 24, 1):
            arrays = inputs(kind, batch)
            expected, received = net(*arrays).asnumpy(), converted(*arrays).asnumpy()
            assert distance([received], [expected]) <= (1e-5 if target == "float32" else 0.02)
            if kind == "everything":
                assert_close(received, plain(*arrays).asnumpy(), 1e-5 if target == "float32" else 0.05)
                assert "_gluon_amp_layer_norm" in kinds(converted)
            else:
                assert types_of_attention(converted) == ["bfloat16"]
                with autograd.record(train_mode=False):  # a graph of its own
                    assert_close(converted(*arrays).asnumpy(), received, 1e-6)
        plain(*arrays)
        assert not any(kind.startswith("_gluon_amp") for kind in kinds(plain))

    @pytest.mark.parametrize(("kind", "target"), ATTENTION)
    def test_attention_stays_in_fp32_where_users_say_so(self, kind, target):
        net, arrays = traced(kind)
        expected = net(*arrays).asnumpy()
        converted = amp.convert_hybrid_block(net, target, data_example=arrays, fp32_ops=["softmax"])
        assert distance([converted(*arrays).asnumpy()], [expected]) <= 0.02
        assert types_of_attention(converted) == ["float32"]

    @pytest.mark.parametrize(("kind", "target"), TYPES + ATTENTION)
    def test_files_hold_mxnets_operators(self, kind, target, tmp_path):
        net, arrays = traced(kind)
        converted = amp.convert_hybrid_block(net, target, data_example=arrays)
        expected = converted(*arrays).asnumpy()
        files = converted.export(str(tmp_path / "net"))
        converted.save(str(tmp_path / "saved"))
        texts = [path.read_text() for path in [tmp_path / "net-symbol.json", *tmp_path.glob("saved*.json")]]
        texts.append(converted._cached_graph[1].tojson())
        texts.append(pickle.dumps(converted._cached_graph[1]).decode("latin1"))
        assert len(texts) >= 4
        assert not any('"_gluon_amp_' in text for text in texts)
        ((_, operation),) = prepared_operations(converted)
        names = sorted(name for name in operation.names if name.startswith("data"))
        arrays = arrays[:len(names)]  # attention without a bias does not read it
        stock = SymbolBlock.imports(files[0], names, files[1])
        bound = 1e-5 if target == "float32" else 0.02
        assert distance([stock(*arrays).asnumpy()], [expected]) <= bound
        amp.init(target)
        stock.hybridize()
        assert distance([stock(*arrays).asnumpy()], [expected]) <= bound

    def test_imported_ones_run_natively_under_amp_only(self, tmp_path):
        net, (x,) = traced()
        files = amp.convert_hybrid_block(net, "float32").export(str(tmp_path / "net"))
        stock = SymbolBlock.imports(files[0], ["data"], files[1])
        stock.hybridize()
        expected = stock(x).asnumpy()
        amp.init("float32")
        assert_close(stock(x).asnumpy(), expected, 2e-6)
        assert "_gluon_amp_layer_norm" in kinds(stock)
        amp.deinit()
        amp.init("float32", disable_passes=["native_operators"])
        np.testing.assert_array_equal(stock(x).asnumpy(), expected)

    @pytest.mark.parametrize(("kind", "target"), [TYPES[0], pytest.param("joint", "bfloat16", marks=[
        pytest.mark.bf16, requires_onednn])])
    def test_gradients_accumulate(self, kind, target):
        """Such as those of an input that several read, with one cast."""
        net, arrays = traced(kind)

        def gradients(**options):
            converted = amp.convert_hybrid_block(net, target, data_example=arrays, optimize="none", **options)
            converted.collect_params().setattr("grad_req", "add")
            arrays[0].attach_grad("add")
            for _ in range(2):
                with autograd.record():
                    out = converted(*arrays)
                out.backward(nd.array(np.random.RandomState(5).normal(size=out.shape)))
            return [arrays[0].grad.asnumpy(), *(p.grad().asnumpy() for p in converted.collect_params().values())]

        expected, received = gradients(disable_passes=["native_operators"]), gradients()
        assert len(received) == len(expected)
        if target == "bfloat16":
            received, expected = received[:1], expected[:1]
        assert distance(received, expected) <= (1e-5 if target == "float32" else 0.05)

    @pytest.mark.bf16
    @requires_rnn
    def test_recurrent_layers_run_in_bfloat16(self):
        net, (x,) = traced()
        expected = net(x).asnumpy()
        converted = amp.convert_hybrid_block(net, "bfloat16")
        assert distance([converted(x).asnumpy()], [expected]) < 0.02
        assert converted._cached_graph[1].tojson().count('"RNN"') == 1
        for excluded, types in ((None, ["bfloat16"]), ("*lstm*", [])):
            converted = amp.convert_hybrid_block(net, "bfloat16", exclude=excluded)
            converted(x)
            ran = [node for node in latest(converted) if node.kind == "RNN"]
            assert [node.attrs["dtype"] for node in ran if "dtype" in node.attrs] == types
            assert len(ran) == 1
