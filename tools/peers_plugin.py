"""pytest's plugin of tools/peers.py: nose's names, models without a download, AMP, and a log of what happens."""
from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import random
import sys
import types
import unittest
from pathlib import Path
from typing import Any, Callable

LOOSE = 0.05  # the distance, over the length, up to which arrays in low precision are equal but for rounding

MODE = os.environ["PEERS_MODE"]
EVENTS = Path(os.environ["PEERS_EVENTS"])
DONE = set(Path(os.environ["PEERS_DONE"]).read_text().splitlines())

if MODE != "stock" or importlib.metadata.version("numpy") >= "2":  # which MXNet alone cannot be imported with
    import gluon_amp

import mxnet as mx  # noqa: E402  after this package, which asks for AMX
import mxnet.test_utils  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from apart import native_at_every_size  # noqa: E402

_rounded: set[str] = set()  # whether the test that runs needed more than its own tolerance


def pytest_configure() -> None:
    """Prepare what the tests import, and switch AMP on."""
    sys.modules.update({"nose": types.ModuleType("nose"), "nose.tools": _nose_tools()})
    mx.test_utils.download_model = _make_model
    mx.gluon.model_zoo.model_store.get_model_file = _make_weights
    if MODE != "stock":
        gluon_amp.install()
        if MODE != "install":
            gluon_amp.init(MODE)
        if os.environ.get("PEERS_NATIVE"):
            native_at_every_size().__enter__()  # until the process ends
    if MODE in ("bfloat16", "float16"):
        for module, name in ((mx.test_utils, "assert_almost_equal"), (np.testing, "assert_allclose"),
                             (np.testing, "assert_almost_equal"), (np.testing, "assert_array_almost_equal")):
            setattr(module, name, _up_to_rounding(getattr(module, name)))


def pytest_collection_modifyitems(items: list) -> None:
    """Leave out what ran in an earlier process, and the tests that are too slow, with all their parameters."""
    items[:] = [item for item in items if not {item.nodeid, item.name.partition("[")[0]} & DONE]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give every test the same random numbers, whichever ran before."""
    _rounded.clear()
    random.seed(1)
    np.random.seed(1)
    mx.random.seed(1)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins."""
    _write(nodeid, "started")


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a part of a test went."""
    if report.when == "call" or report.failed or report.skipped:
        message = report.longreprtext[-2000:] if report.failed else " ".join(_rounded)
        _write(report.nodeid, report.outcome, message, round(report.duration, 1))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Note that a test has ended."""
    _write(nodeid, "finished")


def _up_to_rounding(compare: Callable) -> Callable:
    """Make a comparison of arrays accept what low precision differs by; the tests' own tolerances are FP32's."""
    def compared(found: Any, expected: Any, *arguments: Any, **options: Any) -> None:
        try:
            compare(found, expected, *arguments, **options)
        except AssertionError:
            if not _distance(found, expected) < LOOSE:
                raise
            _rounded.add("rounding")
    return compared


def _distance(found: Any, expected: Any) -> float:
    """Return the length of the difference over that of the expected values."""
    left, right = (np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value) for value in (found, expected))
    if left.shape != right.shape or left.dtype.kind not in "fiu" or right.dtype.kind not in "fiu":
        return np.inf
    return float(np.linalg.norm(left.astype("float64") - right) / np.linalg.norm(right.astype("float64")))


def _write(test: str, result: str, message: str = "", seconds: float = 0.0) -> None:
    with EVENTS.open("a") as file:
        file.write(json.dumps([test, result, message, seconds]) + "\n")


def _nose_tools() -> types.ModuleType:
    """Return the functions of nose.tools that MXNet's tests use."""
    case: Any = unittest.TestCase()
    tools = types.ModuleType("nose.tools")
    vars(tools).update(
        raises=_raises, make_decorator=_make_decorator, ok_=case.assertTrue, eq_=case.assertEqual,
        nottest=lambda function: setattr(function, "__test__", False) or function, assert_raises=case.assertRaises,
        assert_equal=case.assertEqual, assert_true=case.assertTrue, assert_almost_equal=case.assertAlmostEqual,
        SkipTest=unittest.SkipTest)
    return tools


def _make_decorator(original: Callable) -> Callable:
    def decorate(function: Callable) -> Callable:
        functools.update_wrapper(function, original)
        del function.__wrapped__  # type: ignore[attr-defined]  whose arguments pytest would take for fixtures
        return function
    return decorate


