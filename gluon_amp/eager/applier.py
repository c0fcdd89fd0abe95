"""Imperative operator calls: the inputs of each are cast as the policy says.

Every operator function of ``mx.nd``, ``mx.np`` and ``mx.npx`` ends in ``mxnet.ndarray.register._imperative_invoke``,
looked up when it is called, so that replacing this one name reaches functions that were imported long before.

Low precision lives inside calls of hybrid blocks only: a result that leaves the outermost one, or an operator called
outside of any, is FP32, as it is when the block is hybridized. NumPy cannot read bfloat16, and users' code need not
know about it. Casts are MXNet's own operators, recorded by autograd.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.arrays import FLOATS, cast_arrays, flag_of
from .._mxnet.invoke import Invocation, Invoke, Runs, handle_of, run_operator
from ..errors import PolicyError
from ..graph.attrs import LOW_FLAGS
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..rules import KEEP, LOWER, Decision, precision
from ..rules.decision import FOR_SECOND_GRADIENTS, may_lower
from ..rules.tables.groups import FILLED_LIKE
from ..state.in_force import frame, outermost
from ..state.state import EagerPolicy, Operator, twins
from .gradient_fixes import TWICE_DIFFERENTIABLE, are_recorded, fixing_invocations
from .loss_scale import scaled_invocations
from .running_stats import noting_invocations

_MOST_DIMENSIONS = 6  # of the arrays that amp_cast takes
_FILLED_LIKE = {*FILLED_LIKE, "_npi_full_like"}


def is_low(value: Any, policy: EagerPolicy) -> bool:
    """Tell whether a value is a dense array of the policy's low-precision type."""
    return isinstance(value, NDArray) and not isinstance(value, BaseSparseNDArray) and flag_of(value) == policy.flag


def returns_fp32(arguments: Sequence[Any]) -> bool:
    """Tell whether the block that is being called returns FP32: it is the outermost one and was given FP32."""
    given = (flag_of(array) for array in arguments
             if isinstance(array, NDArray) and not isinstance(array, BaseSparseNDArray))
    return frame.hybrid_blocks <= 1 and LOW_FLAGS.isdisjoint(given)


def release(value: Any, policy: EagerPolicy, invoke: Invoke) -> Any:
    """Return results, nested as they are, with low-precision arrays turned to FP32."""
    return cast_arrays(value, FLOAT32, (policy.target,), invoke)


def widened(invoke: Invoke, inputs: Sequence[NDArray], is_np_op: bool, low: int | None = None) -> Sequence[NDArray]:
    """Return the inputs with the user's own low-precision arrays in FP32, where they meet FP32 or AMP's arrays."""
    flags = [flag_of(array) for array in inputs]
    users = [i for i, flag in enumerate(flags)
             if flag in LOW_FLAGS and flag != low and not isinstance(inputs[i], BaseSparseNDArray)]
    if not users or not {0, low}.intersection(flags):
        return inputs
    wide = list(inputs)
    for i in users:  # amp_cast loses gradients that accumulate, and Cast does not know bfloat16
        op = "Cast" if FLOATS[flags[i]] == FLOAT16 else "amp_cast"
        wide[i] = run_operator(invoke, op, [inputs[i]], {"dtype": FLOAT32}, is_np_op=is_np_op)
    return wide


