"""Mixed precision on hybridized networks and symbols, against FP32 on the same weights and data."""
from __future__ import annotations

import json

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from networks import BF16_EPS, accumulated, conv_net, differentiate, gradients, ready, relative, sequential, worst

import gluon_amp as amp
from gluon_amp.session import hooks

pytestmark = pytest.mark.machine
SHAPE = (4, 3, 16, 16)
HYBRIDIZE = [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


class Added(nn.HybridBlock):
    """Adds a parameter to the data, on either side, and convolves the sum."""

    def __init__(self, side):
        super().__init__()
        self.side = side
        with self.name_scope():
            self.shift = self.params.get("shift", shape=(2, 32, 8, 8), init=mx.init.Normal(1))
            self.layer = nn.Conv2D(32, 3, padding=1, in_channels=32)

    def hybrid_forward(self, F, x, shift):
        return self.layer(F.elemwise_add(*((x, F.tanh(shift)) if self.side else (F.tanh(x), shift))))


@pytest.mark.bf16
@pytest.mark.parametrize("flags", HYBRIDIZE, ids=str)
class TestHybridized:
    def test_values_and_gradients_are_those_of_fp32_up_to_rounding(self, flags):
        net, data = ready(conv_net(), SHAPE, **flags)
        outputs = [net(each).asnumpy() for each in (data, data[:2])]
        amp.init("bfloat16")
        for each, output in zip((data, data[:2]), outputs):
            assert relative(output, net(each).asnumpy()) < 4 * BF16_EPS
        amp.deinit()
        expected = gradients(net, data)
        amp.init("bfloat16")
        found = gradients(net, data)
        assert worst(expected, found)[0] < 16 * BF16_EPS
        assert any((expected[name] != found[name]).any() for name in expected), "nothing ran in bfloat16"

    def test_accumulated_gradients_are_kept(self, flags):
        net, data = ready(conv_net(), SHAPE, **flags)
        amp.init("bfloat16")
        single = gradients(net, data)
        tripled = accumulated(net, data, passes=3)
        assert worst({name: 3 * value for name, value in single.items()}, tripled)[0] < 2 * BF16_EPS

    @pytest.mark.parametrize("side", [0, 1])
    def test_accumulated_gradients_of_terms_of_a_sum_are_kept(self, flags, side):
        """MXNet lets what comes before a sum's gradient write where that is added up; stock FP32 loses a part."""
        net = Added(side)
        net.initialize()
        net.hybridize(**flags)
        amp.init("bfloat16")
        data = mx.nd.random.normal(shape=(2, 32, 8, 8))

        def added(passes, request):
            net.shift.grad_req = request
            data.attach_grad(request)
            for _ in range(passes):
                differentiate(lambda: net(data).sum())
            return [data.grad.asnumpy(), net.shift.grad().asnumpy()]

        once = added(1, "write")
        for expected, found in zip(once, added(3, "add")):
            assert np.abs(expected).max() > 0
            assert relative(3 * expected, found) < 1e-5

    def test_after_deinit_the_network_runs_in_fp32_bit_for_bit(self, flags):
        net, data = ready(conv_net(), SHAPE, **flags)
        expected = net(data).asnumpy()
        amp.init("bfloat16")
        assert (net(data).asnumpy() != expected).any()
        amp.deinit()
        assert (net(data).asnumpy() == expected).all()


class TestLifeCycle:
    def test_init_may_be_repeated_but_not_changed(self):
        amp.init()
        amp.init()
        with pytest.raises(amp.StateError, match=r"amp\.deinit"):
            amp.init(disable_passes=["shape_operands"])  # it has an effect on a CPU that stays in FP32, too
        assert amp.is_active()

    def test_each_name_of_mxnet_is_replaced_once_and_restored(self):
        places = [(owner, name) for owner, name, _ in (*hooks._OF_CONVERTED, *hooks._REPLACEMENTS)]
        assert len({(id(owner), name) for owner, name in places}) == len(places)

        def found():
            return [vars(owner).get(name) for owner, name in places]

        before = found()
        amp.init()
        assert all(one is not other for one, other in zip(found(), before))
        amp.deinit()
        assert found() == before
        amp.deinit()

    def test_export_writes_the_fp32_model(self, tmp_path):
        net, data = ready(conv_net(), SHAPE)
        net(data)
        net.export(str(tmp_path / "plain"))
        amp.init()
        gradients(net, data)
        net.export(str(tmp_path / "amp"))
        amp.deinit()
        plain, mixed = ((tmp_path / f"{name}-symbol.json").read_text() for name in ("plain", "amp"))
        assert json.loads(plain) == json.loads(mixed)
        again = gluon.SymbolBlock.imports(str(tmp_path / "amp-symbol.json"), ["data"],
                                          str(tmp_path / "amp-0000.params"))
        assert (again(data).asnumpy() == net(data).asnumpy()).all()

    @pytest.mark.bf16
    def test_a_smaller_image_later_does_not_meet_the_kernel_that_leaves_garbage(self):
        # In bfloat16 oneDNN does not write the gradient of filter positions that meet padding only.
        net = sequential([nn.Conv2D(64, 3, strides=2, padding=1, in_channels=64, use_bias=False)])
        amp.init("bfloat16")
        for size in (8, 1):
            for _ in range(4):
                dirty = [mx.nd.full(net[0].weight.shape, np.nan) for _ in range(12)]
                mx.nd.waitall()
                del dirty
                found = gradients(net, mx.nd.ones((2, 64, size, size)))
                assert all(np.isfinite(value).all() for value in found.values())

    @pytest.mark.bf16
    def test_an_error_names_the_operator_the_rule_and_the_way_out(self):
        net, data = ready(conv_net(), SHAPE)
        amp.init("bfloat16")
        net(data)
        message = r"(?s)net_dense0_fwd \(FullyConnected\) ran under AMP.*bfloat16.*LOWER.*fp32_ops=\['FullyConnected'\]"
        with pytest.raises(mx.MXNetError, match=message):
            net(mx.nd.ones((4, 3, 20, 20))).wait_to_read()

    @pytest.mark.bf16
    def test_a_list_keeps_an_operator_in_fp32(self):
        net, data = ready(conv_net(), SHAPE)
        expected = net(data).asnumpy()
        amp.init("bfloat16", fp32_ops=["Convolution", "FullyConnected"])
        assert (net(data).asnumpy() == expected).all()


@pytest.mark.bf16
def test_numpy_blocks_are_covered():
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = sequential([nn.Conv2D(32, 1, in_channels=16), nn.Dense(8)], active=False)
        data = mx.np.random.normal(size=(2, 16, 4, 4))
        net(data)
        net.hybridize()
        expected = net(data).asnumpy()
        amp.init("bfloat16")
        found = net(data)
        assert isinstance(found, mx.np.ndarray)
        assert 0 < relative(expected, found.asnumpy()) < 4 * BF16_EPS


def softmax_net():
    data = mx.sym.var("data")
    body = mx.sym.relu(mx.sym.Convolution(data, num_filter=20, kernel=(3, 3), name="conv"))
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(body), num_hidden=5, name="fc"), name="softmax")


