"""Save and resume: loss scalers, and trainers with theirs."""
from __future__ import annotations

import json
import os
from functools import partial
from types import FunctionType
from typing import Any, Callable, Collection, Mapping, Sequence

from mxnet import gluon

from .._mxnet import optimizer_states, trainers
from .._mxnet.optimizer_states import STATES_BEGIN, known_classes, unpickle
from ..base import checks
from ..base.files import replacing
from ..errors import StateError, expected
from .loss_scaler import LossScaler, ScalerState
from .trainer_scaler import TrainerScaler, scalers_in_use

_MAGIC = STATES_BEGIN + b"2\n"
_PICKLED = STATES_BEGIN + b"1\n"  # as versions before wrote them


def state_dict() -> dict[str, dict[str, float]]:
    """Return the state of every loss scaler in use, in the order of the trainers' ``init_trainer`` and their losses.

    The names are ``'loss_scaler0'``, ``'loss_scaler1'``, ..., the states numbers, fit for JSON. A trainer of before the
    last :func:`init` or :func:`initialize` is left out until it scales a loss again.
    """
    return {f"loss_scaler{number}": scaler.state_dict() for number, scaler in enumerate(scalers_in_use())}


def load_state_dict(state: Mapping[str, Mapping[str, float]]) -> None:
    """Continue all loss scalers, as many as now, from a result of :func:`state_dict`; none if it is malformed."""
    scalers = scalers_in_use()
    if not isinstance(state, Mapping) or not all(isinstance(each, Mapping) for each in state.values()):
        raise ValueError(expected("what amp.state_dict() returned", "state", state))
    if set(state) != {f"loss_scaler{number}" for number in range(len(scalers))}:
        names = ", ".join(map(str, state)) or "none"
        raise StateError(f"the state holds {len(state)} loss scalers ({names}), but {len(scalers)} are in use: "
                         "call amp.init_trainer or amp.initialize on the same trainers first")
    load_scalers(scalers, [state[f"loss_scaler{number}"] for number in range(len(scalers))])


def load_scalers(scalers: Sequence[LossScaler], states: Sequence[Mapping[str, float]]) -> None:
    """Give scalers their states; all or none."""
    for state in states:
        ScalerState.of(state)
    for scaler, state in zip(scalers, states):
        scaler.load_state_dict(state)


def save_states(trainer: gluon.Trainer, fname: str | os.PathLike) -> None:
    """Write the optimizer, its states and the loss scalers' into one file, whole or not at all.

    The file holds JSON and arrays: reading it runs no code. Raises TypeError for an optimizer or a scheduler that holds
    other things than numbers, texts, arrays and objects of them.
    """
    header = json.dumps([scaler.state_dict() for scaler in scalers_of(trainer)]).encode()
    content = b"".join((_MAGIC, header, b"\n", optimizer_states.write(trainers.optimizer_states(trainer))))
    with replacing(fname) as (temporary,), open(temporary, "wb") as file:
        file.write(content)


def load_states(trainer: gluon.Trainer, fname: str | os.PathLike, *, classes: type | Sequence[type] = ()) -> None:
    """Read a file of :func:`save_states` or of plain ``Trainer.save_states``, completely or not at all.

    Files of ``Trainer.save_states`` are pickles, which can run any code. Here they may refer to MXNet's and NumPy's own
    classes only, and to the classes that you name.

    Parameters
    ----------
    trainer : gluon.Trainer
        With the network, the optimizer and the number of losses of the trainer that was saved.
    fname : path
        The file.
    classes : type or sequence of type
        Classes of your own that the file may hold objects of, such as a scheduler of learning rates.
    """
    scalers = scalers_of(trainer)
    own = checks.one_or_several("classes", classes, type, "a class") if classes else []
    # The trainer has some of the user's classes already.
    scheduler = trainer.optimizer.lr_scheduler
    own += [type(each) for each in (trainer.optimizer, scheduler) if not isinstance(each, (FunctionType, type(None)))]
    with open(fname, "rb") as file:
        content = file.read()
    try:
        states, read = _parsed(content, known_classes(*own))
        for state in states:
            ScalerState.of(state)
        hand_over = trainers.load_optimizer_states(trainer, read)
    except StateError:
        raise
    except Exception as error:  # pickles and arrays of damaged files raise anything
        raise ValueError(f"{os.fspath(fname)!r} holds no trainer states ({type(error).__name__}: {error}). Expected a "
                         "file written by amp.save_states or Trainer.save_states") from error
    fit = fitting(scalers, states, fname)
    hand_over()
    load_scalers(scalers, fit)


def fitting(scalers: Sequence[LossScaler], states: Sequence[Any], fname: str | os.PathLike) -> Sequence[Any]:
    """Return the states of a file, none where it or the trainer has none; raise StateError for another number."""
    if scalers and states and len(scalers) != len(states):
        raise StateError(f"{os.fspath(fname)!r} holds the states of {len(states)} loss scalers, the trainer has "
                         f"{len(scalers)}: give amp.initialize the same num_losses")
    return states if scalers else ()


def _parsed(content: bytes, classes: Collection[type]) -> tuple[list[Any], Callable[[], Any]]:
    """Return the states of loss scalers, and a function that reads the optimizer's states."""
    for magic, read in (_MAGIC, optimizer_states.read), (_PICKLED, unpickle):
        if content.startswith(magic):
            header, _, states = content[len(magic):].partition(b"\n")
            raw = json.loads(header) or []
            return raw if isinstance(raw, list) else [raw], partial(read, states, classes)
    return [], partial(unpickle, content, classes)


def scalers_of(trainer: gluon.Trainer) -> list[LossScaler]:
    """Return the loss scalers of a trainer, none for one without AMP."""
    checks.instance("trainer", trainer, gluon.Trainer, "a gluon.Trainer")
    attached = trainers.attached(trainer)
    return attached.scalers if isinstance(attached, TrainerScaler) and attached.skips else []
