"""Passes are switched off by name, everywhere by the same mechanism."""
from __future__ import annotations

from pathlib import Path

import mxnet as mx
import pytest
from cpu_kinds import FASTEST
from graphs import conv, graph, rewrite, variable
from mxnet.gluon import nn
from networks import sequential

import gluon_amp as amp
from gluon_amp import PolicyError, passes
from gluon_amp.cli import main
from gluon_amp.convert import STEPS
from gluon_amp.convert.options import disabled_passes
from gluon_amp.graph import Graph
from gluon_amp.rules import Device, Policy

OPTIONAL = list(amp.list_passes())
REQUIRED = [each.name for each in passes.PASSES if each.required]


def data(channels=16):
    return variable("data", (2, channels, 8, 8))


class TestTable:
    def test_the_page_of_the_design_has_every_pass(self):
        page = (Path(passes.__file__).parents[2] / "docs" / "design" / "graphs.md").read_text()
        assert [each.name for each in passes.PASSES if f"`{each.name}`" not in page] == []

    def test_the_list_holds_what_can_be_switched_off(self):
        assert {"shape_operands", "align_channels", "fold_batch_norm", "fuse"} <= set(OPTIONAL)
        assert not set(OPTIONAL) & set(REQUIRED)
        assert set(STEPS) <= set(OPTIONAL)


class TestNames:
    @pytest.mark.parametrize(("names", "message"), [
        (["align_chanels"], r"disable_passes: there is no pass 'align_chanels'\. Did you mean 'align_channels'\?"),
        (["prune_weights"], "Those that can be switched off are .*cast_params_offline"),
        (["place_casts"], "'place_casts' cannot be switched off: without it operators would read"),
        (["assign_dtypes"], "'assign_dtypes' cannot be switched off: .*leave amp.init"),
        ("align_channels", "expected a list of names of passes, received disable_passes='align_channels'"),
        ([3], "expected a list of names of passes"), (3, r"received disable_passes=3 \(of type int\)")])
    def test_wrong_ones_are_refused_everywhere(self, names, message):
        with pytest.raises(PolicyError, match=message):
            amp.init(disable_passes=names)
        assert not amp.is_active()
        with pytest.raises(PolicyError, match=message):
            amp.convert_symbol(mx.sym.relu(mx.sym.var("data")), "float16", device=mx.gpu(0), disable_passes=names)

    def test_an_iterator_is_read_once(self):
        assert passes.checked(iter(["fuse"])) == {"fuse"}

    @pytest.mark.bf16
    def test_a_policy_with_wrong_ones_is_refused(self):
        with pytest.raises(PolicyError, match=r"policy\.disabled_passes: .*place_casts"):
            amp.init(policy=Policy("bfloat16", disabled_passes=frozenset({"place_casts"})))


class TestConversionArguments:
    def test_three_arguments_are_one_set(self):
        steps = set(STEPS)
        assert disabled_passes("all", None) == frozenset()
        assert disabled_passes("none", None) == steps
        assert disabled_passes("none", True) == steps - {"cast_params_offline"}
        assert disabled_passes("all", False, ["fuse"]) == {"cast_params_offline", "fuse"}
        assert disabled_passes(["fuse"], None, ["fuse", "shape_operands"]) == steps | {"shape_operands"}

    def test_a_contradiction_is_refused(self):
        with pytest.raises(PolicyError, match="switched off, and asked for by cast_params_offline=True"):
            disabled_passes("all", True, ["cast_params_offline"])


@pytest.mark.parametrize(("amx", "training", "off", "dtype", "dilation"), [
    (True, False, False, "bfloat16", "(2, 2)"), (True, False, True, "float32", None),
    (False, False, True, "bfloat16", None), (True, True, True, "bfloat16", None)])
def test_pointwise_convolutions_stay_sound(amx, training, off, dtype, dilation):
    policy = Policy("bfloat16", training=training, disabled_passes=frozenset({"dilate_pointwise"} if off else ()))
    result = graph(conv("c", data(32), 32, 32, kernel=1), conv("wide", data(32), 32, 32))
    rewrite(result, policy, Device(amx=amx), check=True)
    nodes = {node.name: node for node in result.operators()}
    assert (nodes["c"].inputs[0].dtype, nodes["c"].attrs.get("dilate")) == (dtype, dilation)
    assert nodes["wide"].inputs[0].dtype == "bfloat16"


