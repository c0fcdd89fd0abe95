"""``convert_sync_batchnorm``: batch normalization by the statistics of the batches of all contexts and processes.

The operator behind converted blocks runs MXNet's BatchNorm kernels, with statistics that were added up.
"""
from __future__ import annotations

import ast
import itertools
import os
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from .. import parallel
from .._mxnet import batch_norms, gpus
from .._mxnet.batch_norms import CustomBatchNorm, MXNetSyncBatchNorm, exchange
from .._mxnet.blocks import descendants, forget_traces
from .._mxnet.symbols import dtype_name
from ..base import checks
from ..errors import StateError, expected, warn
from ..state.in_force import in_force
from .groups import total_of

__all__ = ["convert_sync_batchnorm"]

OPERATOR = "gluon_amp_sync_batch_norm"
Allreduce = Callable[..., NDArray]
PATIENCE = 600.0  # seconds to wait for the other contexts, which may have most of a network to compute before

_layers: weakref.WeakValueDictionary[str, Layer] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_USES_AT_ONCE = 8  # of one layer between forward and backward
_LEAST_COPIES = 1024  # of MXNet's scratch memory: as many as operators in a step of a deep network, on all contexts
_CALLED = "convert_sync_batchnorm"
_ADVICE = ("In training every context must run the network, before any result is read: give convert_sync_batchnorm "
           "their number as num_devices. CPU contexts need MXNET_CPU_TEMP_COPY above the number of operators in a step")


def convert_sync_batchnorm(net: Block, num_devices: int | None = None, allreduce: Allreduce | None = None) -> Block:
    """Make a network's batch normalization use the statistics of the whole batch, wherever its parts are computed.

    Works in place, in FP32, and returns the network: call it before :func:`initialize` or :func:`init`, and before the
    first step. Blocks with ``use_global_stats=True`` have nothing to synchronize and stay as they are.

    In training every context of every process must run the network, in the same order, before a result is read:
    the contexts wait for each other. Gradients of scale and shift are those of a context's own batch, for the trainer
    to add up as others. Several CPU contexts need ``MXNET_CPU_TEMP_COPY=1024`` to be set.

    Parameters
    ----------
    net : Block
        Hybridized or not, initialized or not, with FP32 parameters.
    num_devices : int, optional
        How many contexts of this process take part; the contexts that the parameters are on, when left out.
    allreduce : callable, optional
        ``allreduce(vector, name=name)`` returns the sum of a vector over all processes, the same bits in each, in
        threads of MXNet's: that of Horovod or the KVStore, when left out.
    """
    checks.instance("net", net, Block, "a Block")
    if allreduce is not None and not callable(allreduce):
        raise TypeError(expected("a callable", "allreduce", allreduce))
    blocks = batch_norms.batch_norms(net)
    _refuse_unfit(net, blocks)
    contexts, count = _contexts(net, num_devices)
    prepare = None
    if allreduce is None and parallel.size() > 1:
        allreduce, prepare = parallel.allreduce, parallel.prepare
    if count == 1 and allreduce is None:
        warn(f"{_CALLED}: one context in one process has nothing to synchronize; the network stays as it is")
        return net
    are_gpus = bool(contexts) and all(context.device_type == "gpu" for context in contexts)
    uses_mxnet = are_gpus and allreduce is None
    axes = {block: batch_norms.axis_of(block) for block in blocks}
    other = next((block.name for block, axis in axes.items() if axis != 1), None)
    if uses_mxnet and other:
        raise StateError(f"{_CALLED}: MXNet's SyncBatchNorm, used for the GPUs of one process, normalizes axis 1 only, "
                         f"and {other} another one. Use one process per GPU")
    for block, axis in axes.items():
        if uses_mxnet:  # which knows the layer among all networks of the process by a key
            exchange(block, MXNetSyncBatchNorm, key=f"{block.prefix}{id(block)}", ndev=count, use_global_stats=False)
        else:
            layer = Layer(count, allreduce, prepare)
            exchange(block, CustomBatchNorm, layer, op_type=OPERATOR, layer=layer.key, axis=axis)
    forget_traces(descendants(net))
    return net


