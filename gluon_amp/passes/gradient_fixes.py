"""Gradients of single operators that MXNet gets wrong: a table, and what applies it.

A row of :data:`FIXES` puts other operators around one, or in its place, where a gradient of its operands is asked for::

    FullyConnected(x, w, bias)   ->   broadcast_add(FullyConnected(x, w), bias)
    SequenceLast(x)              ->   squeeze(slice_axis(x, begin=-1))
    reshape_like(x, y)           ->   reshape_like(x, BlockGrad(y))

:func:`fix` follows the table in a graph. The body of a loop is a graph as well, and so is a call outside of graphs: one
operator. What an operator in C++ has taken the place of needs no fix, and gets none.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Sequence, Tuple

from ..graph import BODIES, WISHES, Entry, Graph, Node, Role, edit_bodies, loops_and_branches, subgraphs_of
from ..graph.attrs import integer, integers, is_channels_last, is_set
from ..machine.dtypes import FLOAT16, FLOAT32, FLOAT64
from ..rules import KEEP, Decision
from .context import Concern, Context
from .gradients import LOOP, Companions, inputs_of_bodies
from .precisions import decide, plan_outputs, propagate_dtypes

_LOWEST = {FLOAT16: -65504.0}
_NEWER_ATTRIBUTES = ("cudnn_off", "p_value", "count_include_pad", "layout")  # of Pooling
_FLOATS = (FLOAT16, FLOAT32, FLOAT64)  # AMP casts none to bfloat16 before operators without a gradient


class _Fix(Companions):
    """Changes one node, and puts others in, which serve it."""

    def __init__(self, graph: Graph, node: Node, of: int, role: Role):
        super().__init__(graph, node, role)
        self.of, self.operand = of, node.inputs[of]

    def put_like(self, op: str, like: Entry, *others: Entry, **attrs: Any) -> Entry:
        """Make an operator that gives the type and shape of its first input."""
        return self.put(op, [like, *others], like=like, **attrs)


def _block(fix: _Fix) -> None:
    if fix.operand.node.op != "BlockGrad":
        fix.node.inputs[fix.of] = fix.put_like("BlockGrad", fix.operand)


def _compute_zeros(fix: _Fix) -> None:
    if fix.operand.dtype in _FLOATS and fix.operand.shape and all(fix.operand.shape):
        fix.node.inputs[fix.of] = fix.put_like("SliceChannel", fix.operand, num_outputs=1, axis=0)


def _slope_apart(fix: _Fix) -> Entry:
    """Let the gradient of a slope come from a term that is 0: another PReLU, with the slope minus itself."""
    # Of values above 0 it reads 0, and of infinite ones the lowest finite number.
    data, slope = fix.node.inputs
    fixed = fix.put_like("BlockGrad", slope)
    zero = fix.put_like("elemwise_sub", slope, fixed)
    below = fix.put_like("clip", fix.put_like("BlockGrad", data), a_min=_LOWEST.get(str(data.dtype), -3.4e38), a_max=0)
    term = fix.put_like("LeakyReLU", below, zero, act_type="prelu")
    fix.node.inputs[1] = fixed
    total = fix.put_like("elemwise_add", Entry(fix.node), term)
    for made in fix.made:
        made.decision = fix.node.decision
    return total


def _bias_apart(fix: _Fix) -> Entry:
    node = fix.node
    bias, node.inputs, node.attrs = node.inputs[2], node.inputs[:2], {**node.attrs, "no_bias": "True"}
    return fix.put_like("broadcast_add", Entry(node), bias)


def _ask_for_the_first(fix: _Fix) -> None:
    """Let the gradient of the first operand be asked for as well: add zero times a value of the other one to it."""
    is_numpy = fix.node.op.startswith("_np")
    flat = fix.put("Reshape", [fix.operand], shape="(-1,)")
    one = fix.put("slice_axis", [flat], axis=0, begin=0, end=1)
    zero = fix.put("_mul_scalar", [fix.put("clip", [one], a_min=-1, a_max=1)], scalar=0.0)
    if not is_numpy:
        zero = fix.put("Reshape", [zero], shape="(1, 1, 1)")
    fix.node.inputs[0] = fix.put_like("_npi_add" if is_numpy else "broadcast_add", fix.node.inputs[0], zero)


def _last_step(fix: _Fix) -> Entry:
    data, axis = fix.node.inputs[0], integer(fix.node.attrs, "axis", 0)
    last = fix.put("slice_axis", [data], axis=axis, begin=-1, end=None)
    return fix.put("squeeze", [last], like=Entry(fix.node), axis=axis)


def _as_leaky(fix: _Fix) -> Entry:
    """Run a randomised rectifier with the slope that it has in inference."""
    lower, upper = (float(fix.node.attrs.get(f"{name}_bound", default))
                    for name, default in (("lower", 0.125), ("upper", 0.334)))
    made = fix.put_like("LeakyReLU", fix.node.inputs[0], act_type="leaky", slope=(lower + upper) / 2)
    made.node.decision = fix.node.decision
    return made


def _copy(fix: _Fix) -> None:
    fix.node.inputs[fix.of] = fix.put_like("_copy", fix.operand)


def _as_older(fix: _Fix) -> None:
    fix.node.op = "Pooling_v1"
    fix.node.attrs = {name: value for name, value in fix.node.attrs.items() if name not in _NEWER_ATTRIBUTES}


def _in_float64(fix: _Fix) -> Entry:
    def cast(entry: Entry, dtype: str) -> Entry:  # amp_cast loses gradients that accumulate
        return fix.put("Cast", [entry], dtype, entry, f"{entry.node.name}_{dtype}", dtype=dtype)

    node = fix.node
    node.inputs = [cast(entry, FLOAT64) for entry in node.inputs]
    node.planned = [FLOAT64] * node.num_outputs
    result = cast(Entry(node), FLOAT32)
    if node.decision is not None and fix.role is Role.HELPER:  # one that is imitated stays decided as it was
        kept = Decision(KEEP, node.decision.cause, "in float64, which oneDNN does not run", safe=False)
        for each in (node, *fix.made):
            each.decision = kept
    return result


def _with(**attrs: str) -> Callable[[Node], bool]:
    return lambda node: attrs.items() <= node.attrs.items()


def _takes_largest(node: Node) -> bool:
    return node.attrs.get("pool_type", "max") == "max" and not is_channels_last(node.attrs)


def _computes_weight(node: Node) -> bool:
    weight = node.inputs[1]
    return (not weight.node.is_variable and weight.dtype not in (FLOAT64, FLOAT16)
            and len(integers(node.attrs, "kernel")) != 3)


@dataclass(frozen=True)
class GradientFix:
    """A gradient that MXNet gets wrong."""

    ops: tuple[str, ...]  # the operators, by registered name
    of: tuple[int, ...]  # the positions of the operands whose gradient is wrong
    why: str  # what is wrong
    remedy: str  # what stands there instead
    upstream: str  # where MXNet shows it: a file below https://github.com/apache/mxnet/blob/1.9.1/src/
    apply: Callable[[_Fix], Entry | None]  # edits the node; returns what gives the result from then on, if another does
    where: Callable[[Node], bool] = lambda node: True  # takes a node and says whether it is concerned
    without: int | None = None  # wrong only where the gradient of the operand at this position is not asked for
    evaluating: bool = False  # wrong in gradients of inference only
    in_graphs: bool = True
    in_calls: bool = True
    behind_casts: bool = False  # what AMP casts is concerned as well: in calls it is applied behind the casts


_ROUNDING = ("rint", "ceil", "floor", "trunc", "fix")
_COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "lesser", "lesser_equal", "logical_and", "logical_or",
                "logical_xor")
_NUMPY_COMPARISONS = ("equal", "not_equal", "greater", "less", "greater_equal", "less_equal")
_WITHOUT_GRADIENT = (
    "BlockGrad", "zeros_like", "ones_like", "round", "logical_not", "argmax", "argmin", "argsort", "topk", "one_hot",
    "shape_array", "size_array", "_contrib_arange_like", "_contrib_index_array", "_ravel_multi_index", "_unravel_index",
    "_sample_multinomial", "_np_any", "_np_all", "_npi_argmax", "_npi_argmin", "_npi_logical_not", "_npi_isnan",
    "_npi_isinf", "_npi_isposinf", "_npi_isneginf", "_npi_isfinite", "_npi_around", "_npi_full_like", "_npi_std",
    "_npi_var", "_npi_percentile", "_npi_unique", "_npi_bincount", "_npx_nonzero", "_npx_constraint_check",
    "_npi_where_scalar2", *_ROUNDING, *(f"_npi_{name}" for name in (*_NUMPY_COMPARISONS, *_ROUNDING)),
    *(f"{prefix}{name}" for prefix in ("broadcast_", "_") for name in _COMPARISONS),
    *(f"_{name}_scalar" for name in _COMPARISONS), *(f"_npi_{name}_scalar" for name in _NUMPY_COMPARISONS))


def _unwritten(of: Sequence[int], *ops: str, upstream: str, where: Callable[[Node], bool] = lambda node: True
               ) -> GradientFix:
    return GradientFix(ops, tuple(of), "the gradient is not written: whatever is in memory goes back from there",
                       "BlockGrad before the operand", upstream, _block, where)


def _unasked(of: int, without: int, *ops: str, upstream: str) -> GradientFix:
    return GradientFix(ops, (of,), "the gradient is not written where that of the first operand is not asked for",
                       "the first operand plus zero times a value of this one", upstream, _ask_for_the_first,
                       without=without)


def _zero(of: Sequence[int], *ops: str) -> GradientFix:
    return GradientFix(ops, tuple(of), "it is zeros_like of an operand, by name, and so are those of casts and "
                       "elementwise operators before it: outside of graphs these operands were not saved, and the "
                       "process ends", "SliceChannel with one output before the operand, which computes its gradient",
                       "operator/tensor/elemwise_unary_op_basic.cc", _compute_zeros, in_graphs=False,
                       behind_casts=True)


FIXES: tuple[GradientFix, ...] = (
    GradientFix(("LeakyReLU",), (1,), "the data's gradient is written over the incoming one before that of the slope "
                "is summed: that is multiplied by the slope wherever another operator follows",
                "a term that is 0 and has the gradient of the slope; an operator in C++ where it runs",
                "operator/leaky_relu.cc", _slope_apart, _with(act_type="prelu"), in_calls=False),
    GradientFix(("FullyConnected",), (2,), "the gradient of the bias is computed with that of the weight, and not "
                "written where nobody asks for the latter", "the bias is added by an operator of its own",
                "operator/nn/fully_connected-inl.h", _bias_apart, without=1),
    _unasked(1, 0, "_contrib_interleaved_matmul_selfatt_valatt", "_contrib_interleaved_matmul_encdec_qk",
             upstream="operator/contrib/transformer.cc"),
    _unasked(1, 0, "_npi_polyval", upstream="operator/numpy/np_polynomial_op.cc"),
    GradientFix(("SequenceLast",), (0,), "without lengths the backward pass reads positions from memory that it did "
                "not write", "slice_axis", "operator/sequence_last-inl.h", _last_step,
                lambda node: not is_set(node.attrs, "use_sequence_length")),
    GradientFix(("Pooling",), (0,), "in inference oneDNN keeps no positions of maxima, from which the backward pass "
                "takes the gradient", "Pooling_v1 for maps, which oneDNN does not run, where gradients of inference "
                "are asked for", "operator/nn/mkldnn/mkldnn_pooling.cc", _as_older,
                lambda node: _takes_largest(node) and len(integers(node.attrs, "kernel")) == 2, evaluating=True),
    GradientFix(("Pooling",), (0,), "of a view, a part of an array or one in another shape, positions of maxima are "
                "not written either, but read", "a copy of what may be a view: inputs of graphs, data of calls",
                "operator/nn/pooling.cc", _copy, lambda node: _takes_largest(node) and not node.inputs[0].node.inputs),
    GradientFix(("LeakyReLU",), (0,), "the gradient of a randomised rectifier in inference is its output; in training "
                "the process ends", "a leaky rectifier in inference", "operator/leaky_relu-inl.h", _as_leaky,
                _with(act_type="rrelu"), evaluating=True),
    GradientFix(("Deconvolution",), (1,), "oneDNN's backward pass ends the process where the weight is computed",
                "float64, but for volumes, which have no other kernel",
                "operator/nn/mkldnn/mkldnn_deconvolution-inl.h", _in_float64, _computes_weight, behind_casts=True),
    _unwritten((1,), "_contrib_BilinearResize2D", upstream="operator/contrib/bilinear_resize-inl.h",
               where=_with(mode="like")),
    _unwritten((1,), "reshape_like", upstream="operator/tensor/elemwise_unary_op_basic.cc"),
    _unwritten((1,), "SequenceLast", "SequenceMask", "SequenceReverse", upstream="operator/sequence_mask-inl.h"),
    _unwritten((1,), "SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput",
               "SVMOutput", upstream="operator/regression_output-inl.h"),
    _unwritten((1, 2, 3), "CTCLoss", upstream="operator/nn/ctc_loss-inl.h"),
    _unwritten((0, 1), "_contrib_MultiBoxTarget", upstream="operator/contrib/multibox_target-inl.h"),
    _unwritten((1,), "_contrib_boolean_mask", upstream="operator/contrib/boolean_mask.cc"),
    GradientFix(("take",), (1,), "the backward pass fails where only the gradient of the indices, which is zero, is "
                "asked for", "BlockGrad before the operand", "operator/tensor/indexing_op.h", _block),
    _zero((0, 1), *_WITHOUT_GRADIENT),
    _zero(range(6), "_contrib_box_encode", "_contrib_box_decode"),
    _zero((0,), "where", "_npi_where", "_npi_where_lscalar", "_npi_where_rscalar"),
    _zero((1,), "pick", "gather_nd", "scatter_nd", "broadcast_like", "reshape_like", "_identity_with_attr_like_rhs"),
)


_Rows = Mapping[str, Sequence[Tuple[GradientFix, int]]]  # rows and operands, by operator


def _rows(*chosen: GradientFix) -> _Rows:
    return {op: [(row, of) for row in chosen if op in row.ops for of in row.of] for row in chosen for op in row.ops}


_IN_GRAPHS = _rows(*(row for row in FIXES if row.in_graphs))
_BEHIND_CASTS_IN_GRAPHS = _rows(*(row for row in FIXES if row.in_graphs and row.behind_casts))
# By whether AMP's casts are before them.
IN_CALLS: Mapping[bool, _Rows] = {behind: _rows(*(row for row in FIXES if row.in_calls and row.behind_casts == behind))
                                  for behind in (False, True)}
CONCERNED = frozenset((*_IN_GRAPHS, *BODIES))  # the operators in graphs that may give wrong gradients
# those of which some row is about gradients of inference
DEPEND_ON_MODE = frozenset(op for row in FIXES if row.evaluating for op in row.ops)


def concerns_of(graph: Graph, is_asked: Callable[[str], bool], evaluates: bool) -> frozenset[Concern]:
    """Name the gradients in a graph, as the program made it, that are wrong."""
    # ``is_asked`` takes the name of a variable and says whether its gradient is asked for; ``evaluates`` says whether
    # gradients are those of inference.
    def reaches(entry: Entry) -> bool:
        return any(is_asked(name) for name in _variables_before(entry))

    found = {(node.name, of) for node in graph.operators() for row, of in _IN_GRAPHS.get(node.op, ())
             if _is_concerned(node, row, of, evaluates)
             and (row.without is None or not reaches(node.inputs[row.without])) and reaches(node.inputs[of])}
    for node in loops_and_branches(graph):
        if node.op == LOOP:
            found.update((node.name, of) for of, entry in enumerate(node.inputs) if reaches(entry))
        parts = subgraphs_of(node)
        for part, reads in inputs_of_bodies(node):
            asked = {one.name for one, entry in zip(parts[part].variables(), reads) if reaches(entry)}
            found.update(concerns_of(parts[part], asked.__contains__, evaluates))
    return frozenset(found)


def _variables_before(entry: Entry) -> Iterator[str]:
    """Yield the variables that a tensor's gradient goes back to, near ones first."""
    waiting = [entry.node]
    seen = set(waiting)
    for node in waiting:  # it grows
        if node.is_variable:
            yield node.name
        elif node.op != "BlockGrad":
            waiting += [each.node for each in node.inputs if each.node not in seen]
            seen.update(each.node for each in node.inputs)


