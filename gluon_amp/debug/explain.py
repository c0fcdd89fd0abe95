"""``amp.explain``: why an operator runs in the precision that it runs in, and how to change that."""
from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

from mxnet.gluon import Block

from ..base import checks
from ..errors import GraphError, StateError, closest
from ..machine.dtypes import FLOAT32, LOW_PRECISION
from ..rules import FP32, KEEP, NEUTRAL, WIDEST, Cause
from ..state.in_force import in_force
from .recording import planned
from .records import OpRecord
from .report import Report, report

_NOTHING_LOWER = ("FP32 is fastest here. To run low precision all the same, name a type that the device can run: "
                  "amp.init('bfloat16')")
_TABLES = (Cause.TABLE, Cause.DEFAULT)
# How to change the precision of an operator that runs in FP32.
_BY_CAUSE = {
    Cause.USER_LIST: "take {row.op!r} out of the fp32_ops or conditional_fp32_ops given to amp.init",
    Cause.NOT_LISTED: "add {row.op!r} to the target_precision_ops given to amp.init",
    Cause.CHANNELS: "give it more input channels: operator lists cannot lower it, because it would not be faster",
    Cause.SHAPE: "try other sizes of the input, or of the batch",
    Cause.REGION: "take it out of the autocast region, or its block out of amp.exclude",
    Cause.OUTSIDE: "call it inside `with amp.autocast():`, or call amp.init()",
    Cause.EXCLUSION: "take it out of the exclusions of the policy",
    Cause.REGISTERED: "give amp.register_op another rule for it",
    Cause.DEVICE: "name the type, as in amp.init('bfloat16'): it is slower here and runs on request only",
    **dict.fromkeys(_TABLES, "amp.init(target_precision_ops=[*amp.list_lp16_ops({target!r}), {row.op!r}]) lowers all "
                             "operators of its kind"),
}


def explain(net: Block | Report, name: str, data: Any = None) -> Explanation:
    """Say why an operator runs in the precision that it runs in, and how to change that.

    Parameters
    ----------
    net : Block or Report
        The network, or what :func:`gluon_amp.report` returned for it, which saves running it again.
    name : str
        An operator, with wildcards if wanted (``'*conv0_fwd'``); a block, by its name or by the attributes that lead to
        it (``'features.3'``), for all operators in it; or a parameter, for the operators that read it.
    data : NDArray or sequence of them, optional
        As :func:`gluon_amp.report` takes it. Without it the network is not run: what was planned at its last call is
        explained, which needs a network that was called hybridized, under AMP.

    Returns
    -------
    Explanation
        Print it.
    """
    checks.instance("name", name, str, "the name of an operator, block or parameter")
    records, device = _records(net, data)
    own = [each for each in records if not each.inserted]
    rows: list[OpRecord] = []
    for fits in (lambda row: row.name == name,
                 lambda row: bool(name) and (name in (row.block, row.path) or row.path.startswith(f"{name}.")),
                 lambda row: any(read.name == name for read in row.inputs),
                 lambda row: fnmatch.fnmatchcase(row.name, name)):
        rows = rows or list(filter(fits, own))
    if not rows:
        known = [text for each in own for text in (each.name, each.block, each.path,
                                                   *(read.name for read in each.reads)) if text]
        raise GraphError(f"the network has no operator, block or parameter {name!r} that ran.{closest(name, known)}")
    state = in_force.current()
    policy = state.policy(device) if state is not None and state.enabled else None
    in_fp32 = policy is not None and not policy.lowers
    target = next((other.precision for other in own if other.precision in LOW_PRECISION),
                  None if policy is None or in_fp32 else policy.target_dtype)
    return Explanation(tuple(OperatorExplanation(
        row, _why(row), tuple(f"{read.name}: {read.source_dtype}{f', cast to {read.dtype}' if read.is_cast else ''}"
                              for read in row.inputs),
        (_NOTHING_LOWER,) if in_fp32 and row.rule else tuple(_remedies(row, target))) for row in rows))


@dataclass(frozen=True)
class OperatorExplanation:
    """What is to be said about one operator."""

    operator: OpRecord
    why: str  # the reason for its precision
    reads: tuple[str, ...]  # its inputs, and what becomes of them
    remedies: tuple[str, ...]  # how to change its precision

    def __str__(self) -> str:
        row = self.operator
        seen = f"observed {row.observed}" if row.observed else "not observed"
        block = f", in block {row.block}" + (f" at {row.path}" if row.path else "") if row.block else ""
        lines = [f"{row.name} ({row.op}{block}) runs in {row.precision}: planned {row.planned}, {seen}"]
        for title, texts in (("why", [self.why]), ("reads", self.reads), ("change", self.remedies)):
            lines += [f"  {title if not number else '':<7} {text}" for number, text in enumerate(texts)]
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What :func:`gluon_amp.explain` found; print it."""

    operators: tuple[OperatorExplanation, ...]  # in the order in which they run

    def __repr__(self) -> str:
        return "\n".join(map(str, self.operators))


def _records(net: Any, data: Any) -> tuple[Sequence[OpRecord], str]:
    """Return the records of what ran, or else was planned, and what policies call the device."""
    if data is not None and not isinstance(net, Report):
        net = report(net, data)
    if isinstance(net, Report):
        state = in_force.current()
        return net.operators, "cpu" if state is None else state.key(net.device)
    checks.instance("net", net, Block, "a Gluon block")
    records, device = planned(net)
    if not records:
        raise StateError("explain: there is no graph to explain, because the network has not been called under AMP "
                         "while hybridized. Give data to run it with: amp.explain(net, name, data)")
    return records, device


def _why(row: OpRecord) -> str:
    if not row.rule:
        return "AMP did not decide about it: AMP is off, or the network was converted and its graph holds the types"
    rule = f"rule {row.rule}: {row.reason}"
    if row.rule == NEUTRAL and row.inputs:
        return f"{rule}. It follows its first input, {row.inputs[0].name}, which is {row.inputs[0].source_dtype}"
    wide = _fp32_inputs(row)
    if row.rule == WIDEST and wide:
        return f"{rule}. Of its inputs {', '.join(wide)} {'are' if len(wide) > 1 else 'is'} FP32"
    return rule


def _fp32_inputs(row: OpRecord) -> list[str]:
    return [read.name for read in row.inputs if read.source_dtype == FLOAT32]


def _remedies(row: OpRecord, target: str | None) -> Iterator[str]:
    """Say how to change an operator's precision; ``target`` is the low-precision type."""
    if not row.rule:
        yield ("amp.init() rewrites networks that are not converted; a converted one is made again from its FP32 "
               "original: amp.convert_hybrid_block(net, exclude=...)")
    elif row.rule == KEEP:
        yield "the program itself chooses its type"
    elif row.precision in LOW_PRECISION:
        if row.block:
            yield f"amp.exclude({row.block!r}) keeps its block in FP32"
        yield f"amp.init(fp32_ops=[{row.op!r}]) keeps all operators of its kind in FP32"
    elif row.rule == FP32:
        is_safe = row.decision is None or row.decision.safe
        if not is_safe:
            yield "it cannot run in low precision: lists that ask for it are refused"
        if row.cause in _BY_CAUSE and (is_safe or row.cause not in _TABLES):
            yield _BY_CAUSE[Cause(row.cause)].format(row=row, target=target)
    elif row.rule == NEUTRAL:
        yield f"change {row.inputs[0].name if row.inputs else ''}, which it follows"
    elif row.rule == WIDEST:
        yield f"lower what comes in FP32: {', '.join(_fp32_inputs(row))}"
