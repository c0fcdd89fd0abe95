"""Converted networks keep what scripts rely on: names of outputs, MXNet's ways to bind, save and load, float64."""
from __future__ import annotations

import collections
import copy
import json
import pickle
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LACKING
from mxnet.gluon import HybridBlock, SymbolBlock, nn
from networks import relative

import gluon_amp as amp
from gluon_amp.errors import GraphError, PolicyError

pytestmark = [pytest.mark.machine, pytest.mark.filterwarnings("ignore:the converted network stays in FP32")]
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
GPU = {"target_dtype": "float16", "device": mx.gpu(0)}


def values(symbol, seed=3, dtype="float32", **shapes):
    generator = np.random.RandomState(seed)
    found, _, aux = symbol.infer_shape(**shapes)
    args = {name: mx.nd.array(generator.normal(scale=0.2, size=shape), dtype=dtype)
            for name, shape in zip(symbol.list_arguments(), found) if name not in shapes}
    return args, {name: mx.nd.array(generator.uniform(0.5, 2, size=shape), dtype=dtype)
                  for name, shape in zip(symbol.list_auxiliary_states(), aux)}


def run(symbol, args, aux, **data):
    arrays = {**args, **aux, **data}
    found = mx.nd.CachedOp(symbol)(*[arrays[name] for name in symbol.list_inputs()])
    return [output.asnumpy() for output in (found if isinstance(found, list) else [found])]


def layer(data, name="conv", filters=32):
    return mx.sym.Convolution(data, num_filter=filters, kernel=(3, 3), no_bias=True, name=name)


def normalised(data, **attrs):
    return mx.sym.BatchNorm(data, name="bn", fix_gamma=False, **attrs)


def network():
    x = mx.sym.Activation(normalised(layer(mx.sym.var("data"))), act_type="relu", name="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(layer(x, "few", 6)), num_hidden=4, name="fc"),
                                name="softmax")


def batch_norm_behind_relu(data):
    return normalised(mx.sym.relu(layer(data)), output_mean_var=True)


HEADS = {
    "batch norm": lambda x: normalised(mx.sym.relu(layer(x), name="relu")),
    "batch norm with statistics": lambda x: mx.sym.Group(list(batch_norm_behind_relu(x))),
    "folded batch norm": lambda x: normalised(layer(x)),
    "a layer and its dropout": lambda x: (lambda y: mx.sym.Group([y, mx.sym.Dropout(y, name="drop")]))(
        mx.sym.FullyConnected(x, num_hidden=8, name="fc")),
    "a layer twice": lambda x: (lambda y: mx.sym.Group([y, mx.sym.identity(y, name="same"), mx.sym.BlockGrad(
        y, name="cut")]))(layer(x)),
    "split": lambda x: mx.sym.split(layer(x), num_outputs=4, name="split"),
    "a part of a split": lambda x: mx.sym.split(layer(x), num_outputs=4, name="split")[2],
    "a split and a part": lambda x: (lambda y: mx.sym.Group([y[1], mx.sym.relu(y[0], name="relu"), y[3]]))(
        mx.sym.split(layer(x), num_outputs=4, name="split")),
    "layer and activation": lambda x: (lambda y: mx.sym.Group([y, mx.sym.relu(y, name="relu")]))(layer(x)),
    "joined by NumPy": lambda x: mx.sym.np.concatenate([layer(x).as_np_ndarray()] * 2, axis=1).as_nd_ndarray(),
    "data": lambda x: mx.sym.Group([x, layer(x)]),
    "inner tensors": lambda x: normalised(mx.sym.relu(layer(x), name="relu")).get_internals(),
}


