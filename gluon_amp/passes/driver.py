"""The table of passes, and the driver that runs them.

To add a pass write a function of its name, ``(graph, context) -> int`` (how much it did), and give it a record in
:data:`PASSES`, in the order of execution. Passes read the data types and shapes that an analysis wrote into the nodes,
and keep them up to date. In tests :func:`verify` checks, behind each pass, the rules that every rewrite must keep.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, Sequence

from ..errors import GraphError, PolicyError, closest, expected
from ..graph import Graph, Role, cast_nodes
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32, LOW_PRECISION
from .activations import hard_swish, native_activations
from .alignment import align_channels, dilate_pointwise, fold_padding, fold_stride, shape_operands
from .channels_last import channels_last
from .context import Context
from .float16 import imitate
from .gradient_fixes import gradient_fixes
from .gradients import branch_gradients, carry_scale, is_scale, loop_gradients, split_concat
from .identities import identities
from .inference import cast_params_offline, drop_training, fold_batch_norm, fold_weights, fuse, prepare_int8
from .native_operators import native_operators
from .precisions import assign_dtypes, input_dtypes, place_casts

TRAINING, INFERENCE, CONVERTED = "training", "inference", "converted"


def _records(context: Context) -> bool:
    return context.facts.recorded


@dataclass(frozen=True)
class Pass:
    """A rewrite of graphs."""

    run: Callable[[Graph, Context], int]  # takes a graph and a Context, edits the graph, and says how much it did
    summary: str  # in a line, for people
    # ``'training'``, which is everything under ``init`` and ``autocast``; ``'inference'``, which is conversion;
    # ``'converted'``, which is for a converted graph when it runs: files do not hold its result
    where: tuple[str, ...] = (TRAINING, INFERENCE)
    required: str = ""  # why it cannot be switched off; empty for one that can
    applies: Callable[[Context], bool] = lambda context: True  # whether it is for graphs of a context
    after: tuple[str, ...] = ()  # the passes whose results it needs, or would undo
    is_step: bool = False  # whether the ``optimize`` argument of the conversions lists it
    is_last: bool = False  # whether only MXNet's fusion comes behind it

    @property
    def name(self) -> str:
        """The name by which users switch it off: that of its function."""
        return self.run.__name__


PASSES: tuple[Pass, ...] = (
    Pass(drop_training, "operators that do nothing in inference are dropped (Dropout)", (INFERENCE,), is_step=True),
    Pass(fold_weights, "weights that are computed from parameters are stored", (INFERENCE,), is_step=True,
         after=("drop_training",), applies=lambda context: context.weights is not None and context.weights.are_known),
    Pass(fold_batch_norm, "BatchNorm is folded into the convolution or dense layer before it", (INFERENCE,),
         is_step=True, after=("fold_weights",), applies=lambda context: context.weights is not None),
    Pass(fold_padding, "convolutions pad their data themselves in place of an operator before them", is_step=True),
    Pass(shape_operands, "operands that are read for their shape only are not computed", is_step=True),
    Pass(branch_gradients, "what one branch reads alone, or a condition, gets a gradient of zero elsewhere",
         applies=_records, required="without it whatever is in memory would be taken for those gradients"),
    Pass(loop_gradients, "the gradient of a loop's state is asked for, and without a step those of all else are zero",
         applies=_records, required="without it whatever is in memory would be taken for those gradients",
         after=("branch_gradients",)),
    Pass(split_concat, "the gradients of joined feature maps come in a layout that MXNet can split", applies=_records,
         required="without it MXNet would end the process"),
    Pass(assign_dtypes, "every operator gets a precision",
         required="without it nothing runs in low precision: leave amp.init() or the conversion out",
         after=("fold_batch_norm", "fold_padding", "shape_operands", "branch_gradients", "loop_gradients",
                "split_concat")),
    Pass(hard_swish, "values times their sigmoid, hard or not, are one operator in C++", (TRAINING, CONVERTED),
         applies=lambda context: context.native is not None and context.target != FLOAT16, after=("assign_dtypes",)),
    Pass(channels_last, "chains of convolutions that MXNet runs slowly train with the channels last, in C++",
         (TRAINING,), after=("assign_dtypes", "hard_swish"),
         applies=lambda context: (context.facts.trains and context.facts.recorded and context.native is not None
                                  and context.target != FLOAT16 and not context.device.imitated)),
    Pass(native_operators, "operators in C++ take the place of MXNet's slow ones on the CPU", (TRAINING, CONVERTED),
         applies=lambda context: context.native is not None and context.policy.runs_native(context.device),
         after=("assign_dtypes", "channels_last")),
    Pass(gradient_fixes, "gradients that MXNet's operators get wrong come another way", (TRAINING,), applies=_records,
         required="without it some gradients would be wrong", after=("native_operators",)),
    Pass(native_activations, "activations run oneDNN's kernels where those are faster, x ** 2 as a square",
         applies=lambda context: context.policy.training if context.target == FLOAT32 else (
             context.target == BFLOAT16 and not context.device.imitated), after=("native_operators",)),
    Pass(align_channels, "convolutions are padded to the channel multiple that the fast kernels need",
         is_step=True, after=("assign_dtypes",), applies=lambda context: (
             context.policy.lowers or context.policy.training or context.device.channel_multiple is not None)),
    Pass(fold_stride, "strided convolutions of few channels run on AMX; they stay in FP32 without it", (TRAINING,),
         applies=lambda context: context.policy.trains_on_amx(context.device), after=("align_channels",)),
    Pass(place_casts, "a cast is inserted where producer and consumer differ",
         required="without it operators would read types that they cannot run in",
         after=("assign_dtypes", "native_operators", "gradient_fixes", "align_channels", "fold_stride")),
    Pass(identities, "operators that change nothing stand where gradients that are added would be lost",
         (TRAINING, INFERENCE, CONVERTED), applies=lambda context: not context.converted or context.facts.recorded,
         required="without it some gradients would be lost", after=("branch_gradients", "place_casts")),
    Pass(carry_scale, "gradients that operators make on their own carry the loss scale", (TRAINING, CONVERTED),
         applies=lambda context: bool(context.facts.own_gradients), after=("place_casts",),
         required="without it steps would be too small by the loss scale"),
    Pass(dilate_pointwise, "pointwise convolutions avoid an AMX kernel that gives wrong results; without this pass "
         "they stay in FP32", (INFERENCE,), applies=lambda context: context.device.amx, after=("place_casts",)),
    Pass(imitate, "a type that the device has no kernels for is imitated", after=("place_casts", "identities"),
         applies=lambda context: context.device.imitated,
         required="without it the device would have to run a type that it has no kernels for"),
    Pass(cast_params_offline, "parameters that are read in low precision only are stored in it", (INFERENCE,),
         applies=lambda context: context.weights is not None, is_step=True,
         after=("place_casts", "imitate")),
    Pass(prepare_int8, "rectifiers and flattened maps come in a form that MXNet has INT8 operators for", (INFERENCE,),
         applies=lambda context: context.int8 is not None, after=("cast_params_offline",),
         required="without it MXNet fails on dense layers in INT8"),
    Pass(fuse, "oneDNN's fused operators (convolution, activation, sum) on the CPU", (INFERENCE,),
         is_step=True, is_last=True, after=("cast_params_offline",)),
)


def pipeline_of(context: Context) -> tuple[Pass, ...]:
    """Return the passes for graphs of a context, in order."""
    place = CONVERTED if context.converted else TRAINING if context.policy.training else INFERENCE
    return tuple(each for each in PASSES
                 if place in each.where and context.policy.runs(each.name) and each.applies(context))


def run(graph: Graph, context: Context) -> dict[str, int]:
    """Run all passes but the last one, which prepares a graph for MXNet's fusion."""
    counts: dict[str, int] = {}
    for each in pipeline_of(context):
        if not each.is_last:
            counts[each.name] = each.run(graph, context)
            if context.check:
                verify(graph, context, list(counts))
    if context.weights is not None:
        context.weights.keep({node.name for node in graph.variables()})
    return counts


