"""``initialize``: Apex's opt levels, as a table of options for this package's own calls."""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

from mxnet import gluon
from mxnet.gluon import Block

from .. import parallel, passes
from .._mxnet import trainers
from .._mxnet.symbols import dtype_name
from ..base import checks
from ..base.aliases import answers
from ..errors import PolicyError, StateError, closest, expected, warn
from ..machine.dtypes import FLOAT16, FLOAT32, LOW_PRECISION, normalize
from ..rules import FP32, WIDEST, Policy
from ..rules.tables import WHOLE_NETWORK, table
from ..session import hooks
from ..session.init import init
from ..state.blocks import Network, block_settings
from ..state.devices import announce, choose, device_supports, of_device
from ..state.in_force import in_force
from ..state.state import State, device_policies
from ..training.loss_scaler import LossScaler, scale_of
from ..training.scaling import make_scaler
from ..training.trainer_scaler import TrainerScaler, attach

_DYNAMIC = "dynamic"
_IN_FP32 = ("keep_batchnorm_fp32", "master_weights")  # what stays in FP32 here at every level
_LOW = "low precision"  # the type that the device at hand runs


class Options(NamedTuple):
    """The settings of a level, or of a level with overrides; as text one a line."""

    cast_model_type: str | None  # the type that networks run in; None leaves that to the operators
    loss_scale: float | str | LossScaler
    cast_model_outputs: str | None = None  # None for FP32

    def __str__(self) -> str:
        return "\n".join(f"  {name:<20} " + (f"{type(value).__name__} at {value.loss_scale:g}"
                                             if isinstance(value, LossScaler) else "-" if value is None else str(value))
                         for name, value in self._asdict().items())


LEVELS: Mapping[str, tuple[str, Options]] = {
    "O0": ("plain FP32", Options(FLOAT32, 1.0)),
    "O1": ("each operator in the precision that suits it, weights in FP32", Options(None, _DYNAMIC)),
    "O2": ("networks in low precision, BatchNorm and master weights in FP32", Options(_LOW, _DYNAMIC)),
}


@answers(models="it is called net", optimizers="the trainer stands in their place: amp.initialize(net, trainer)",
         patch_torch_functions="it is part of the level: leave it out",
         min_loss_scale="pass loss_scale=amp.DynamicLossScaler(min_scale=...)",
         max_loss_scale="pass loss_scale=amp.DynamicLossScaler(max_scale=...)",
         **dict.fromkeys(("target_dtype", "dtype"),
                         "it is called cast_model_type, for O2; O1 takes what is fastest"))
def initialize(net: Block | Sequence[Block], trainer: gluon.Trainer | Sequence[gluon.Trainer] | None = None,
               opt_level: str = "O1", *, keep_batchnorm_fp32: bool | str | None = None,
               master_weights: bool | str | None = None, loss_scale: float | str | LossScaler | None = None,
               cast_model_type: object = None, cast_model_outputs: object = None, num_losses: int = 1,
               enabled: bool | str = True, verbosity: int = 1, disable_passes: Iterable[str] | None = None) -> Any:
    r"""Set networks and trainers up for a level of precision, in place.

    Call it once, after :func:`convert_sync_batchnorm`, before the first step. Every keyword that is not None overrides
    its level; strings of command lines will do: ``'True'``, ``'128.0'``. Where low precision would be slower, networks
    stay in FP32; weights and BatchNorm do at every level: O3 runs as O2, and a warning says so.

    ====  ==============================================  ==========
    ..    runs in low precision                           loss scale
    ====  ==============================================  ==========
    O0    nothing                                         1
    O1    operators that gain by it, as with ``init()``   dynamic*
    O2    the networks: every operator that can           dynamic*
    ====  ==============================================  ==========

    \* in float16; 1 in bfloat16 and FP32, unless ``loss_scale`` says more.

    Parameters
    ----------
    net : Block or sequence of Block
        With FP32 parameters, initialized or not, hybridized or not.
    trainer : gluon.Trainer or sequence of them, optional
        Trainers that come later get the level's loss scalers by :func:`init_trainer`.
    opt_level : {'O0', 'O1', 'O2', 'O3'}
        The level.
    keep_batchnorm_fp32, master_weights : bool, optional
        O2: True, as it is in any case; False warns.
    loss_scale : float, 'dynamic' or LossScaler, optional
        A number is a scale that never changes.
    cast_model_type : dtype, optional
        O2: the low-precision type; ``'float16'`` without a GPU imitates it, to test its numerics.
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
    level = partial(_take_on, [], reduces=False)
    if as_bool("enabled", enabled):
        name, options = resolve(opt_level, {
            "cast_model_type": cast_model_type, "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights, "loss_scale": loss_scale, "cast_model_outputs": cast_model_outputs})
        if loss_scale is None:
            options = _scaled_where_needed(options, several)
        scalers = _scalers(options.loss_scale, checks.whole("num_losses", num_losses, 1))
        disabled = passes.checked(disable_passes)
        _refuse_unfit(networks, several, name)
        in_force.begin()
        if name == "O0" and options.loss_scale == 1.0:
            scalers = []
        for item in several if scalers else ():
            trainers.update_locally(item)
        if name == "O0" and scalers:
            warn(f"opt_level O0 with loss_scale={options.loss_scale}: FP32 needs no loss scaling; leave it out")
        _switch_on(name, options, networks, disabled)
        level = partial(_take_on, scalers, reduces=True)
        if verbosity:
            print(_in_words(name, options))
    block_settings.level = level
    for item in several:
        level(item)
    return net if trainer is None else (net, trainer)


def resolve(opt_level: object, overrides: Mapping[str, object]) -> tuple[str, Options]:
    """Return a level's name, and its options with the overrides that are not None."""
    asked = level = str(opt_level).upper()
    level = "O2" if asked == "O3" else asked
    if level not in LEVELS:
        hint = " The first character is the letter O." if level.startswith("0") else closest(level, LEVELS)
        raise PolicyError(expected(f"one of {', '.join(LEVELS)}", "opt_level", opt_level) + "." + hint)
    given = {name: _READERS[name](name, value) for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        reason = _contradiction(level, name, value)
        if reason:
            raise PolicyError(f"opt_level {asked} with {name}={value!r}: {reason}")
    in_fp32 = [given.pop(name, None) for name in _IN_FP32]
    if level == "O2" and (asked == "O3" or False in in_fp32):
        warn(f"opt_level {asked} runs as O2 with weights and BatchNorm in FP32: rounding them gains no speed here")
    return level, LEVELS[level][1]._replace(**given)


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
    **dict.fromkeys(_IN_FP32, as_bool), "loss_scale": _as_scale,
}


