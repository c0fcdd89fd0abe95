"""What MXNet does wrong with single operators, and between two of them: where, why, and what is put in."""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable

from ..dtypes import FLOAT16
from ..graph import CAST, Entry, Graph, Node, operator
from ..graph.attrs import integer, integers, is_channels_last, is_set, region_of
from ..rules import KEEP, Decision
from .native_operators import NATIVE
from .widen import computes_weight, in_float64

_LOWEST = {FLOAT16: -65504.0}
_LOWEST_FP32 = -3.4e38
_NEWER_ATTRIBUTES = ("cudnn_off", "p_value", "count_include_pad", "layout")  # of Pooling


class Cure:
    """Changes one node, and puts others in, which serve it."""

    def __init__(self, graph: Graph, node: Node, of: int):
        self.graph, self.node, self.of = graph, node, of
        self.made: list[Node] = []

    def put(self, op: str, inputs: list[Entry], like: Entry | None = None, **attrs: Any) -> Entry:
        """Make an operator, with the type and shape of a tensor, of its first input by default."""
        like = like or inputs[0]
        made = operator(op, self.graph.new_name(f"{self.node.name}_{op.strip('_')}"), inputs, like, **attrs)
        made.dtypes = like.node.dtypes[like.output:like.output + 1] or [None]  # as analysed: its plan comes later
        made.attrs.update(region_of(self.node.attrs))
        self.made.append(made)
        return Entry(made)

    def put_shaped(self, op: str, inputs: list[Entry], **attrs: Any) -> Entry:
        """Make an operator of the type of its first input, and of a shape that nobody needs to know."""
        made = self.put(op, inputs, **attrs)
        made.node.shapes = [None]
        return made


@dataclass(frozen=True)
class Defect:
    """What MXNet does wrong with the gradient of an operand.

    Attributes
    ----------
    ops : tuple of str
        The operators, by registered name.
    of : int
        The position of the operand whose gradient is wrong.
    why : str
        What is wrong.
    remedy : str
        What takes the operator's place.
    upstream : str
        Where MXNet shows it: a file below https://github.com/apache/mxnet/blob/1.9.1/src/.
    cure : callable
        Takes a :class:`Cure` and edits its node; returns what gives the result from then on, None where the node does.
    where : callable
        Takes a node and says whether it is concerned.
    without : int, optional
        The gradient is wrong only where that of the operand at this position is not asked for.
    evaluating : bool
        Whether it is wrong in gradients of inference only.
    in_calls : bool
        Whether calls outside of graphs are concerned.
    """

    ops: tuple[str, ...]
    of: int
    why: str
    remedy: str
    upstream: str
    cure: Callable[[Cure], Entry | None]
    where: Callable[[Node], bool] = lambda node: True
    without: int | None = None
    evaluating: bool = False
    in_calls: bool = True

    def concerns(self, node: Node, evaluates: bool) -> bool:
        """Tell whether a node is concerned, whose gradients are those of inference or of training."""
        return len(node.inputs) > self.of and (evaluates or not self.evaluating) and self.where(node)


def _block(cure: Cure) -> None:
    """Let a gradient of zeros come back from an operand."""
    operand = cure.node.inputs[cure.of]
    if operand.node.op != "BlockGrad":
        cure.node.inputs[cure.of] = cure.put("BlockGrad", [operand])


def _slope_apart(cure: Cure) -> Entry:
    """Let the gradient of a slope come from a term of its own, which is 0: another PReLU, with the slope minus itself.

    Of values above 0 it reads 0, and of infinite ones the lowest finite number.
    """
    data, slope = cure.node.inputs
    fixed = cure.put("BlockGrad", [slope])
    zero = cure.put("elemwise_sub", [slope, fixed])
    below = cure.put("clip", [cure.put("BlockGrad", [data])], a_min=_LOWEST.get(str(data.dtype), _LOWEST_FP32), a_max=0)
    term = cure.put("LeakyReLU", [below, zero], act_type="prelu")
    cure.node.inputs[1] = fixed
    total = cure.put("elemwise_add", [Entry(cure.node), term])
    for made in cure.made:
        made.decision = cure.node.decision
    return total


def _bias_apart(cure: Cure) -> Entry:
    """Add a bias by an operator of its own."""
    node = cure.node
    bias, node.inputs, node.attrs = node.inputs[2], node.inputs[:2], {**node.attrs, "no_bias": "True"}
    return cure.put("broadcast_add", [Entry(node), bias])


