"""Converted symbols: every way to run, train, save and name them, and what is refused."""
from __future__ import annotations

import copy
import json
import pickle

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LACKING, LOW, RUNS_BFLOAT16
from mxnet import autograd, gluon
from mxnet.gluon import SymbolBlock, nn
from networks import differentiate, relative, sequential

import gluon_amp as amp
from gluon_amp.errors import PolicyError, StateError

pytestmark = [pytest.mark.machine, pytest.mark.filterwarnings("ignore:the converted network stays in FP32")]
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
GPU = {"target_dtype": "float16", "device": mx.gpu(0)}
SHAPES = {"data": (8, 16, 8, 8), "softmax_label": (8,)}
DATA = {name: [(name, shape)] for name, shape in SHAPES.items()}
both = pytest.mark.parametrize("dtype", [LOW, "float32"])
FOLDED = [{"optimize": "all"}, {"optimize": ["fold_batch_norm"]}, {"optimize": "all", "disable_passes": ["fuse"]}]


def layer(data, name="conv", filters=32):
    return mx.sym.Convolution(data, num_filter=filters, kernel=(3, 3), no_bias=True, name=name)


def normalised(data, **attrs):
    return mx.sym.BatchNorm(data, name="bn", fix_gamma=False, **attrs)


def network(odd=False):
    data = mx.sym.var("data")
    for number in (1, 2):
        data = mx.sym.Convolution(data, num_filter=264 if odd else 32, kernel=(3, 3), pad=(1, 1), no_bias=number == 1,
                                  name=f"conv{number}")
        if not odd:
            data = mx.sym.BatchNorm(data, fix_gamma=False, name=f"bn{number}")
        data = mx.sym.Activation(data, act_type="relu", name=f"relu{number}")
    pool = mx.sym.Pooling(data, global_pool=True, kernel=(1, 1), pool_type="avg", name="pool")
    drop = mx.sym.Dropout(pool, p=0.0, name="drop")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(drop, num_hidden=4, name="fc"), name="softmax")


def values(symbol, seed=3, **shapes):
    generator = np.random.RandomState(seed)
    found, _, aux = symbol.infer_shape(**shapes)
    args = {name: mx.nd.array(generator.uniform(0.5, 1.5, shape) if "gamma" in name
                              else generator.normal(0, 0.1, shape))
            for name, shape in zip(symbol.list_arguments(), found) if name not in shapes}
    return args, {name: mx.nd.array(generator.uniform(0.5, 1.5, shape))
                  for name, shape in zip(symbol.list_auxiliary_states(), aux)}


def batch(seed=7):
    generator = np.random.RandomState(seed)
    return mx.io.DataBatch([mx.nd.array(generator.normal(size=SHAPES["data"]))],
                           [mx.nd.array(generator.randint(0, 4, SHAPES["softmax_label"]))])


def run(symbol, args, aux, **data):
    arrays = {**args, **aux, **data}
    found = mx.nd.CachedOp(symbol)(*[arrays[name] for name in symbol.list_inputs()])
    return [output.asnumpy() for output in (found if isinstance(found, list) else [found])]


def bound(symbol, for_training=True, **options):
    module = mx.mod.Module(symbol, **options)
    module.bind(DATA["data"], DATA["softmax_label"], for_training=for_training)
    return module


def forward(module):
    module.forward(batch(), is_train=False)
    return module.get_outputs()[0].asnumpy()


def with_parameters(module, args, aux):
    module.set_params(args, aux)
    return module


def predicted(symbol, args, aux):
    return forward(with_parameters(bound(symbol, False), args, aux))


def trained(symbol, args, aux, steps=3):
    """Train a symbol by a module; return its parameters."""
    module = with_parameters(bound(symbol), args, aux)
    module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.05, "momentum": 0.9})
    for step in range(steps):
        module.forward_backward(batch(step))
        module.update()
    mx.nd.waitall()  # MXNet's modules give the statistics of an earlier step before
    return {name: array.asnumpy() for params in module.get_params() for name, array in params.items()}