def _contradiction(level: str, name: str, value: object) -> str | None:
    """Return the reason against an override at a level; None when it is allowed."""
    if name == "cast_model_outputs" and value == "bfloat16":
        return "NumPy and plain MXNet code cannot read bfloat16; use 'float16' or 'float32', or leave it out"
    if name in ("cast_model_outputs", "loss_scale"):
        return None
    if level == "O1":
        return "O1 keeps weights in FP32 and casts per operator; leave it out, or use opt_level O2"
    if level == "O0":
        wanted = {"cast_model_type": FLOAT32, "keep_batchnorm_fp32": True, "master_weights": False}[name]
        return None if value == wanted else "O0 is plain FP32; leave it out, or use opt_level O2"
    return "a network in FP32 is opt_level O0" if (name, value) == ("cast_model_type", FLOAT32) else None


def _in_words(level: str, options: Options) -> str:
    meaning, defaults = LEVELS[level]
    if options.cast_model_type == _LOW:
        policies = in_force.marked.policies if in_force.marked is not None else {}
        types = ", ".join(f"{policy.target_dtype} on the {device}" for device, policy in policies.items())
        options = options._replace(cast_model_type=types or FLOAT32)
    return f"gluon_amp opt_level {level}: {meaning}. Its defaults:\n{defaults}\nIn force:\n{options}"


def _scaled_where_needed(options: Options, several: Sequence[gluon.Trainer]) -> Options:
    """Leave losses as they are, as ``init_trainer`` does, unless a trainer's device, or any device, runs float16."""
    named = options.cast_model_type if options.cast_model_type in LOW_PRECISION else None
    chosen = choose(named, device_supports())
    found = [of_device(context, chosen) for trainer in several for context in trainers.contexts(trainer)]
    runs_float16 = any(each.dtype == FLOAT16 for each in list(filter(None, found)) or chosen.values())
    return options if runs_float16 else options._replace(loss_scale=1.0)


def _scalers(loss_scale: float | str | LossScaler, count: int) -> list[LossScaler]:
    if isinstance(loss_scale, LossScaler) and count != 1:
        raise ValueError(f"num_losses={count} losses need as many scalers: expected a number or 'dynamic' as "
                         "loss_scale, received one LossScaler")
    return [make_scaler(loss_scale) for _ in range(count)]


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


def _switch_on(level: str, options: Options, networks: Sequence[Block], disabled_passes: frozenset[str]) -> None:
    """Put networks into the precision of a level."""
    state = None
    if level == "O0":
        for net in networks:
            if any(dtype_name(parameter.dtype) != FLOAT32 for parameter in net.collect_params().values()):
                net.cast(FLOAT32)
    elif level == "O1":
        init(disable_passes=disabled_passes)
    else:  # networks run in low precision as a whole
        requested = None if options.cast_model_type == _LOW else options.cast_model_type
        chosen = choose(requested, device_supports())
        policies = {device: cast_network(policy) if policy.lowers else policy
                    for device, policy in device_policies(chosen, disabled_passes).items()}
        state = State.on(chosen, policies)
        announce(chosen, requested)
        in_force.marked = state.disabled()  # for networks inside blocks that are hybridized as a whole
    if state is not None or options.cast_model_outputs is not None:
        hooks.install()
        block_settings.cast({net: Network(state, options.cast_model_outputs) for net in networks})


def cast_network(policy: Policy) -> Policy:
    """Return the policy for a network that is cast as a whole: operators with a correct kernel follow their data."""
    known, note = table(policy.target_dtype), "the network is cast as a whole; mixed inputs widen to FP32"
    followers = {name: tuple(replace(rule, rule=WIDEST, note=note) if rule.rule == FP32 and rule.safe else rule
                             for rule in known[name]) for name in WHOLE_NETWORK[policy.target_dtype]}
    return replace(policy, overrides={**followers, **policy.overrides})


def _take_on(scalers: Sequence[LossScaler], trainer: gluon.Trainer, warn_after: int = 20,
             max_skipped: int | None = None, *, reduces: bool, **reduction: Any) -> None:
    """Give a trainer a level's loss scalers, which all share: one per loss, none where losses are not scaled."""
    # ``reduces``: where they are not, whether the gradients of several processes are reduced as ``reduction`` says.
    attach(TrainerScaler(trainer, scalers, warn_after, max_skipped),
           updates=bool(scalers) or (reduces and parallel.size() > 1), **reduction)