def _is_concerned(node: Node, row: GradientFix, of: int, evaluates: bool) -> bool:
    return len(node.inputs) > of and (evaluates or not row.evaluating) and row.where(node)


def gradient_fixes(graph: Graph, context: Context) -> int:
    """Follow the table; return how many gradients were fixed."""
    evaluates = context.facts.evaluates
    count, made = _fix(graph, _IN_GRAPHS, lambda node, row, of: (node.name, of) in context.facts.concerned, evaluates)
    for node, served in made:
        if node.decision is None:  # that of the node that it serves where the user asked for that one's
            wished = served.decision is not None and served.decision.cause in WISHES
            node.decision = served.decision if wished else decide(node, context)
        if node.decided.rule != KEEP:
            plan_outputs(node, context)
    if made:
        propagate_dtypes(graph, context)
    return count + sum(_fix_bodies(node, context) for node in loops_and_branches(graph))


def fix_behind_casts(graph: Graph, role: Role = Role.HELPER) -> None:
    """Fix what is concerned only since its operands were cast."""
    _fix(graph, _BEHIND_CASTS_IN_GRAPHS, lambda *_: True, evaluates=False, role=role)


def _fix(graph: Graph, rows: _Rows, applies: Callable[[Node, GradientFix, int], bool], evaluates: bool,
         role: Role = Role.HELPER) -> tuple[int, list[tuple[Node, Node]]]:
    """Fix the nodes of a graph; return how many times, and what was put in, with the node that each serves."""
    moved: dict[tuple[int, int], Entry] = {}
    count, made = 0, []
    for node in graph.operators():
        node.inputs = [moved.get(entry.key, entry) for entry in node.inputs]
        for row, of in rows.get(node.op, ()):
            if _is_concerned(node, row, of, evaluates) and applies(node, row, of):
                fix = _Fix(graph, node, of, role)
                result = row.apply(fix)
                if result is not None:
                    result.node.stands_for = node.name
                    moved[Entry(node).key] = result
                count += 1
                made += [(one, node) for one in fix.made]
    graph.heads = [moved.get(head.key, head) for head in graph.heads]
    return count, made