def wide(symbol, name):
    """Return a tensor of a symbol in FP32."""
    return mx.sym.amp_cast(symbol.get_internals()[f"{name}_output"], dtype="float32")


def operators(symbol):
    return {(node["name"], node["op"]) for node in json.loads(symbol.tojson(remove_amp_cast=False))["nodes"]}


def casts(symbol):
    return symbol.tojson(remove_amp_cast=False).count("amp_cast")


def loaded(model, folder):
    mx.model.save_checkpoint(str(folder / "net"), 0, *model)
    module = mx.mod.Module.load(str(folder / "net"), 0)
    module.bind(DATA["data"], DATA["softmax_label"], for_training=False)
    return module


def imported(model, folder):
    mx.model.save_checkpoint(str(folder / "net"), 0, *model)
    block = SymbolBlock.imports(str(folder / "net-symbol.json"), list(SHAPES), str(folder / "net-0000.params"))
    return block(*batch().data, *batch().label).asnumpy()


def saved_again(model, folder):
    module = with_parameters(bound(model[0], False), *model[1:])
    module.save_checkpoint(str(folder / "again"), 0)
    return predicted(*mx.model.load_checkpoint(str(folder / "again"), 0))


def simply_bound(model, folder):
    executor = model[0].simple_bind(mx.cpu(), **SHAPES, grad_req="null")
    executor.copy_params_from(*model[1:])
    return executor.forward(is_train=False, data=batch().data[0])[0].asnumpy()


ROUTES = {
    "cached op": lambda model, folder: run(*model, data=batch().data[0], softmax_label=batch().label[0])[0],
    "module": lambda model, folder: predicted(*model),
    "checkpoint": lambda model, folder: forward(loaded(model, folder)),
    "imported": imported, "saved again": saved_again, "simple_bind": simply_bound}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("options", [{}, {"cast_optional_params": False}, {"cast_optional_params": True},
                                     {"target_dtype_ops": ["Convolution"]}, *FOLDED], ids=str)
@both
def test_every_way_to_run_a_model(dtype, options, route, tmp_path):
    symbol = network()
    args, aux = values(symbol, **SHAPES)
    model = amp.convert_model(symbol, args, aux, dtype, data_names=["data"], **options)
    error = relative(predicted(symbol, args, aux), ROUTES[route](model, tmp_path))
    assert error < (1e-5 if dtype == "float32" else 0.02)
    if dtype == "bfloat16":
        assert error > 0
        stored = options.get("cast_optional_params", options.get("optimize") == "all")
        assert any(array.dtype == BFLOAT16 for array in model[1].values()) == stored
        assert casts(model[0])


