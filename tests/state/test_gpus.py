"""What is decided for GPUs, on a machine that need not have any: drivers that do not fit or work, GPUs that differ."""
from __future__ import annotations

import os
import warnings

import mxnet as mx
import pytest
from cpu_kinds import take_for

import gluon_amp as amp
from gluon_amp._mxnet import gpus as mxnet_gpus
from gluon_amp.machine import host
from gluon_amp.machine.dtypes import cuda_support
from gluon_amp.state import devices
from gluon_amp.state.in_force import in_force

AMPERE, HOPPER, KEPLER, PASCAL = (8, 0), (9, 0), (3, 7), (6, 1)


@pytest.fixture
def told(monkeypatch):
    """Let this package believe in GPUs of these capabilities, and in a driver and a run-time compiler."""
    def told(*capabilities, driver=(12, 2), compiler=(11, 8)):
        monkeypatch.setattr(mxnet_gpus, "count", lambda: len(capabilities))
        take_for(monkeypatch, "AVX512_CORE_BF16")
        monkeypatch.setattr(host, "gpu", lambda number: ("GPU", capabilities[number]))
        monkeypatch.setattr(host, "driver_version", lambda: driver)
        monkeypatch.setattr(host, "nvrtc_version", lambda: compiler)
        for name in (host.NO_FUSION, devices.SAFE_ACCUMULATION):
            monkeypatch.delenv(name, raising=False)
    yield told
    amp.deinit()


def trainer_on(contexts):
    """Make a trainer of a network that is said to be on some devices."""
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    trainer._contexts = contexts
    return trainer


def warned(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in caught]


class TestDriver:
    @pytest.mark.parametrize(("driver", "compiler", "fits"), [
        ((11, 2), (11, 8), False), ((11, 8), (11, 8), True), ((12, 4), (11, 8), True), ((10, 2), (11, 2), False),
        (None, (11, 8), True), ((11, 2), None, True)])
    def test_one_older_than_the_compiler_refuses_what_that_makes(self, driver, compiler, fits):
        problem = host.fusion_problem(driver, compiler)
        assert (problem is None) == fits
        assert fits or f"CUDA {driver[0]}.{driver[1]}" in problem

    def test_fusion_is_switched_off_as_long_as_amp_is_on_and_one_warning_says_so(self, told):
        told(AMPERE, driver=(11, 4))
        found = [text for text in warned(amp.init) if "MXNET_USE_FUSION" in text]
        assert len(found) == 1
        assert "driver knows CUDA 11.4" in found[0]
        assert os.environ["MXNET_USE_FUSION"] == "0"
        amp.deinit()
        assert "MXNET_USE_FUSION" not in os.environ
        assert [text for text in warned(amp.init) if "MXNET_USE_FUSION" in text] == []

    @pytest.mark.parametrize("value", ["0", "1"])
    def test_who_has_set_it_gets_that_back_and_hears_nothing_where_it_was_off(self, told, monkeypatch, value):
        told(AMPERE, driver=(11, 4))
        monkeypatch.setenv("MXNET_USE_FUSION", value)
        assert bool(warned(amp.init)) == (value == "1")
        assert os.environ["MXNET_USE_FUSION"] == "0"
        amp.deinit()
        assert os.environ["MXNET_USE_FUSION"] == value

    def test_one_that_does_not_work_leaves_the_cpu_usable(self, told, monkeypatch):
        def fail():
            raise mx.MXNetError("Traceback:\n  File base.h\nMXNetError: Check failed:  CUDA: unknown error")

        told()
        monkeypatch.undo()
        monkeypatch.setattr(mx.context, "num_gpus", fail)
        monkeypatch.setattr(devices, "_warned", set())
        found = warned(amp.init)
        assert [text for text in found if "driver does not work" in text and text.endswith("unknown error")]
        assert amp.is_active()
        assert amp.active_dtype("gpu") is None
        assert mx.nd.ones(2).sum().asscalar() == 2


class TestMessages:
    @pytest.mark.parametrize("capability", [HOPPER, KEPLER])
    def test_a_gpu_without_kernels_beside_a_good_cpu(self, told, capability):
        told(capability)
        found = warned(amp.init)
        assert len(found) == 1
        assert "on the GPU: the GPU has compute capability" in found[0]
        assert "no operator runs there in any type. Use another device" in found[0]
        assert (amp.active_dtype("cpu"), amp.active_dtype("gpu")) == ("bfloat16", None)

    def test_active_dtype_knows_its_devices(self, told):
        told(AMPERE)
        amp.init()
        assert amp.active_dtype("gpu") == amp.active_dtype("cuda") == amp.active_dtype(mx.gpu(0)) == "float16"
        with pytest.raises(ValueError, match=r"expected one of 'cpu', .* or a Context, received device_type='tpu'"):
            amp.active_dtype("tpu")


