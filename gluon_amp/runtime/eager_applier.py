"""Imperative operator calls: the inputs of each are cast as the policy says.

Every operator function of ``mx.nd``, ``mx.np`` and ``mx.npx`` ends in ``mxnet.ndarray.register._imperative_invoke``,
looked up when it is called, so that replacing this one name reaches functions that were imported long before.

Low precision lives inside calls of hybrid blocks only: what leaves the outermost one, or an operator called outside of
any, is FP32, as it is when the block is hybridized. NumPy cannot read bfloat16, and users' code need not know about it.
"""
from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.arrays import map_arrays
from .._mxnet.operators import handle_of, registered_operators
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from ..errors import PolicyError
from ..graph.attrs import TYPE_FLAGS
from ..rules import KEEP, LOWER, NEUTRAL, WIDEST, Decision, Policy, precision
from ..rules.decision import FOR_SECOND_GRADIENTS, SWITCHED_OFF
from .second_gradients import TWICE_DIFFERENTIABLE, are_recorded
from .zero_gradients import make_saving_invoke

Invoke = Callable[..., Any]

_MOST_DIMENSIONS = 6  # what amp_cast takes
_LOW = frozenset((TYPE_FLAGS[FLOAT16], TYPE_FLAGS[BFLOAT16]))
_NAMES = {flag: name for name, flag in TYPE_FLAGS.items()}
_ARITHMETIC = ("add", "sub", "mul", "div")
_UNTOUCHED = {"amp_cast", "amp_multicast"}
_COPIES = {"_copyto", "_npi_copyto"}
_get_dtype = _LIB.MXNDArrayGetDType


class Frame(threading.local):
    """The current thread's calls of blocks."""

    def __init__(self) -> None:
        self.blocks = 0  # how many calls of blocks are under way
        self.hybrid_blocks = 0  # how many of them are of hybrid blocks
        # Casts of parameters made since the outermost block that MXNet could trace was called, so that each is made
        # once; None outside of such a call. They must not live longer: two losses that share a recorded cast cannot
        # both be differentiated.
        self.casts: dict[tuple[int, str], tuple[NDArray, NDArray]] | None = None
        self.excluded: set[int] = set()  # ids of the blocks that are excluded in the outermost block's call
        # the blocks inside networks that were given to ``initialize``, where the outermost block is none of those
        self.parts: Mapping[Any, Any] = {}
        self.data_gradients = False  # whether gradients of the data of the outermost block's call are recorded
        self.imitates = False  # whether the casts that are made now imitate a type


frame = Frame()


def returns_fp32(arguments: Sequence[Any]) -> bool:
    """Tell whether the block that is being called returns FP32: it is the outermost one and was given FP32."""
    given = [_NAMES.get(_flag(array)) for array in arguments
             if isinstance(array, NDArray) and not isinstance(array, BaseSparseNDArray)]
    return frame.hybrid_blocks <= 1 and not {FLOAT16, BFLOAT16}.intersection(given)


@contextmanager
def outermost() -> Iterator[None]:
    """Treat the body as code outside of all blocks, whose results are FP32."""
    around, frame.hybrid_blocks = frame.hybrid_blocks, 0
    try:
        yield
    finally:
        frame.hybrid_blocks = around


class _Operator(NamedTuple):
    """One operator under a policy; ``rule`` is None where it depends on the call."""

    # ``may_lower`` tells whether it can run in low precision when none of its inputs is.

    name: str
    rule: Decision | None
    may_lower: bool


