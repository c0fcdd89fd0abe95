"""``initialize``: Apex's opt levels, as a table of options for this package's own calls."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

from mxnet import autograd, gluon
from mxnet.gluon import Block

from .. import checks, parallel, passes
from .._mxnet import trainers
from .._mxnet.arrays import round_in_place
from .._mxnet.batch_norms import batch_norm_parameters
from .._mxnet.symbols import dtype_name
from ..aliases import answers
from ..dtypes import FLOAT16, FLOAT32, LOW_PRECISION, normalize
from ..errors import PolicyError, StateError, closest, expected, warn
from ..rules import FP32, WIDEST, Policy, Rule
from ..rules.tables import WHOLE_NETWORK, table
from ..rules.tables.groups import BATCH_NORMS
from ..session import hooks
from ..session.init import init
from ..state.blocks import Network, block_settings
from ..state.devices import announce, choose, device_supports, of_device
from ..state.in_force import in_force
from ..state.state import State, device_policies
from ..training.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler, scale_of
from ..training.trainer_scaler import TrainerScaler, attach

_DYNAMIC = "dynamic"
_LOW = "low precision"  # the type that the device at hand runs
_SCALE_AND_SHIFT = (1, 2)  # inputs of batch normalization


@dataclass(frozen=True)
class Options:
    """The settings of a level, or of a level with overrides."""

    cast_model_type: str | None  # the type that networks run in; None leaves that to the operators
    keep_batchnorm_fp32: bool | None  # scale, shift and statistics of BatchNorm, in a network that is cast
    master_weights: bool | None  # whether the optimizer updates FP32 weights in a network that is cast
    loss_scale: float | str | LossScaler
    cast_model_outputs: str | None = None  # None for FP32


LEVELS: Mapping[str, tuple[str, Options]] = {
    "O0": ("plain FP32", Options(FLOAT32, None, None, 1.0)),
    "O1": ("each operator in the precision that suits it, weights in FP32", Options(None, None, None, _DYNAMIC)),
    "O2": ("networks in low precision, BatchNorm and master weights in FP32", Options(_LOW, True, True, _DYNAMIC)),
    "O3": ("networks and weights in low precision", Options(_LOW, False, False, 1.0)),
}


@answers(models="it is called net", optimizers="the trainer stands in their place: amp.initialize(net, trainer)",
         patch_torch_functions="it is part of the level: leave it out",
         min_loss_scale="pass loss_scale=amp.DynamicLossScaler(min_scale=...)",
         max_loss_scale="pass loss_scale=amp.DynamicLossScaler(max_scale=...)",
         **dict.fromkeys(("target_dtype", "dtype"),
                         "it is called cast_model_type, for O2 and O3; O1 takes what is fastest"))
def initialize(net: Block | Sequence[Block], trainer: gluon.Trainer | Sequence[gluon.Trainer] | None = None,
               opt_level: str = "O1", *, keep_batchnorm_fp32: bool | str | None = None,
               master_weights: bool | str | None = None, loss_scale: float | str | LossScaler | None = None,
               cast_model_type: object = None, cast_model_outputs: object = None, num_losses: int = 1,
               enabled: bool | str = True, verbosity: int = 1, disable_passes: Iterable[str] | None = None) -> Any:
    r"""Set networks and trainers up for a level of precision, in place.

    Call it once, after the networks and trainers are created (and :func:`convert_sync_batchnorm`, if any), before the
    first step. Every keyword that is not None overrides its level; command lines may hand strings through: ``'True'``,
    ``'128.0'``, ``'dynamic'``. Where low precision would be slower than FP32, networks stay in FP32 at every level.

    ====  ==============================================  ================  ============  ==========
    ..    runs in low precision                           BatchNorm in      FP32 masters  loss scale
    ====  ==============================================  ================  ============  ==========
    O0    nothing                                         FP32              --            1
    O1    operators that gain by it, as with ``init()``   --                --            dynamic*
    O2    the networks: every operator that can           FP32              yes           dynamic*
    O3    the networks, and the weights                   low precision     no            1
    ====  ==============================================  ================  ============  ==========

    \* in float16; bfloat16 and FP32 have the range to do without, and their scale is 1 unless ``loss_scale`` says more.

    Parameters
    ----------
    net : Block or sequence of Block
        With FP32 parameters, initialized or not, hybridized or not.
    trainer : gluon.Trainer or sequence of them, optional
        Trainers that come later get the level's loss scalers by :func:`init_trainer`.
    opt_level : {'O0', 'O1', 'O2', 'O3'}
        The level.
    keep_batchnorm_fp32 : bool, optional
        O2 and O3: whether scale, shift and running statistics of BatchNorm stay FP32.
    master_weights : bool, optional
        O2 and O3: whether the optimizer updates FP32 weights, and the network uses copies of them in low precision.
        False rounds weights, and the optimizer's states, to low precision after every update.
    loss_scale : float, 'dynamic' or LossScaler, optional
        A number is a scale that never changes.
    cast_model_type : dtype, optional
        O2 and O3: the low-precision type, in place of the one that the device runs. ``'float16'`` without a GPU
        imitates it, to test its numerics.
    cast_model_outputs : {'float32', 'float16'}, optional
        The type of the networks' results; FP32 without.
    num_losses : int
        How many losses have a scaler of their own, for ``amp.scale_loss(loss, trainer, loss_id=...)``.
    enabled : bool
        False leaves everything as it is; ``scale_loss`` then gives losses back unscaled.
    verbosity : int
        0 prints nothing; 1 the level's defaults and the options in force.
    disable_passes : list of str, optional
        Graph passes to switch off, by their names in :func:`list_passes`.

    Returns
    -------
    Block or (Block, gluon.Trainer)
        The arguments, lists where lists were given; the network alone without a trainer.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(1, in_units=2)
    >>> net.initialize()
    >>> trainer = mx.gluon.Trainer(net.collect_params(), 'sgd')
    >>> net, trainer = amp.initialize(net, trainer, opt_level='O2', loss_scale=128.0, verbosity=0)
    >>> amp.get_loss_scaler(trainer).loss_scale
    128.0
    >>> amp.deinit()
    """
    networks = checks.one_or_several("net", net, Block, "a Block")
    several = [] if trainer is None else checks.one_or_several("trainer", trainer, gluon.Trainer, "a gluon.Trainer")
    _refuse_repetition()
    level = _Applied(reduces=False)
    if as_bool("enabled", enabled):
        name, options = resolve(opt_level, {
            "cast_model_type": cast_model_type, "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights, "loss_scale": loss_scale, "cast_model_outputs": cast_model_outputs})
        if loss_scale is None:
            options = _scaled_where_needed(options, several)
        scalers = _scalers(options.loss_scale, checks.whole("num_losses", num_losses, 1))
        checks.whole("verbosity", verbosity, 0)
        disabled = passes.checked(disable_passes)
        _refuse_unfit(networks, several, name)
        in_force.begin()
        if name == "O0" and options.loss_scale == 1.0:
            scalers = []
        for item in several if scalers else ():
            trainers.update_locally(item)
        if name == "O0" and scalers:
            warn(f"opt_level O0 with loss_scale={options.loss_scale}: FP32 needs no loss scaling; leave it out")
        level = _Applied(scalers, _switch_on(name, options, networks, disabled))
        if verbosity:
            print(_in_words(name, options))
    block_settings.level = level
    for item in several:
        level.take_on(item)
    return net if trainer is None else (net, trainer)


def resolve(opt_level: object, overrides: Mapping[str, object]) -> tuple[str, Options]:
    """Return a level's name, and its options with the overrides that are not None."""
    level = str(opt_level).upper()
    if level not in LEVELS:
        hint = " The first character is the letter O." if level.startswith("0") else closest(level, LEVELS)
        raise PolicyError(expected(f"one of {', '.join(LEVELS)}", "opt_level", opt_level) + "." + hint)
    given = {name: _READERS[name](name, value) for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        reason = _contradiction(level, name, value)
        if reason:
            raise PolicyError(f"opt_level {level} with {name}={value!r}: {reason}")
    return level, replace(LEVELS[level][1], **given)


def as_bool(name: str, value: object) -> bool:
    """Read a bool, or its name as a command line gives it."""
    truth = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if isinstance(truth, bool):
        return truth
    raise TypeError(expected("True, False, 'True' or 'False'", name, value))


def _as_scale(name: str, value: object) -> float | str | LossScaler:
    if isinstance(value, LossScaler) or value == _DYNAMIC:
        return value  # type: ignore[return-value]
    try:
        return scale_of(name, float(value) if isinstance(value, str) else value)
    except ValueError:
        raise ValueError(expected("a number above 0, 'dynamic' or a LossScaler", name, value)) from None


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(("cast_model_type", "cast_model_outputs"), lambda name, value: normalize(value, name, True)),
    **dict.fromkeys(("keep_batchnorm_fp32", "master_weights"), as_bool), "loss_scale": _as_scale,
}