@pytest.mark.parametrize("options", [{"target_dtype": "bfloat16"}, {"target_dtype": "float32"}, GPU,
                                     {"target_dtype": "bfloat16", "optimize": "all"},
                                     {"target_dtype": "float32", "optimize": "all"},
                                     {"target_dtype": "bfloat16", "cast_outputs": False}], ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_outputs_keep_their_names_and_values(heads, options):
    if options.get("target_dtype") == "bfloat16" and not _runs_bfloat16():
        pytest.skip(f"{LACKING} bfloat16")
    symbol = HEADS[heads](mx.sym.var("data"))
    args, aux = values(symbol, data=(2, 16, 6, 6))
    converted, new_args, new_aux = amp.convert_model(symbol, args, aux, **options)
    assert converted.list_outputs() == symbol.list_outputs()
    again = mx.sym.load_json(converted.tojson())
    assert again.list_outputs() == symbol.list_outputs()
    if options is GPU or options.get("cast_outputs") is False:
        return
    data = mx.nd.random.normal(shape=(2, 16, 6, 6))
    kept = set(converted.list_inputs())
    if "inner" in heads and not set(symbol.list_inputs()) <= kept | {"data"}:
        return
    for one, other in zip(run(symbol, args, aux, data=data), run(converted, new_args, new_aux, data=data)):
        assert relative(one, other) < (1e-5 if options["target_dtype"] == "float32" else 0.02)


def _runs_bfloat16():
    from cpu_kinds import RUNS_BFLOAT16
    return RUNS_BFLOAT16


@pytest.mark.bf16
class TestModule:
    """As scripts for MXNet's AMP deploy what convert_model gives."""

    @pytest.mark.parametrize("options", [{}, {"cast_optional_params": False}, {"cast_optional_params": True},
                                         {"target_dtype_ops": ["Convolution"]}], ids=str)
    @pytest.mark.parametrize("training", [True, False])
    def test_bind_and_set_params(self, options, training):
        symbol = network()
        args, aux = values(symbol, data=(2, 16, 8, 8), softmax_label=(2,))
        data = mx.nd.random.normal(shape=(2, 16, 8, 8))
        expected, = run(symbol, args, aux, data=data, softmax_label=mx.nd.zeros(2))
        converted, new_args, new_aux = amp.convert_model(symbol, args, aux, "bfloat16", **options)
        module = mx.mod.Module(converted)
        module.bind([("data", data.shape)], [("softmax_label", (2,))], **({} if training else {"for_training": False}))
        module.set_params(new_args, new_aux)
        module.forward(mx.io.DataBatch([data], [mx.nd.zeros(2)]), is_train=False)
        assert relative(expected, module.get_outputs()[0].asnumpy()) < 0.02
        low = module._arg_params["conv_weight"].dtype == BFLOAT16
        assert low == options.get("cast_optional_params", False)

    @pytest.mark.parametrize("options", [{}, {"cast_optional_params": False}, {"optimize": "all"}], ids=str)
    def test_a_checkpoint_with_mxnets_defaults_loads(self, options, tmp_path):
        symbol = network()
        args, aux = values(symbol, data=(2, 16, 8, 8), softmax_label=(2,))
        data, label = mx.nd.random.normal(shape=(2, 16, 8, 8)), mx.nd.zeros(2)
        expected, = run(symbol, args, aux, data=data, softmax_label=label)
        model = amp.convert_model(symbol, args, aux, "bfloat16", **options)
        mx.model.save_checkpoint(str(tmp_path / "net"), 0, *model)
        block = SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data", "softmax_label"],
                                    str(tmp_path / "net-0000.params"))
        module = mx.mod.Module.load(str(tmp_path / "net"), 0)
        module.bind([("data", data.shape)], [("softmax_label", (2,))], for_training=False)
        module.forward(mx.io.DataBatch([data], [label]), is_train=False)
        for found in (block(data, label), module.get_outputs()[0]):
            assert 0 < relative(expected, found.asnumpy()) < 0.02
        module = mx.mod.Module(model[0])
        module.bind([("data", data.shape)], [("softmax_label", (2,))], for_training=False)
        module.set_params(*model[1:])
        module.save_checkpoint(str(tmp_path / "again"), 0)
        assert "amp_cast" in (tmp_path / "again-symbol.json").read_text()