class EagerPolicy:
    """A policy prepared for imperative calls: operator handle to rule."""

    def __init__(self, policy: Policy, enabled: bool = True):
        self.policy = policy
        self.target = policy.target_dtype
        self.flag = TYPE_FLAGS[policy.target_dtype]
        names = set(registered_operators().values()) - _UNTOUCHED
        self.operators = {handle_of(name): self._operator(name) if enabled else _Operator(name, SWITCHED_OFF, False)
                          for name in names if not self._keeps(policy.fixed(name))}

        self.twins = twins()

    def _operator(self, name: str) -> _Operator:
        return _Operator(name, self.policy.fixed(name), self.policy.may_lower(name))

    def _keeps(self, rule: Decision | None) -> bool:
        # Operators that take inputs as they come know float16, but few know bfloat16.
        return rule is not None and rule.rule == KEEP and self.target != BFLOAT16

    def decide(self, operator: _Operator, inputs: Sequence[NDArray], keys: Sequence[str],
               values: Sequence[Any]) -> Decision:
        """Return the rule of a call."""
        if operator.rule is not None:
            return operator.rule
        attributes = dict(zip(keys, map(str, values)))
        return self.policy.decide(operator.name, attributes, inputs[0].shape)


@lru_cache(maxsize=1)
def twins() -> Mapping[int, int]:
    """Map handles of arithmetic on arrays to those on symbols."""
    # ``x + y`` is broadcast_add of arrays but elemwise_add of symbols: equal shapes take the one of graphs.
    return {handle_of(f"broadcast_{name}"): handle_of(f"elemwise_{name}") for name in _ARITHMETIC}


def _flag(array: NDArray) -> int:
    flag = ctypes.c_int()
    _get_dtype(array.handle, ctypes.byref(flag))
    return flag.value


def is_low(value: Any, policy: EagerPolicy) -> bool:
    """Tell whether a value is a dense array of the policy's low-precision type."""
    return isinstance(value, NDArray) and not isinstance(value, BaseSparseNDArray) and _flag(value) == policy.flag


def _castable(array: NDArray) -> bool:
    return not isinstance(array, BaseSparseNDArray) and array.ndim <= _MOST_DIMENSIONS and array.size > 0


def _is_grouped(keys: Sequence[str], values: Sequence[Any]) -> bool:
    return any(key == "num_group" and int(value) > 1 for key, value in zip(keys, values))


def _dtypes(rule: Decision, flags: list[int], low: int) -> list[int] | None:
    """Return the type flag that each input must have; None when AMP leaves the call alone."""
    data = precision(rule, flags, 0, low)
    if data is None:
        return None
    return [flag if flag not in (0, low) else 0 if position in rule.fp32_inputs else data
            for position, flag in enumerate(flags)]


def make_invoke(original: Invoke, current: Callable[[Sequence[NDArray]], EagerPolicy | None],
                is_on: Callable[[], bool]) -> Invoke:
    """Make the function that takes the place of MXNet's ``_imperative_invoke``."""
    original = make_saving_invoke(original)

    def invoke(handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any], out: Any,
               is_np_op: bool, output_is_list: bool) -> Any:
        policy = current(inputs)
        if out is not None and frame.casts:
            frame.casts.clear()  # of what is being written, perhaps
        if policy is not None and inputs:
            operator = policy.operators.get(handle)
            # Outside of hybrid blocks there is no bfloat16 to look for.
            if operator is not None and (operator.may_lower or frame.hybrid_blocks or policy.target != BFLOAT16):
                flags = [_flag(array) for array in inputs]
                # Outside of hybrid blocks bfloat16 arrays are the user's own: what only reads them is as in MXNet.
                is_own = not frame.hybrid_blocks and policy.target == BFLOAT16 and 0 not in flags
                if not is_own and (operator.may_lower or policy.flag in flags):
                    call = _Call(original, policy, is_np_op)
                    return call.run(operator, handle, inputs, flags, keys, values, out, output_is_list)
        try:
            return original(handle, inputs, keys, values, out, is_np_op, output_is_list)
        except mx.MXNetError:
            widened = _widened(original, inputs, is_np_op) if is_on() else inputs
            if widened is inputs:
                raise
            return _run_cast(original, handle, inputs, widened, keys, values, out, is_np_op, output_is_list)
    return invoke