def _refuse_unfit(net: Block, blocks: list[Any]) -> None:
    if mx.util.is_np_array():
        raise StateError(f"{_CALLED}: custom operators take legacy arrays only. Leave mx.npx.set_np() out")
    hidden = [block.name for block in descendants(net) if batch_norms.has_batch_norm_inside(block)]
    if hidden:
        raise StateError(f"{_CALLED}: the batch normalization inside {', '.join(hidden[:3])} is part of a "
                         "SymbolBlock's graph. Convert the network that the graph was exported from")
    own = [block for block in blocks if not batch_norms.is_plain(block)]
    if own:
        raise StateError(f"{_CALLED}: {own[0].name} is a {type(own[0]).__name__}, a subclass of BatchNorm "
                         "whose computation is its own. Use nn.BatchNorm in its place")
    low = [parameter.name for block in blocks for parameter in block.params.values()
           if dtype_name(parameter.dtype) != "float32"]
    if low:
        raise StateError(f"{_CALLED}: expected FP32 parameters, received {low[0]} in another type. Leave "
                         "net.cast out: amp.initialize and amp.init run networks in low precision")


def _contexts(net: Block, num_devices: int | None) -> tuple[list[mx.Context], int]:
    """Return the contexts that parameters are on, none of a network that is not initialized, and how many take part."""
    contexts: list[mx.Context] = []
    with suppress(RuntimeError):
        contexts += next((parameter.list_ctx() for parameter in net.collect_params().values()), [])
    count = len(contexts) if num_devices is None else checks.whole("num_devices", num_devices, 1)
    if not count:
        raise StateError(f"{_CALLED}: the network is not initialized, so that its contexts are not known. Call "
                         "net.initialize(ctx=...) first, or give num_devices")
    if contexts and count != len(contexts):
        raise ValueError(f"expected num_devices={len(contexts)}, the number of contexts that the parameters are on, "
                         f"received num_devices={num_devices}: the contexts would wait for each other for ever")
    # CPU contexts that share scratch memory: an operator that waits for another context would block it.
    copies = int(os.environ.get("MXNET_CPU_TEMP_COPY", "4"))
    on_cpus = any(context.device_type != "gpu" for context in contexts) or not gpus.count()
    if count > 1 and on_cpus and copies < _LEAST_COPIES:
        raise StateError(f"{_CALLED}: operators on several CPU contexts block each other without scratch memory of "
                         f"their own. Set MXNET_CPU_TEMP_COPY={_LEAST_COPIES} or more (received {copies}) "
                         "before the process starts, or use one process per context")
    return contexts, count


class Meeting:
    """Where the contexts of a process add up a vector each, again and again; the last one sums over processes."""

    def __init__(self, name: str, num_devices: int, allreduce: Allreduce | None):
        self.name = name
        self._num_devices = num_devices
        self._allreduce = allreduce
        self._arrived: dict[str, NDArray] = {}
        self._closed = 0  # meetings so far
        self._total: NDArray | None = None  # of the last one; all have read it before the next can close
        self._change = threading.Condition()

    def sum(self, vector: NDArray, place: str) -> NDArray:
        """Return the sum of the vectors of all contexts and processes, on this one's context."""
        with self._change:
            meeting = self._closed
            if place in self._arrived:
                raise StateError(f"{self.name}: {place} came twice before the others of "
                                 f"num_devices={self._num_devices}. {_ADVICE}")
            self._arrived[place] = vector
            if len(self._arrived) == self._num_devices:
                self._close()
            elif not self._change.wait_for(lambda: self._closed > meeting, PATIENCE):
                raise StateError(f"{self.name}: only {', '.join(self._arrived)} of num_devices={self._num_devices} "
                                 f"came in {PATIENCE:.0f} seconds. {_ADVICE}")
            if self._total is None:
                raise StateError(f"{self.name}: the sum failed on another context, whose error says why")
            return self._total.as_in_context(vector.context)

    def _close(self) -> None:
        vectors = [self._arrived[place] for place in sorted(self._arrived)]  # in one order: the same bits every time
        self._arrived, self._total = {}, None
        try:
            total = total_of(vectors)
            self._total = total if self._allreduce is None else self._allreduce(total, name=self.name)
        finally:
            self._closed += 1
            self._change.notify_all()