class TestSymbolAlone:
    def test_it_is_a_graph_of_casts(self):
        symbol = network()
        converted = amp.convert_symbol(symbol, "float16", device=mx.gpu(0))
        text = converted.tojson(remove_amp_cast=False)
        ops = collections.Counter(node["op"] for node in json.loads(text)["nodes"])
        plain = collections.Counter(node["op"] for node in json.loads(symbol.tojson())["nodes"])
        casts = ops.pop("amp_cast")
        assert casts > 3
        assert ops == plain

    def test_its_text_drops_casts_as_mxnets_does_and_its_files_keep_them(self, tmp_path):
        symbol = network()
        converted = amp.convert_symbol(symbol, "float16", device=mx.gpu(0))
        assert mx.test_utils.same_symbol_structure(converted, symbol)
        assert len(json.loads(converted.tojson())["nodes"]) == len(json.loads(symbol.tojson())["nodes"])
        mx.model.save_checkpoint(str(tmp_path / "net"), 0, converted, {}, {})
        casts = converted.tojson(remove_amp_cast=False).count("amp_cast")
        assert (tmp_path / "net-symbol.json").read_text().count("amp_cast") == casts
        assert pickle.loads(pickle.dumps(converted)).tojson(remove_amp_cast=False).count("amp_cast") == casts
        for again in (copy.copy(converted), copy.deepcopy(converted)):
            again.save(str(tmp_path / "again.json"), remove_amp_cast=True)
            assert (tmp_path / "again.json").read_text().count("amp_cast") == casts

    @pytest.mark.parametrize("part", [lambda symbol: symbol.get_internals()["conv_output"], lambda symbol: symbol[0]])
    def test_files_of_its_parts_keep_casts(self, tmp_path, part):
        symbol = layer(mx.sym.var("data"))
        args, _ = values(symbol, data=(1, 16, 8, 8))
        for converted in (amp.convert_symbol(symbol, "float16", device=mx.gpu(0)),
                          amp.convert_model(symbol, args, {}, "float16", device=mx.gpu(0))[0]):
            taken = part(converted)
            mx.model.save_checkpoint(str(tmp_path / "part"), 0, taken, {}, {})
            casts = taken.tojson(remove_amp_cast=False).count("amp_cast")
            assert casts
            assert (tmp_path / "part-symbol.json").read_text().count("amp_cast") == casts

    def test_its_text_keeps_casts_where_its_variables_are_in_low_precision(self):
        symbol = network()
        options = {"data_names": ["data", "softmax_label"], "device": mx.gpu(0), "cast_optional_params": True}
        assert "amp_cast" in amp.convert_symbol(symbol, "float16", **options).tojson()

    def test_it_is_portable_unless_more_is_asked_for(self):
        symbol = mx.sym.Activation(layer(mx.sym.var("data")), act_type="relu")
        assert "_sg_mkldnn" not in amp.convert_symbol(symbol, "bfloat16").tojson()
        assert "_sg_mkldnn" in amp.convert_symbol(symbol, "bfloat16", optimize=["fuse"]).tojson()

    @pytest.mark.bf16
    @pytest.mark.parametrize("optional", [False, True])
    def test_mxnets_own_way_to_run_it(self, optional):
        symbol = network()
        args, aux = values(symbol, data=(2, 16, 8, 8), softmax_label=(2,))
        data = mx.nd.random.normal(shape=(2, 16, 8, 8))
        expected, = run(symbol, args, aux, data=data, softmax_label=mx.nd.zeros(2))
        converted = amp.convert_symbol(symbol, "bfloat16", target_dtype_ops=["Convolution"],
                                       data_names=["data", "softmax_label"], cast_optional_params=optional)
        assert set(converted.list_inputs()) == set(symbol.list_inputs())
        executor = converted.simple_bind(mx.cpu(), data=data.shape, softmax_label=(2,), grad_req="null")
        types = {name: array.dtype for name, array in executor.arg_dict.items()}
        assert [name for name, dtype in types.items() if dtype == BFLOAT16] == (
            ["conv_weight", "few_weight", "few_bias"][:2] if optional else [])
        executor.copy_params_from(args, aux)
        found = executor.forward(is_train=False, data=data)[0].asnumpy()
        assert relative(expected, found) < 0.02

    @pytest.mark.bf16
    @pytest.mark.parametrize("groups", [1, 8, 16])
    @pytest.mark.parametrize("optional", [False, True])
    def test_module_infers_the_types_of_grouped_weights(self, groups, optional):
        data = mx.sym.var("data")
        symbol = mx.sym.Convolution(data, kernel=(3, 3), num_filter=16, num_group=groups, no_bias=True, name="conv")
        args, aux = values(symbol, data=(2, 16, 8, 8))
        data = mx.nd.random.normal(shape=(2, 16, 8, 8))
        expected, = run(symbol, args, aux, data=data)
        converted, args, aux = amp.convert_model(symbol, args, aux, "bfloat16", cast_optional_params=optional)
        module = mx.mod.Module(converted, label_names=None)
        module.bind([("data", data.shape)], for_training=False)
        module.set_params(args, aux)
        module.forward(mx.io.DataBatch([data]), is_train=False)
        assert relative(expected, module.get_outputs()[0].asnumpy()) < 0.02

    def test_without_data_names_typed_variables_are_parameters(self):
        typed = mx.sym.FullyConnected(mx.sym.var("data"), mx.sym.var("w", dtype="float32"), num_hidden=8, no_bias=True)
        converted = amp.convert_symbol(typed, cast_optional_params=True, **GPU)
        assert converted.attr_dict()["w"]["__dtype__"] == "2"
        assert converted.attr_dict()["data"]["__dtype__"] == "0"

    @pytest.mark.parametrize(("casts", "low"), [(["bfloat16", "bfloat16"], True), (["bfloat16", "float32"], False),
                                                (["bfloat16", None], False)], ids=str)
    def test_a_variable_that_the_programs_own_casts_read_is_stored_in_their_type(self, casts, low):
        weight = mx.sym.var("weight")
        reads = [weight if dtype is None else mx.sym.amp_cast(weight, dtype=BFLOAT16 if dtype == "bfloat16" else dtype)
                 for dtype in casts]
        symbol = mx.sym.Group(reads)
        values = mx.nd.random.normal(shape=(3, 4))
        expected = run(symbol, {"weight": values}, {})
        for offline in (True, False):
            converted = amp.convert_symbol(symbol, "bfloat16", data_names=[], cast_optional_params=offline)
            assert converted.list_outputs() == symbol.list_outputs()
            executor = converted.simple_bind(mx.cpu(), weight=(3, 4))
            assert (executor.arg_dict["weight"].dtype == BFLOAT16) == (low and offline)
            executor.copy_params_from({"weight": values})
            for one, other in zip(expected, executor.forward()):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other.asnumpy())
        model, args, _ = amp.convert_model(symbol, {"weight": values}, {}, "bfloat16", cast_optional_params=True)
        assert (args["weight"].dtype == BFLOAT16) == low
        assert "amp_cast" in model.tojson()


