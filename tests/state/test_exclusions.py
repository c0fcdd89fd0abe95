"""What an exclusion reaches: blocks that are iterated and not called, symbol blocks; what matches nothing."""
from __future__ import annotations

import gc
import warnings
import weakref

import mxnet as mx
import pytest
from cpu_kinds import LOW
from mxnet.gluon import Block, HybridBlock, SymbolBlock, nn
from networks import differentiate

import gluon_amp as amp

pytestmark = [pytest.mark.machine, pytest.mark.filterwarnings("ignore:the converted network stays in FP32")]


class Heads(HybridBlock):
    """Layers in containers that are iterated, as the heads of GluonCV's SSD."""

    def __init__(self, container=nn.HybridSequential):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = nn.Dense(32, in_units=32)
            self.heads = container(prefix="heads_")
            with self.heads.name_scope():
                self.heads.add(nn.Dense(8, in_units=32), nn.HybridSequential())
                self.heads[1].add(nn.Dense(16, in_units=32), nn.Dense(4, in_units=16))

    def hybrid_forward(self, F, x):
        return self.body(x), self.heads[0](x), self.heads[1](x)


class Around(HybridBlock):
    """A block in another one."""

    def __init__(self, inner, region=None):
        super().__init__(prefix="around_")
        self.region = region
        with self.name_scope():
            self.first = nn.Dense(32, in_units=32)
        self.inner = inner

    def hybrid_forward(self, F, x):
        if self.region is None:
            return self.first(x), self.inner(x)
        with self.region():
            inner = self.inner(x)
        return self.first(x), inner


def ready(net):
    mx.random.seed(3)
    net.initialize(mx.init.Xavier())
    return net, mx.nd.random.normal(shape=(4, 32))


def symbol_block():
    """A dense layer, tanh, and a sum with the input, as an imported symbol."""
    data = mx.sym.var("data")
    weight = mx.sym.var("imported_weight", shape=(32, 32))
    symbol = mx.sym.tanh(mx.sym.FullyConnected(data, weight, num_hidden=32, no_bias=True, name="imported")) + data
    return SymbolBlock(symbol, data)


def exact(found, expected):
    return [bool((one == other).asnumpy().all()) for one, other in zip(found, expected)]


def numbers(outputs):
    return [one.copy() for one in outputs]


@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
class TestContainersThatAreIterated:
    @pytest.mark.parametrize("target", [lambda net: net.heads, lambda net: "net_heads", lambda net: nn.HybridSequential,
                                        lambda net: "*heads*"], ids=["block", "name", "class", "wildcard"])
    def test_everything_below_is_excluded(self, hybridize, target):
        net, data = ready(Heads())
        expected = numbers(net(data))
        if hybridize:
            net.hybridize()
        amp.init(LOW)
        assert exact(net(data), expected) == [False] * 3
        amp.exclude(target(net))
        assert exact(net(data), expected) == [False, True, True]

    def test_inside_a_plain_block(self, hybridize):
        class Plain(Block):
            def __init__(self):
                super().__init__(prefix="plain_")
                with self.name_scope():
                    self.layers = nn.Sequential(prefix="layers_")
                    with self.layers.name_scope():
                        self.layers.add(nn.Dense(32, in_units=32), nn.Dense(8, in_units=32))
                    self.last = nn.Dense(8, in_units=32)

            def forward(self, x):
                return [layer(x) for layer in self.layers] + [self.last(x)]
        net, data = ready(Plain())
        expected = numbers(net(data))
        if hybridize:
            net.hybridize()
        amp.init(LOW)
        amp.exclude("plain_layers")
        assert exact(net(data), expected) == [True, True, False]

    def test_gradients_of_what_is_excluded_are_exact(self, hybridize):
        net, data = ready(Heads())
        found = []
        for target in (None, net.heads):
            net.hybridize(hybridize and target is not None)
            if target is not None:
                amp.init(LOW)
                amp.exclude(target)
            differentiate(lambda: sum((one * one).sum() for one in net(data)[1:]))
            found.append([one.grad().copy() for one in net.heads.collect_params().values()])
        assert all(exact(found[1], found[0]))

    def test_conversion(self, hybridize):
        net, data = ready(Heads())
        expected = numbers(net(data))
        net.hybridize(hybridize)
        for target in (net.heads, "net_heads", nn.HybridSequential):
            converted = amp.convert_hybrid_block(net, LOW, exclude=target, optimize="none")
            assert exact(converted(data), expected) == [False, True, True]