def make_invoke(original: Invoke, current: Callable[[Sequence[NDArray]], EagerPolicy | None],
                is_on: Callable[[], bool]) -> Invoke:
    """Make the function that takes the place of MXNet's ``_imperative_invoke``."""
    original = make_recorded_invoke(original)

    def invoke(handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any], out: Any,
               is_np_op: bool, output_is_list: bool) -> Any:
        policy = current(inputs)
        if out is not None and frame.casts:
            frame.casts.clear()  # one may be of the array that is being written
        if policy is not None and inputs:
            operator = policy.operators.get(handle)
            # Outside of hybrid blocks there is no bfloat16 to look for.
            if operator is not None and (operator.may_lower or frame.hybrid_blocks or policy.target != BFLOAT16):
                flags = [flag_of(array) for array in inputs]
                # Outside of hybrid blocks bfloat16 arrays are the user's own: operators that read nothing else run as
                # in MXNet. So does the one that makes the gradient for attach_grad, which needs the type of its array.
                is_own = (not frame.hybrid_blocks and 0 not in flags
                          and (policy.target == BFLOAT16 or operator.name in _FILLED_LIKE))
                if not is_own and (operator.may_lower or policy.flag in flags):
                    call = Invocation(handle, inputs, keys, values, out, is_np_op, output_is_list)
                    return _Applier(original, policy, is_np_op).run(operator, call, flags)
        try:
            return original(handle, inputs, keys, values, out, is_np_op, output_is_list)
        except mx.MXNetError:
            wide = widened(original, inputs, is_np_op) if is_on() else inputs
            if wide is inputs:
                raise
            return original(handle, wide, keys, values, out, is_np_op, output_is_list)
    return make_recorded_invoke(invoke, fixing_invocations(behind_casts=False, is_on=is_on))


def make_recorded_invoke(original: Invoke, runs: Runs | None = None) -> Invoke:
    """Make a function that runs operators as ``original`` does, some in another way where gradients are recorded."""
    def invoke(handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any], out: Any,
               is_np_op: bool, output_is_list: bool) -> Any:
        run = recorded.get(handle)
        if run is None or not autograd.is_recording():
            return original(handle, inputs, keys, values, out, is_np_op, output_is_list)
        return run(original, Invocation(handle, inputs, keys, values, out, is_np_op, output_is_list))

    recorded = noting_invocations({**fixing_invocations(), **scaled_invocations()}) if runs is None else runs
    return invoke


