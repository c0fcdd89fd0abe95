"""Functions that run in a region: generators and coroutines too, which are in it only while their own code runs."""
from __future__ import annotations

import functools
import inspect
import types
from typing import Any, AsyncIterator, Callable, ContextManager, Iterator, Mapping, Tuple

Region = Callable[[], ContextManager]
Arguments = Tuple[Tuple[Any, ...], Mapping[str, Any]]


def _as_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    return args, kwargs


def run_in(region: Region, function: Callable, prepared: Callable[..., Arguments] = _as_given) -> Callable:
    """Return a function of the same kind that runs in a region, on what `prepared` makes of its arguments there."""
    def begun(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with region():
            args, kwargs = prepared(args, kwargs)
            return function(*args, **kwargs)

    return functools.wraps(function)(_of_kind(function)(region, begun))


def _of_kind(function: Callable) -> Callable[[Region, Callable], Callable]:
    """Return what makes a function of the kind of another one."""
    if inspect.isasyncgenfunction(function):
        return _async_generator
    if inspect.iscoroutinefunction(function):
        return _coroutine
    return _generator if inspect.isgeneratorfunction(function) else _plain


def _plain(region: Region, begun: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        return begun(args, kwargs)
    return run


def _generator(region: Region, begun: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        return (yield from _steps(region, begun(args, kwargs)))
    return run


def _coroutine(region: Region, begun: Callable) -> Callable:
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await _awaited(region, begun(args, kwargs))
    return run


def _async_generator(region: Region, begun: Callable) -> Callable:
    async def run(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        body = begun(args, kwargs)
        step, given = body.asend, None
        try:
            while True:
                try:
                    value = await _awaited(region, step(given))
                except StopAsyncIteration:
                    return
                try:
                    step, given = body.asend, (yield value)
                except GeneratorExit:
                    raise
                except BaseException as error:  # thrown in: the generator's own code may catch it
                    step, given = body.athrow, error
        finally:
            await _awaited(region, body.aclose())
    return run


def _steps(region: Region, body: Any) -> Iterator[Any]:
    """Yield what a generator or a coroutine yields, and run it in a region from one of them to the next."""
    step, given = body.send, None
    while True:
        try:
            with region():
                value = step(given)
        except StopIteration as end:
            return end.value
        try:
            step, given = body.send, (yield value)
        except GeneratorExit:  # before the end: from Python 3.13 on what has ended must not be closed
            with region():
                body.close()
            raise
        except BaseException as error:  # thrown in: the generator's own code may catch it
            step, given = body.throw, error


_awaited: Any = types.coroutine(_steps)
