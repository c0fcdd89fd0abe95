"""What the fuzzer asks stock MXNet for, where that by itself would end the process, or diverges."""
from __future__ import annotations

import fuzz
import pytest
from fuzz_checks import CHECKS
from fuzz_programs import FLOAT, Kind, Part, Program, Step
from fuzz_stock import StockFails, rounding, stock_gradients, stock_trained

import gluon_amp as amp

pytestmark = pytest.mark.filterwarnings("ignore")
MAP = Kind("map", 16)
CONVOLUTION = "F.Convolution({{0}}, {}, kernel=(1, 1), num_filter=16, no_bias=True)"


def step(result, source, text, *weights):
    return Step(result, (source,), text, MAP, tuple((name, (16, 16, 1, 1)) for name in weights))


@pytest.mark.parametrize("of", ["gradients", "training"])
def test_rounding_is_measured_behind_operators_without_a_gradient(monkeypatch, of):
    steps = (step(1, 0, CONVOLUTION.format("w0"), "w0"), step(2, 0, CONVOLUTION.format("w1"), "w1"),
             step(3, 2, "F.clip({0}, a_min=-4, a_max=4)"),
             step(4, 3, "F.BlockGrad(F.slice_axis({0}, axis=0, begin=0, end=None))"))
    program = Program(0, FLOAT, (Part(steps),), outputs=(1, 4), inputs=(MAP,))

    def measures(program, dtype):
        rounding(program, dtype, of=of)
    monkeypatch.setitem(CHECKS, "measures", measures)
    assert fuzz.failure_apart(program, "measures", "float32") is None


def test_training_that_does_not_stay_finite_in_stock_mxnet_says_nothing():
    steps = step(1, 0, CONVOLUTION.format("w0"), "w0"), step(2, 1, "F.exp(-16 * {0})")
    program = Program(0, FLOAT, (Part(steps),), outputs=(2,), inputs=(MAP,))
    with pytest.raises(StockFails, match="does not stay finite"):
        stock_trained(program)
    assert fuzz.failure(program, "training", "float32") is None


def convolution():
    steps = step(2, 0, CONVOLUTION.format("w0"), "w0"), Step(3, (2, 1), "{0} + {1}", MAP)
    return Program(0, FLOAT, (Part(steps),), outputs=(3,), inputs=(MAP, MAP))


def test_stock_mxnet_is_not_asked_while_amp_is_on():
    amp.init("float32")
    with pytest.raises(RuntimeError, match="expected AMP to be off"):
        stock_gradients(convolution())


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_every_check_asks_stock_mxnet_first(check):
    assert fuzz.failure_apart(convolution(), check, "float32") is None
