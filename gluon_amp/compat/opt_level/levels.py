"""What is in force after ``initialize``: for the networks, and for the trainers."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

from mxnet import autograd, gluon
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from ... import parallel
from ..._mxnet import trainers
from ..._mxnet.arrays import round_in_place
from ..._mxnet.batch_norms import batch_norm_parameters
from ..._mxnet.symbols import dtype_name
from ...dtypes import FLOAT32
from ...rules import FP32, WIDEST, Policy, Rule
from ...rules.tables import WHOLE_NETWORK, table
from ...rules.tables.groups import BATCH_NORMS
from ...session import hooks
from ...session.autocast import init
from ...state.blocks import block_settings
from ...state.devices import announce, choose, device_supports
from ...state.in_force import in_force
from ...state.networks import Network
from ...state.policies import device_policies, devices_of, rewrites
from ...state.state import State
from ...training.loss_scaler import LossScaler
from ...training.trainer_scaler import TrainerScaler, UnscaledTrainer, scale_steps_of, stand_by
from .options import LOW, Options

_SCALE_AND_SHIFT = (1, 2)  # inputs of batch normalization


class LowWeights:
    """The parameters of networks without masters: what updates give, and running statistics, is rounded."""

    # MXNet cannot store bfloat16 parameters, and its optimizers refuse them. FP32 arrays that hold values of the
    # low-precision type compute the same; a cast of such an array to the type is exact.

    def __init__(self, networks: Sequence[Block], options: Options, state: State):
        self._state = state
        parameters = {id(parameter): parameter for net in networks for parameter in net.collect_params().values()}
        normalizing = {id(parameter) for net in networks for parameter in batch_norm_parameters(net)}
        self._trained: dict[int, gluon.Parameter] = {}
        kept = normalizing if options.keep_batchnorm_fp32 else set()
        if not options.master_weights:
            self._trained = {key: parameter for key, parameter in parameters.items()
                             if parameter.grad_req != "null" and key not in kept}
        self._statistics = [parameters[key] for key in normalizing - kept if parameters[key].grad_req == "null"]

    def round(self) -> None:
        """Round the parameters that have values; deferred ones are rounded later."""
        self._round(self._arrays([*self._trained.values(), *self._statistics]))

    def round_updated(self, trainer: gluon.Trainer) -> None:
        """Round what a trainer's update has written: weights, the optimizer's states, and running statistics."""
        updated = [parameter for parameter in trainers.parameters(trainer) if id(parameter) in self._trained]
        self._round(self._arrays([*updated, *self._statistics]))
        self._round(trainers.optimizer_arrays(trainer, updated))

    @staticmethod
    def _arrays(parameters: Iterable[gluon.Parameter]) -> Iterator[NDArray]:
        for parameter in parameters:
            if trainers.is_initialized(parameter):
                yield from parameter.list_data()

    def _round(self, arrays: Iterable[NDArray]) -> None:
        with autograd.pause():
            for array in arrays:
                policy = self._state.policy(self._state.key(array.context))
                if policy is not None and policy.lowers:
                    round_in_place(array, policy.target_dtype)


class Applied(NamedTuple):
    """A level's work on trainers."""

    scalers: Sequence[LossScaler] = ()  # one per loss, shared by all trainers; none where losses are not scaled
    weights: LowWeights | None = None  # what is rounded after updates
    reduces: bool = True  # whether it reduces the gradients of several processes where losses are not scaled

    def take_on(self, trainer: gluon.Trainer, warn_after: int = 20, max_skipped: int | None = None,
               **reduction: Any) -> None:
        """Give a trainer the loss scalers; ``reduction`` is what ``init_trainer`` takes for several processes."""
        scaler = (TrainerScaler(trainer, self.scalers, warn_after, max_skipped) if self.scalers
                  else UnscaledTrainer(trainer))
        if self.scalers or (self.reduces and parallel.size() > 1):
            trainers.update_locally(trainer)
            scale_steps_of(trainer, scaler, **reduction)
        else:
            stand_by(trainer, scaler)  # which trains as without it

    def updated(self, trainer: gluon.Trainer) -> None:
        """Round the weights that a trainer has updated."""
        if self.weights is not None:
            self.weights.round_updated(trainer)


def switch_on(level: str, options: Options, networks: Sequence[Block],
              disabled_passes: frozenset[str]) -> LowWeights | None:
    """Put networks into the precision of a level; return the weights that are to hold low precision, None for none."""
    state, weights = None, None
    if level == "O0":
        _cast_up(networks)
    elif level == "O1":
        init(disable_passes=disabled_passes)
    else:
        state = _cast_state(options, disabled_passes)
        weights = LowWeights(networks, options, state)
        weights.round()
    if state is not None or options.cast_model_outputs is not None:
        hooks.install()
        block_settings.cast({net: Network(state, options.cast_model_outputs) for net in networks})
    return weights


def cast_network(policy: Policy, round_batch_norm: bool = False) -> Policy:
    """Return the policy for a network that is cast as a whole: operators with a correct kernel follow their data."""
    known = table(policy.target_dtype)
    followers = {name: tuple(map(_follower, known[name])) for name in WHOLE_NETWORK[policy.target_dtype]}
    rounding = {name: tuple(replace(rule, rounded_inputs=_SCALE_AND_SHIFT) for rule in known[name])
                for name in BATCH_NORMS if round_batch_norm}
    return replace(policy, overrides={**followers, **rounding, **policy.overrides})


def _follower(rule: Rule) -> Rule:
    if rule.rule != FP32 or not rule.safe:
        return rule
    return replace(rule, rule=WIDEST, note="the network is cast as a whole; mixed inputs widen to FP32")


def _cast_up(networks: Sequence[Block]) -> None:
    for net in networks:
        if any(dtype_name(parameter.dtype) != FLOAT32 for parameter in net.collect_params().values()):
            net.cast(FLOAT32)


def _cast_state(options: Options, disabled_passes: frozenset[str]) -> State:
    """Make the state in which networks run in low precision as a whole."""
    requested = None if options.cast_model_type == LOW else options.cast_model_type
    chosen = choose(requested, device_supports())
    rounds_masters = bool(options.master_weights) and not options.keep_batchnorm_fp32
    policies = {device: cast_network(policy, round_batch_norm=rounds_masters) if policy.lowers else policy
                for device, policy in device_policies(chosen, disabled_passes).items()}
    state = State(policies, devices_of(chosen))
    announce(chosen, requested, rewrites(policies, state.devices))
    in_force.marked = state.disabled()  # for networks inside blocks that are hybridized as a whole
    return state