def _widened(original: Invoke, inputs: Sequence[NDArray], is_np_op: bool, low: int | None = None) -> Sequence[NDArray]:
    """Return the inputs with the user's own low-precision arrays in FP32, where they meet FP32 or AMP's arrays."""
    flags = [_flag(array) for array in inputs]
    users = [i for i, flag in enumerate(flags)
             if flag in _LOW and flag != low and not isinstance(inputs[i], BaseSparseNDArray)]
    if not users or not {0, low}.intersection(flags):
        return inputs
    widened = list(inputs)
    for i in users:  # amp_cast loses gradients that accumulate, and Cast does not know bfloat16
        op = "Cast" if flags[i] == TYPE_FLAGS[FLOAT16] else "amp_cast"
        widened[i] = original(handle_of(op), [inputs[i]], ["dtype"], [FLOAT32], None, is_np_op, False)
    return widened


def _has_frozen_weight(inputs: Sequence[NDArray]) -> bool:
    """Tell whether a dense layer's bias gets a gradient and its weight does not."""
    return autograd.is_recording() and len(inputs) == 3 and inputs[1].grad is None and inputs[2].grad is not None


def _is_casts_deconvolution(handle: int, inputs: Sequence[NDArray], widened: Sequence[NDArray]) -> bool:
    return handle == handle_of("Deconvolution") and widened[1] is not inputs[1]


def _run_cast(original: Invoke, handle: int, given: Sequence[NDArray], inputs: Sequence[NDArray], keys: Sequence[str],
              values: Sequence[Any], out: Any, is_np_op: bool, output_is_list: bool) -> Any:
    """Run an operator on inputs that are FP32 casts of those given."""
    if out is None and _is_casts_deconvolution(handle, given, inputs):
        return _beside_onednn(original, handle, inputs, keys, values, is_np_op, output_is_list)
    return original(handle, inputs, keys, values, out, is_np_op, output_is_list)


def _beside_onednn(original: Invoke, handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any],
                   is_np_op: bool, output_is_list: bool) -> Any:
    """Run a Deconvolution in float64: the backward of oneDNN's ends the process where the weight is cast."""
    def cast(array: NDArray, dtype: str) -> Any:
        return original(handle_of("Cast"), [array], ["dtype"], [dtype], None, is_np_op, False)

    wide = [cast(array, FLOAT64) for array in inputs]
    return cast(original(handle, wide, keys, values, None, is_np_op, output_is_list), FLOAT32)


