"""Names and arguments of Apex, torch.amp and MXNet: what means the same works, the rest is answered with ours."""
from __future__ import annotations

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import gluon_amp as amp
from gluon_amp.base import aliases


def test_aliases_are_ours():
    for name, ours in aliases.ALIASES.items():
        assert getattr(amp, name) is getattr(amp, ours)
    from gluon_amp import half_function  # as scripts import it
    assert half_function is amp.low_precision_function


@pytest.mark.parametrize(("name", "ours"), [
    ("Autocast", "amp.autocast()"), ("is_autocast_enabled", "amp.is_active()"), ("disable_casts", "enabled=False"),
    ("_amp_state", "amp.get_loss_scaler(trainer)"), ("promote_function", "write the function without it"),
    ("lists", "amp.list_fp32_ops"), ("init_trainr", "Did you mean 'init_trainer'?"),
    ("Gradscaler", "Did you mean 'GradScaler'")])
def test_names_from_elsewhere_are_answered(name, ours):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'") as caught:
        getattr(amp, name)
    assert ours in str(caught.value)


def test_answers_name_what_exists():
    texts = " ".join(aliases.answer(name, ()) for name in aliases._ANSWERS)
    named = set(re.findall(r"amp\.(\w+)(?!\*)\b", texts)) - {"list_"}
    assert len(named) > 10
    assert [name for name in named if name not in amp.__all__] == []
    assert [name for name in (*aliases.ALIASES, *aliases._ANSWERS) if name in vars(amp)] == []


def test_other_names_are_like_those_of_any_module():
    assert not hasattr(amp, "__wrapped__")
    with pytest.raises(AttributeError, match=r"has no attribute 'zzzz'$"):
        _ = amp.zzzz


@pytest.mark.parametrize(("call", "answer"), [
    (lambda: amp.autocast("cuda"), "the device of the arrays decides"),
    (lambda: amp.autocast("cuda", np.float16), "the device of the arrays decides"),
    (lambda: amp.autocast(device_type="cuda", dtype="float16"), "the device of the arrays decides"),
    (lambda: amp.autocast(np.float16), r"amp\.autocast\(dtype='float16'\)"),
    (lambda: amp.autocast("bf16"), r"amp\.autocast\(dtype='bfloat16'\)"),
    (lambda: amp.autocast(cache_enabled=False), "leave it out"),
    (lambda: amp.init(opt_level="O1"), r"amp\.initialize"),
    (lambda: amp.init(tuning=True), "leave it out, or name what stays in FP32 in fp32_ops"),
    (lambda: amp.convert_model(None, {}, {}, tuning=True), "leave it out"),
    (lambda: amp.init_trainer(None, init_scale=128), r"loss_scaler=amp\.DynamicLossScaler\(init_scale="),
    (lambda: amp.initialize(models=[], optimizers=[]), "it is called net"),
    (lambda: amp.initialize(None, min_loss_scale=1), r"amp\.DynamicLossScaler\(min_scale="),
    (lambda: amp.scale_loss(None, None, delay_unscale=True), "leave it out"),
    (lambda: amp.init(dtype="bfloat16"), "it is called target_dtype"),
    (lambda: amp.autocast(target_dtype="bfloat16"), "it is called dtype"),
    (lambda: amp.custom_fwd(device_type="cuda"), "leave it out")])
def test_arguments_from_elsewhere_are_answered(call, answer):
    with pytest.raises(TypeError, match=answer):
        call()


def test_the_type_and_the_device_may_be_called_as_elsewhere():
    net = mx.gluon.nn.Dense(2, in_units=3)
    net.initialize()
    assert amp.convert_hybrid_block(net, dtype="float32").conversion.target_dtype == "float32"
    dense = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="dense")
    found = amp.convert_symbol(dense, dtype="float16", ctx=mx.gpu(0))
    assert found.tojson() == amp.convert_symbol(dense, "float16", device=mx.gpu(0)).tojson()


@pytest.mark.bf16
def test_every_spelling_of_a_type_reaches_what_takes_types():
    with amp.autocast(dtype="BF16"):
        assert amp.is_active()
    with amp.autocast(dtype=np.float32):
        assert not amp.is_active()
    assert amp.list_fp32_ops("half") == amp.list_fp32_ops("float16")
    amp.init("FP32")
    assert (amp.is_active(), amp.active_dtype()) == (True, None)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"ctx": mx.cpu(0), "device": mx.cpu(1)}, "ctx and device mean the same"),
    ({"ctx": [mx.cpu(0)], "device": mx.gpu(0)}, "ctx and device mean the same"),
    ({"cast_optional_params": True, "cast_params_offline": False}, "cast_optional_params and cast_params_offline")])
def test_arguments_with_two_names_must_not_contradict_each_other(arguments, message):
    net = nn.Dense(2, in_units=2)
    net.initialize()
    with pytest.raises(ValueError, match=message):
        amp.convert_hybrid_block(net, "float32", **arguments)