def _raises(*exceptions: type) -> Callable:
    def decorate(function: Callable) -> Callable:
        @_make_decorator(function)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            with pytest.raises(exceptions):
                function(*args, **kwargs)
        return wrapped
    return decorate


def _make_model(name: str, dst_dir: str = "./", meta_info: Any = None) -> tuple[str, int]:
    """Write the ResNet-18 of MXNet's model gallery, with random weights, where a test wants the trained one."""
    prefix = os.path.join(dst_dir, name)
    symbol = _resnet18()
    shapes, _, aux_shapes = symbol.infer_shape(data=(1, 3, 224, 224), softmax_label=(1,))
    draw = np.random.RandomState(1)
    arguments = {name: mx.nd.array(_value(name, shape, draw)) for name, shape in zip(symbol.list_arguments(), shapes)
                 if name not in ("data", "softmax_label")}
    states = {name: mx.nd.array(_value(name, shape, draw))
              for name, shape in zip(symbol.list_auxiliary_states(), aux_shapes)}
    mx.model.save_checkpoint(prefix, 0, symbol, arguments, states)
    return prefix, 0


def _make_weights(name: str, root: str = "") -> str:
    """Write random weights for a network of Gluon's model zoo; the user's folder of trained ones is left alone."""
    path = os.path.abspath(f"{name}.params")
    net = mx.gluon.model_zoo.vision.get_model(name)
    net.infer_shape(mx.nd.zeros((1, 3, 224, 224)))
    net.initialize()
    draw = np.random.RandomState(1)
    for parameter in net.collect_params().values():
        parameter.set_data(mx.nd.array(_value(parameter.name, parameter.shape, draw)))
    net.save_parameters(path)
    return path


def _value(name: str, shape: tuple[int, ...], draw: np.random.RandomState) -> np.ndarray:
    if name.endswith("weight"):
        return draw.randn(*shape) * np.sqrt(2 / np.prod(shape[1:]))
    return np.ones(shape) if name.endswith(("gamma", "var")) else np.zeros(shape)


def _resnet18() -> mx.sym.Symbol:
    body = _batch_norm(mx.sym.var("data"), "bn_data", fix_gamma=True)
    body = _convolution(body, "conv0", 64, 7, 2)
    body = mx.sym.Activation(_batch_norm(body, "bn0"), act_type="relu", name="relu0")
    body = mx.sym.Pooling(body, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max", name="pooling0")
    for stage, channels in enumerate((64, 128, 256, 512), start=1):
        for unit in (1, 2):
            body = _unit(body, f"stage{stage}_unit{unit}", channels, 2 if stage > 1 and unit == 1 else 1, unit == 1)
    body = mx.sym.Activation(_batch_norm(body, "bn1"), act_type="relu", name="relu1")
    body = mx.sym.Pooling(body, global_pool=True, kernel=(7, 7), pool_type="avg", name="pool1")
    body = mx.sym.FullyConnected(mx.sym.Flatten(body), num_hidden=1000, name="fc1")
    return mx.sym.SoftmaxOutput(body, name="softmax")


def _unit(data: mx.sym.Symbol, name: str, channels: int, stride: int, projects: bool) -> mx.sym.Symbol:
    first = mx.sym.Activation(_batch_norm(data, f"{name}_bn1"), act_type="relu", name=f"{name}_relu1")
    body = _batch_norm(_convolution(first, f"{name}_conv1", channels, 3, stride), f"{name}_bn2")
    body = mx.sym.Activation(body, act_type="relu", name=f"{name}_relu2")
    body = _convolution(body, f"{name}_conv2", channels, 3)
    return body + (_convolution(first, f"{name}_sc", channels, 1, stride) if projects else data)


def _convolution(data: mx.sym.Symbol, name: str, channels: int, size: int, stride: int = 1) -> mx.sym.Symbol:
    return mx.sym.Convolution(data, num_filter=channels, kernel=(size, size), stride=(stride, stride),
                              pad=(size // 2, size // 2), no_bias=True, name=name)


def _batch_norm(data: mx.sym.Symbol, name: str, fix_gamma: bool = False) -> mx.sym.Symbol:
    return mx.sym.BatchNorm(data, fix_gamma=fix_gamma, eps=2e-5, momentum=0.9, name=name)