class TestPlainConversions:
    """MXNet's names give MXNet's symbols: the network's own nodes and parameters, and casts."""

    @both
    @pytest.mark.parametrize("optional", [None, False, True])
    def test_every_node_name_and_parameter_is_kept(self, dtype, optional):
        symbol = network()
        args, aux = values(symbol, **SHAPES)
        converted, new_args, new_aux = amp.convert_model(symbol, args, aux, dtype, cast_optional_params=optional)
        assert {name for name, op in operators(symbol)} <= {name for name, op in operators(converted)}
        assert operators(converted) >= {pair for pair in operators(symbol) if pair[0] != "softmax"}
        assert (set(new_args), set(new_aux)) == (set(args), set(aux))
        low = {name for name, array in new_args.items() if array.dtype != np.float32}
        assert bool(low) == bool(optional and dtype == "bfloat16")  # float16 is imitated: stored in FP32
        rounded = 1e-3 if optional and dtype == "float16" else 0
        for name in set(args) - low:
            np.testing.assert_allclose(new_args[name].asnumpy(), args[name].asnumpy(), rtol=rounded, atol=rounded / 1e3)

    @pytest.mark.parametrize("with_amp", [False, True])
    @both
    def test_they_train_as_the_network_does(self, dtype, with_amp):
        symbol = network()
        args, aux = values(symbol, **SHAPES)
        expected = trained(symbol, args, aux)
        model = amp.convert_model(symbol, args, aux, dtype)
        if with_amp:
            amp.init(dtype)
        found = trained(*model)
        for name, value in expected.items():
            start = {**args, **aux}[name].asnumpy()
            if name == "conv2_bias":  # before BatchNorm: its gradient is rounding noise
                continue
            assert relative(value - start, found[name] - start) < (1e-4 if dtype == "float32" else 0.1), name

    @pytest.mark.parametrize("part", ["tied", "in both precisions", "read often", "shape only"])
    def test_gradients_of_weights_that_are_read_more_than_once(self, part):
        weight, data = mx.sym.var("w"), mx.sym.var("data")
        read = mx.sym.FullyConnected(data, weight, num_hidden=16, no_bias=True, name="one")
        made = {"tied": lambda: mx.sym.FullyConnected(read, weight, num_hidden=16, no_bias=True),
                "in both precisions": lambda: mx.sym.broadcast_add(read, mx.sym.sum(weight * weight).reshape((1, 1))),
                "read often": lambda: mx.sym.broadcast_add(read, mx.sym.add_n(
                    *[mx.sym.sum(mx.sym.sin(weight * (0.1 * count))) for count in range(1, 10)]).reshape((1, 1))),
                "shape only": lambda: mx.sym.slice_like(read, mx.sym.FullyConnected(
                    data, weight, num_hidden=16, no_bias=True, name="two") * 0)}[part]()
        generator = np.random.RandomState(4)
        arrays = {name: mx.nd.array(generator.normal(size=(size, 16))) for name, size in (("data", 4), ("w", 16))}

        def slope(symbol, parameters):
            grad = mx.nd.full((16, 16), np.nan)
            executor = symbol.bind(mx.cpu(), {**parameters, "data": arrays["data"]}, {"w": grad})
            executor.forward(is_train=True)
            executor.backward(mx.nd.ones((4, 16)))
            return grad.asnumpy()

        converted, parameters, _ = amp.convert_model(made, {"w": arrays["w"]}, {}, LOW, data_names=["data"])
        assert relative(slope(made, {"w": arrays["w"]}), slope(converted, parameters)) < 0.02

    @pytest.mark.parametrize("with_amp", [False, True])
    def test_gradients_that_accumulate_are_right_or_refused(self, with_amp):
        symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc")
        args, _ = values(symbol, data=(4, 16))
        converted, args, _ = amp.convert_model(symbol, args, {}, LOW)
        if not with_amp:
            with pytest.raises(StateError, match=r"grad_req='write' for 'fc_bias', received 'add'.*amp\.init"):
                converted.simple_bind(mx.cpu(), {"fc_weight": "add", "fc_bias": "add"}, data=(4, 16))
            return
        amp.init(LOW)
        executor = converted.simple_bind(mx.cpu(), "add", data=(4, 16))
        executor.copy_params_from(args)
        executor.arg_dict["data"][:] = 1
        for _ in range(3):
            executor.forward(is_train=True)
            executor.backward(mx.nd.ones((4, 16)))
        np.testing.assert_array_equal(executor.grad_dict["fc_weight"].asnumpy(), 12)
        np.testing.assert_array_equal(executor.grad_dict["fc_bias"].asnumpy(), 12)


