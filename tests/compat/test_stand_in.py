"""Scripts and libraries written for mxnet.contrib.amp."""
from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_amp as amp
from gluon_amp.state.in_force import in_force

pytestmark = pytest.mark.machine


@pytest.fixture
def _installed():
    amp.install()
    yield
    amp.uninstall()


MODULES = ["", ".amp", ".lists", ".lists.symbol_fp16", ".lists.symbol_bf16", ".loss_scaler"]


def test_every_submodule_is_replaced_and_restored():
    names = ["mxnet.contrib.amp" + suffix for suffix in MODULES]
    before = {name: importlib.import_module(name) for name in names}
    contents = {name: dict(vars(module)) for name, module in before.items()}
    own = set(vars(amp))
    amp.install()
    amp.install()
    after = {name: importlib.import_module(name) for name in names}
    assert not set(map(id, before.values())) & set(map(id, after.values()))
    for name in names[1:]:
        parent, _, child = name.rpartition(".")
        assert getattr(after[parent], child) is after[name]
    assert after["mxnet.contrib.amp"] is amp
    amp.uninstall()
    amp.uninstall()
    assert {name: importlib.import_module(name) for name in names} == before
    assert {name: dict(vars(module)) for name, module in before.items()} == contents
    assert set(vars(amp)) == own
    assert not hasattr(amp, "_amp_initialized")


IMPORTS = """
import mxnet.contrib.amp as first
from mxnet.contrib import amp as second
from mxnet.contrib.amp import amp as third
import mxnet.contrib.amp.amp as fourth
from mxnet.contrib.amp import lists
from mxnet.contrib.amp.lists import symbol_fp16, symbol_bf16
import mxnet.contrib.amp.lists.symbol_fp16 as again
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.contrib.amp.amp import init, scale_loss, bfloat16
import gluon_amp

assert first.init is second.init is third.init is fourth.init is init is gluon_amp.init
assert first.lists is third.lists is lists and lists.symbol_fp16 is symbol_fp16 is again
assert second.amp._amp_initialized is third._amp_initialized is False and third._loss_scaler is None
assert LossScaler().loss_scale == 65536
assert bfloat16.names == ("bfloat16",)
"""


@pytest.mark.parametrize("before", ["", "import mxnet.contrib.amp", "from mxnet.contrib.amp import amp, lists"])
def test_every_way_to_import_it(before):
    program = f"import gluon_amp\nimport mxnet\n{before}\ngluon_amp.install()\n{IMPORTS}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_modules_imported_before_follow():
    from mxnet.contrib import amp as theirs
    from mxnet.contrib.amp import amp as inner
    original = inner.init
    amp.install()
    assert theirs.init is inner.init is amp.init
    assert theirs.amp is amp
    assert not inner._amp_initialized
    inner.init("float32")
    assert inner._amp_initialized
    assert theirs.amp._amp_initialized
    amp.uninstall()
    assert theirs.amp is inner
    assert inner.init is original
    assert inner._amp_initialized is False


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(("dtype", "prefix"), [("float16", "FP16"), ("bfloat16", "BF16")])
def test_lists_are_those_of_the_tables(dtype, prefix):
    from mxnet.contrib.amp import lists
    module = getattr(lists, "symbol_fp16" if dtype == "float16" else "symbol_bf16")
    found = [getattr(module, f"{prefix}_FUNCS"), getattr(module, f"{prefix}_FP32_FUNCS"), module.FP32_FUNCS,
             module.WIDEST_TYPE_CASTS, [name for name, *_ in module.CONDITIONAL_FP32_FUNCS]]
    names = [name for part in found for name in part]
    assert len(names) == len(set(names)), "an operator is in several lists"
    assert "Convolution" in found[0]
    assert "Activation" in found[4]
    assert "SoftmaxOutput" in module.LOSS_OUTPUT_FUNCTIONS
    assert hasattr(module, "BF16_USE_FP32_PARAMS") == (dtype == "bfloat16")


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("change", [lambda names: names.append("relu"), lambda names: names.remove("Convolution"),
                                    lambda names: names.__iadd__(["relu"]), lambda names: names.__setitem__(0, "relu")])
def test_changes_of_lists_warn(change):
    from mxnet.contrib.amp.lists import symbol_fp16
    with pytest.warns(UserWarning, match=r"changing them does nothing: pass amp\.init"):
        change(symbol_fp16.FP16_FUNCS)
    assert "Convolution" in amp.list_lp16_ops("float16")


@pytest.mark.usefixtures("_installed")
def test_variables_that_scripts_read_follow_what_is_on():
    from mxnet.contrib.amp import amp as inner
    with amp.autocast():
        assert inner._amp_initialized
    assert not inner._amp_initialized
    assert inner._loss_scaler is None
    inner.init()
    assert inner._amp_initialized
    assert inner._loss_scaler.loss_scale == 65536
    trainer = trainer_of(nn.Dense(2, in_units=4))
    inner.init_trainer(trainer)
    assert inner._loss_scaler is trainer._amp_loss_scaler.scaler
    assert inner._amp_loss_scale_initialized