def _contradiction(level: str, name: str, value: object) -> str | None:
    """Return the reason against an override at a level; None when it is allowed."""
    if name == "cast_model_outputs" and value == "bfloat16":
        return "NumPy and plain MXNet code cannot read bfloat16; use 'float16' or 'float32', or leave it out"
    if name in ("cast_model_outputs", "loss_scale"):
        return None
    if level == "O1":
        return "O1 keeps weights in FP32 and casts per operator; leave it out, or use opt_level O2 or O3"
    if level == "O0":
        wanted = {"cast_model_type": FLOAT32, "keep_batchnorm_fp32": True, "master_weights": False}[name]
        return None if value == wanted else "O0 is plain FP32; leave it out, or use opt_level O2 or O3"
    return "a network in FP32 is opt_level O0" if (name, value) == ("cast_model_type", FLOAT32) else None


def _in_words(level: str, options: Options) -> str:
    meaning, defaults = LEVELS[level]
    if options.cast_model_type == _LOW:
        policies = in_force.marked.policies if in_force.marked is not None else {}
        types = ", ".join(f"{policy.target_dtype} on the {device}" for device, policy in policies.items())
        options = replace(options, cast_model_type=types or FLOAT32)
    return (f"gluon_amp opt_level {level}: {meaning}. Its defaults:\n{describe(defaults)}\n"
            f"In force:\n{describe(options)}")


