"""Regions in code that waits: generators and tasks, each in its own precision."""
from __future__ import annotations

import asyncio

import mxnet as mx
import pytest
from mxnet.gluon import SymbolBlock

import gluon_amp as amp

pytestmark = pytest.mark.machine


@pytest.fixture(autouse=True, params=[pytest.param("bfloat16", marks=pytest.mark.bf16), "float16"])
def dtype(request):
    return request.param


@pytest.fixture
def low():
    """Tell whether the code that asks runs in low precision: a product of 1 + 2 ** -12 and 1 is 1 there."""
    one, weight = mx.nd.zeros((16, 64)), mx.nd.zeros((64, 64))
    one[0, 0], weight[0, 0] = 1 + 2 ** -12, 1
    return lambda: float(mx.nd.FullyConnected(one, weight, num_hidden=64, no_bias=True)[0, 0].asscalar()) == 1


async def pause():
    await asyncio.sleep(0)


def test_tasks_run_in_their_own_regions(low, dtype):
    amp.init(dtype)

    async def task(enabled):
        seen = []
        for _ in range(4):
            with amp.autocast(enabled=enabled):
                await pause()
                seen.append(low())
            await pause()
            seen.append(low())
        return seen

    async def both():
        return await asyncio.gather(task(True), task(False))

    assert asyncio.run(both()) == [[True] * 8, [False, True] * 4]
    assert low()


def test_a_task_takes_the_region_that_it_begins_in_along(low, dtype):
    async def task():
        await pause()
        return low()

    async def main():
        with amp.autocast(dtype=dtype):
            inside = asyncio.ensure_future(task())
        outside = asyncio.ensure_future(task())
        return await asyncio.gather(inside, outside)

    assert asyncio.run(main()) == [True, False]


def test_one_region_may_be_entered_by_several_tasks(low, dtype):
    region = amp.autocast(dtype=dtype)

    async def task(pauses):
        with region:
            for _ in range(pauses):
                await pause()
            seen = low()
        await pause()
        return seen, low()

    async def main():
        return await asyncio.gather(task(1), task(3), task(2))

    assert asyncio.run(main()) == [(True, False)] * 3


def test_generators_leave_their_regions_in_any_order(low, dtype):
    def steps(enabled):
        while True:
            with amp.autocast(enabled=enabled, dtype=dtype):
                yield low()

    for first, second in [(True, False), (False, True)]:
        one, other = steps(first), steps(second)
        assert [(next(one), next(other)) for _ in range(3)] == [(first, second)] * 3
        one.close()
        other.close()
        assert not amp.is_active()
        assert not low()


@pytest.mark.parametrize("decorate", [lambda dtype: amp.autocast(dtype=dtype), lambda dtype: amp.float32_function])
def test_functions_that_wait_are_not_decorated(decorate, dtype):
    async def coroutine():
        await pause()

    def generator():
        yield 1

    for waits in (coroutine, generator):
        with pytest.raises(TypeError, match=f"expected a plain function, received {waits.__name__}, which waits"):
            decorate(dtype)(waits)


def test_symbols_do_not_get_the_marks_of_regions_that_wait(dtype):
    made = {}

    async def waits():
        with amp.autocast(dtype=dtype):
            await pause()
            await pause()
            made["inside"] = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=64, no_bias=True, name="dense")

    async def composes():
        await pause()
        made["outside"] = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=64, no_bias=True, name="dense")

    async def both():
        await asyncio.gather(waits(), composes())

    asyncio.run(both())
    data, weight = mx.nd.random.normal(shape=(8, 64)), mx.nd.random.normal(shape=(64, 64))
    exact = mx.nd.FullyConnected(data, weight, num_hidden=64, no_bias=True)
    is_exact = {}
    for name, symbol in made.items():
        net = SymbolBlock(symbol, mx.sym.var("data"))
        net.collect_params()["dense_weight"]._load_init(weight, mx.cpu())
        is_exact[name] = bool((net(data) == exact).asnumpy().all())
    assert is_exact == {"inside": False, "outside": True}
