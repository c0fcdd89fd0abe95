"""Trace a block without leaving a mark on it, make blocks from symbols, and what conversions need of modules."""
from __future__ import annotations

import copy
import functools
import inspect
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import mxnet as mx
from mxnet.gluon import Block, HybridBlock, SymbolBlock
from mxnet.gluon.block import _flatten, _regroup
from mxnet.gluon.rnn.rnn_layer import _RNNLayer
from mxnet.gluon.utils import _check_all_np_ndarrays
from mxnet.module import BucketingModule
from mxnet.util import is_np_array

from ..base.context import Replaced
from ..graph.attrs import REGION_OFF
from .arrays import first_array, wait_for_statistics
from .invoke import UpstreamCachedOp
from .symbols import current_mark, marked, marks, outermost_trace


class Trace(NamedTuple):
    """A block as a symbol."""

    inputs: list[mx.sym.Symbol]  # its data variables
    symbol: mx.sym.Symbol  # its outputs
    formats: tuple[Any, Any]  # the nesting of its arguments and results, as Gluon notes it


def trace(block: HybridBlock, example: Sequence[Any] | None = None,
          is_excluded: Callable[[Block], bool] | None = None) -> Trace:
    """Trace a hybrid block to a symbol; its cached graph stays as it is."""
    if isinstance(block, SymbolBlock):
        inputs, symbol = block._cached_graph
        if is_excluded is not None and is_excluded(block):
            symbol = marked(symbol, REGION_OFF)
        return Trace(list(inputs), symbol, (block._in_format, block._out_format))
    if isinstance(block, _RNNLayer):  # which makes its first states in __call__, past which graphs are traced
        example = [_stand_in()] if example is None and vars(block).get("skip_states", True) else example
        block = _Called(block)
    arguments = _arguments(block) if example is None else list(example)
    cached = Replaced()
    for name, value in (("_cached_graph", ()), ("_in_format", None), ("_out_format", None)):
        cached.put(block, name, value)
    try:
        with outermost_trace(), _marked(block, is_excluded):
            inputs, symbol = block._get_graph(*arguments)
        return Trace(list(inputs), symbol, (block._in_format, block._out_format))
    finally:
        cached.restore()


class _Called(HybridBlock):
    """Calls another block; `_cached_graph` is that of its own calls."""

    def __init__(self, block: HybridBlock):
        super().__init__(prefix="")
        self.register_child(block)
        self._cached_graph, self._in_format = block._cached_graph, getattr(block, "_in_format", None)

    def hybrid_forward(self, F: Any, *args: Any) -> Any:
        """Call the block."""
        block, = children_of(self)
        return block(*args)


def _stand_in() -> mx.nd.NDArray:
    return mx.np.zeros((1,)) if is_np_array() else mx.nd.zeros((1,))


def _arguments(block: HybridBlock) -> list[Any]:
    """Return stand-ins for the arguments of a block's latest call, or for those that it has to get."""
    def nested(formats: Any) -> Any:  # as Gluon's note of the call says
        if isinstance(formats, int):
            return None if formats == -1 else _stand_in()
        return list(map(nested, formats))

    if block._cached_graph:
        return nested(block._in_format)
    _, *parameters = inspect.signature(block.hybrid_forward).parameters.values()  # F comes first
    required = [parameter for parameter in parameters
                if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
                and parameter.default is parameter.empty and parameter.name not in block._reg_params]
    return [_stand_in()] * max(1, len(required))


@contextmanager
def _marked(block: Block, is_excluded: Callable[[Block], bool] | None) -> Iterator[None]:
    """Mark the operators of excluded blocks while they are traced."""
    if is_excluded is None:
        yield
        return
    excluded = set(map(id, subtrees(block, is_excluded)))
    entered: list[Any] = []  # by calls, which nest
    with ExitStack() as handles:
        if id(block) in excluded:
            handles.enter_context(marks.entered(REGION_OFF))
        for child in descendants(block):
            if child is not block and id(child) in excluded:
                handles.enter_context(child.register_forward_pre_hook(
                    lambda *_: entered.append(marks.enter(REGION_OFF))))
                handles.enter_context(child.register_forward_hook(lambda *_: marks.leave(entered.pop())))
        yield