def describe(options: Options) -> str:
    """Return the options, one a line."""
    def shown(value: object) -> str:
        if isinstance(value, LossScaler):
            return f"{type(value).__name__} at {value.loss_scale:g}"
        return "-" if value is None else str(value)
    return "\n".join(f"  {name:<20} {shown(getattr(options, name))}" for name in options.__dataclass_fields__)


def _scaled_where_needed(options: Options, several: Sequence[gluon.Trainer]) -> Options:
    """Leave losses as they are, as ``init_trainer`` does, unless a trainer's device, or any device, runs float16."""
    named = options.cast_model_type if options.cast_model_type in LOW_PRECISION else None
    chosen = choose(named, device_supports())
    found = [of_device(context, chosen) for trainer in several for context in trainers.contexts(trainer)]
    runs_float16 = any(each.dtype == FLOAT16 for each in list(filter(None, found)) or chosen.values())
    return options if runs_float16 else replace(options, loss_scale=1.0)


def _scalers(loss_scale: float | str | LossScaler, count: int) -> list[LossScaler]:
    if not isinstance(loss_scale, LossScaler):
        return [DynamicLossScaler() if loss_scale == _DYNAMIC else StaticLossScaler(float(loss_scale))
                for _ in range(count)]
    if count != 1:
        raise ValueError(f"num_losses={count} losses need as many scalers: expected a number or 'dynamic' as "
                         "loss_scale, received one LossScaler")
    return [loss_scale]


def _refuse_repetition() -> None:
    if block_settings.level is not None:
        raise StateError("amp.initialize was called already: give it all networks and trainers at once, as lists. To "
                         "call it again, as where a notebook's cell runs twice, begin the cell with amp.deinit() and "
                         "make the trainer anew in it")
    if in_force.state is not None:
        raise StateError("AMP is on already: amp.initialize switches it on itself. Leave amp.init() out, or call "
                         "amp.deinit() first")


def _refuse_unfit(networks: Sequence[Block], several: Sequence[gluon.Trainer], level: str) -> None:
    if any(getattr(item, "skips", item is not None) for item in map(trainers.attached, several)):
        raise StateError("a trainer has a loss scaler already: amp.initialize attaches its own. Leave amp.init_trainer "
                         "out, and give every amp.initialize a new trainer")
    low = [parameter.name for net in networks for parameter in net.collect_params().values()
           if dtype_name(parameter.dtype) in LOW_PRECISION]
    if low and level != "O0":
        raise StateError(f"expected a network with FP32 parameters, received {', '.join(low[:3])} in low precision: "
                         "leave net.cast('float16') out, amp.initialize does its work")