def _ask_for_the_first(cure: Cure) -> None:
    """Let the gradient of the first operand be asked for as well: add zero times a value of the other one to it."""
    first, other = cure.node.inputs[0], cure.node.inputs[cure.of]
    is_numpy = cure.node.op.startswith("_np")
    flat = cure.put_shaped("Reshape", [other], shape="(-1,)")
    one = cure.put_shaped("slice_axis", [flat], axis=0, begin=0, end=1)
    zero = cure.put_shaped("_mul_scalar", [cure.put_shaped("clip", [one], a_min=-1, a_max=1)], scalar=0.0)
    if not is_numpy:
        zero = cure.put_shaped("Reshape", [zero], shape="(1, 1, 1)")
    cure.node.inputs[0] = cure.put("_npi_add" if is_numpy else "broadcast_add", [first, zero])


def _last_step(cure: Cure) -> Entry:
    """Cut the last step off a sequence."""
    data, axis = cure.node.inputs[0], integer(cure.node.attrs, "axis", 0)
    last = cure.put_shaped("slice_axis", [data], axis=axis, begin=-1, end=None)
    return cure.put("squeeze", [last], Entry(cure.node), axis=axis)


def _as_leaky(cure: Cure) -> Entry:
    """Run a randomised rectifier with the slope that it has in inference."""
    lower, upper = (float(cure.node.attrs.get(f"{name}_bound", default))
                    for name, default in (("lower", 0.125), ("upper", 0.334)))
    made = cure.put("LeakyReLU", cure.node.inputs[:1], act_type="leaky", slope=(lower + upper) / 2)
    made.node.decision = cure.node.decision
    return made


def _as_older(cure: Cure) -> None:
    """Run MXNet's older pooling."""
    cure.node.op = "Pooling_v1"
    cure.node.attrs = {name: value for name, value in cure.node.attrs.items() if name not in _NEWER_ATTRIBUTES}


def _in_float64(cure: Cure) -> Entry:
    """Run an operator in float64."""
    node = cure.node
    result = in_float64(node, lambda entry, dtype: _cast(cure, entry, dtype))
    if node.decision is not None:
        kept = Decision(KEEP, node.decision.cause, "in float64, which oneDNN does not run", safe=False)
        for each in (node, *cure.made):
            each.decision = kept
    return result


def _cast(cure: Cure, entry: Entry, dtype: str) -> Entry:
    # Not amp_cast, which loses gradients that accumulate.
    made = cure.put("Cast", [entry], dtype=dtype)
    made.node.dtypes = [dtype]
    return made


def _is_like(node: Node) -> bool:
    return node.attrs.get("mode") == "like"


def _is_prelu(node: Node) -> bool:
    return node.attrs.get("act_type") == "prelu"


def _is_random(node: Node) -> bool:
    return node.attrs.get("act_type") == "rrelu"


def _is_whole(node: Node) -> bool:
    return not is_set(node.attrs, "use_sequence_length")


def _takes_largest_of_maps(node: Node) -> bool:
    return (node.attrs.get("pool_type", "max") == "max" and len(integers(node.attrs, "kernel")) == 2
            and not is_channels_last(node.attrs))


def _unwritten(of: int, *ops: str, upstream: str, where: Callable[[Node], bool] = lambda node: True) -> Defect:
    return Defect(ops, of, "the gradient is not written: whatever is in memory goes back from there",
                  "BlockGrad before the operand", upstream, _block, where)


def _unasked(of: int, without: int, *ops: str, upstream: str) -> Defect:
    return Defect(ops, of, "the gradient is not written where that of the first operand is not asked for",
                  "the first operand plus zero times a value of this one", upstream, _ask_for_the_first,
                  without=without)


