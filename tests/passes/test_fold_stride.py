"""Convolutions whose stride is folded give the values and gradients of those that keep it."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import plans_of
from mxnet.gluon import nn

import gluon_amp as amp
from gluon_amp.dtypes import cpu_support
from gluon_amp.state import devices

pytestmark = pytest.mark.bf16

FILTERS = 32


@pytest.fixture(autouse=True)
def with_amx(monkeypatch):
    with_tiles = cpu_support("AVX512_CORE_BF16")._replace(amx=True, channel_multiple=32)
    monkeypatch.setattr(devices, "cpu_support", lambda: with_tiles)


def integers(shape, seed):
    """Values that bfloat16 holds exactly."""
    return mx.nd.array(np.random.RandomState(seed).randint(-8, 9, shape) / 8)


def make_stem(kernel, pad, channels, bias, grad_req):
    stem = nn.Conv2D(FILTERS, kernel, 2, pad, in_channels=channels, use_bias=bias)
    stem.initialize()
    stem.weight.set_data(integers(stem.weight.shape, 0))
    stem.collect_params().setattr("grad_req", grad_req)
    stem.hybridize(static_alloc=True, static_shape=True)
    return stem


def run(stem, size, channels):
    """Return the output of two equal steps, and the gradients that they leave."""
    x = integers((2, channels, *size), 1)
    x.attach_grad()
    for _ in range(2):
        with mx.autograd.record():
            y = stem(x)
        y.backward(integers(y.shape, 2))
    gradients = [parameter.grad().asnumpy() for parameter in stem.collect_params().values()]
    return [y.asnumpy(), x.grad.asnumpy(), *gradients]


def count_convolutions(stem, x):
    graph = stem._cached_op.graph([x, *(parameter.data() for parameter in stem.collect_params().values())])
    return sum(node.op == "Convolution" for node in graph.operators())


@pytest.mark.parametrize(("kernel", "pad", "size", "channels", "bias", "grad_req"), [
    (7, 3, (32, 32), 3, False, "write"), (7, 3, (31, 33), 3, True, "add"), (3, 1, (32, 33), 3, False, "write"),
    (3, 0, (33, 32), 1, True, "add"), (4, 1, (32, 31), 4, True, "write"), (4, 3, (16, 16), 3, False, "write"),
    (5, 2, (17, 16), 8, False, "write"), (7, 0, (41, 40), 2, False, "write")])
def test_values_and_gradients_are_those_of_fp32(kernel, pad, size, channels, bias, grad_req):
    stem = make_stem(kernel, pad, channels, bias, grad_req)
    expected = run(stem, size, channels)
    stem.collect_params().zero_grad()
    amp.init("bfloat16")
    results = run(stem, size, channels)
    assert count_convolutions(stem, integers((2, channels, *size), 1)) == 3
    for result, wanted in zip(results, expected):
        assert np.abs(result - wanted).max() <= 2 ** -7 * np.abs(wanted).max()  # rounded to bfloat16 twice


def test_one_graph_serves_maps_of_even_and_of_odd_size():
    stem = make_stem(7, 3, 3, False, "write")
    amp.init("bfloat16")
    shapes = [stem(mx.nd.ones(shape)).shape for shape in [(2, 3, 32, 32), (1, 3, 31, 33), (3, 3, 64, 32)]]
    assert shapes == [(2, FILTERS, 16, 16), (1, FILTERS, 16, 17), (3, FILTERS, 32, 16)]
    assert len(plans_of(stem)) == 1


def test_parameters_and_files_keep_the_users_shapes(tmp_path):
    stem = make_stem(7, 3, 3, False, "write")
    amp.init("bfloat16")
    run(stem, (32, 32), 3)
    stem.export(str(tmp_path / "stem"))
    assert stem.weight.shape == stem.weight.grad().shape == (FILTERS, 3, 7, 7)
    assert mx.nd.load(str(tmp_path / "stem-0000.params"))[f"arg:{stem.weight.name}"].shape == (FILTERS, 3, 7, 7)
    assert "_eye" not in (tmp_path / "stem-symbol.json").read_text()