@pytest.mark.bf16
@pytest.mark.parametrize("channels", [1, 3, 8, 16])
def test_a_list_of_low_operators_is_obeyed_for_every_channel_count(channels):
    symbol = mx.sym.Pooling(layer(mx.sym.var("data")), kernel=(2, 2), pool_type="max")
    args, aux = values(symbol, data=(2, channels, 8, 8))
    converted, new_args, _ = amp.convert_model(symbol, args, aux, "bfloat16", target_dtype_ops=["Convolution"],
                                               cast_optional_params=True, data_example={"data": (2, channels, 8, 8)})
    assert new_args["conv_weight"].dtype == BFLOAT16
    data = mx.nd.random.normal(shape=(2, channels, 8, 8))
    assert relative(*(run(symbol, args, aux, data=data) + run(converted, new_args, {}, data=data))) < 0.02


def test_but_not_where_the_kernel_is_not_sound():
    symbol = mx.sym.Convolution(mx.sym.var("data"), num_filter=8, kernel=(3, 3), layout="NHWC", name="conv")
    args = {"conv_weight": mx.nd.ones((8, 3, 3, 16)), "conv_bias": mx.nd.zeros(8)}
    _, new_args, _ = amp.convert_model(symbol, args, {}, "bfloat16", target_dtype_ops=["Convolution"],
                                       cast_optional_params=True)
    assert new_args["conv_weight"].dtype == np.float32


