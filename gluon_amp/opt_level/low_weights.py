"""Weights without masters: results of the optimizer and running statistics are rounded to low precision.

MXNet cannot store bfloat16 parameters, and its optimizers refuse them. FP32 arrays that hold values of the
low-precision type compute the same; a cast of such an array to the type is exact.
"""
from __future__ import annotations

from typing import Callable, Iterable, Iterator, Sequence

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import Block

from .._mxnet import trainers
from .._mxnet.arrays import round_in_place
from .._mxnet.batch_norms import batch_norm_parameters
from .options import Options


class LowWeights:
    """The parameters of networks that are to hold values of a low-precision type."""

    def __init__(self, networks: Sequence[Block], options: Options, dtypes: dict[str, str],
                 key: Callable[[mx.Context], str]):
        self._dtypes, self._key = dtypes, key
        parameters = {id(parameter): parameter for net in networks for parameter in net.collect_params().values()}
        normalizing = {id(parameter) for net in networks for parameter in batch_norm_parameters(net)}
        self._trained: dict[int, gluon.Parameter] = {}
        kept = normalizing if options.keep_batchnorm_fp32 else set()
        if not options.master_weights:
            self._trained = {key: parameter for key, parameter in parameters.items()
                             if parameter.grad_req != "null" and key not in kept}
        self._statistics = [parameters[key] for key in normalizing - kept if parameters[key].grad_req == "null"]

    def round(self) -> None:
        """Round the parameters that have values; deferred ones are rounded later."""
        self._round(self._arrays([*self._trained.values(), *self._statistics]))

    def round_updated(self, trainer: gluon.Trainer) -> None:
        """Round what a trainer's update has written: weights, the optimizer's states, and running statistics."""
        updated = [parameter for parameter in trainers.parameters(trainer) if id(parameter) in self._trained]
        self._round(self._arrays([*updated, *self._statistics]))
        self._round(trainers.optimizer_arrays(trainer, updated))

    @staticmethod
    def _arrays(parameters: Iterable[gluon.Parameter]) -> Iterator[mx.nd.NDArray]:
        for parameter in parameters:
            if trainers.is_initialized(parameter):
                yield from parameter.list_data()

    def _round(self, arrays: Iterable[mx.nd.NDArray]) -> None:
        with autograd.pause():
            for array in arrays:
                dtype = self._dtypes.get(self._key(array.context))
                if dtype is not None:
                    round_in_place(array, dtype)
