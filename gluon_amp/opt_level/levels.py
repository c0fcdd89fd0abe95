"""What is in force after ``initialize``: for the networks, and for the trainers."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Sequence

from mxnet import gluon
from mxnet.gluon import Block

from .. import parallel
from .._mxnet import trainers
from .._mxnet.symbols import dtype_name
from ..dtypes import FLOAT32
from ..loss_scaler import LossScaler
from ..rules import FP32, WIDEST, Policy, Rule
from ..rules.tables import table
from ..rules.tables.groups.layers import BATCH_NORMS
from ..rules.tables.whole_network import WHOLE_NETWORK
from ..runtime import hooks
from ..runtime.autocast import init
from ..runtime.devices import announce, choose, device_supports
from ..runtime.policies import device_policies, rewrites
from ..runtime.state import Network, State, controller
from ..trainer_scaler import TrainerScaler, UnscaledTrainer, attach, stand_by
from .low_weights import LowWeights
from .options import LOW, Options

_SCALE_AND_SHIFT = (1, 2)  # inputs of batch normalization


class Applied(NamedTuple):
    """A level's work on trainers."""

    scalers: Sequence[LossScaler] = ()  # one per loss, shared by all trainers; none where losses are not scaled
    weights: LowWeights | None = None  # what is rounded after updates
    reduces: bool = True  # whether it reduces the gradients of several processes where losses are not scaled

    def attach(self, trainer: gluon.Trainer, warn_after: int = 20, **reduction: Any) -> None:
        """Give a trainer the loss scalers; ``reduction`` is what ``init_trainer`` takes for several processes."""
        scaler = TrainerScaler(trainer, self.scalers, warn_after) if self.scalers else UnscaledTrainer(trainer)
        if self.scalers or (self.reduces and parallel.size() > 1):
            trainers.update_locally(trainer)
            attach(trainer, scaler, **reduction)
        else:
            stand_by(trainer, scaler)  # which trains as without it

    def updated(self, trainer: gluon.Trainer) -> None:
        """Round the weights that a trainer has updated."""
        if self.weights is not None:
            self.weights.round_updated(trainer)


def switch_on(level: str, options: Options, networks: Sequence[Block],
              disabled_passes: frozenset[str] = frozenset()) -> LowWeights | None:
    """Put networks into the precision of a level; return the weights that are to hold low precision, None for none."""
    state, weights = None, None
    if level == "O0":
        _cast_up(networks)
    elif level == "O1":
        init(disable_passes=disabled_passes)
    else:
        state = _cast_state(options, disabled_passes)
        dtypes = {device: policy.target_dtype for device, policy in state.policies.items() if policy.lowers}
        weights = LowWeights(networks, options, dtypes, state.key)
        weights.round()
    if state is not None or options.cast_model_outputs is not None:
        hooks.install()
        controller.cast({net: Network(state, options.cast_model_outputs) for net in networks})
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
    announce(chosen, requested, rewrites(policies))
    controller.marked = State(policies, enabled=False)  # for networks inside blocks that are hybridized as a whole
    return State(policies)
