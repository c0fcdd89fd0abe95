"""``initialize``: a whole training script's precision by one argument."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterable, Sequence

from mxnet import gluon
from mxnet.gluon import Block

from ... import checks, passes
from ..._mxnet import trainers
from ..._mxnet.symbols import dtype_name
from ...dtypes import FLOAT16, FLOAT32, LOW_PRECISION
from ...elsewhere import answers
from ...errors import StateError, warn
from ...state.blocks import block_settings
from ...state.devices import choose, device_supports, of_device
from ...state.in_force import in_force
from ...training.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler
from ...training.trainer_scaler import UnscaledTrainer
from .levels import Applied, switch_on
from .options import DYNAMIC, LEVELS, LOW, Options, as_bool, describe, resolve


@answers(models="it is called net", optimizers="the trainer stands in their place: amp.initialize(net, trainer)",
         patch_torch_functions="it is part of the level: leave it out",
         min_loss_scale="pass loss_scale=amp.DynamicLossScaler(min_scale=...)",
         max_loss_scale="pass loss_scale=amp.DynamicLossScaler(max_scale=...)",
         target_dtype="it is called cast_model_type, for O2 and O3; O1 takes what is fastest",
         dtype="it is called cast_model_type, for O2 and O3; O1 takes what is fastest")
def initialize(net: Block | Sequence[Block], trainer: gluon.Trainer | Sequence[gluon.Trainer] | None = None,
               opt_level: str = "O1", *, keep_batchnorm_fp32: bool | str | None = None,
               master_weights: bool | str | None = None, loss_scale: float | str | LossScaler | None = None,
               cast_model_type: object = None, cast_model_outputs: object = None, num_losses: int = 1,
               enabled: bool | str = True, verbosity: int = 1, disable_passes: Iterable[str] | None = None) -> Any:
    r"""Set networks and trainers up for a level of precision, in place.

    Call it once, after the networks and trainers are created (and :func:`convert_sync_batchnorm`, if any), before the
    first step.

    ====  ==============================================  ================  ============  ==========
    ..    what runs in low precision                      BatchNorm in      FP32 masters  loss scale
    ====  ==============================================  ================  ============  ==========
    O0    nothing                                         FP32              --            1
    O1    operators that gain by it, as with ``init()``   --                --            dynamic*
    O2    the networks: every operator that can           FP32              yes           dynamic*
    O3    the networks, and the weights                   low precision     no            1
    ====  ==============================================  ================  ============  ==========

    \* in float16; bfloat16 and FP32 have the range to do without, and their scale is 1 unless ``loss_scale`` says more.
    Where low precision would be slower than FP32, networks stay in FP32 at every level.

    Every keyword that is not None overrides its level. Command lines may hand strings through: ``'True'``, ``'128.0'``,
    ``'dynamic'``.

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
        False rounds weights, and what the optimizer keeps, to low precision after every update.
    loss_scale : float, 'dynamic' or LossScaler, optional
        A number is a scale that never changes.
    cast_model_type : dtype, optional
        O2 and O3: the low-precision type, in place of the one that the device runs. ``'float16'`` without a GPU
        imitates it, to test its numerics.
    cast_model_outputs : {'float32', 'float16'}, optional
        The type of what the networks return; FP32 without.
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

    Raises
    ------
    PolicyError
        The level or a pass is unknown, an option contradicts the level, or a pass cannot be switched off.
    StateError
        AMP is on already, a trainer has a loss scaler or updates on the KVStore, or parameters are not FP32.
    DTypeError
        The type is unknown, or the machine cannot run it.
    TypeError, ValueError
        An argument has a wrong type or value.

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
    level = Applied(reduces=False)
    if as_bool("enabled", enabled):
        overrides = {"cast_model_type": cast_model_type, "keep_batchnorm_fp32": keep_batchnorm_fp32,
                     "master_weights": master_weights, "loss_scale": loss_scale,
                     "cast_model_outputs": cast_model_outputs}
        name, options = resolve(opt_level, overrides)
        if loss_scale is None:
            options = _scaled_where_needed(options, several)
        scalers = _scalers(options.loss_scale, checks.whole("num_losses", num_losses, 1))
        checks.whole("verbosity", verbosity, 0)
        disabled = passes.checked(disable_passes)
        _refuse_unfit(networks, several, name)
        in_force.begin()
        level = _start(name, options, networks, several, scalers, disabled)
        if verbosity:
            _print(name, options)
    block_settings.level = level
    for item in several:
        level.take_on(item)
    return net if trainer is None else (net, trainer)


def _scaled_where_needed(options: Options, several: Sequence[gluon.Trainer]) -> Options:
    """Leave losses as they are, as ``init_trainer`` does, unless a trainer's device, or any device, runs float16."""
    named = options.cast_model_type if options.cast_model_type in LOW_PRECISION else None
    chosen = choose(named, device_supports())
    found = [of_device(context, chosen) for trainer in several for context in trainers.contexts(trainer)]
    runs_float16 = any(each.dtype == FLOAT16 for each in list(filter(None, found)) or chosen.values())
    return options if runs_float16 else replace(options, loss_scale=1.0)


def _scalers(loss_scale: float | str | LossScaler, count: int) -> list[LossScaler]:
    if not isinstance(loss_scale, LossScaler):
        return [DynamicLossScaler() if loss_scale == DYNAMIC else StaticLossScaler(float(loss_scale))
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
    if any(not isinstance(trainers.attached(trainer), (UnscaledTrainer, type(None))) for trainer in several):
        raise StateError("a trainer has a loss scaler already: amp.initialize attaches its own. Leave amp.init_trainer "
                         "out, and give every amp.initialize a new trainer")
    low = [parameter.name for net in networks for parameter in net.collect_params().values()
           if dtype_name(parameter.dtype) in LOW_PRECISION]
    if low and level != "O0":
        raise StateError(f"expected a network with FP32 parameters, received {', '.join(low[:3])} in low precision: "
                         "leave net.cast('float16') out, amp.initialize does its work")


def _start(name: str, options: Options, networks: Sequence[Block], several: Sequence[gluon.Trainer],
           scalers: list[LossScaler], disabled_passes: frozenset[str]) -> Applied:
    scaled = name != "O0" or options.loss_scale != 1.0
    if scaled:
        for trainer in several:
            trainers.update_locally(trainer)
    if scaled and name == "O0":
        warn(f"opt_level O0 with loss_scale={options.loss_scale}: FP32 needs no loss scaling; leave it out")
    weights = switch_on(name, options, networks, disabled_passes)
    return Applied(scalers, weights) if scaled else Applied()


def _print(level: str, options: Options) -> None:
    meaning, defaults = LEVELS[level]
    if options.cast_model_type == LOW:
        policies = in_force.marked.policies if in_force.marked is not None else {}
        types = ", ".join(f"{policy.target_dtype} on the {device}" for device, policy in policies.items())
        options = replace(options, cast_model_type=types or FLOAT32)
    print(f"gluon_amp opt_level {level}: {meaning}. Its defaults:\n{describe(defaults)}\n"
          f"In force:\n{describe(options)}")