@pytest.mark.usefixtures("_installed")
def test_scripts_may_set_up_the_scaler_of_a_trainer_store_what_it_holds_and_put_it_back():
    from mxnet.contrib.amp.loss_scaler import LossScaler
    names = ["_loss_scale", "_next_loss_scale", "_max_loss_scale", "_scale_seq_len", "_unskipped"]  # all there is
    amp.init()
    trainers = [trainer_of(nn.Dense(2, in_units=4)) for _ in range(2)]
    for trainer in trainers:
        amp.init_trainer(trainer, LossScaler())
    old, new = (trainer._amp_loss_scaler for trainer in trainers)
    assert [getattr(old, name) for name in names] == [2.0 ** 16, 2.0 ** 16, 2.0 ** 24, 2000, 0]
    for found_inf in (True, False, False):
        old.scaler.update(found_inf)
    for name in names:
        setattr(new, name, getattr(old, name))
    assert {name: getattr(new, name) for name in names} == {name: getattr(old, name) for name in names}
    for wrong in (-1, 0.5, "2", True):
        with pytest.raises(ValueError, match="_unskipped"):
            new._unskipped = wrong
    assert (new._loss_scale, new._unskipped) == (2.0 ** 15, 2)
    new._scale_seq_len, new._loss_scale = 3, 8.0
    new.scaler.update(found_inf=False)
    assert (new.loss_scale, new._next_loss_scale, new._unskipped) == (16.0, 16.0, 0)
    with pytest.raises(ValueError, match="_scale_seq_len"):
        new._scale_seq_len = 0
    static = amp.StaticLossScaler(4)
    static._scale_seq_len = 1
    static.update(found_inf=False)
    assert static.loss_scale == 4


def test_a_scaler_checks_parameters_as_mxnets_own():
    net = nn.Dense(2, in_units=4)
    trainer = trainer_of(net)
    trainer._amp_loss_scaler = scaler = amp.LossScaler()
    with autograd.record():
        loss = (net(mx.nd.ones((2, 4))) * np.inf).sum()
    loss.backward()
    before = net.weight.data().asnumpy()
    trainer.step(1)
    assert (net.weight.data().asnumpy() == before).all()
    assert scaler.loss_scale == 32768


def test_a_bare_init_keeps_what_a_launcher_set(caplog):
    amp.init("float32", disable_passes=["native_activations"])
    before = in_force.state
    with caplog.at_level("INFO", "gluon_amp"):
        amp.init()
    assert in_force.state is before
    assert "keeps its settings" in caplog.text
    with pytest.raises(amp.StateError, match="other settings"):
        amp.init("float16")


def trainer_of(net):
    net.initialize()
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)


@pytest.mark.usefixtures("_installed")
def test_a_published_training_script_runs_unchanged():
    from mxnet.contrib import amp
    amp.init()
    net = nn.Dense(2, in_units=4)
    net.initialize()
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)
    amp.init_trainer(trainer)
    before = net.weight.data().asnumpy()
    with autograd.record():
        losses = [net(mx.nd.ones((2, 4))).sum()]
        with amp.scale_loss(losses, trainer) as scaled_losses:
            autograd.backward(scaled_losses)
    trainer.step(1)
    assert np.allclose(net.weight.data().asnumpy(), before - 0.1 * 2)


NEWER = """
import gluon_amp
gluon_amp.install()
import mxnet as mx
from mxnet import amp, gluon
import mxnet.amp
assert amp is mxnet.amp is gluon_amp
amp.init()
device = mx.cpu(0)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(4, in_units=3), gluon.nn.Dense(2, in_units=4))
net.initialize(device=device)
net.reset_device([mx.cpu(0), mx.cpu(1)])
assert net[0].weight.list_device() == [mx.cpu(0), mx.cpu(1)]
assert net[0].weight.data(device=mx.cpu(1)).device == mx.cpu(1) == mx.Device("cpu", 1)
net.save_parameters({path!r})
net.reset_device(device)
net.load_parameters({path!r}, device=device)
data = mx.np.ones((2, 3), device=mx.current_device())
assert net(data.as_nd_ndarray()).to_device(mx.cpu(1)).context == mx.cpu(1)
assert mx.nd.zeros((2,), device=mx.cpu(1)).context == mx.cpu(1)
assert mx.np.random.uniform(size=(2,), device=mx.cpu(1)).ctx == mx.cpu(1)
amp.deinit()
"""


def test_names_of_mxnet_2(tmp_path):
    code = NEWER.format(path=str(tmp_path / "net.params"))
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_names_of_mxnet_2_are_gone_again():
    owners = (mx, gluon.Block, gluon.Parameter, gluon.ParameterDict, mx.nd.NDArray)
    names = {owner: set(vars(owner)) for owner in owners}
    initialize = gluon.Block.initialize
    amp.install()
    assert mx.amp is amp
    with pytest.raises(TypeError, match="device or ctx"):
        nn.Dense(1).initialize(device=mx.cpu(), ctx=mx.cpu())
    amp.uninstall()
    assert {owner: set(vars(owner)) for owner in names} == names
    assert gluon.Block.initialize is initialize
    assert "mxnet.amp" not in sys.modules