class TestSymbolBlocks:
    @pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
    @pytest.mark.parametrize("target", [lambda net: net.inner, lambda net: SymbolBlock], ids=["block", "class"])
    def test_an_excluded_one_in_a_parent(self, hybridize, target):
        net, data = ready(Around(symbol_block()))
        expected = numbers(net(data))
        net.hybridize(hybridize)
        amp.init(LOW)
        assert exact(net(data), expected) == [False, False]
        amp.exclude(target(net))
        assert exact(net(data), expected) == [False, True]

    @pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
    def test_one_in_a_region_that_switches_on(self, hybridize):
        net, data = ready(Around(symbol_block(), lambda: amp.autocast(dtype=LOW)))
        with amp.autocast(enabled=False):
            expected = numbers([net.first(data), net.inner(data)])
        net.hybridize(hybridize)
        net(data)  # enters a region, which puts the hooks in place
        assert exact(net(data), expected) == [True, False]

    @pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
    def test_initialize_with_one_in_a_parent(self, hybridize):
        net, data = ready(Around(symbol_block()))
        expected = numbers(net(data))
        net.hybridize(hybridize)
        amp.initialize(net.inner, opt_level="O2", cast_model_type=LOW, verbosity=0)
        assert exact(net(data), expected) == [True, False]

    def test_conversion_of_a_parent(self):
        net, data = ready(Around(symbol_block()))
        expected = numbers(net(data))
        for target in (net.inner, SymbolBlock):
            converted = amp.convert_hybrid_block(net, LOW, exclude=target, optimize="none")
            assert exact(converted(data), expected) == [False, True]

    def test_conversion_of_a_region(self):
        net, data = ready(Around(symbol_block(), lambda: amp.autocast(enabled=False)))
        expected = numbers(net(data))
        amp.deinit()
        converted = amp.convert_hybrid_block(net, LOW, optimize="none")
        assert exact(converted(data), expected) == [False, True]


class TestWarnings:
    @pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
    def test_what_is_not_there(self, hybridize):
        net, data = ready(Heads())
        net.hybridize(hybridize)
        amp.init(LOW)
        amp.exclude("no_such_*")
        with pytest.warns(UserWarning, match="no_such_"):
            net(data)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(data)

    def test_the_closest_name(self):
        net, data = ready(Heads())
        amp.init(LOW)
        amp.exclude("net_head")
        with pytest.warns(UserWarning, match="net_heads"):
            net(data)

    def test_nothing_while_other_networks_are_to_run(self):
        net, data = ready(Heads())
        other, _ = ready(nn.Dense(32, in_units=32, prefix="other_"))
        amp.init(LOW)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            amp.exclude(other, "other*")
            for _ in range(3):
                other(net(data)[0])


@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
class TestWhatIsKept:
    """Blocks come and go; what was found out about them goes with them, and is found out once."""

    @pytest.mark.parametrize("runs", [True, False])
    def test_excluded_networks_are_freed(self, hybridize, runs):
        amp.init(LOW)
        kept = []
        for _ in range(5):
            net, data = ready(Heads())
            net.hybridize(hybridize)
            amp.exclude(net.heads)
            if runs:
                net(data)[0].wait_to_read()
            kept += [weakref.ref(net), weakref.ref(net.heads[0])]
            del net
        gc.collect()
        assert not [block for block in kept if block() is not None]

    def test_a_slice_of_a_network_reaches_its_layers(self, hybridize):
        net, data = ready(nn.HybridSequential())
        for _ in range(4):
            net.add(nn.Dense(32, in_units=32))
        net.initialize(mx.init.Xavier())
        expected = numbers(layer(data) for layer in net)
        net.hybridize(hybridize)
        amp.init(LOW)
        amp.exclude(net[:2])
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                net(data)
        assert exact([layer(data) for layer in net], expected) == [True, True, False, False]

    @pytest.mark.parametrize("target", [lambda net: net.heads, lambda net: "*heads*", lambda net: nn.HybridSequential],
                             ids=["block", "wildcard", "class"])
    def test_layers_that_come_after_a_call(self, hybridize, target):
        net, data = ready(Heads())
        net.hybridize(hybridize)
        amp.init(LOW)
        amp.exclude(target(net))
        for _ in range(2):
            net(data)
        later = nn.Dense(8, in_units=32)
        later.initialize(mx.init.Xavier())
        net.heads.register_child(later, "0")
        net.heads._layers = [later, net.heads[1]]
        net.hybridize(hybridize)
        with amp.autocast(enabled=False):
            expected = numbers(net(data))
        assert exact(net(data), expected) == [False, True, True]

    def test_blocks_in_the_place_of_dropped_ones_are_not_excluded(self, hybridize):
        amp.init(LOW)
        for _ in range(20):  # Python gives some of them the memory of those before
            net, data = ready(nn.Dense(8, in_units=32))
            net.hybridize(hybridize)
            with amp.autocast(enabled=False):
                expected = numbers([net(data)])
            assert exact([net(data)], expected) == [False]
            amp.exclude(net)
            assert exact([net(data)], expected) == [True]
            del net