def make_symbol_block_forward(original: Callable) -> Callable:
    """Make the function that takes the place of ``SymbolBlock.forward``: in a trace its operators get marks, too."""
    @functools.wraps(original)
    def forward(block: SymbolBlock, x: Any, *args: Any) -> Any:
        is_traced = isinstance(x, mx.sym.Symbol) and current_mark() is not None
        return call_symbol_block(block, (x, *args)) if is_traced else original(block, x, *args)
    return forward


@contextmanager
def without_a_trace(net: Block) -> Iterator[None]:
    """Forget the graphs that calls in the body trace: networks may compute something else in training."""
    untraced = [block for block in descendants(net) if isinstance(block, HybridBlock)
                and not isinstance(block, SymbolBlock) and block._cached_op is None]
    try:
        yield
    finally:
        forget_traces(untraced)


def subtrees(block: Block, is_top: Callable[[Block], bool]) -> list[Block]:
    """Return the blocks that ``is_top`` picks, and all blocks inside them."""
    inside: dict[int, Block] = {}
    for top in descendants(block):
        if id(top) not in inside and is_top(top):
            inside.update((id(each), each) for each in descendants(top))
    return list(inside.values())


def children_of(block: Block) -> Iterator[Block]:
    """Yield the blocks right inside a block, in order."""
    return iter(block._children.values())


def descendants(block: Block) -> Iterator[Block]:
    """Yield a block and all blocks inside it, each once, in order."""
    return iter({id(inner): inner for _, inner in block_tree(block)}.values())


def has_own_forward(block: Block) -> bool:
    """Tell whether a block's class replaces ``forward``, which MXNet never traces, rather than ``hybrid_forward``."""
    kind = type(block)
    return (isinstance(block, HybridBlock) and not isinstance(block, SymbolBlock)
            and kind.hybrid_forward is HybridBlock.hybrid_forward and kind.forward is not HybridBlock.forward)


def block_tree(block: Block, path: str = "") -> Iterator[tuple[str, Block]]:
    """Yield a block and all blocks inside it, with the attributes and indices that lead there."""
    yield path, block
    for name, child in block._children.items():
        yield from block_tree(child, f"{path}.{name}" if path else str(name))


def parameters_of(block: HybridBlock, names: Sequence[str]) -> dict[str, mx.nd.NDArray]:
    """Return a block's parameters by name; the mean over its contexts, as ``export`` writes them."""
    wait_for_statistics()
    parameters = block.collect_params()
    return {name: parameters[name]._reduce() for name in names if name in parameters}


def untouched_parameters(block: HybridBlock, names: Sequence[str]) -> list[str]:
    """Name the parameters that hold no values yet."""
    parameters = block.collect_params()
    return [name for name in names if name in parameters and parameters[name]._data is None]


def cache_flags(block: HybridBlock) -> list[tuple[str, Any]]:
    """Return the flags that a block's cached op was made with."""
    positions: dict[bool, list[int]] = {True: [], False: []}
    for position, (is_data, _) in enumerate(block._cached_op_args):
        positions[is_data].append(position)
    return [("data_indices", positions[True]), ("param_indices", positions[False]), *block._flags]


def cached_op_of(block: Block) -> Any:
    """Return what a hybridized block runs; None before it is traced, and of other blocks."""
    return getattr(block, "_cached_op", None)


def renew_cached_op(block: HybridBlock, arguments: Sequence[Any], is_stale: bool) -> None:
    """Make a block's cached op, unless it has one that rewrites; a stale one goes with its trace."""
    if block._cached_op is not None and is_stale:
        block._clear_cached_op()  # other blocks inside were excluded when it was traced
    if isinstance(block._cached_op, UpstreamCachedOp):
        block._cached_op = None  # cached before AMP was switched on
    if block._cached_op is None:
        block._build_cache(*arguments)


