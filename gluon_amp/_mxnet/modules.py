"""What conversion needs of ``BucketingModule``."""
from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
from mxnet.module import BucketingModule


def bucket_symbols(module: BucketingModule) -> dict[Any, mx.sym.Symbol]:
    """Return the symbol of every bucket made so far, by its key."""
    return {key: bucket._symbol for key, bucket in module._buckets.items()}


def sym_gen_of(module: BucketingModule) -> Callable:
    """Return the function that makes the symbol of a bucket."""
    return module._sym_gen


def rebuilt(module: BucketingModule, symbols: dict[Any, mx.sym.Symbol], sym_gen: Callable,
            arg_params: dict[str, mx.nd.NDArray], aux_params: dict[str, mx.nd.NDArray]) -> BucketingModule:
    """Make a module like another, with other symbols and parameters; bind it before it runs."""
    return BucketingModule.load_dict(
        symbols, sym_gen, module._default_bucket_key, arg_params, aux_params, logger=module.logger,
        context=module._context, work_load_list=module._work_load_list, fixed_param_names=module._fixed_param_names,
        state_names=module._state_names, group2ctxs=module._group2ctxs, compression_params=module._compression_params)