class Layer:
    """What the operators of one block share."""

    def __init__(self, num_devices: int, allreduce: Allreduce | None, prepare: Any = None):
        # The same in all processes that convert the same networks in the same order.
        self.key = f"sync_batch_norm{next(_numbers)}"
        # MXNet runs the uses of a layer in order, and their gradients in any: the uses take meetings in turn.
        self.mean, self.variance, *self.gradients = (
            Meeting(f"{self.key}.{part}", num_devices, allreduce)
            for part in ("mean", "variance", *(f"gradient{use}" for use in range(_USES_AT_ONCE))))
        self._prepare = prepare
        self._uses: dict[str, int] = {}  # by context
        self._busy: set[str] = set()
        _layers[self.key] = self

    def prepare(self, channels: int) -> None:
        """Make the sums over processes known."""
        if self._prepare is not None:
            with mx.engine.bulk(0):  # a cached op that is being run collects operators, the KVStore's too
                for meeting, size in ((self.mean, channels + 1), (self.variance, channels),
                                      *((each, 2 * channels) for each in self.gradients)):
                    self._prepare(meeting.name, (size,))

    @contextmanager
    def use(self, place: str) -> Iterator[Meeting]:
        """Measure statistics in the body; give the meeting for the gradients of this use."""
        if place in self._busy:
            raise StateError(f"{self.key}: the layer is used twice at once on {place}. MXNet keeps no order between "
                             "the uses of a layer in a network hybridized with static_shape=True: leave it out")
        self._busy.add(place)
        number = self._uses[place] = self._uses.get(place, -1) + 1
        try:
            yield self.gradients[number % _USES_AT_ONCE]
        finally:
            self._busy.remove(place)