def forget_traces(blocks: Iterable[Block]) -> None:
    """Let hybrid blocks be traced again."""
    for block in blocks:
        if isinstance(block, HybridBlock):
            block._clear_cached_op()


def grad_reqs_of(block: HybridBlock) -> dict[str, str]:
    """Return the ``grad_req`` of each parameter that a block's cached op takes, by name."""
    return {source.name: source.grad_req for is_data, source in block._cached_op_args if not is_data}


def has_hooks(block: Block) -> bool:
    """Tell whether forward hooks, before or after a call, are registered."""
    return bool(block._forward_pre_hooks or block._forward_hooks)


def call_with_hooks(block: Block, arguments: Sequence[Any], shown: Callable[[Any], Any]) -> Any:
    """Call a block as ``Block.__call__`` does, with hooks that get what `shown` makes of arguments and results."""
    shown_arguments = shown(arguments)
    for hook in list(block._forward_pre_hooks.values()):
        hook(block, shown_arguments)
    result = block.forward(*arguments)
    hooks = list(block._forward_hooks.values())
    shown_result = shown(result) if hooks else None
    for hook in hooks:
        hook(block, shown_arguments, shown_result)
    if is_np_array():
        _check_all_np_ndarrays(result)
    return result


def load_parameters(block: SymbolBlock, arrays: Mapping[str, mx.nd.NDArray], devices: Sequence[mx.Context],
                    formats: tuple[Any, Any] | None = None) -> None:
    """Give a new symbol block its parameters, without gradients, and the structures that it takes and returns."""
    if formats is not None:
        block._in_format, block._out_format = formats
    # So that save_parameters writes what load_parameters reads: MXNet cuts off with what all names begin.
    block._reg_params = dict(block._params.items())
    for name, parameter in block.collect_params().items():
        parameter.grad_req = "null"
        parameter.shape = arrays[name].shape
        parameter.cast(arrays[name].dtype)
        parameter._load_init(arrays[name], list(devices))


def call_symbol_block(block: SymbolBlock, arguments: Sequence[Any]) -> Any:
    """Call a symbol block with arrays or symbols, in the structures of :func:`load_parameters`: lists and None, too."""
    array = first_array(arguments)
    if array is not None:
        with array.context:
            return block._call_cached_op(*arguments)
    given, formats = _flatten(arguments, "input")
    if any(one != other for one, other in zip_longest(formats, block._in_format, fillvalue=-1)):
        raise ValueError(f"the argument structure is not that of the network: expected {block._in_format}, received "
                         f"{formats}, where 0 is a symbol and -1 is None")
    inputs, symbol = block._cached_graph
    setting = current_mark()
    made = copy.copy(symbol) if setting is None else marked(symbol, setting)
    values = [value for value in given if value is not None]
    made._compose(**{variable.name: value for variable, value in zip(inputs, values)})
    return _regroup(list(made), block._out_format)


def graph_of(block: SymbolBlock) -> tuple[list[mx.sym.Symbol], mx.sym.Symbol]:
    """Return a symbol block's inputs and outputs."""
    inputs, symbol = block._cached_graph
    return list(inputs), symbol


def buckets_of(module: BucketingModule) -> tuple[dict[Any, mx.sym.Symbol], Callable]:
    """Return the symbol of every bucket made so far, by its key, and the function that makes them."""
    return {key: bucket._symbol for key, bucket in module._buckets.items()}, module._sym_gen


def rebuilt(module: BucketingModule, symbols: dict[Any, mx.sym.Symbol], sym_gen: Callable,
            arg_params: dict[str, mx.nd.NDArray], aux_params: dict[str, mx.nd.NDArray]) -> BucketingModule:
    """Make a module like another, with other symbols and parameters; bind it before it runs."""
    return BucketingModule.load_dict(
        symbols, sym_gen, module._default_bucket_key, arg_params, aux_params, logger=module.logger,
        context=module._context, work_load_list=module._work_load_list, fixed_param_names=module._fixed_param_names,
        state_names=module._state_names, group2ctxs=module._group2ctxs, compression_params=module._compression_params)
