"""Regions in code that waits: generators, coroutines, asynchronous generators and tasks, each in its own precision."""
from __future__ import annotations

import asyncio
import inspect
import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import HybridBlock, SymbolBlock, nn

import gluon_amp as amp

pytestmark = pytest.mark.machine

TYPES = {"float16": np.float16, "bfloat16": np.dtype([("bfloat16", np.uint16)])}


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


def test_threads_begin_outside_of_all_regions(low, dtype):
    seen = []
    with amp.autocast(dtype=dtype):
        thread = threading.Thread(target=lambda: seen.append(low()))
        thread.start()
        thread.join()
        assert low()
    assert seen == [False]


DECORATORS = {"autocast": lambda dtype: amp.autocast(dtype=dtype),
              "low_precision_function": lambda dtype: amp.low_precision_function}


@pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)
class TestDecorated:
    """Functions of every kind are in their region while their own code runs, and keep what they are."""

    @pytest.fixture(autouse=True)
    def _fp32_around(self, decorate, dtype):
        amp.init(dtype)
        with amp.autocast(enabled=False):
            yield

    def test_generators(self, low, decorate, dtype):
        @decorate(dtype)
        def steps():
            given = yield low()
            try:
                yield low(), given
            except KeyError as error:
                yield low(), error.args
            return "the end"

        assert inspect.isgeneratorfunction(steps)
        one, other = steps(), steps()
        assert [next(one), low(), next(other), low()] == [True, False, True, False]
        assert [one.send(7), low(), other.send(8)] == [(True, 7), False, (True, 8)]
        assert [one.throw(KeyError("why")), low()] == [(True, ("why",)), False]
        with pytest.raises(StopIteration) as end:
            next(one)
        assert end.value.value == "the end"
        with pytest.raises(ValueError, match="unknown"):
            other.throw(ValueError("unknown"))

    def test_generators_that_are_left(self, low, decorate, dtype):
        ended = []

        @decorate(dtype)
        def steps():
            try:
                yield 1
            finally:
                ended.append(low())

        steps_left = steps()
        next(steps_left)
        steps_left.close()
        assert ended == [True]
        assert not low()

    def test_coroutines(self, low, decorate, dtype):
        @decorate(dtype)
        async def task(name):
            seen = [low()]
            await pause()
            seen.append(low())
            if name == "bad":
                raise KeyError(name)
            return seen

        async def main():
            first, second = asyncio.ensure_future(task("one")), asyncio.ensure_future(task("bad"))
            await pause()
            around = low()
            return around, await asyncio.gather(first, second, task("three"), return_exceptions=True)

        assert inspect.iscoroutinefunction(task)
        around, (one, bad, three) = asyncio.run(main())
        assert (around, one, three) == (False, [True] * 2, [True] * 2)
        assert isinstance(bad, KeyError)

    def test_coroutines_that_are_run_by_hand(self, low, decorate, dtype):
        class Wait:
            def __await__(self):
                return (yield "waits")

        @decorate(dtype)
        async def task():
            return [low(), await Wait(), low()]

        one, other = task(), task()
        assert [one.send(None), low(), other.send(None), low()] == ["waits", False, "waits", False]
        for each, given in ((one, 1), (other, 2)):
            with pytest.raises(StopIteration) as end:
                each.send(given)
            assert end.value.value == [True, given, True]
        assert not low()

    def test_asynchronous_generators(self, low, decorate, dtype):
        ended = []

        @decorate(dtype)
        async def steps(count):
            try:
                for number in range(count):
                    await pause()
                    try:
                        given = yield number, low()
                    except KeyError as error:
                        given = error.args
                    ended.append((given, low()))
            finally:
                await pause()
                ended.append(low())

        async def main():
            seen = [(each, low()) async for each in steps(2)]
            agen = steps(5)
            await agen.asend(None)
            await agen.asend("given")
            await agen.athrow(KeyError("thrown"))
            await agen.aclose()
            return seen, low()

        assert inspect.isasyncgenfunction(steps)
        assert asyncio.run(main()) == ([((0, True), False), ((1, True), False)], False)
        assert ended == [(None, True), (None, True), True, ("given", True), (("thrown",), True), True]


def test_functions_in_fp32_may_be_of_any_kind(low, dtype):
    amp.init(dtype)
    data = mx.nd.amp_cast(mx.nd.ones((2, 2)), dtype=TYPES[dtype])

    @amp.float32_function
    def generator(x):
        yield low(), x.dtype

    @amp.float32_function
    async def coroutine(x):
        await pause()
        return low(), x.dtype

    @amp.float32_function
    async def asynchronous(x):
        await pause()
        yield low(), x.dtype

    async def main():
        return [await coroutine(data), *[each async for each in asynchronous(data)], *generator(data)]

    assert asyncio.run(main()) == [(False, np.float32)] * 3
    assert low()


class Interleaved(HybridBlock):
    """Dense layers by two generators that take turns, one in FP32."""

    def __init__(self):
        super().__init__()
        self.layers = nn.HybridSequential()
        for _ in range(4):
            self.layers.add(nn.Dense(64, in_units=64, use_bias=False))

    @amp.autocast(enabled=False)
    def exact(self, x):
        yield self.layers[0](x)
        yield self.layers[1](x)

    @amp.autocast(enabled=True)
    def lowered(self, x):
        yield self.layers[2](x)
        yield self.layers[3](x)

    def hybrid_forward(self, F, x):
        return F.concat(*(each for pair in zip(self.exact(x), self.lowered(x)) for each in pair))


def test_operators_that_generators_trace_keep_their_regions(dtype):
    net = Interleaved()
    net.initialize(mx.init.Normal(0.5))
    data = mx.nd.random.normal(shape=(4, 64))
    exact = [net.layers[number](data) for number in (0, 2, 1, 3)]
    amp.init(dtype)
    found = {}
    for hybridize in (False, True):
        net.hybridize(hybridize)
        found[hybridize] = net(data).split(4)
        assert [bool((one == other).asnumpy().all()) for one, other in zip(exact, found[hybridize])] == [
            True, False, True, False]
    assert all((one == other).asnumpy().all() for one, other in zip(found[False], found[True]))


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