class TestTraining:
    """What is folded, dropped or fused is not trained in silence."""

    @pytest.mark.parametrize("options", FOLDED, ids=str)
    @both
    def test_a_module_is_refused(self, dtype, options):
        symbol = network()
        converted, *_ = amp.convert_model(symbol, *values(symbol, **SHAPES), dtype, **options)
        with pytest.raises(StateError, match=r"cannot be trained.*for_training=False.*optimize='none'"):
            bound(converted)

    @pytest.mark.parametrize("make", [
        lambda symbol: mx.sym.FullyConnected(wide(symbol, "pool"), num_hidden=3, name="head"),
        lambda symbol: mx.sym.Group([wide(symbol, "pool"), mx.sym.var("other")]),
        lambda symbol: mx.sym.load_json(wide(symbol, "pool").tojson(remove_amp_cast=False)),
        lambda symbol: mx.sym.load_json(symbol.tojson()), copy.deepcopy, lambda symbol: wide(symbol, "relu1") * 2])
    @pytest.mark.parametrize("with_amp", [False, True])
    def test_parts_copies_and_heads_are_refused(self, make, with_amp):
        symbol = network()
        converted, *_ = amp.convert_model(symbol, *values(symbol, **SHAPES), LOW,
                                          optimize=["fold_batch_norm", "cast_params_offline"])
        made = make(converted)
        if with_amp:
            amp.init(LOW)
        shapes = {name: shape for name, shape in {**SHAPES, "other": (1,)}.items() if name in made.list_inputs()}
        with pytest.raises(StateError, match=r"cannot be trained.*made of conv1_weight and the BatchNorm bn1"):
            made.simple_bind(mx.cpu(), **shapes)
        arrays = {name: mx.nd.zeros(1) for name in made.list_arguments() if name not in shapes}
        with pytest.raises(StateError, match="cannot be trained"):
            made.bind(mx.cpu(), arrays, arrays)
        executor = made.simple_bind(mx.cpu(), "null", **shapes)
        assert np.isfinite(executor.forward()[0].asnumpy()).all()

    def test_a_head_on_frozen_folded_layers_is_trained(self):
        symbol = network()
        args, aux = values(symbol, **SHAPES)
        found = []
        for each, arrays, states in ((symbol, args, aux), amp.convert_model(symbol, args, aux, LOW,
                                                                            optimize=["fold_batch_norm"])):
            head = mx.sym.FullyConnected(wide(each, "pool"), num_hidden=4, name="head")
            made = mx.sym.SoftmaxOutput(head, name="softmax")
            own = {name: array for name, array in arrays.items() if name in made.list_arguments()}
            module = bound(made, fixed_param_names=list(own))
            module.init_params(mx.init.One(), own, states, allow_missing=True)
            module.init_optimizer(optimizer_params={"learning_rate": 0.1})
            module.forward(batch(), is_train=False)  # as frozen layers run
            module.backward()
            module.update()
            found.append(module.get_params()[0]["head_weight"].asnumpy() - 1)
        assert np.abs(found[0]).max() > 0
        assert relative(*found) < 0.05

    def test_a_network_without_its_dropout_is_refused(self):
        symbol = mx.sym.Dropout(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="fc"), name="drop") + 1
        args, _ = values(symbol, data=(4, 16))
        converted, *_ = amp.convert_model(symbol, args, {}, LOW, optimize=["drop_training"])
        with pytest.raises(StateError, match="the Dropout drop is left out"):
            converted.simple_bind(mx.cpu(), data=(4, 16))

    @pytest.mark.parametrize("op", ["BlockGrad", "make_loss"])
    def test_gradients_of_data_stop_where_the_network_stops_them(self, op):
        data = mx.sym.var("data")
        symbol = getattr(mx.sym, op)(mx.sym.FullyConnected(data, num_hidden=16, no_bias=True, name="fc"), name="stop")
        symbol = mx.sym.broadcast_mul(symbol, data)
        args, _ = values(symbol, data=(4, 16))
        found = []
        for each, arrays in ((symbol, args), amp.convert_model(symbol, args, {}, LOW, optimize="all",
                                                               disable_passes=["fuse"])[:2]):
            slope, x = mx.nd.zeros((4, 16)), mx.nd.array(np.random.RandomState(1).normal(size=(4, 16)))
            executor = each.bind(mx.cpu(), {**arrays, "data": x}, {"data": slope})
            executor.forward(is_train=True)
            executor.backward(mx.nd.ones((4, 16)))
            found.append(slope.asnumpy())
        assert relative(*found) < 0.02

    @pytest.mark.bf16  # an imitated type has parameters in FP32
    def test_casts_of_one_weight_that_is_stored_twice(self):
        weight = mx.sym.var("w")
        symbol = mx.sym.broadcast_add(mx.sym.FullyConnected(mx.sym.var("data"), weight, num_hidden=16, no_bias=True),
                                      mx.sym.sum(weight, keepdims=True))
        converted, args, _ = amp.convert_model(symbol, {"w": mx.nd.ones((16, 16))}, {}, LOW, data_names=["data"],
                                               cast_optional_params=True)
        assert set(args) == {"w", f"w_{LOW}"}
        with pytest.raises(StateError, match=f"'w_{LOW}' .made of w"):
            converted.simple_bind(mx.cpu(), data=(4, 16))