def _fix_bodies(node: Node, context: Context) -> int:
    """Fix the bodies of a loop or branch."""
    def applies(inner: Node, row: GradientFix, of: int) -> bool:
        return row.without is None or (inner.name, of) in context.facts.concerned

    def fix(_: int, body: Graph) -> int:
        count, _made = _fix(body, _IN_GRAPHS, applies, context.facts.evaluates)
        return count + sum(_fix_bodies(inner, context) for inner in loops_and_branches(body))

    return edit_bodies(node, fix)


def is_call_concerned(op: str, operands: int, is_asked: Callable[[int], bool], evaluates: bool, behind_casts: bool
                      ) -> bool:
    """Tell whether :func:`fixed_call` may give something, without a look at attributes and operands."""
    return any(operands > of and _is_asked_for(row, of, is_asked, evaluates) for row, of in IN_CALLS[behind_casts][op])


def _is_asked_for(row: GradientFix, of: int, is_asked: Callable[[int], bool], evaluates: bool) -> bool:
    return ((evaluates or not row.evaluating) and is_asked(of)
            and (row.without is None or not is_asked(row.without)))


def fixed_call(op: str, attrs: Mapping[str, str], operands: Sequence[Node], is_asked: Callable[[int], bool],
               evaluates: bool, behind_casts: bool) -> Graph | None:
    """Return a graph of what a call outside of graphs is to run; None where that is the operator alone."""
    # ``operands`` stand for the arrays: variables for those that a user made, other nodes for those that were computed.
    # ``is_asked`` takes the position of an operand and says whether its gradient is asked for.
    node = Node(op, op, dict(attrs), list(map(Entry, operands)))
    graph = Graph([Entry(node)])
    count, _ = _fix(graph, IN_CALLS[behind_casts], lambda _, row, of: _is_asked_for(row, of, is_asked, evaluates),
                    evaluates)
    return graph if count else None