@pytest.mark.bf16
class TestSymbols:
    def module(self, grad_req="write"):
        mx.random.seed(2)
        np.random.seed(2)
        module = mx.mod.Module(softmax_net(), label_names=["softmax_label"])
        module.bind([("data", (8, 16, 8, 8))], [("softmax_label", (8,))], grad_req=grad_req)
        module.init_params(mx.init.Xavier())
        return module

    def batch(self, size=8):
        generator = np.random.RandomState(3)
        return mx.io.DataBatch([mx.nd.array(generator.randn(size, 16, 8, 8))],
                               [mx.nd.array(generator.randint(0, 5, size))])

    def run(self, module, passes=1):
        for _ in range(passes):
            module.forward_backward(self.batch())
        executor = module._exec_group.execs[0]
        trained = ("conv_weight", "conv_bias", "fc_weight", "fc_bias")
        return module.get_outputs()[0].asnumpy(), {name: executor.grad_dict[name].asnumpy() for name in trained}

    def test_module_runs_the_rewritten_symbol(self):
        output, grads = self.run(self.module())
        amp.init("bfloat16")
        module = self.module()
        found, found_grads = self.run(module)
        assert module.output_names == ["softmax_output"]
        assert 0 < relative(output, found) < 4 * BF16_EPS
        assert worst(grads, found_grads)[0] < 8 * BF16_EPS

    def test_module_accumulates(self):
        amp.init("bfloat16")
        single = self.run(self.module())[1]
        tripled = self.run(self.module("add"), passes=3)[1]
        assert worst({name: 3 * value for name, value in single.items()}, tripled)[0] < 2 * BF16_EPS

    def test_bind_keeps_names_and_types(self):
        arguments = {"data": mx.nd.ones((1, 16, 8, 8)), "conv_weight": mx.nd.ones((20, 16, 3, 3)),
                     "conv_bias": mx.nd.zeros(20)}
        conv = softmax_net().get_internals()["conv_output"]
        amp.init()
        executor = conv.bind(mx.cpu(), arguments)
        result = executor.forward()[0]
        assert list(executor.output_dict) == ["conv_output"]
        assert (result.dtype, result.shape) == (np.float32, (1, 20, 6, 6))
        assert (result.asnumpy() == 144).all()


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"target_dtype": "int8"}, amp.DTypeError, "expected 'float16', 'bfloat16'"),
    ({"fp32_ops": ["Convolutin"]}, amp.PolicyError, "Did you mean 'Convolution'"),
    ({"fp32_ops": ["Pooling"], "target_precision_ops": ["Pooling"]}, amp.PolicyError, "in one list only"),
    ({"layout_optimization": True}, amp.StateError, "MXNet 2")])
def test_a_failed_init_leaves_mxnet_as_it_was(arguments, error, message):
    before = mx.ndarray.CachedOp
    with pytest.raises(error, match=message):
        amp.init(**arguments)
    assert mx.ndarray.CachedOp is before
    assert not amp.is_active()
