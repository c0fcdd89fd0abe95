"""Conversion for inference: hand-written graphs, values against FP32, files that MXNet alone runs, bad input."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn, rnn
from networks import NETWORKS, differentiate, outputs_of, ready, relative, sequential

import gluon_amp as amp
from gluon_amp.errors import DTypeError, GraphError, PolicyError, StateError
from gluon_amp.machine.dtypes import cpu_support

pytestmark = [pytest.mark.machine, pytest.mark.filterwarnings("ignore:the converted network stays in FP32")]
GPU = {"target_dtype": "float16", "device": mx.gpu(0)}  # graphs for a GPU can be made without one


def mlp():
    """conv -> batch norm -> relu -> dropout -> dense, as a symbol with random parameters."""
    data = mx.sym.var("data")
    x = mx.sym.Convolution(data, kernel=(3, 3), num_filter=32, no_bias=True, name="conv")
    x = mx.sym.BatchNorm(x, fix_gamma=False, eps=1e-5, name="bn")
    x = mx.sym.Dropout(mx.sym.Activation(x, act_type="relu", name="relu"), name="drop")
    x = mx.sym.FullyConnected(x, num_hidden=5, name="fc")
    random = np.random.RandomState(3)
    shapes, _, aux_shapes = x.infer_shape(data=(2, 16, 6, 6))
    args = {name: mx.nd.array(random.normal(scale=0.2, size=shape))
            for name, shape in zip(x.list_arguments(), shapes) if name != "data"}
    aux = {name: mx.nd.array(random.uniform(0.5, 2, size=shape))
           for name, shape in zip(x.list_auxiliary_states(), aux_shapes)}
    return x, args, aux


def run_symbol(symbol, args, aux, **data):
    # Not Symbol.bind: MXNet fuses convolution and BatchNorm there, wrongly for other axes and for further outputs.
    arrays = {**args, **aux, **data}
    found = mx.nd.CachedOp(symbol)(*[arrays[name] for name in symbol.list_inputs()])
    return [output.asnumpy() for output in (found if isinstance(found, list) else [found])]


def describe(symbol):
    """List the operators of a symbol as ``name: op(inputs)``."""
    nodes = json.loads(symbol.tojson(remove_amp_cast=False))["nodes"]
    return [f"{node['name']}: {node['op']}({', '.join(nodes[i[0]]['name'] for i in node['inputs'])})"
            for node in nodes if node["op"] != "null"]


class TestGraphs:
    @pytest.mark.parametrize("options", [{}, {"optimize": "none"}, {"cast_optional_params": False}], ids=str)
    def test_plain_conversion_inserts_casts_only(self, options):
        symbol, args, aux = mlp()
        converted, new_args, _ = amp.convert_model(symbol, args, aux, **options, **GPU)
        assert describe(converted) == [
            "data_float16: amp_cast(data)",
            "conv_weight_float16: amp_cast(conv_weight)",
            "conv: Convolution(data_float16, conv_weight_float16)",
            "bn: BatchNorm(conv, bn_gamma, bn_beta, bn_moving_mean, bn_moving_var)",
            "relu: Activation(bn)",
            "drop: Dropout(relu)",
            "fc_weight_float16: amp_cast(fc_weight)",
            "fc_bias_float16: amp_cast(fc_bias)",
            "fc_low: FullyConnected(drop, fc_weight_float16, fc_bias_float16)",
            "fc: amp_cast(fc_low)",
        ]
        assert {name: array.dtype for name, array in new_args.items()} == dict.fromkeys(args, np.float32)

    def test_optimised_conversion_folds_drops_and_stores_low_precision(self):
        symbol, args, aux = mlp()
        converted, new_args, new_aux = amp.convert_model(symbol, args, aux, optimize="all", **GPU)
        assert describe(converted) == [
            "data_float16: amp_cast(data)",
            "bn: Convolution(data_float16, bn_weight, bn_bias)",
            "relu: Activation(bn)",
            "fc_low: FullyConnected(relu, fc_weight, fc_bias)",
            "fc: amp_cast(fc_low)",
        ]
        assert {name: array.dtype for name, array in new_args.items()} == dict.fromkeys(
            ["bn_weight", "bn_bias", "fc_weight", "fc_bias"], np.float16)
        assert new_aux == {}

    def test_outputs_in_low_precision_when_asked_for(self):
        symbol, args, aux = mlp()
        converted, *_ = amp.convert_model(symbol, args, aux, cast_outputs=False, optimize="all", **GPU)
        assert describe(converted)[-1] == "fc: FullyConnected(relu, fc_weight, fc_bias)"

    def test_converting_again_adds_nothing(self):
        symbol, args, aux = mlp()
        once = amp.convert_model(symbol, args, aux, **GPU)
        twice = amp.convert_model(*once, **GPU)
        assert once[0].tojson(remove_amp_cast=False) == twice[0].tojson(remove_amp_cast=False)
        with pytest.raises(GraphError, match="already converted to float16"):
            amp.convert_model(*once, "float32")

    def test_a_weight_that_two_layers_share_stays_shared(self):
        weight, data = mx.sym.var("w"), mx.sym.var("data")
        x = mx.sym.FullyConnected(mx.sym.FullyConnected(data, weight, num_hidden=16, no_bias=True, name="one"), weight,
                                  num_hidden=16, no_bias=True, name="two")
        converted, args, _ = amp.convert_model(x, {"w": mx.nd.ones((16, 16))}, {}, optimize="all", **GPU)
        assert describe(converted)[1:3] == ["one: FullyConnected(data_float16, w)", "two_low: FullyConnected(one, w)"]
        assert args["w"].dtype == np.float16

    def test_a_weight_read_in_both_precisions_is_kept_in_both(self):
        weight, data = mx.sym.var("w"), mx.sym.var("data")
        x = mx.sym.FullyConnected(data, weight, num_hidden=16, no_bias=True, name="fc")
        x = mx.sym.Group([x, mx.sym.norm(weight, name="size")])
        converted, args, _ = amp.convert_model(x, {"w": mx.nd.ones((16, 16))}, {}, optimize="all", **GPU)
        assert {name: array.dtype for name, array in args.items()} == {"w": np.float32, "w_float16": np.float16}
        assert converted.list_outputs() == ["fc_output", "size_output"]

    @pytest.mark.parametrize("layer", ["shared weight", "returned weight", "other axis", "read twice",
                                       "statistics used"])
    def test_batch_norm_that_cannot_be_folded_is_left(self, layer):
        data, weight = mx.sym.var("data"), mx.sym.var("w")
        conv = mx.sym.Convolution(data, weight, kernel=(1, 1), num_filter=8, no_bias=True, name="conv")
        norm = mx.sym.BatchNorm(conv, name="bn", axis=2 if layer == "other axis" else 1,
                                output_mean_var=layer == "statistics used")
        heads = [*norm]
        if layer == "shared weight":
            heads.append(mx.sym.Convolution(heads[0], weight, kernel=(1, 1), num_filter=8, no_bias=True, name="again"))
        if layer == "returned weight":
            heads.append(weight)
        if layer == "read twice":
            heads.append(mx.sym.relu(conv))
        symbol = mx.sym.Group(heads)
        random = np.random.RandomState(0)
        args = {name: mx.nd.array(random.uniform(0.5, 1, (8, 8, 1, 1) if name == "w" else (8,)))
                for name in symbol.list_arguments() if name != "data"}
        aux = {name: mx.nd.array(random.uniform(0.5, 1, 8)) for name in symbol.list_auxiliary_states()}
        x = mx.nd.array(random.normal(size=(2, 8, 8, 8)))
        expected = run_symbol(symbol, args, aux, data=x)
        converted, new_args, new_aux = amp.convert_model(symbol, args, aux, "float32", optimize=["fold_batch_norm"])
        folded = not any("BatchNorm" in line for line in describe(converted))
        assert folded == layer.endswith("weight")  # the folded layer gets a weight of its own
        fused, fused_args, fused_aux = amp.convert_model(symbol, args, aux, "float32", optimize="all")
        for one, other, third in zip(expected, run_symbol(converted, new_args, new_aux, data=x),
                                     run_symbol(fused, fused_args, fused_aux, data=x)):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
            np.testing.assert_allclose(one, third, rtol=2e-4, atol=1e-5)


LAYERS = {
    "conv1d": (nn.Conv1D(8, 3, in_channels=4), (2, 4, 9)),
    "conv3d": (nn.Conv3D(8, 3, in_channels=4), (2, 4, 5, 5, 5)),
    "grouped": (nn.Conv2D(8, 3, groups=4, in_channels=8), (2, 8, 7, 7)),
    "deconvolution": (nn.Conv2DTranspose(8, 3, in_channels=6), (2, 6, 5, 5)),
    "grouped deconvolution": (nn.Conv2DTranspose(8, 3, groups=2, in_channels=6), (2, 6, 5, 5)),
    "dense": (nn.Dense(8, in_units=12), (2, 12)),
    "dense on sequences": (nn.Dense(8, in_units=12, flatten=False), (2, 3, 12)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_folding_changes_no_values(name):
    layer, shape = LAYERS[name]
    norm = nn.BatchNorm(axis=2 if name == "dense on sequences" else 1, in_channels=8)
    net = nn.HybridSequential()
    net.add(layer, norm)
    net.initialize(mx.init.Uniform(1), force_reinit=True)
    random = np.random.RandomState(1)
    for parameter in norm.collect_params().values():
        parameter.set_data(mx.nd.array(random.uniform(0.5, 1.5, parameter.shape)))
    data = mx.nd.array(random.normal(size=shape))
    expected = net(data).asnumpy()
    converted = amp.convert_hybrid_block(net, "float32")
    assert relative(expected, converted(data).asnumpy()) < 1e-5
    kept = ("deconvolution", "grouped deconvolution", "dense on sequences")
    assert converted.conversion.steps["fold_batch_norm"] == (name not in kept)


@pytest.mark.parametrize(("kind", "folds"), [("convolutions", True), ("dense", True), ("excluded", False),
                                             ("data", False), ("read twice", False), ("other axis", False),
                                             ("dense on sequences", False)])
def test_batch_norm_folds_into_all_layers_that_are_joined(kind, folds):
    class Joined(HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.one, self.two = (
                    nn.Dense(filters, in_units=16, flatten=kind == "dense") if "dense" in kind else
                    nn.Conv2D(filters, 3, padding=1, groups=groups, use_bias=bias, in_channels=4)
                    for filters, groups, bias in ((3, 1, True), (5 if kind != "dense on sequences" else 3, 1, False)))
                self.norm = nn.BatchNorm(axis={"other axis": 2, "dense on sequences": 2}.get(kind, 1))

        def hybrid_forward(self, F, x):
            one, two = self.one(x), self.two(x * 2)
            parts = [one, two, *[x] * (kind == "data")]
            x = self.norm(F.concat(*parts, dim=1))
            return F.broadcast_add(x, F.sum(two)) if kind == "read twice" else x

    net = Joined()
    net.initialize(mx.init.Uniform(1))
    data = mx.nd.random.normal(shape=(2, 16) if kind == "dense" else (2, 4, 16) if "dense" in kind else (2, 4, 6, 6))
    net(data)
    random = np.random.RandomState(1)
    for parameter in net.norm.collect_params().values():
        parameter.set_data(mx.nd.array(random.uniform(0.5, 1.5, parameter.shape)))
    expected = net(data).asnumpy()
    converted = amp.convert_hybrid_block(net, "float32", exclude=[net.two] if kind == "excluded" else None)
    assert relative(expected, converted(data).asnumpy()) < 1e-5
    assert converted.conversion.steps["fold_batch_norm"] == folds


class TestBlocks:
    @pytest.mark.bf16
    @pytest.mark.parametrize("hybridized", [False, True])
    @pytest.mark.parametrize("name", NETWORKS)
    def test_outputs_are_close_to_fp32(self, name, hybridized):
        make, shape = NETWORKS[name]
        net, data = ready(make(), shape, active=hybridized)
        expected = outputs_of(net, data)
        converted = amp.convert_hybrid_block(net, "bfloat16")
        assert converted.conversion.low_precision > 0
        for one, other in zip(expected, outputs_of(converted, data)):
            assert other.dtype == np.float32
            assert relative(one, other) < 0.03

    @pytest.mark.parametrize("name", NETWORKS)
    def test_float16_is_imitated_without_a_gpu(self, name):
        make, shape = NETWORKS[name]
        net, data = ready(make(), shape, active=False)
        expected = outputs_of(net, data)
        for one, other in zip(expected, outputs_of(amp.convert_hybrid_block(net, "float16"), data)):
            assert 0 < relative(one, other) < 0.01

    def test_an_example_gives_deferred_parameters_their_shapes(self):
        net = nn.Dense(8)
        net.initialize()
        with pytest.raises(StateError, match=r"weight.*data_example"):
            amp.convert_hybrid_block(net)
        converted = amp.convert_hybrid_block(net, data_example=mx.nd.ones((2, 4)))
        assert converted(mx.nd.ones((3, 4))).shape == (3, 8)

    def test_control_flow_and_fused_recurrent_layers(self):
        class Loops(HybridBlock):
            def __init__(self):
                super().__init__()
                self.cell, self.again = nn.Dense(4, in_units=4, flatten=False), nn.Dense(4, in_units=4)
                self.fused = rnn.GRU(4, input_size=4)

            def hybrid_forward(self, F, x):
                scanned, last = F.contrib.foreach(lambda item, state: (self.cell(item) + state, item * 2), x,
                                                   F.zeros((2, 4)))
                _, counted = F.contrib.while_loop(lambda i, _: i < 3, lambda i, v: ([], (i + 1, v * 1.5)),
                                                  (F.zeros((1,)), last), max_iterations=5)
                chosen = F.contrib.cond((counted[0] > 2).sum(), lambda: self.again(last), lambda: last)
                return self.fused(scanned, F.zeros((1, 2, 4)))[0], chosen, counted[1]

        net = Loops()
        net.initialize(mx.init.Xavier())
        net.hybridize()
        data = mx.nd.array(np.random.RandomState(0).normal(size=(3, 2, 4)))
        expected = [part.asnumpy() for part in net(data)]
        converted = amp.convert_hybrid_block(net)
        for one, other in zip(expected, converted(data)):
            assert relative(one, other.asnumpy()) < 0.02

    def test_integers_stay_integers(self):
        net = sequential([nn.Embedding(10, 16), nn.Dense(4, in_units=16, flatten=False)], active=False)
        words = mx.nd.array([[1, 2], [3, 9]], dtype="int32")
        expected = net(words).asnumpy()
        converted = amp.convert_hybrid_block(net, data_example=words)
        assert relative(expected, converted(words).asnumpy()) < 0.02
        assert relative(expected, converted(words.astype("float32")).asnumpy()) < 0.02

    def test_the_network_is_untouched(self):
        net, data = ready(*(lambda make, shape: (make(), shape))(*NETWORKS["conv"]), active=True)
        before = {name: parameter.data().asnumpy() for name, parameter in net.collect_params().items()}
        expected = net(data).asnumpy()
        cached = net._cached_graph, net._cached_op
        converted = amp.convert_hybrid_block(net, exclude=nn.BatchNorm)
        for parameter in converted.collect_params().values():
            parameter.set_data(parameter.data() * 0)
        np.testing.assert_array_equal(net(data).asnumpy(), expected)
        assert (net._cached_graph, net._cached_op) == cached
        assert not any(child._forward_hooks or child._forward_pre_hooks for child in net._children.values())
        for name, parameter in net.collect_params().items():
            np.testing.assert_array_equal(parameter.data().asnumpy(), before[name])

    def test_dropout_that_is_always_on_stays(self):
        net = nn.HybridSequential()
        net.add(nn.Dense(64, in_units=8), nn.Dropout(0.5))
        net[1].hybrid_forward = lambda F, x: F.Dropout(x, p=0.5, mode="always")
        net.initialize(mx.init.One())
        converted = amp.convert_hybrid_block(net)
        share = (converted(mx.nd.ones((64, 8))).asnumpy() == 0).mean()
        assert 0.3 < share < 0.7

    @pytest.mark.bf16
    def test_batch_sizes_and_contexts(self):
        net, _ = ready(*(lambda make, shape: (make(), shape))(*NETWORKS["conv"]), active=True)
        devices = [mx.cpu(0), mx.cpu(1)]
        converted = amp.convert_hybrid_block(net, "bfloat16", device=devices)
        for size in (1, 5, 2):
            data = mx.nd.random.normal(shape=(size, 3, 16, 16))
            for device in devices:
                assert relative(net(data).asnumpy(), converted(data.as_in_context(device)).asnumpy()) < 0.03

    @pytest.mark.parametrize("ran", ["never", "with data", "with states"])
    @pytest.mark.parametrize("layer", [rnn.LSTM, rnn.GRU])
    def test_a_recurrent_layer_alone(self, layer, ran):
        net = layer(5, input_size=4)
        net.initialize()
        net.hybridize()
        data, states = mx.nd.random.normal(shape=(3, 2, 4)), [mx.nd.ones((1, 2, 5))] * (2 if layer is rnn.LSTM else 1)
        arguments = [data, states] if ran == "with states" else [data]
        example = None
        if ran == "with states":
            net(*arguments)
        elif ran == "with data":
            example = data
        expected = net(*arguments)
        converted = amp.convert_hybrid_block(net, "float32", data_example=example)
        for one, other in zip(self.flat(expected), self.flat(converted(*arguments))):
            np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), atol=1e-6)

    def flat(self, value):
        return [array for item in value for array in self.flat(item)] if isinstance(value, (list, tuple)) else [value]


class TestExclusions:
    def net(self):
        return sequential(lambda: [nn.Dense(16, in_units=16), nn.Dense(16, in_units=16),
                                   nn.Dense(16, in_units=16)], prefix="net_", active=False)

    @pytest.mark.parametrize(("exclude", "low"), [
        (None, {"dense0", "dense1", "dense2"}), ("net_dense1_fwd", {"dense0", "dense2"}),
        ("net_dense1", {"dense0", "dense2"}),
        (["net_dense[01]*"], {"dense2"}), (lambda net: net[0], {"dense1", "dense2"}), (lambda net: nn.Dense, set()),
        (lambda net: [net[0], "*dense2*"], {"dense1"}), (lambda net: net, set())])
    def test_names_patterns_blocks_and_classes(self, exclude, low):
        net = self.net()
        converted = amp.convert_hybrid_block(net, "bfloat16", exclude=exclude(net) if callable(exclude) else exclude)
        names = {name.split("_")[1] for name, parameter in converted.collect_params().items()
                 if parameter.dtype != np.float32}
        assert names == low

    @pytest.mark.parametrize("argument", ["exclude", "excluded_sym_names"])
    def test_unknown_names_get_suggestions(self, argument):
        with pytest.raises(PolicyError, match=r"no node or block 'net_dens1_fwd'.*Did you mean 'net_dense1_fwd'"):
            amp.convert_hybrid_block(self.net(), **{argument: ["net_dens1_fwd"]})

    @pytest.mark.parametrize("name", ["net[0]_dense0_fwd", "net[0]_dense0"])
    def test_a_name_with_brackets_in_it(self, name):
        net = sequential(lambda: [nn.Dense(16, in_units=16), nn.Dense(16, in_units=16)], prefix="net[0]_", active=False)
        found = amp.convert_hybrid_block(net, "float16", exclude=name)
        assert found.conversion.casts == amp.convert_hybrid_block(net, "float16", exclude=net[0]).conversion.casts == 4

    def test_blocks_of_another_network_are_refused(self):
        with pytest.raises(PolicyError, match="has no node or block"):
            amp.convert_hybrid_block(self.net(), exclude=nn.Conv2D)
        with pytest.raises(PolicyError, match="expected names of nodes or blocks"):
            amp.convert_hybrid_block(self.net(), exclude=3)

    def test_operator_lists(self):
        converted = amp.convert_hybrid_block(self.net(), fp32_ops=["FullyConnected"])
        assert converted.conversion.low_precision == 0


STOCK = textwrap.dedent("""
    import sys
    import numpy as np
    assert "gluon_amp" not in sys.modules
    {shim}
    import mxnet as mx
    folder = sys.argv[1]
    x, expected = mx.nd.array(np.load(folder + "/x.npy")), np.load(folder + "/y.npy")
    block = mx.gluon.SymbolBlock.imports(folder + "/net-symbol.json", ["data"], folder + "/net-0003.params")
    block.hybridize(static_alloc=True, static_shape=True)
    symbol, args, aux = mx.model.load_checkpoint(folder + "/net", 3)
    module = mx.mod.Module(symbol, label_names=None)
    module.bind([("data", x.shape)], for_training=False)
    module.set_params(args, aux)
    module.forward(mx.io.DataBatch([x]), is_train=False)
    for found in (block(x), module.get_outputs()[0]):
        error = np.abs(found.asnumpy() - expected).max() / np.abs(expected).max()
        assert found.dtype == np.float32 and error < 0.01, error
    low = [name for name, array in args.items() if array.dtype != np.float32]
    print(len(low))