class _Call(NamedTuple):
    """One imperative call that may need casts."""

    original: Invoke
    policy: EagerPolicy
    is_np_op: bool
    is_asked: bool = False  # the caller wants low precision, whatever will be differentiated

    def run(self, operator: _Operator, handle: int, inputs: Sequence[NDArray], flags: list[int], keys: Sequence[str],
            values: Sequence[Any], out: Any, output_is_list: bool) -> Any:
        """Cast the inputs, call the operator, and give the result the type that its receiver expects."""
        if handle in self.policy.twins and inputs[0].shape == inputs[1].shape:
            handle = self.policy.twins[handle]
            operator = self.policy.operators[handle]
        if operator.name == "FullyConnected" and _has_frozen_weight(inputs):
            return self._biased_apart(operator, handle, inputs, flags, keys, values, out, output_is_list)
        rule = self.policy.decide(operator, inputs, keys, values)
        if (rule.rule == LOWER and operator.name in TWICE_DIFFERENTIABLE and not self.is_asked
                and (frame.data_gradients or (not frame.blocks and are_recorded(inputs[:1])))):
            rule = FOR_SECOND_GRADIENTS
        if rule.rule != KEEP and _LOW.difference((self.policy.flag,)).intersection(flags):
            widened = _widened(self.original, inputs, self.is_np_op, self.policy.flag)
            if out is None and _is_casts_deconvolution(handle, inputs, widened):
                wide = [self.cast(array, FLOAT32) if is_low(array, self.policy) else array for array in widened]
                return _beside_onednn(self.original, handle, wide, keys, values, self.is_np_op, output_is_list)
            inputs, flags = widened, [_flag(array) for array in widened]
        return self._run_by(rule, operator, handle, inputs, flags, keys, values, out, output_is_list)

    def _run_by(self, rule: Decision, operator: _Operator, handle: int, inputs: Sequence[NDArray], flags: list[int],
                keys: Sequence[str], values: Sequence[Any], out: Any, output_is_list: bool) -> Any:
        """Cast the inputs as a rule says, and call the operator."""
        wanted = _dtypes(rule, flags, self.policy.flag)
        changed = [i for i, flag in enumerate(flags) if wanted is not None and flag != wanted[i]]
        rounded = [i for i in rule.rounded_inputs if wanted is not None and flags[i] == 0]
        lowers = wanted is not None and self.policy.flag in wanted
        if not (changed or lowers or rounded) or not all(_castable(inputs[i]) for i in changed):
            return self.original(handle, inputs, keys, values, out, self.is_np_op, output_is_list)
        cast = list(inputs)
        for i in changed:
            fragile = i == 1 and operator.name == "Convolution" and _is_grouped(keys, values)
            cast[i] = self._input_cast(inputs[i], wanted[i], fragile)  # type: ignore[index]
        for i in rounded:
            cast[i] = self.cast(self._input_cast(inputs[i], self.policy.flag, fragile=False), FLOAT32)
        if operator.name in _COPIES and out is not None:  # it has no type of its own, and converts to any
            return self.original(handle, cast, keys, values, out, self.is_np_op, output_is_list)
        try:
            result = self._computed(handle, cast, keys, values, output_is_list, rule if lowers else None)
        except mx.MXNetError as error:
            raise self._explained(error, operator, rule, cast) from error
        if out is not None:
            return self._written(result, out)
        return result if frame.hybrid_blocks else release(result, self.policy, self.original)

    def _biased_apart(self, operator: _Operator, handle: int, inputs: Sequence[NDArray], flags: list[int],
                      keys: Sequence[str], values: Sequence[Any], out: Any, output_is_list: bool) -> Any:
        """Run a dense layer, and add its bias apart, as passes/separate_biases.py does in graphs."""
        kept = [pair for pair in zip(keys, values) if pair[0] != "no_bias"]
        names, given = [key for key, _ in kept] + ["no_bias"], [value for _, value in kept] + [True]
        product = self.run(operator, handle, inputs[:2], flags[:2], names, given, None, False)
        adder, terms = handle_of("broadcast_add"), [product, inputs[2]]
        return self.run(self.policy.operators[adder], adder, terms, [_flag(array) for array in terms], [], [], out,
                        output_is_list)

    def _computed(self, handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any],
                  output_is_list: bool, lowering: Decision | None) -> Any:
        if lowering is None or not self.policy.policy.imitated:
            return self.original(handle, inputs, keys, values, None, self.is_np_op, output_is_list)
        # As in passes/imitate.py: FP32 arithmetic on rounded values, and a rounded result.
        raised = [self._imitating(array, FLOAT32) if is_low(array, self.policy) else array for array in inputs]
        result = _run_cast(self.original, handle, inputs, raised, keys, values, None, self.is_np_op, output_is_list)
        outputs = result if isinstance(result, list) else [result]
        low = outputs[:1] if lowering.fp32_inputs else outputs  # the statistics of BatchNorm are FP32 as well
        rounded = [self._imitating(array, self.policy.target) if _flag(array) == 0 else array for array in low]
        return [*rounded, *outputs[len(low):]] if isinstance(result, list) else rounded[0]

    def _imitating(self, array: NDArray, dtype: str) -> NDArray:
        """Make a cast that serves to imitate the type: recordings tell it from others."""
        frame.imitates = True
        try:
            return self.cast(array, dtype)
        finally:
            frame.imitates = False

    def _input_cast(self, array: NDArray, flag: int, fragile: bool) -> NDArray:
        """Cast an array; a parameter once per call of the outermost block, in a way that lets gradients accumulate."""
        dtype = self.policy.target if flag else FLOAT32
        parameter = flag and autograd.is_recording() and array.grad is not None
        if not parameter:
            return self.cast(self._guarded(array) if fragile else array, dtype)
        if frame.casts is None:
            return self.cast(self._guarded(array), dtype)
        key = (array.handle.value, dtype)
        if key not in frame.casts:
            frame.casts[key] = (array, self.cast(self._guarded(array), dtype))
        return frame.casts[key][1]

    def _guarded(self, array: NDArray) -> NDArray:
        # Behind an elementwise operator amp_cast does what it fails to do otherwise: see passes/place_casts.py.
        return self.original(handle_of("_mul_scalar"), [array], ["scalar"], [1.0], None, self.is_np_op, False)

    def cast(self, array: NDArray, dtype: str, out: Any = None) -> NDArray:
        """Cast an array with MXNet's amp_cast, recorded for autograd when it is on."""
        return self.original(handle_of("amp_cast"), [array], ["dtype"], [dtype], out, self.is_np_op, False)

    def _written(self, result: Any, out: Any) -> Any:
        """Write a result into the caller's arrays, in their types."""
        receivers = out if isinstance(out, (list, tuple)) else [out]
        for value, receiver in zip(result if isinstance(result, list) else [result], receivers):
            flag = _flag(receiver)
            if flag in _NAMES and flag != _flag(value):
                self.cast(value, _NAMES[flag], receiver)
            else:
                self.original(handle_of("_copyto"), [value], [], [], receiver, self.is_np_op, False)
        return out

    def _explained(self, error: mx.MXNetError, operator: _Operator, rule: Decision,
                   inputs: Sequence[NDArray]) -> Exception:
        types = ", ".join(_NAMES.get(_flag(array), "other") for array in inputs)
        return type(error)(f"{error}\nThis operator ran under AMP: {operator.name} (rule {rule.rule}: {rule.note}), "
                           f"with inputs of {types}. To keep it in FP32 use amp.init(fp32_ops=['{operator.name}']), or "
                           "run it inside `with amp.autocast(enabled=False):`")