@mx.operator.register(OPERATOR)
class _Property(mx.operator.CustomOpProp):
    """Describes the operator to MXNet; parameters arrive as text."""

    def __init__(self, layer: str, **kernel: str):
        super().__init__(need_top_grad=True)
        self._kernel = {name: ast.literal_eval(value) for name, value in kernel.items()}
        self._layer = layer

    def list_arguments(self) -> list[str]:
        return ["data", "gamma", "beta"]

    def list_auxiliary_states(self) -> list[str]:
        return ["moving_mean", "moving_var"]

    def infer_shape(self, in_shape: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        data = in_shape[0]
        channels = [data[self._kernel["axis"]]]
        return [data, channels, channels], [data], [channels, channels]

    def infer_type(self, in_type: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        float32 = mx.base.mx_real_t
        if any(dtype != float32 for dtype in in_type):
            raise TypeError(f"synchronized batch normalization computes in float32, received data of type {in_type[0]}")
        return [float32] * 3, [float32], [float32] * 2

    def declare_backward_dependency(self, out_grad: Sequence[int], in_data: Sequence[int],
                                    out_data: Sequence[int]) -> list[int]:
        return [*out_grad, *in_data]

    def create_operator(self, ctx: Any, in_shapes: Sequence[Any], in_dtypes: Sequence[Any]) -> _Operator:
        layer = _layers.get(self._layer)
        if layer is None:
            raise StateError(f"the block of {self._layer} is gone: networks with synchronized batch normalization "
                             "cannot be exported and loaded. Save their parameters instead")
        if autograd.is_training():  # in evaluation, a process may be alone
            layer.prepare(in_shapes[1][0])
        return _Operator(layer, str(ctx), **self._kernel)


class _Operator(mx.operator.CustomOp):
    """Runs one layer on one context; holds the statistics from forward to backward."""

    def __init__(self, layer: Layer, place: str, axis: int, eps: float, momentum: float, fix_gamma: bool):
        super().__init__()
        self._layer, self._place = layer, place
        self._momentum, self._fix_gamma = momentum, fix_gamma
        self._given = {"axis": axis, "eps": eps, "fix_gamma": False}
        self._statistics: tuple[NDArray, NDArray] | None = None  # of the batch; None outside of training
        self._count = 1.0
        self._gradients = layer.gradients[0]

    def forward(self, is_train: bool, req: Sequence[str], in_data: Sequence[NDArray], out_data: Sequence[NDArray],
                aux: Sequence[NDArray]) -> None:
        with in_force.off(), autograd.pause():
            data, gamma, beta = in_data
            self._statistics = None
            if is_train:
                with self._layer.use(self._place) as self._gradients:
                    self._statistics = self._measured(data)
                for moving, value in zip(aux, self._statistics):
                    moving[:] = self._momentum * moving + (1 - self._momentum) * value
            self.assign(out_data[0], req[0],
                        self._normalized(data, self._scale(gamma), beta, *(self._statistics or aux)))

    def backward(self, req: Sequence[str], out_grad: Sequence[NDArray], in_data: Sequence[NDArray],
                 out_data: Sequence[NDArray], in_grad: Sequence[NDArray], aux: Sequence[NDArray]) -> None:
        with in_force.off(), autograd.pause():
            data, gamma, beta = in_data
            mean, variance = self._statistics or aux
            scale = self._scale(gamma)
            gradients = self._with_statistics_held(out_grad[0], data, scale, beta, mean, variance)
            if self._statistics is not None:
                gradients[0] -= self._share_of_statistics(gradients, data, scale, mean, variance)
            if self._fix_gamma:
                gradients[1][:] = 0
            for place, request, value in zip(in_grad, req, gradients):
                self.assign(place, request, value)

    def _scale(self, gamma: NDArray) -> NDArray:
        return mx.nd.ones_like(gamma) if self._fix_gamma else gamma

    def _normalized(self, data: NDArray, scale: NDArray, shift: NDArray, mean: NDArray, variance: NDArray) -> NDArray:
        return mx.nd.BatchNorm(data, scale, shift, mean, variance, use_global_stats=True, **self._given)

    def _measured(self, data: NDArray) -> tuple[NDArray, NDArray]:
        """Return mean and variance over all contexts and processes."""
        channels = data.shape[self._given["axis"]]
        own = float(data.size // channels)
        zeros, ones = mx.nd.zeros(channels, data.context), mx.nd.ones(channels, data.context)
        with autograd.train_mode():
            _, mean, deviation = mx.nd.BatchNorm(data, ones, zeros, zeros.copy(), ones.copy(), output_mean_var=True,
                                                 **self._given)  # the inverse of the deviation, in fact
        variance = deviation ** -2 - self._given["eps"]
        vector = mx.nd.concat(mean * own, mx.nd.full(1, own, data.context), dim=0)
        total = self._layer.mean.sum(vector, self._place)
        count, common = total[channels:], total[:channels] / total[channels:]
        self._count = count.asscalar()
        # In a second sum around the common mean, so that large means do not cancel small variances.
        around = (variance + (mean - common) ** 2) * own
        return common, self._layer.variance.sum(around, self._place) / count

    def _with_statistics_held(self, gradient: NDArray, *inputs: NDArray) -> list[NDArray]:
        """Return the gradients of data, scale and shift as if the statistics did not depend on the data."""
        variables = [array.detach() for array in inputs[:3]]
        for variable in variables:
            variable.attach_grad()
        with autograd.record():
            result = self._normalized(*variables, *inputs[3:])
        result.backward(gradient)
        return [variable.grad for variable in variables]

    def _share_of_statistics(self, gradients: Sequence[NDArray], data: NDArray, scale: NDArray, mean: NDArray,
                             variance: NDArray) -> NDArray:
        _, of_scale, of_shift = gradients
        total = self._gradients.sum(mx.nd.concat(of_scale, of_shift, dim=0), self._place) / self._count
        factor = scale / (variance + self._given["eps"]).sqrt()
        of_scale, of_shift = total.split(2, axis=0)
        return self._normalized(data, factor * of_scale, factor * of_shift, mean, variance)