def finish(graph: Graph, context: Context) -> None:
    """Run the last pass."""
    for each in pipeline_of(context):
        if each.is_last:
            each.run(graph, context)


def checked(names: Iterable[str] | None, argument: str = "disable_passes") -> frozenset[str]:
    """Return the passes to switch off."""
    if names is None:
        return frozenset()
    given = [] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if (not given and names) or not all(isinstance(name, str) for name in given):
        raise PolicyError(expected("a list of names of passes", argument, names))
    known = {each.name: each for each in PASSES}
    for name in given:
        if name not in known:
            raise PolicyError(f"{argument}: there is no pass {name!r}.{closest(name, list_passes())} Those that can be "
                              f"switched off are {', '.join(list_passes())}")
        if known[name].required:
            raise PolicyError(f"{argument}: {name!r} cannot be switched off: {known[name].required}")
    return frozenset(given)


def list_passes() -> dict[str, str]:
    """List the graph passes that can be switched off, in the order in which they run, with what each does.

    Their names are what ``disable_passes`` of :func:`init` and of the conversions takes.
    """
    return {each.name: each.summary for each in PASSES if not each.required}


def _wrong_names(graph: Graph, context: Context) -> Iterator[str]:
    operators = graph.operators()
    names = Counter(node.name for node in operators if node.role is not Role.OWN)
    originals = {node.name for node in operators if node.role is Role.OWN}
    yield from (f"the name {name!r} is used {count} times" for name, count in names.items() if count > 1)
    yield from (f"the name {name!r} of a new node was taken" for name in names if name in originals)
    after = tuple(node.name for node in graph.variables() if not is_scale(node))
    if context.weights is None and after != context.variables:
        yield f"the inputs were {list(context.variables)}, they are {list(after)}"