def may_lower(rule: Decision) -> bool:
    """Tell whether MXNet's operator runs in low precision where its data is, or is cast so."""
    return rule.rule in (LOWER, NEUTRAL, WIDEST)


def run_lowered(op: str, inputs: Sequence[NDArray], attrs: Mapping[str, Any], policy: EagerPolicy,
                original: Invoke) -> list[NDArray]:
    """Run an operator in low precision, if the policy allows it, on FP32 inputs; return FP32 outputs."""
    if handle_of(op) in twins() and inputs[0].shape == inputs[1].shape:
        op = op.replace("broadcast_", "elemwise_")
    rule = policy.policy.decide(op, attrs, inputs[0].shape)
    if not may_lower(rule):
        raise PolicyError(f"the operator {op} does not run in {policy.target} (rule {rule.rule}: {rule.note})")
    rule = replace(rule, rule=LOWER)
    flags = [_flag(array) for array in inputs]
    call = _Call(original, policy, False, is_asked=True)
    with outermost():
        return call.run(_Operator(op, rule, True), handle_of(op), inputs, flags, list(attrs), list(attrs.values()),
                        None, True)


def release(value: Any, policy: EagerPolicy, original: Invoke) -> Any:
    """Return results, nested as they are, with low-precision arrays turned to FP32."""
    def released(array: NDArray) -> NDArray:
        if not is_low(array, policy):
            return array
        return _Call(original, policy, isinstance(array, mx.np.ndarray)).cast(array, FLOAT32)
    return map_arrays(released, value)
