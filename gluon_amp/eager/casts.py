"""Casts of arrays in imperative calls, made with MXNet's own operators and recorded by autograd."""
from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.arrays import flag_of, map_arrays
from .._mxnet.invoke import Invocation, Invoke, run_operator
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..graph.attrs import TYPE_FLAGS
from ..state.in_force import frame
from ..state.state import EagerPolicy

LOW_FLAGS = frozenset((TYPE_FLAGS[FLOAT16], TYPE_FLAGS[BFLOAT16]))
NAMES = {flag: name for name, flag in TYPE_FLAGS.items()}
_MOST_DIMENSIONS = 6  # what amp_cast takes


def is_low(value: Any, policy: EagerPolicy) -> bool:
    """Tell whether a value is a dense array of the policy's low-precision type."""
    return isinstance(value, NDArray) and not isinstance(value, BaseSparseNDArray) and flag_of(value) == policy.flag


def is_castable(array: NDArray) -> bool:
    """Tell whether amp_cast takes an array."""
    return not isinstance(array, BaseSparseNDArray) and array.ndim <= _MOST_DIMENSIONS and array.size > 0


def returns_fp32(arguments: Sequence[Any]) -> bool:
    """Tell whether the block that is being called returns FP32: it is the outermost one and was given FP32."""
    given = (flag_of(array) for array in arguments
             if isinstance(array, NDArray) and not isinstance(array, BaseSparseNDArray))
    return frame.hybrid_blocks <= 1 and LOW_FLAGS.isdisjoint(given)


class Caster(NamedTuple):
    """Casts arrays for one call."""

    invoke: Invoke  # MXNet's own
    policy: EagerPolicy
    is_np_op: bool

    def cast(self, array: NDArray, dtype: str, out: Any = None) -> NDArray:
        """Cast an array with MXNet's amp_cast."""
        return run_operator(self.invoke, "amp_cast", [array], {"dtype": dtype}, out, self.is_np_op)

    def input_cast(self, array: NDArray, flag: int, fragile: bool) -> NDArray:
        """Cast an array; a parameter once per call of the outermost block, in a way that lets gradients accumulate."""
        dtype = self.policy.target if flag else FLOAT32
        parameter = flag and autograd.is_recording() and array.grad is not None
        if not parameter:
            return self.cast(self._behind_identity(array) if fragile else array, dtype)
        if frame.casts is None:
            return self.cast(self._behind_identity(array), dtype)
        key = (array.handle.value, dtype)
        if key not in frame.casts:
            frame.casts[key] = (array, self.cast(self._behind_identity(array), dtype))
        return frame.casts[key][1]

    def _behind_identity(self, array: NDArray) -> NDArray:
        # Behind an elementwise operator amp_cast does what it fails to do otherwise: see passes/identities.py.
        return run_operator(self.invoke, "_mul_scalar", [array], {"scalar": 1.0}, is_np_op=self.is_np_op)

    def imitated(self, call: Invocation, has_statistics: bool) -> Any:
        """Run a call as passes/float16.py does: FP32 arithmetic on rounded values, and a rounded result."""
        raised = [self._imitating(array, FLOAT32) if is_low(array, self.policy) else array for array in call.inputs]
        result = self.invoke(*call._replace(inputs=raised))
        outputs = result if isinstance(result, list) else [result]
        low = outputs[:1] if has_statistics else outputs  # the statistics of BatchNorm are FP32 as well
        rounded = [self._imitating(array, self.policy.target) if flag_of(array) == 0 else array for array in low]
        return [*rounded, *outputs[len(low):]] if isinstance(result, list) else rounded[0]

    def _imitating(self, array: NDArray, dtype: str) -> NDArray:
        """Make a cast that serves to imitate the type: recordings tell it from others."""
        frame.imitates = True
        try:
            return self.cast(array, dtype)
        finally:
            frame.imitates = False

    def write(self, result: Any, out: Any) -> Any:
        """Write a result into the caller's arrays, in their types."""
        receivers = out if isinstance(out, (list, tuple)) else [out]
        for value, receiver in zip(result if isinstance(result, list) else [result], receivers):
            flag = flag_of(receiver)
            if flag in NAMES and flag != flag_of(value):
                self.cast(value, NAMES[flag], receiver)
            else:
                run_operator(self.invoke, "_copyto", [value], {}, receiver, self.is_np_op)
        return out


def release(value: Any, policy: EagerPolicy, invoke: Invoke) -> Any:
    """Return results, nested as they are, with low-precision arrays turned to FP32."""
    def released(array: NDArray) -> NDArray:
        if not is_low(array, policy):
            return array
        return Caster(invoke, policy, isinstance(array, mx.np.ndarray)).cast(array, FLOAT32)
    return map_arrays(released, value)


def widened(invoke: Invoke, inputs: Sequence[NDArray], is_np_op: bool, low: int | None = None) -> Sequence[NDArray]:
    """Return the inputs with the user's own low-precision arrays in FP32, where they meet FP32 or AMP's arrays."""
    flags = [flag_of(array) for array in inputs]
    users = [i for i, flag in enumerate(flags)
             if flag in LOW_FLAGS and flag != low and not isinstance(inputs[i], BaseSparseNDArray)]
    if not users or not {0, low}.intersection(flags):
        return inputs
    wide = list(inputs)
    for i in users:  # amp_cast loses gradients that accumulate, and Cast does not know bfloat16
        op = "Cast" if NAMES[flags[i]] == FLOAT16 else "amp_cast"
        wide[i] = run_operator(invoke, op, [inputs[i]], {"dtype": FLOAT32}, is_np_op=is_np_op)
    return wide