class _Applier(NamedTuple):
    """Applies a policy to one imperative call that may need casts."""

    invoke: Invoke  # MXNet's own
    policy: EagerPolicy
    is_np_op: bool  # of the call
    is_asked: bool = False  # the caller wants low precision, whatever will be differentiated

    def run(self, operator: Operator, call: Invocation, flags: list[int]) -> Any:
        """Cast the inputs, call the operator, and give the result the type that its receiver expects."""
        inputs, policy = call.inputs, self.policy
        if call.handle in policy.twins and inputs[0].shape == inputs[1].shape:
            call = call._replace(handle=policy.twins[call.handle])
            operator = policy.operators[call.handle]
        rule = policy.decide(operator, call)
        if (rule.rule == LOWER and operator.name in TWICE_DIFFERENTIABLE and not self.is_asked
                and (frame.data_gradients or (not frame.blocks and are_recorded(inputs[:1])))):
            rule = FOR_SECOND_GRADIENTS
        if rule.rule != KEEP and LOW_FLAGS.difference((policy.flag,)).intersection(flags):
            wide = widened(self.invoke, inputs, call.is_np_op, policy.flag)
            call, flags = call._replace(inputs=wide), [flag_of(array) for array in wide]
        return self._run_by(rule, operator, call, flags)

    def _run_by(self, rule: Decision, operator: Operator, call: Invocation, flags: list[int]) -> Any:
        """Cast the inputs as a rule says, and call the operator."""
        low = self.policy.flag
        data = precision(rule, flags, 0, low)
        if data is None:
            return self.invoke(*call)
        wanted = [flag if flag not in (0, low) else 0 if position in rule.fp32_inputs else data
                  for position, flag in enumerate(flags)]
        changed = [i for i, flag in enumerate(flags) if flag != wanted[i]]
        lowers = low in wanted
        castable = (not isinstance(array, BaseSparseNDArray) and array.ndim <= _MOST_DIMENSIONS and array.size > 0
                    for array in map(call.inputs.__getitem__, changed))
        if not (changed or lowers) or not all(castable):
            return self.invoke(*call)
        inputs = list(call.inputs)
        for i in changed:
            fragile = i == 1 and operator.name == "Convolution" and any(
                key == "num_group" and int(value) > 1 for key, value in zip(call.keys, call.values))
            inputs[i] = self._input_cast(inputs[i], wanted[i], fragile)
        # A copy has no type of its own, and converts to any.
        if operator.name in ("_copyto", "_npi_copyto") and call.out is not None:
            return self.invoke(*call._replace(inputs=inputs))
        lowered = call._replace(inputs=inputs, out=None)
        try:
            result = (self._imitated(lowered, has_statistics=bool(rule.fp32_inputs))
                      if lowers and self.policy.device.imitated else self.invoke(*lowered))
        except mx.MXNetError as error:
            raise _explained(error, operator, rule, inputs) from error
        if call.out is not None:
            return self._write(result, call.out)
        return result if frame.hybrid_blocks else release(result, self.policy, self.invoke)

    def _cast(self, array: NDArray, dtype: str, out: Any = None) -> NDArray:
        return run_operator(self.invoke, "amp_cast", [array], {"dtype": dtype}, out, self.is_np_op)

    def _input_cast(self, array: NDArray, flag: int, fragile: bool) -> NDArray:
        """Cast an array; a parameter once per call of the outermost block, in a way that lets gradients accumulate."""
        dtype = self.policy.target if flag else FLOAT32
        is_parameter = flag and autograd.is_recording() and array.grad is not None
        known = frame.casts if is_parameter else None
        key = (array.handle.value, dtype)
        if known is not None and key in known:
            return known[key][1]
        made = self._cast(self._behind_identity(array) if is_parameter or fragile else array, dtype)
        if known is not None:
            known[key] = array, made
        return made

    def _behind_identity(self, array: NDArray) -> NDArray:
        # amp_cast loses gradients, or fails, unless an elementwise operator stands before it: see passes/identities.py.
        return run_operator(self.invoke, "_mul_scalar", [array], {"scalar": 1.0}, is_np_op=self.is_np_op)

    def _imitated(self, call: Invocation, has_statistics: bool) -> Any:
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
            return self._cast(array, dtype)
        finally:
            frame.imitates = False

    def _write(self, result: Any, out: Any) -> Any:
        """Write a result into the caller's arrays, in their types."""
        receivers = out if isinstance(out, (list, tuple)) else [out]
        for value, receiver in zip(result if isinstance(result, list) else [result], receivers):
            flag = flag_of(receiver)
            if flag in FLOATS and flag != flag_of(value):
                self._cast(value, FLOATS[flag], receiver)
            else:
                run_operator(self.invoke, "_copyto", [value], {}, receiver, self.is_np_op)
        return out


def _explained(error: mx.MXNetError, operator: Operator, rule: Decision, inputs: Sequence[NDArray]) -> Exception:
    types = ", ".join(FLOATS.get(flag_of(array), "other") for array in inputs)
    return type(error)(f"{error}\nThis operator ran under AMP: {operator.name} (rule {rule.rule}: {rule.note}), "
                       f"with inputs of {types}. To keep it in FP32 use amp.init(fp32_ops=['{operator.name}']), or "
                       "run it inside `with amp.autocast(enabled=False):`")


def run_lowered(op: str, inputs: Sequence[NDArray], attrs: Mapping[str, Any], policy: EagerPolicy,
                original: Invoke) -> list[NDArray]:
    """Run an operator in low precision, if the policy allows it, on FP32 inputs; return FP32 outputs."""
    if handle_of(op) in twins() and inputs[0].shape == inputs[1].shape:
        op = op.replace("broadcast_", "elemwise_")
    rule = policy.rule_of(op, attrs, inputs[0].shape)
    if not may_lower(rule):
        raise PolicyError(f"the operator {op} does not run in {policy.target} (rule {rule.rule}: {rule.note})")
    call = Invocation(handle_of(op), inputs, list(attrs), list(attrs.values()), None, False, output_is_list=True)
    with outermost():
        return _Applier(original, policy, is_np_op=False, is_asked=True).run(
            Operator(op, replace(rule, rule=LOWER), True), call, [flag_of(array) for array in inputs])