class TestParameters:
    """A folded network takes its own parameters only."""

    def test_a_padded_weight_is_not_taken_for_the_checkpoints(self):
        symbol = network(odd=True)
        args, aux = values(symbol, **SHAPES)
        model = amp.convert_model(symbol, args, aux, LOW, optimize=["align_channels", "cast_params_offline"],
                                  data_example=SHAPES)
        module = bound(model[0], for_training=False)
        if LOW == "bfloat16":
            assert model[1]["conv1_weight_padded_bfloat16"].shape[0] == 272
            with pytest.raises(RuntimeError, match="conv1_weight_padded_bfloat16 is not presented"):
                module.set_params(args, aux)
        assert relative(predicted(symbol, args, aux), predicted(*model)) < 0.02

    @pytest.mark.parametrize("optional", [False, True])
    def test_a_plain_conversion_takes_the_checkpoints(self, optional):
        symbol = network()
        args, aux = values(symbol, **SHAPES)
        converted, *_ = amp.convert_model(symbol, args, aux, LOW, cast_optional_params=optional)
        assert relative(predicted(symbol, args, aux), predicted(converted, args, aux)) < 0.03


HEADS = {
    "batch norm": lambda x: normalised(mx.sym.relu(layer(x), name="relu")),
    "batch norm with statistics": lambda x: mx.sym.Group(list(normalised(mx.sym.relu(layer(x)), output_mean_var=True))),
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
    "inner tensors": lambda x: normalised(mx.sym.relu(layer(x), name="relu")).get_internals()}


class TestNames:
    """A name gives the value that it gave in the network, or nothing."""

    @pytest.mark.parametrize("options", [{"target_dtype": "bfloat16"}, {"target_dtype": "float32"}, GPU,
                                         {"target_dtype": "bfloat16", "optimize": "all"},
                                         {"target_dtype": "float32", "optimize": "all"},
                                         {"target_dtype": "bfloat16", "cast_outputs": False}], ids=str)
    @pytest.mark.parametrize("heads", HEADS)
    def test_outputs_keep_their_names_and_values(self, heads, options):
        if options.get("target_dtype") == "bfloat16" and not RUNS_BFLOAT16:
            pytest.skip(f"{LACKING} bfloat16")
        symbol = HEADS[heads](mx.sym.var("data"))
        args, aux = values(symbol, data=(2, 16, 6, 6))
        converted, new_args, new_aux = amp.convert_model(symbol, args, aux, **options)
        assert converted.list_outputs() == symbol.list_outputs()
        assert mx.sym.load_json(converted.tojson()).list_outputs() == symbol.list_outputs()
        kept = set(converted.list_inputs()) | {"data"}
        if options is GPU or options.get("cast_outputs") is False or (
                "inner" in heads and not set(symbol.list_inputs()) <= kept):
            return
        data = mx.nd.random.normal(shape=(2, 16, 6, 6))
        for one, other in zip(run(symbol, args, aux, data=data), run(converted, new_args, new_aux, data=data)):
            assert relative(one, other) < (1e-5 if options["target_dtype"] == "float32" else 0.02)

    @pytest.mark.parametrize("options", [{}, {"cast_optional_params": True}, *FOLDED,
                                         {"optimize": ["align_channels", "cast_params_offline"]},
                                         {"optimize": ["align_channels"]}], ids=str)
    @pytest.mark.parametrize("odd", [False, True])
    @both
    def test_every_tensor_that_is_found_is_right(self, dtype, odd, options, tmp_path):
        symbol = network(odd=odd)
        args, aux = values(symbol, **SHAPES)
        model = amp.convert_model(symbol, args, aux, dtype, data_example=SHAPES, **options)
        mx.model.save_checkpoint(str(tmp_path / "net"), 0, *model)
        wanted = {name: self.value(symbol, args, aux, name) for name in symbol.get_internals().list_outputs()
                  if name.endswith("_output")}
        for made in (model, mx.model.load_checkpoint(str(tmp_path / "net"), 0)):
            names = [name for name in made[0].get_internals().list_outputs() if name in wanted]
            assert {"pool_output", "softmax_output"} <= set(names)
            for name in names:
                found = self.value(*made, name)
                assert relative(wanted[name], found) < (1e-4 if dtype == "float32" else 0.03), name

    @staticmethod
    def value(symbol, args, aux, name):
        tensor = symbol.get_internals()[name]
        arrays = {**args, **aux, "data": batch().data[0], "softmax_label": batch().label[0]}
        found = mx.nd.CachedOp(tensor)(*[arrays[each] for each in tensor.list_inputs()])
        return mx.nd.amp_cast(found, dtype="float32").asnumpy()