def _switch_on(level: str, options: Options, networks: Sequence[Block],
               disabled_passes: frozenset[str]) -> _LowWeights | None:
    """Put networks into the precision of a level; return the weights that are to hold low precision, None for none."""
    state, weights = None, None
    if level == "O0":
        for net in networks:
            if any(dtype_name(parameter.dtype) != FLOAT32 for parameter in net.collect_params().values()):
                net.cast(FLOAT32)
    elif level == "O1":
        init(disable_passes=disabled_passes)
    else:
        state = _cast_state(options, disabled_passes)
        weights = _LowWeights(networks, options, state)
        weights.round()
    if state is not None or options.cast_model_outputs is not None:
        hooks.install()
        block_settings.cast({net: Network(state, options.cast_model_outputs) for net in networks})
    return weights


def _cast_state(options: Options, disabled_passes: frozenset[str]) -> State:
    """Make the state in which networks run in low precision as a whole."""
    requested = None if options.cast_model_type == _LOW else options.cast_model_type
    chosen = choose(requested, device_supports())
    rounds_masters = bool(options.master_weights) and not options.keep_batchnorm_fp32
    policies = {device: cast_network(policy, round_batch_norm=rounds_masters) if policy.lowers else policy
                for device, policy in device_policies(chosen, disabled_passes).items()}
    state = State.on(chosen, policies)
    announce(chosen, requested, state.rewrites())
    in_force.marked = state.disabled()  # for networks inside blocks that are hybridized as a whole
    return state


def cast_network(policy: Policy, round_batch_norm: bool = False) -> Policy:
    """Return the policy for a network that is cast as a whole: operators with a correct kernel follow their data."""
    def follower(rule: Rule) -> Rule:
        if rule.rule != FP32 or not rule.safe:
            return rule
        return replace(rule, rule=WIDEST, note="the network is cast as a whole; mixed inputs widen to FP32")

    known = table(policy.target_dtype)
    followers = {name: tuple(map(follower, known[name])) for name in WHOLE_NETWORK[policy.target_dtype]}
    rounding = {name: tuple(replace(rule, rounded_inputs=_SCALE_AND_SHIFT) for rule in known[name])
                for name in BATCH_NORMS if round_batch_norm}
    return replace(policy, overrides={**followers, **rounding, **policy.overrides})


class _LowWeights:
    """The parameters of networks without masters: updated values, and running statistics, are rounded."""

    # MXNet cannot store bfloat16 parameters, and its optimizers refuse them. FP32 arrays that hold values of the
    # low-precision type compute the same; a cast of such an array to the type is exact.

    def __init__(self, networks: Sequence[Block], options: Options, state: State):
        self._state = state
        parameters = {id(parameter): parameter for net in networks for parameter in net.collect_params().values()}
        normalizing = {id(parameter) for net in networks for parameter in batch_norm_parameters(net)}

        def is_rounded(key: int, is_trained: bool) -> bool:
            if options.keep_batchnorm_fp32 and key in normalizing:
                return False
            return not options.master_weights if is_trained else key in normalizing
        self._rounded = {key: parameter for key, parameter in parameters.items()
                         if is_rounded(key, parameter.grad_req != "null")}

    def round(self, trainer: gluon.Trainer | None = None) -> None:
        """Round the parameters that have values, and the states that a trainer's optimizer keeps of them."""
        arrays = [array for parameter in self._rounded.values() if trainers.is_initialized(parameter)
                  for array in parameter.list_data()]
        if trainer is not None:
            own = [parameter for parameter in trainers.parameters(trainer) if id(parameter) in self._rounded]
            arrays += trainers.optimizer_arrays(trainer, own)
        with autograd.pause():
            for array in arrays:
                policy = self._state.policy(self._state.key(array.context))
                if policy is not None and policy.lowers:
                    round_in_place(array, policy.target_dtype)


class _Applied(NamedTuple):
    """A level's work on trainers."""

    scalers: Sequence[LossScaler] = ()  # one per loss, shared by all trainers; none where losses are not scaled
    weights: _LowWeights | None = None  # rounded after updates
    reduces: bool = True  # whether it reduces the gradients of several processes where losses are not scaled

    def take_on(self, trainer: gluon.Trainer, warn_after: int = 20, max_skipped: int | None = None,
                **reduction: Any) -> None:
        """Give a trainer the loss scalers; ``reduction`` are the options of ``init_trainer`` for several processes."""
        attach(TrainerScaler(trainer, self.scalers, warn_after, max_skipped),
               updates=bool(self.scalers) or (self.reduces and parallel.size() > 1), **reduction)

    def updated(self, trainer: gluon.Trainer) -> None:
        """Round the weights that a trainer has updated."""
        if self.weights is not None:
            self.weights.round(trainer)