class TestGpusThatDiffer:
    def test_each_decides_for_itself(self, told):
        told(AMPERE, PASCAL, HOPPER)
        found = warned(amp.init)
        assert [text for text in found if "on the GPU(2): the GPU has compute capability 9.0" in text]
        assert [amp.active_dtype(mx.gpu(number)) for number in range(3)] == ["float16", "float16", None]
        assert sorted(in_force.state.policies) == ["cpu", "gpu", "gpu(1)", "gpu(2)"]

    def test_equal_ones_share_their_graphs(self, told):
        told(AMPERE, AMPERE)
        amp.init()
        assert sorted(in_force.state.policies) == ["cpu", "gpu"]

    def test_one_line_tells_all_that_are_alike(self, told):
        told(PASCAL, AMPERE, AMPERE)
        said = devices.verdict(devices.device_supports())
        assert "on the gpu(1), gpu(2), because the GPU has compute capability 8.0 (Tensor Cores)" in said
        assert "on the gpu, because the GPU has compute capability 6.1 (no Tensor Cores" in said

    @pytest.mark.parametrize(("contexts", "scale"), [
        ([mx.gpu(1)], 2.0 ** 16), ([mx.gpu(0), mx.gpu(1)], 2.0 ** 16), ([mx.gpu(0)], 1.0), ([mx.cpu()], 1.0)])
    def test_losses_are_scaled_for_the_gpu_that_trains(self, told, contexts, scale):
        told(HOPPER, AMPERE)
        warned(amp.init)
        trainer = trainer_on(contexts)
        amp.init_trainer(trainer)
        assert amp.get_loss_scaler(trainer).loss_scale == scale
        amp.deinit()
        net, trainer = mx.gluon.nn.Dense(1, in_units=1), trainer_on(contexts)
        warned(lambda: amp.initialize(net, trainer, opt_level="O1", verbosity=0))
        assert amp.get_loss_scaler(trainer).loss_scale == scale

    def test_a_conversion_is_for_the_device_that_is_named(self, told):
        told(HOPPER, AMPERE)
        x = mx.sym.FullyConnected(mx.sym.var("x"), num_hidden=2, name="fc")
        for number, is_low in enumerate((False, True)):
            made = amp.convert_symbol(x, device=mx.gpu(number))
            assert ("x_float16_output" in made.get_internals().list_outputs()) == is_low

    def test_a_conversion_is_for_one_kind_of_device(self, told):
        told(HOPPER, AMPERE)
        net = mx.gluon.nn.Dense(1, in_units=1)
        net.initialize()
        with pytest.raises(amp.DTypeError, match=r"received gpu\(0\) \(float32\), gpu\(1\) \(float16\): convert it"):
            amp.convert_hybrid_block(net, device=[mx.gpu(0), mx.gpu(1)])
        with pytest.raises(amp.DTypeError, match="expected devices that run one converted network"):
            amp.convert_hybrid_block(net, "float32", device=[mx.cpu(), mx.gpu(1)])


class TestSums:
    """MXNet's kernels add float16 values up in float16 unless MXNET_SAFE_ACCUMULATION is set."""

    def test_none_is_in_float16_by_itself(self, told):
        told(AMPERE)
        amp.init()
        assert devices.SAFE_ACCUMULATION not in os.environ

    @pytest.mark.parametrize("op", ["softmax", "LayerNorm", "sum"])
    def test_a_list_that_puts_one_there_sets_the_variable(self, told, op):
        told(AMPERE)
        amp.init("float16", target_precision_ops=["FullyConnected", op])
        assert os.environ[devices.SAFE_ACCUMULATION] == "1"
        amp.deinit()
        assert devices.SAFE_ACCUMULATION not in os.environ

    def test_the_users_own_setting_stays(self, told, monkeypatch):
        told(AMPERE)
        monkeypatch.setenv(devices.SAFE_ACCUMULATION, "0")
        amp.init("float16", target_precision_ops=["softmax"])
        assert os.environ[devices.SAFE_ACCUMULATION] == "0"


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 0), (8, 6)])
def test_channels_are_not_padded_for_a_gpu(capability):
    # Below 7.0 there are no Tensor Cores; from there on cuDNN pads where it gains.
    assert cuda_support(capability).channel_multiple == 1