""")
SHIM = "for name in ('bool', 'object', 'int', 'float', 'complex', 'str'): np.__dict__.setdefault(name, eval(name))"


class TestFiles:
    @pytest.mark.bf16
    def test_stock_mxnet_loads_and_runs_them(self, tmp_path):
        net, data = ready(*(lambda make, shape: (make(), shape))(*NETWORKS["conv"]), active=True)
        converted = amp.convert_hybrid_block(net, "bfloat16")
        files = converted.export(tmp_path / "net", epoch=3)
        assert sorted(os.listdir(tmp_path)) == ["net-0003.params", "net-symbol.json"]
        assert list(files) == [str(tmp_path / "net-symbol.json"), str(tmp_path / "net-0003.params")]
        np.save(tmp_path / "x.npy", data.asnumpy())
        np.save(tmp_path / "y.npy", converted(data).asnumpy())
        environ = {**os.environ, "DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16"}  # what stock MXNet may use
        child = subprocess.run([sys.executable, "-c", STOCK.format(shim=SHIM), str(tmp_path)], env=environ, text=True,
                               capture_output=True, check=False)
        assert child.returncode == 0, child.stderr
        assert int(child.stdout) == (8 if cpu_support().amx else 6)  # with AMX the first convolution too

    def test_a_directory_that_cannot_be_written_to_leaves_nothing(self, tmp_path):
        net = nn.Dense(2, in_units=2)
        net.initialize()
        converted = amp.convert_hybrid_block(net)
        with pytest.raises(OSError, match="absent"):
            converted.export(tmp_path / "absent" / "net")
        (tmp_path / "net-0000.params").mkdir()  # the second file cannot take its place
        with pytest.raises(OSError, match="net-0000"):
            converted.export(tmp_path / "net")
        assert os.listdir(tmp_path) == ["net-0000.params"]

    @pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_parameters_saved_by_a_converted_network_load_into_another(self, dtype, inside, tmp_path):
        def network(seed):
            mx.random.seed(seed)
            net = nn.HybridSequential(prefix="my_")  # with which all names begin
            with net.name_scope():
                net.add(nn.Conv2D(16, 3, in_channels=16), nn.Dense(4, in_units=16 * 36))
            net.initialize(mx.init.Uniform(1))
            converted = amp.convert_hybrid_block(net, dtype, data_example=[mx.nd.ones((1, 16, 8, 8))])
            if not inside:
                return converted
            parent = nn.HybridSequential()
            parent.add(converted)
            return parent

        def values(net):
            return [mx.nd.amp_cast(each.data(), dtype="float32").asnumpy() for each in net.collect_params().values()]

        saved, loaded = network(1), network(2)
        saved.save_parameters(str(tmp_path / "net.params"))
        assert not np.array_equal(values(loaded)[0], values(saved)[0])
        loaded.load_parameters(str(tmp_path / "net.params"))
        for one, other in zip(values(loaded), values(saved)):
            np.testing.assert_array_equal(one, other)

    def test_casts_cannot_be_removed(self, tmp_path):
        net = nn.Dense(2, in_units=2)
        net.initialize()
        with pytest.raises(ValueError, match="expected remove_amp_cast=False"):
            amp.convert_hybrid_block(net).export(tmp_path / "net", remove_amp_cast=True)


class TestBucketing:
    def module(self):
        def sym_gen(length):
            data, cell = mx.sym.var("data"), mx.rnn.LSTMCell(16, prefix="lstm_")
            outputs, _ = cell.unroll(length, mx.sym.Embedding(data, input_dim=20, output_dim=8, name="embed"),
                                     merge_outputs=True)
            return mx.sym.FullyConnected(outputs.reshape((-1, 16)), num_hidden=5, name="fc"), ("data",), ()

        module = mx.mod.BucketingModule(sym_gen, default_bucket_key=6)
        module.bind([("data", (2, 6))], None, for_training=False)
        module.init_params(mx.init.Xavier())
        module.forward(self.batch(4), is_train=False)
        return module

    @staticmethod
    def batch(length):
        words = mx.nd.array(np.arange(2 * length).reshape(2, length))
        return mx.io.DataBatch([words], bucket_key=length, provide_data=[("data", (2, length))], provide_label=None)

    def test_buckets_of_before_and_new_ones(self):
        module = self.module()
        converted = amp.convert_bucketing_module(module)
        assert bool(converted.conversion.casts) == (converted.conversion.target_dtype != "float32")
        converted.bind([("data", (2, 6))], None, for_training=False)
        for length in (6, 4, 3):  # the last bucket is new to both
            module.forward(self.batch(length), is_train=False)
            converted.forward(self.batch(length), is_train=False)
            one, other = (each.get_outputs()[0].asnumpy() for each in (module, converted))
            assert relative(one, other) < 0.02
            assert other.dtype == np.float32

    def test_blocks_cannot_be_excluded_as_the_module_holds_none(self):
        with pytest.raises(PolicyError, match="has no node or block 'Dense'"):
            amp.convert_bucketing_module(self.module(), exclude=nn.Dense)

    def test_a_module_without_parameters_is_refused(self):
        with pytest.raises(StateError, match="bind it"):
            amp.convert_bucketing_module(mx.mod.BucketingModule(lambda key: (mlp()[0], ("data",), ()), 1))


class TestBadInput:
    @pytest.mark.parametrize("shape", [(16,), (16, 16, 3)])
    def test_a_weight_that_states_a_shape_of_another_rank_does_not_stop_a_conversion(self, shape):
        conv = mx.sym.Convolution(mx.sym.var("data"), mx.sym.var("weight", shape=shape), no_bias=True, kernel=(3, 3),
                                  num_filter=16, name="conv")
        assert amp.convert_symbol(conv, **GPU).list_outputs() == ["conv_output"]

    @pytest.mark.parametrize("dtype", ["int4", "halves", np.int32, 16])
    def test_unknown_types(self, dtype):
        symbol, args, aux = mlp()
        with pytest.raises(DTypeError, match="received target_dtype="):
            amp.convert_model(symbol, args, aux, dtype)

    def test_a_plain_block(self):
        net = nn.Sequential()
        net.add(nn.Dense(2))
        with pytest.raises(TypeError, match=r"expected a HybridBlock, received Sequential.*hybrid blocks in"):
            amp.convert_hybrid_block(net)
        with pytest.raises(TypeError, match="expected a HybridBlock, received block=3"):
            amp.convert_hybrid_block(3)

    def test_a_block_never_initialised(self):
        with pytest.raises(StateError, match=r"have no values yet.*initialize\(\)"):
            amp.convert_hybrid_block(nn.Dense(2, in_units=2))

    def test_data_that_the_symbol_does_not_have(self):
        symbol, args, aux = mlp()
        with pytest.raises(GraphError, match=r"no input 'date'.*Did you mean 'data'"):
            amp.convert_model(symbol, args, aux, data_names=["date"])
        with pytest.raises(GraphError, match="no input 'date'"):
            amp.convert_symbol(symbol, data_names=["date"])

    def test_arguments_of_other_kinds(self):
        symbol, args, aux = mlp()
        with pytest.raises(TypeError, match="expected a dict of input name to NDArray or shape, received data_ex"):
            amp.convert_model(symbol, args, aux, data_example=mx.nd.ones((2, 16, 6, 6)))
        with pytest.raises(TypeError, match=r"expected an NDArray or a shape, received data_example\['data'\]=3"):
            amp.convert_model(symbol, args, aux, data_example={"data": 3})
        with pytest.raises(TypeError, match=r"expected an NDArray, received arg_params\['fc_weight'\]=None"):
            amp.convert_model(symbol, {**args, "fc_weight": None}, aux)
        with pytest.raises(TypeError, match=r"expected an NDArray, received aux_params\['bn_moving_mean'\]=array"):
            amp.convert_model(symbol, args, {**aux, "bn_moving_mean": np.zeros(32)})
        for call in (lambda **options: amp.convert_model(symbol, args, aux, **options),
                     lambda **options: amp.convert_symbol(symbol, **options)):
            with pytest.raises(TypeError, match="expected a list of names, received data_names='data'"):
                call(data_names="data")
            with pytest.raises(TypeError, match="expected a Context or a list of them, received device='gpu'"):
                call(device="gpu")

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_parameters_that_do_not_belong_to_the_symbol(self, dtype):
        symbol, args, aux = mlp()
        others = {f"other_{name}": array for name, array in args.items()}
        with pytest.raises(GraphError, match=r"parameters lack conv_weight.*data_names.*'other_conv_weight'"):
            amp.convert_model(symbol, others, {}, dtype)
        with pytest.raises(GraphError, match="parameters lack conv_weight"):
            amp.convert_model(symbol, others, aux, dtype, data_names=["data"])
        with pytest.raises(GraphError, match="parameters lack bn_moving_mean, bn_moving_var"):
            amp.convert_model(symbol, args, {}, dtype)
        for name, shape in (("fc_weight", (5, 7)), ("fc_bias", (9,)), ("conv_weight", (16, 16, 3, 3)),
                            ("conv_weight", (32, 16, 1, 1))):
            with pytest.raises(GraphError, match=f"{name}|do not belong together|does not fit"):
                amp.convert_model(symbol, {**args, name: mx.nd.ones(shape)}, aux, dtype,
                                  data_example={"data": (2, 16, 6, 6)})

    def test_weights_that_are_data_are_named(self):
        symbol = mx.sym.FullyConnected(mx.sym.var("data"), mx.sym.var("weight"), num_hidden=3, no_bias=True)
        with pytest.raises(GraphError, match="parameters lack weight"):
            amp.convert_model(symbol, {}, {})
        assert amp.convert_model(symbol, {}, {}, data_names=["data", "weight"])[1] == {}

    def test_parameters_that_nothing_reads_are_dropped(self):
        symbol, args, aux = mlp()
        _, new_args, _ = amp.convert_model(symbol, {**args, "other": mx.nd.ones(1)}, aux, **GPU)
        assert "other" not in new_args
        assert "other" not in args

    @pytest.mark.parametrize("optimize", ["most", ["fold_batchnorm"], 3])
    def test_unknown_optimisations(self, optimize):
        with pytest.raises(PolicyError, match=r"expected 'all', 'none' or some of .*received optimize="):
            amp.convert_model(*mlp(), optimize=optimize)

    @pytest.mark.parametrize(("route", "arguments", "unknown", "hint"), [
        (amp.convert_hybrid_block, [None], "optimise", "Did you mean 'optimize'"),
        (amp.convert_hybrid_block, [None], "data_names", "no argument 'data_names'"),
        (amp.convert_model, [None, {}, {}], "exclud", "Did you mean 'exclude'"),
        (amp.convert_symbol, [None], "data_example", "no argument 'data_example'"),
        (amp.convert_bucketing_module, [None], "data_names", "no argument 'data_names'")])
    def test_arguments_that_a_conversion_does_not_have(self, route, arguments, unknown, hint):
        with pytest.raises(TypeError, match=rf"amp\.{route.__name__} has no argument '{unknown}'.*{hint}|{hint}"):
            route(*arguments, **{unknown: 1})

    def test_arguments_by_mxnets_position(self):
        symbol, args, aux = mlp()
        given = ["float16", ["Convolution"], ["Flatten"], [("Activation", "act_type", ["relu"])], ["fc"]]
        for converted in (amp.convert_model(symbol, args, aux, *given, True, device=mx.gpu(0))[0],
                          amp.convert_symbol(symbol, *given, ["data"], True, ctx=mx.gpu(0))):
            noted = json.loads(converted.attr("__gluon_amp__"))
            assert (noted["target_dtype"], noted["excluded"]) == ("float16", ["fc"])
            assert converted.attr_dict()["conv_weight"]["__dtype__"] == "2"

    def test_code_that_cannot_be_traced(self):
        class Asks(HybridBlock):
            def hybrid_forward(self, F, x):
                return x + x.shape[0]

        with pytest.raises(GraphError, match="cannot be traced"):
            amp.convert_hybrid_block(Asks())


class TestGradientsOfData:
    """MXNet gives zeros behind fused operators."""

    @pytest.fixture
    def net(self):
        return sequential([nn.Conv2D(8, 3, in_channels=4), nn.Activation("relu"),
                           nn.Dense(3, in_units=8 * 4 * 4)], mx.init.Xavier())

    def gradient(self, net, scale=1.0):
        x = mx.nd.array(np.random.RandomState(3).normal(size=(2, 4, 6, 6)))
        x.attach_grad()
        differentiate(lambda: net(x * scale if scale != 1.0 else x))
        return x.grad.asnumpy()

    @pytest.mark.parametrize("scale", [1.0, 2.0])  # of an array with a gradient, and of what was computed from one
    def test_they_are_refused(self, net, scale):
        converted = amp.convert_hybrid_block(net, "float32")
        assert converted.conversion.steps["fuse"]
        with pytest.raises(amp.StateError, match=r"disable_passes=\['fuse'\]"):
            self.gradient(converted, scale)

    def test_without_fusion_they_are_right(self, net):
        converted = amp.convert_hybrid_block(net, "float32", disable_passes=["fuse"])
        np.testing.assert_allclose(self.gradient(converted), self.gradient(net), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("order", ["teacher first", "student first", "data made in the record"])
    def test_distillation(self, net, order):
        """A student that reads the data first lets MXNet note it, which is no gradient of the data."""
        teacher, x = amp.convert_hybrid_block(net, "float32"), mx.nd.random.normal(shape=(2, 4, 6, 6))
        with autograd.record():
            data = x * 2 if order.startswith("data") else x
            first = teacher(data) if order == "teacher first" else None
            found = net(data)
            loss = ((found - (teacher(data) if first is None else first) + 1) ** 2).sum()
        loss.backward()
        assert net[0].weight.grad().asnumpy().any()
        np.testing.assert_allclose(loss.asscalar(), found.size, rtol=1e-4)

    def test_data_without_gradients_is_fine_while_recording(self, net):
        converted, head = amp.convert_hybrid_block(net, "float32"), nn.Dense(2, in_units=3)
        head.initialize()
        x = mx.nd.ones((2, 4, 6, 6))
        differentiate(lambda: head(converted(x)))
        assert head.weight.grad().asnumpy().any()
        x.attach_grad()
        with autograd.record(), autograd.pause():
            assert converted(x).shape == (2, 3)