class TestSymbolAlone:
    def test_it_is_a_graph_of_casts_whose_files_keep_them(self, tmp_path):
        """Its text drops casts as MXNet's does."""
        symbol = network()
        converted = amp.convert_symbol(symbol, **GPU)
        count = casts(converted)
        nodes = [sorted(node["op"] for node in json.loads(each.tojson())["nodes"]) for each in (symbol, converted)]
        assert nodes[0] == nodes[1]
        assert count > 3
        assert mx.test_utils.same_symbol_structure(converted, symbol)
        mx.model.save_checkpoint(str(tmp_path / "net"), 0, converted, {}, {})
        assert (tmp_path / "net-symbol.json").read_text().count("amp_cast") == count
        assert casts(pickle.loads(pickle.dumps(converted))) == count
        for again in (copy.copy(converted), copy.deepcopy(converted)):
            again.save(str(tmp_path / "again.json"), remove_amp_cast=True)
            assert (tmp_path / "again.json").read_text().count("amp_cast") == count

    @pytest.mark.parametrize("part", [lambda symbol: symbol.get_internals()["conv_output"], lambda symbol: symbol[0]])
    def test_files_of_its_parts_keep_casts(self, tmp_path, part):
        symbol = layer(mx.sym.var("data"))
        args, _ = values(symbol, data=(1, 16, 8, 8))
        for converted in (amp.convert_symbol(symbol, **GPU), amp.convert_model(symbol, args, {}, **GPU)[0]):
            mx.model.save_checkpoint(str(tmp_path / "part"), 0, part(converted), {}, {})
            assert (tmp_path / "part-symbol.json").read_text().count("amp_cast") == casts(part(converted)) > 0

    def test_it_is_portable_unless_more_is_asked_for(self):
        symbol = mx.sym.Activation(layer(mx.sym.var("data")), act_type="relu")
        assert "_sg_mkldnn" not in amp.convert_symbol(symbol, "bfloat16").tojson()
        assert "_sg_mkldnn" in amp.convert_symbol(symbol, "bfloat16", optimize=["fuse"]).tojson()

    def test_without_data_names_typed_variables_are_parameters(self):
        typed = mx.sym.FullyConnected(mx.sym.var("data"), mx.sym.var("w", dtype="float32"), num_hidden=8, no_bias=True)
        converted = amp.convert_symbol(typed, cast_optional_params=True, **GPU)
        assert converted.attr_dict()["w"]["__dtype__"] == "2"
        assert converted.attr_dict()["data"]["__dtype__"] == "0"

    @pytest.mark.parametrize(("given", "low"), [(["bfloat16", "bfloat16"], True), (["bfloat16", "float32"], False),
                                                (["bfloat16", None], False)], ids=str)
    def test_a_variable_that_the_programs_own_casts_read_is_stored_in_their_type(self, given, low):
        weight = mx.sym.var("weight")
        reads = [weight if dtype is None else mx.sym.amp_cast(weight, dtype=BFLOAT16 if dtype == "bfloat16" else dtype)
                 for dtype in given]
        symbol, arrays = mx.sym.Group(reads), {"weight": mx.nd.random.normal(shape=(3, 4))}
        expected = run(symbol, arrays, {})
        for offline in (True, False):
            converted = amp.convert_symbol(symbol, "bfloat16", data_names=[], cast_optional_params=offline)
            assert converted.list_outputs() == symbol.list_outputs()
            executor = converted.simple_bind(mx.cpu(), weight=(3, 4))
            assert (executor.arg_dict["weight"].dtype == BFLOAT16) == (low and offline)
            executor.copy_params_from(arrays)
            for one, other in zip(expected, executor.forward()):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other.asnumpy())
        model, args, _ = amp.convert_model(symbol, arrays, {}, "bfloat16", cast_optional_params=True)
        assert (args["weight"].dtype == BFLOAT16) == low
        assert "amp_cast" in model.tojson()


