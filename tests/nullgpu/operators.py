"""Send every sample of an operator to the device as AMP would: in float16, forward and backward."""
from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet import autograd
from operator_samples import SAMPLES, fill

from gluon_amp._mxnet.invoke import invoke
from gluon_amp.rules import LOWER, NEUTRAL, WIDEST, Policy

POLICY = Policy("float16")


def conditions(op: str) -> list[str]:
    """Name the samples of an operator that the table may run in float16."""
    return [item.condition for item in SAMPLES[op] if POLICY.decide(op, item.attrs).rule in (LOWER, NEUTRAL, WIDEST)]


def dispatch(op: str, dtype: str = "float16", only: str | None = None) -> list[tuple[str, str]]:
    """Return the conditions under which MXNet refuses an operator with inputs as the table has them, and its words."""
    failed = []
    for item in SAMPLES[op]:
        decision = POLICY.decide(op, item.attrs)
        if item.condition not in (conditions(op) if only is None else [only]):
            continue
        kept = decision.fp32_inputs if dtype == "float16" else range(len(item.inputs))
        try:
            with mx.util.np_shape(item.numpy_shape):
                _run(item, dtype, kept)
        except mx.MXNetError as error:
            failed.append((item.condition, str(error).strip().splitlines()[-1][:300]))
    return failed


def _run(item: Any, dtype: str, kept: Any) -> None:
    inputs = []
    for number, each in enumerate(item.inputs):
        value = fill(each, "float16", f"{item.op} {number}")
        low = value.dtype == "float32" and number not in kept
        inputs.append(mx.nd.array(value, ctx=mx.gpu(0), dtype=dtype if low else value.dtype))
    for given, each in zip(inputs, item.inputs):
        if item.gradient and each.differentiable:
            given.attach_grad()
    with autograd.record(train_mode=item.gradient):
        outputs = invoke(item.op, inputs, item.attrs)
    heads = [output for output in outputs if output.dtype in ("float16", "float32")]
    if item.gradient and heads:
        autograd.backward(heads)
    mx.nd.waitall()