DEFECTS: tuple[Defect, ...] = (
    Defect(("LeakyReLU",), 1, "the data's gradient is written over the incoming one before that of the slope is "
           "summed: that is multiplied by the slope wherever another operator follows",
           "a term that is 0 and has the gradient of the slope; an operator in C++ where it runs",
           "operator/leaky_relu.cc", _slope_apart, _is_prelu, in_calls=False),
    Defect(("FullyConnected",), 2, "the gradient of the bias is computed with that of the weight, and not written "
           "where nobody asks for the latter", "the bias is added by an operator of its own",
           "operator/nn/fully_connected-inl.h", _bias_apart, without=1),
    _unasked(1, 0, "_contrib_interleaved_matmul_selfatt_valatt", "_contrib_interleaved_matmul_encdec_qk",
             upstream="operator/contrib/transformer.cc"),
    _unasked(1, 0, "_npi_polyval", upstream="operator/numpy/np_polynomial_op.cc"),
    Defect(("SequenceLast",), 0, "without lengths the backward pass reads positions from memory that it did not write",
           "slice_axis", "operator/sequence_last-inl.h", _last_step, _is_whole),
    Defect(("Pooling",), 0, "in inference oneDNN keeps no positions of maxima, from which the backward pass takes the "
           "gradient", "Pooling_v1 for maps, which oneDNN does not run, where gradients of inference are asked for",
           "operator/nn/mkldnn/mkldnn_pooling.cc", _as_older, _takes_largest_of_maps, evaluating=True),
    Defect(("LeakyReLU",), 0, "the gradient of a randomised rectifier in inference is its output; in training the "
           "process ends", "a leaky rectifier in inference", "operator/leaky_relu-inl.h", _as_leaky, _is_random,
           evaluating=True),
    Defect(("Deconvolution",), 1, "oneDNN's backward pass ends the process where the weight is computed",
           "float64, but for volumes, which have no other kernel", "operator/nn/mkldnn/mkldnn_deconvolution-inl.h",
           _in_float64, computes_weight),
    _unwritten(1, "_contrib_BilinearResize2D", upstream="operator/contrib/bilinear_resize-inl.h", where=_is_like),
    _unwritten(1, "reshape_like", upstream="operator/tensor/elemwise_unary_op_basic.cc"),
    _unwritten(1, "SequenceLast", "SequenceMask", "SequenceReverse", upstream="operator/sequence_mask-inl.h"),
    _unwritten(1, "SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput",
               "SVMOutput", upstream="operator/regression_output-inl.h"),
    *(_unwritten(of, "CTCLoss", upstream="operator/nn/ctc_loss-inl.h") for of in (1, 2, 3)),
    *(_unwritten(of, "_contrib_MultiBoxTarget", upstream="operator/contrib/multibox_target-inl.h") for of in (0, 1)),
    _unwritten(1, "_contrib_boolean_mask", upstream="operator/contrib/boolean_mask.cc"),
    Defect(("take",), 1, "the backward pass fails where only the gradient of the indices, which is zero, is asked for",
           "BlockGrad before the operand", "operator/tensor/indexing_op.h", _block),
)


class Tensor(Enum):
    """Kinds of tensors that some operators must not read themselves."""

    ADDED = "added"  # MXNet asks its readers to add their gradients to what is there
    ADDED_VARIABLE = "added variable"  # a variable of that kind; beside loops and branches every variable
    GROUPED_WEIGHT = "grouped weight"  # the weight of a convolution in groups


@dataclass(frozen=True)
class Barrier:
    """What goes wrong where an operator reads a tensor, and not where a multiplication by 1 stands between.

    Attributes
    ----------
    ops : tuple of str
        The operators, by registered name.
    of : Tensor
        What they must not read.
    why : str
        What goes wrong.
    upstream : str
        Where MXNet shows it: a file below https://github.com/apache/mxnet/blob/1.9.1/src/.
    states : tuple of int
        Positions of inputs that the operators write, which nothing may stand before.
    """

    ops: tuple[str, ...]
    of: Tensor
    why: str
    upstream: str
    states: tuple[int, ...] = ()


_NORM = "_gluon_amp_batch_norm"
_NOT_TOLD = ("MXNet does not tell operators of libraries that a gradient is to be added to what is there",
             "c_api/c_api.cc")

BARRIERS: tuple[Barrier, ...] = (
    Barrier(tuple(sorted(NATIVE - {_NORM})), Tensor.ADDED, *_NOT_TOLD),
    Barrier((_NORM,), Tensor.ADDED, *_NOT_TOLD, states=(3, 4)),
    Barrier((CAST,), Tensor.ADDED, "on CPUs the gradient of a cast is lost where it is to be added to "
            "what is there, as under `grad_req='add'` and from the eighth reader on", "operator/tensor/amp_cast.h"),
    Barrier((CAST,), Tensor.GROUPED_WEIGHT, "the cast fails on a weight that inference in FP32 has left in "
            "oneDNN's five-dimensional layout", "operator/tensor/amp_cast.h"),
    Barrier(("elemwise_add",), Tensor.ADDED_VARIABLE, "the gradient of a sum shares its array with those of "
            "what it adds, and what is written there is lost", "operator/tensor/elemwise_binary_op_basic.cc"),
    Barrier((
        "clip", "mean", "_npi_mean", "moments", "_npi_norm", "_np_cumsum", "Crop", "_split_v2", "reverse",
        "_contrib_boolean_mask", "_linalg_gemm", "_linalg_gemm2", "_linalg_inverse", "_linalg_trmm", "_linalg_trsm",
        "_npi_solve", "_npi_tensorinv", "_npi_rot90", "_npi_flip", "_np_trace", "_npi_hsplit", "_npi_dsplit",
        "_npi_diff", "_npi_tensordot", "_npi_where", "SoftmaxOutput", "SVMOutput", "LinearRegressionOutput",
        "LogisticRegressionOutput", "MAERegressionOutput", "_contrib_box_nms", "_contrib_box_iou",
        "_contrib_DeformableConvolution", "SpatialTransformer", "amp_multicast"), Tensor.ADDED,
        "the gradient is written, wholly or in part, where it is to be added to what is there",
        "operator/tensor/matrix_op.cc"),
)