class TestLists:
    @pytest.mark.bf16
    @pytest.mark.parametrize("channels", [1, 3, 8, 16])
    def test_low_operators_are_low_for_every_channel_count(self, channels):
        symbol = mx.sym.Pooling(layer(mx.sym.var("data")), kernel=(2, 2), pool_type="max")
        args, aux = values(symbol, data=(2, channels, 8, 8))
        converted, new_args, _ = amp.convert_model(symbol, args, aux, "bfloat16", target_dtype_ops=["Convolution"],
                                                   cast_optional_params=True,
                                                   data_example={"data": (2, channels, 8, 8)})
        assert new_args["conv_weight"].dtype == BFLOAT16
        data = mx.nd.random.normal(shape=(2, channels, 8, 8))
        assert relative(*(run(symbol, args, aux, data=data) + run(converted, new_args, {}, data=data))) < 0.02

    def test_but_not_where_the_kernel_is_not_sound(self):
        symbol = mx.sym.Convolution(mx.sym.var("data"), num_filter=8, kernel=(3, 3), layout="NHWC", name="conv")
        args = {"conv_weight": mx.nd.ones((8, 3, 3, 16)), "conv_bias": mx.nd.zeros(8)}
        _, new_args, _ = amp.convert_model(symbol, args, {}, "bfloat16", target_dtype_ops=["Convolution"],
                                           cast_optional_params=True)
        assert new_args["conv_weight"].dtype == np.float32

    @pytest.mark.parametrize(("condition", "message"), [
        (("Convolution", "kernle", ["(1, 1)"]), "no attribute 'kernle'. Did you mean 'kernel'"),
        (("Activation", "act_type", ["rellu"]), r"never 'rellu': expected some of relu, sigmoid"),
        (("Convolution", "no_bias", ["no"]), "never 'no': expected some of False"),
        (("Convolution", "weight", ["x"]), "no attribute 'weight'"), (("Convolution", "kernel", []), r"never \[\]")])
    def test_a_condition_that_never_holds_is_refused(self, condition, message):
        for apply in (lambda lists: amp.init("bfloat16" if RUNS_BFLOAT16 else "float32", **lists),
                      lambda lists: amp.convert_symbol(layer(mx.sym.var("data")), **GPU, **lists)):
            with pytest.raises(PolicyError, match=message):
                apply({"conditional_fp32_ops": [condition]})

    @pytest.mark.parametrize(("attribute", "value"), [
        ("kernel", "(3,3)"), ("kernel", "(3, 3)"), ("kernel", (3, 3)), ("no_bias", "True"), ("no_bias", "1"),
        ("no_bias", True)])
    def test_values_are_read_in_every_spelling(self, attribute, value):
        symbol = mx.sym.Convolution(layer(mx.sym.var("data")), num_filter=32, kernel=(1, 1), name="small")
        args, _ = values(symbol, data=(1, 16, 8, 8))
        _, new_args, _ = amp.convert_model(symbol, args, {}, conditional_fp32_ops=[("Convolution", attribute, [value])],
                                           cast_optional_params=True, **GPU)
        assert (new_args["conv_weight"].dtype, new_args["small_weight"].dtype) == (np.float32, np.float16)