def test_policies_keep_it_in_files():
    policy = Policy("bfloat16", disabled_passes=frozenset({"fuse", "align_channels"}))
    assert Policy.from_json(policy.to_json()) == policy
    text = policy.to_json().replace('"disabled_passes"', '"unknown_to_this_version"')
    assert Policy.from_json(text).disabled_passes == frozenset()


def network():
    """A network whose second convolution is padded."""
    net = sequential(lambda: [nn.Conv2D(16, 3, in_channels=16), nn.Conv2D(20, 3, in_channels=16),
                              nn.Dense(4, in_units=320)], prefix="net_")
    return net, mx.nd.ones((2, 16, 8, 8))


def is_padded(net, images):
    return any(row.op == "Concat" for row in amp.report(net, images, train=True).inserted)


@pytest.mark.bf16
class TestInit:
    def test_another_set_gives_another_graph(self):
        net, images = network()
        seen = []
        for names in (None, ["align_channels"], []):
            amp.init("bfloat16", disable_passes=names)
            seen.append(is_padded(net, images))
            amp.deinit()
        assert seen == [True, False, True]

    def test_another_set_needs_deinit(self):
        amp.init("bfloat16", disable_passes=["align_channels"])
        amp.init("bfloat16", disable_passes=("align_channels",))
        with pytest.raises(amp.StateError, match=r"amp\.deinit"):
            amp.init("bfloat16")

    def test_a_policy_says_it_alone(self):
        policy = Policy("bfloat16", disabled_passes=frozenset({"align_channels"}))
        with pytest.raises(PolicyError, match="expected policy alone, received disable_passes"):
            amp.init(policy=policy, disable_passes=["align_channels"])
        amp.init(policy=policy)
        assert not is_padded(*network())

    def test_regions_take_it_over(self):
        amp.init("bfloat16", disable_passes=["align_channels"])
        net, images = network()
        with amp.autocast(enabled=False), amp.autocast():
            assert not is_padded(net, images)

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_levels_take_it(self, level):
        seen = []
        for names in (None, ["align_channels"]):
            net, images = network()
            dtype = {} if level == "O1" else {"cast_model_type": "bfloat16"}  # O1 takes the machine's own
            amp.initialize(net, opt_level=level, disable_passes=names, verbosity=0, **dtype)
            seen.append(is_padded(net, images))
            amp.deinit()
        assert seen == [level != "O1" or FASTEST == "bfloat16", False]

    def test_a_report_says_what_is_off(self):
        amp.init("bfloat16", disable_passes=["shape_operands", "align_channels"])
        net, images = network()
        found = amp.report(net, images)
        assert found.disabled_passes == ("align_channels", "shape_operands")
        assert "Passes that are off: align_channels, shape_operands" in found.summary


@pytest.mark.bf16
class TestConversion:
    @pytest.mark.parametrize("name", sorted(STEPS))
    def test_steps(self, name):
        net, _ = network()
        steps = amp.convert_hybrid_block(net, "bfloat16", disable_passes=[name]).conversion.steps
        assert set(steps) == set(STEPS) - {name}

    def test_the_command_line(self, tmp_path, capsys):
        net, images = network()
        net(images)
        net.export(str(tmp_path / "net"))
        files = [str(tmp_path / name) for name in ("net-symbol.json", "net-0000.params")]
        assert main(["convert", *files, "-o", str(tmp_path / "out"), "--disable-pass", "fuse", "--disable-pass",
                     "align_channels"]) == 0
        assert "fuse" not in capsys.readouterr().out
        assert main(["convert", *files, "-o", str(tmp_path / "out2"), "--disable-pass", "fuze"]) == 1
        assert "Did you mean 'fuse'?" in capsys.readouterr().err


def test_an_empty_graph_passes_through():
    assert not any(rewrite(Graph([]), Policy("bfloat16")).values())
