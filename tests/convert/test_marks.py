"""What the regions and exclusions of this process leave in symbols, files and conversions."""
from __future__ import annotations

import copy
import pickle
import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import HybridBlock, SymbolBlock, nn
from networks import sequential

import gluon_amp as amp
from gluon_amp.errors import GraphError

pytestmark = pytest.mark.filterwarnings("ignore:(AMP|the b?float16 network) will be slow")
LOW = "float16"  # imitated here: it runs on every CPU


def network():
    return sequential(lambda: [nn.Dense(8, in_units=8), nn.Dense(8, in_units=8)], prefix="net_")


class Inside(HybridBlock):
    """Has a region of its own."""

    def __init__(self):
        super().__init__(prefix="inside_")
        with self.name_scope():
            self.layer = nn.Dense(8, in_units=8)

    def hybrid_forward(self, F, x):
        with amp.autocast(enabled=False):
            return self.layer(x)


@pytest.fixture(params=["excluded", "in a region"])
def marked(request):
    amp.init(LOW)
    net = network() if request.param == "excluded" else Inside()
    net.initialize()
    net.hybridize()
    if request.param == "excluded":
        amp.exclude(net)
    net(nd.ones((2, 8)))
    return net


class TestFiles:
    @pytest.mark.parametrize("is_on", [True, False])
    def test_exported(self, marked, is_on, tmp_path):
        if not is_on:
            amp.deinit()
        marked.export(str(tmp_path / "net"))
        assert "amp" not in (tmp_path / "net-symbol.json").read_text()

    def test_an_export_that_is_read_runs_under_amp(self, marked, tmp_path):
        marked.export(str(tmp_path / "net"))
        read = SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
        rows = amp.report(read, nd.ones((2, 8))).operators
        layers = [row for row in rows if row.op == "FullyConnected"]
        assert layers
        assert {row.rule for row in layers} == {"LOWER"}

    def test_symbols_of_a_region(self, tmp_path):
        amp.init(LOW)
        with amp.autocast(enabled=False):
            symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
        symbol.save(str(tmp_path / "it.json"))
        assert "amp" not in (tmp_path / "it.json").read_text()
        assert "amp" not in symbol.tojson()

    @pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
    def test_copies_keep_regions_of_their_code(self, again):
        amp.init(LOW)
        net = Inside()
        net.initialize(mx.init.Constant(1 / 3))
        net.hybridize()
        x = nd.full((2, 8), 1 / 3)
        expected = net(x).asnumpy()
        assert np.array_equal(again(net)(x).asnumpy(), expected)
        with amp.autocast(enabled=False):
            assert np.array_equal(net(x).asnumpy(), expected)


class TestConversions:
    def test_symbols_of_a_region_say_why_they_stay(self):
        with amp.autocast(enabled=False):
            symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
        arrays = {"fc_weight": nd.ones((4, 8)), "fc_bias": nd.ones(4)}
        with pytest.warns(UserWarning, match="stays in FP32: its operators were made with AMP off"):
            amp.convert_model(symbol, arrays, {}, target_dtype=LOW)

    def test_everything_excluded(self):
        with pytest.warns(UserWarning, match="stays in FP32: .* an excluded block"):
            amp.convert_hybrid_block(network(), LOW, exclude="*")

    def test_nothing_to_lower(self):
        symbol = mx.sym.softmax(mx.sym.var("data"))
        with pytest.warns(UserWarning, match="stays in FP32"):
            amp.convert_symbol(symbol, LOW)

    @pytest.mark.parametrize("convert", [
        lambda net: amp.convert_hybrid_block(net, LOW),
        lambda net: amp.convert_hybrid_block(net, LOW, exclude=net[0]),
        lambda net: amp.convert_hybrid_block(net, "float32")])
    def test_others_do_not_warn(self, convert):
        net = network()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "(AMP|the b?float16 network) will be slow")
            convert(net)


class Overriding(HybridBlock):
    """Is written as MXNet 2's blocks are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(8, in_units=8)

    def forward(self, x):
        return self.layer(x)


def test_a_network_that_overrides_forward_is_told_what_to_do():
    net = Overriding()
    net.initialize()
    with pytest.raises(GraphError, match=r"\(NotImplementedError\)\. Overriding overrides forward.*hybrid_forward"):
        amp.convert_hybrid_block(net, LOW)