class TestBlocks:
    @staticmethod
    def net():
        mx.random.seed(3)
        return sequential([nn.Conv2D(16, 3, in_channels=16, use_bias=False), nn.BatchNorm(in_channels=16),
                           nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Dense(4, in_units=16)], mx.init.Xavier())

    @staticmethod
    def step(net, trainer):
        differentiate(lambda: (net(mx.nd.ones((2, 16, 6, 6))) ** 2).sum())
        trainer.step(2)

    @pytest.mark.parametrize("grad_req", ["null", "write"])
    @pytest.mark.parametrize("with_amp", [False, True])
    def test_fine_tuning_a_converted_network_says_what_to_do(self, grad_req, with_amp):
        fast = amp.convert_hybrid_block(self.net(), LOW)
        fast.collect_params().setattr("grad_req", grad_req)
        if with_amp:
            amp.init(LOW)
        trainer = gluon.Trainer(fast.collect_params(), "sgd", {"learning_rate": 0.1})
        with pytest.raises(StateError, match=r"train the FP32 network under amp\.init\(\), and convert it afterwards"):
            self.step(fast, trainer)

    @pytest.mark.bf16
    def test_an_imported_one_is_not_trained_under_amp(self, tmp_path):
        files = amp.convert_hybrid_block(self.net(), LOW).export(tmp_path / "net")
        block = gluon.SymbolBlock.imports(files[0], ["data"], files[1])
        block.hybridize()
        amp.init(LOW)
        with autograd.record():
            assert block(mx.nd.ones((2, 16, 6, 6))).shape == (2, 4)
        trainer = gluon.Trainer(block.collect_params(), "sgd")
        with pytest.raises(StateError, match="cannot be trained"):
            self.step(block, trainer)

    @pytest.mark.parametrize("target", [pytest.param("bfloat16", marks=pytest.mark.bf16), "float16", "float32"])
    @pytest.mark.parametrize("bias", [False, True])
    def test_float64_networks_stay_float64(self, bias, target):
        net = nn.HybridSequential()
        net.add(nn.Conv2D(8, 3, in_channels=4, use_bias=bias), nn.BatchNorm(in_channels=8))
        if not bias:
            net.add(nn.Activation("relu"), nn.Dense(3, in_units=128))
        net.initialize(mx.init.Xavier())
        net.cast("float64")
        net[1].running_mean.set_data(mx.nd.random.normal(shape=8).astype("float64"))
        data = mx.nd.random.normal(shape=(2, 4, 6, 6)).astype("float64")
        for example in (None, data):
            converted = amp.convert_hybrid_block(net, target, data_example=example)
            assert relative(net(data).asnumpy(), converted(data).asnumpy()) < 1e-12
            assert {parameter.dtype for parameter in converted.collect_params().values()} == {np.float64}

    def test_files_are_written_through_links(self, tmp_path):
        net = nn.Dense(2, in_units=2)
        net.initialize()
        (tmp_path / "store").mkdir()
        for ending in ("symbol.json", "0000.params"):
            (tmp_path / f"net-{ending}").symlink_to(tmp_path / "store" / ending)
        amp.convert_hybrid_block(net).export(tmp_path / "net")
        assert (tmp_path / "net-symbol.json").is_symlink()
        assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["0000.params", "symbol.json"]