@pytest.mark.parametrize("target", [pytest.param("bfloat16", marks=pytest.mark.bf16), "float16", "float32"])
def test_float64_networks_stay_float64(target):
    class Net(HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.conv, self.norm = nn.Conv2D(8, 3, in_channels=4, use_bias=False), nn.BatchNorm(in_channels=8)
                self.out = nn.Dense(3, in_units=128)

        def hybrid_forward(self, F, x):
            return self.out(F.relu(self.norm(self.conv(x))))
    net = Net()
    net.initialize(mx.init.Xavier())
    net.cast("float64")
    net.norm.running_mean.set_data(mx.nd.random.normal(shape=8).astype("float64"))
    data = mx.nd.random.normal(shape=(2, 4, 6, 6)).astype("float64")
    expected = net(data).asnumpy()
    for example in (None, data):
        converted = amp.convert_hybrid_block(net, target, data_example=example)
        assert relative(expected, converted(data).asnumpy()) < 1e-12
        assert {parameter.dtype for parameter in converted.collect_params().values()} == {np.float64}


@pytest.mark.parametrize("target", ["float16", "float32"])
def test_float64_networks_whose_first_layer_has_a_bias_and_no_dense_layer_behind(target):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=4), nn.BatchNorm(in_channels=8))
    net.initialize(mx.init.Xavier())
    net.cast("float64")
    data = mx.nd.random.normal(shape=(2, 4, 6, 6)).astype("float64")
    expected = net(data).asnumpy()
    assert relative(expected, amp.convert_hybrid_block(net, target)(data).asnumpy()) < 1e-12


class TestParametersOfAnotherNetwork:
    def model(self, channels=16, hidden=8):
        x = normalised(layer(layer(mx.sym.var("data")), "second", 24))
        x = mx.sym.Flatten(mx.sym.Pooling(mx.sym.relu(x), global_pool=True, kernel=(1, 1), pool_type="avg"))
        x = mx.sym.FullyConnected(mx.sym.FullyConnected(x, num_hidden=hidden, name="one"), num_hidden=2, name="two")
        return (x, *values(x, data=(1, channels, 8, 8)))

    @pytest.mark.parametrize("example", [None, {"data": (1, 16, 8, 8)}])
    @pytest.mark.parametrize(("name", "shape"), [
        ("second_weight", (24, 16, 3, 3)), ("bn_gamma", (32,)), ("bn_moving_var", (8,)), ("one_weight", (8, 16)),
        ("two_weight", (2, 9)), ("conv_weight", (16, 16, 3, 3)), ("conv_weight", (32, 16, 1, 1)), ("one_bias", (9,))])
    def test_shapes_have_to_fit_between_layers(self, name, shape, example):
        symbol, args, aux = self.model()
        (aux if "moving" in name else args)[name] = mx.nd.ones(shape)
        with pytest.raises(GraphError, match=f"{name}|do not belong together|does not fit"):
            amp.convert_model(symbol, args, aux, data_example=example)

    def test_names_have_to_fit(self):
        symbol, args, aux = self.model()
        with pytest.raises(GraphError, match="parameters lack conv_weight, second_weight"):
            amp.convert_model(symbol, {f"other_{name}": array for name, array in args.items()}, aux)

    def test_what_fits_is_converted(self):
        symbol, args, aux = self.model()
        for example in (None, {"data": (1, 16, 8, 8)}):
            assert amp.convert_model(symbol, args, aux, data_example=example)[0].list_outputs() == ["two_output"]

    def test_the_command_refuses_them(self, tmp_path):
        symbol, *_ = self.model()
        _, args, aux = self.model(hidden=9)
        args["two_weight"] = args["two_weight"][:, :8]
        mx.model.save_checkpoint(str(tmp_path / "net"), 0, symbol, args, aux)
        child = subprocess.run([sys.executable, "-m", "gluon_amp", "convert", str(tmp_path / "net-symbol.json"),
                                str(tmp_path / "net-0000.params"), "-o", str(tmp_path / "out")], capture_output=True,
                               text=True, check=False)
        assert child.returncode != 0
        assert "one_" in child.stderr
        assert not list(tmp_path.glob("out/*"))