def _wrong_types(graph: Graph, context: Context) -> Iterator[str]:
    for cast in cast_nodes(graph):
        source = cast.inputs[0]
        if cast.role is not Role.OWN and source.dtype == cast.dtypes[0]:
            yield f"{cast!r} casts {source.dtype} to itself"
        # A CachedOp that casts between the two low-precision types in place reinterprets the bits.
        if source.dtype in LOW_PRECISION and cast.dtypes[0] in LOW_PRECISION and source.dtype != cast.dtypes[0]:
            yield f"{cast!r} casts {source.dtype} to {cast.dtypes[0]} without FP32 in between"
    for head, dtype in zip(graph.heads, context.outputs):
        if dtype is not None and head.dtype != dtype:
            yield f"the graph's output {head.node!r} is {head.dtype}, expected {dtype}"


def _wrong_inputs(graph: Graph, context: Context) -> Iterator[str]:
    for node in graph.operators():
        for entry, wanted in zip(node.inputs, input_dtypes(node, context) if node.decision is not None else ()):
            if wanted is not None and entry.dtype != wanted:
                yield f"{node!r} needs {wanted} from {entry.node!r}, which gives {entry.dtype}"
    keys = Counter((cast.inputs[0].key, cast.attrs["dtype"]) for cast in cast_nodes(graph)
                   if cast.role is not Role.OWN)
    yield from (f"a tensor is cast to {dtype} {count} times" for (_, dtype), count in keys.items() if count > 1)


def verify(graph: Graph, context: Context, done: Sequence[str]) -> None:
    """Check a graph behind the last of the passes named; a converted graph has had all passes of conversions."""
    has_casts = context.converted or "place_casts" in done
    faults = list(_wrong_names(graph, context))
    faults += _wrong_types(graph, context) if has_casts else ()
    faults += _wrong_inputs(graph, context) if has_casts and "imitate" not in done else ()
    if faults:
        raise GraphError(f"the graph is not sound behind the pass {done[-1]}: {'; '.join(faults)}")