class TestConditions:
    @pytest.mark.parametrize(("condition", "message"), [
        (("Convolution", "kernle", ["(1, 1)"]), "no attribute 'kernle'. Did you mean 'kernel'"),
        (("Activation", "act_type", ["rellu"]), r"never 'rellu': expected some of relu, sigmoid"),
        (("Convolution", "no_bias", ["no"]), "never 'no': expected some of False"),
        (("Convolution", "weight", ["x"]), "no attribute 'weight'"),
        (("Convolution", "kernel", []), r"never \[\]")])
    def test_one_that_never_holds_is_refused(self, condition, message):
        for apply in (lambda lists: amp.init("bfloat16" if _runs_bfloat16() else "float32", **lists),
                      lambda lists: amp.convert_symbol(layer(mx.sym.var("data")), **GPU, **lists)):
            with pytest.raises(PolicyError, match=message):
                apply({"conditional_fp32_ops": [condition]})

    @pytest.mark.parametrize("value", ["(3,3)", "(3, 3)", (3, 3)])
    def test_tuples_are_read_in_every_spelling(self, value):
        symbol = mx.sym.Convolution(layer(mx.sym.var("data")), num_filter=32, kernel=(1, 1), name="small")
        args, _ = values(symbol, data=(1, 16, 8, 8))
        _, new_args, _ = amp.convert_model(symbol, args, {}, conditional_fp32_ops=[("Convolution", "kernel", [value])],
                                           cast_optional_params=True, **GPU)
        assert (new_args["conv_weight"].dtype, new_args["small_weight"].dtype) == (np.float32, np.float16)

    @pytest.mark.parametrize("value", ["True", "1", True])
    def test_booleans_too(self, value):
        symbol = layer(mx.sym.var("data"))
        args, _ = values(symbol, data=(1, 16, 8, 8))
        _, new_args, _ = amp.convert_model(symbol, args, {}, conditional_fp32_ops=[("Convolution", "no_bias", [value])],
                                           cast_optional_params=True, **GPU)
        assert new_args["conv_weight"].dtype == np.float32


def test_no_operator_is_twice_in_a_list():
    for dtype in ("bfloat16", "float16"):
        conditional = [name for name, _, _ in amp.list_conditional_fp32_ops(dtype)]
        lists = [amp.list_lp16_ops(dtype), amp.list_fp32_ops(dtype), amp.list_lp16_fp32_ops(dtype),
                 amp.list_widest_type_cast(dtype), conditional]
        assert max(collections.Counter(name for names in lists for name in names).values()) == 1


def test_mappings_keep_their_class():
    class Named(collections.OrderedDict):
        pass

    class Net(HybridBlock):
        def __init__(self):
            super().__init__()
            self.fc = nn.Dense(16, in_units=16)

        def forward(self, x):
            return Named(first=self.fc(x), rest=collections.defaultdict(list, parts=[self.fc(x)]))
    net = Net()
    net.initialize()
    amp.init("bfloat16" if _runs_bfloat16() else "float16")
    result = net(mx.nd.ones((2, 16)))
    assert type(result) is Named
    assert isinstance(result["rest"], collections.defaultdict)
    assert result["first"].dtype == result["rest"]["parts"][0].dtype == np.float32
    assert result["rest"]["more"] == []


def test_files_are_written_through_links(tmp_path):
    net = nn.Dense(2, in_units=2)
    net.initialize()
    (tmp_path / "store").mkdir()
    for ending in ("symbol.json", "0000.params"):
        (tmp_path / f"net-{ending}").symlink_to(tmp_path / "store" / ending)
    amp.convert_hybrid_block(net).export(tmp_path / "net")
    assert (tmp_path / "net-symbol.json").is_symlink()
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["0000.params", "symbol.json"]
