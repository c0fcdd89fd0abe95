"""Save and resume: loss scalers, and trainers with theirs."""
from __future__ import annotations

import json
import os
from typing import Any, Mapping, Sequence

from mxnet import gluon

from ._mxnet import trainers
from .errors import StateError, expected
from .files import replacing
from .loss_scaler import LossScaler
from .trainer_scaler import TrainerScaler, UnscaledTrainer, attached_scalers

__all__ = ["load_state_dict", "load_states", "save_states", "scalers_of", "state_dict"]

_MAGIC = b"gluon_amp trainer states 1\n"


def state_dict() -> dict[str, dict[str, float]]:
    """Return the state of every loss scaler in use, in the order of the trainers' ``init_trainer`` and their losses.

    Returns
    -------
    dict
        ``'loss_scaler0'``, ``'loss_scaler1'``, ... to the scaler's state; plain numbers, fit for JSON or pickle. A
        scaler that several trainers share is there once.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.load_state_dict(amp.state_dict())
    """
    return {f"loss_scaler{number}": scaler.state_dict() for number, scaler in enumerate(_scalers())}


def _scalers() -> list[LossScaler]:
    scalers = [scaler for item in attached_scalers() for scaler in item.scalers]
    return list({id(scaler): scaler for scaler in scalers}.values())


def load_state_dict(state: Mapping[str, Mapping[str, float]]) -> None:
    """Continue all loss scalers from what :func:`state_dict` returned.

    Parameters
    ----------
    state : mapping
        Of as many scalers as there are now.

    Raises
    ------
    StateError
        The numbers of scalers differ.
    ValueError
        A scaler's state is malformed; none is changed then.
    """
    scalers = _scalers()
    if sorted(state) != sorted(f"loss_scaler{number}" for number in range(len(scalers))):
        raise StateError(f"the state holds {len(state)} loss scalers ({', '.join(state) or 'none'}), there are "
                         f"{len(scalers)} in use: call amp.init_trainer or amp.initialize on the same trainers first")
    before = state_dict()
    try:
        _load(scalers, state)
    except ValueError:
        _load(scalers, before)
        raise


def _load(scalers: Sequence[LossScaler], state: Mapping[str, Mapping[str, float]]) -> None:
    for number, scaler in enumerate(scalers):
        scaler.load_state_dict(state[f"loss_scaler{number}"])


def save_states(trainer: gluon.Trainer, fname: str | os.PathLike) -> None:
    """Write the optimizer's states and the loss scalers' into one file, atomically.

    Parameters
    ----------
    trainer : gluon.Trainer
        With or without a loss scaler.
    fname : path
        Overwritten when all went well, left as it was otherwise.

    Examples
    --------
    ::

        net.save_parameters('net.params')
        amp.save_states(trainer, 'trainer.states')
    """
    header = [scaler.state_dict() for scaler in scalers_of(trainer)]
    content = _MAGIC + json.dumps(header).encode() + b"\n" + trainers.optimizer_states(trainer)
    with replacing(fname) as (temporary,), open(temporary, "wb") as file:
        file.write(content)


def load_states(trainer: gluon.Trainer, fname: str | os.PathLike) -> None:
    """Read a file of :func:`save_states`, or of plain ``Trainer.save_states``.

    Parameters
    ----------
    trainer : gluon.Trainer
        Its optimizer, and its loss scalers where the file and the trainer have any, continue from the file.
    fname : path
        The file.

    Raises
    ------
    StateError
        The file is of a trainer with another number of losses; nothing is changed then.
    ValueError
        The file is of neither kind.

    Examples
    --------
    ::

        net.load_parameters('net.params')
        amp.load_states(trainer, 'trainer.states')
    """
    scalers = scalers_of(trainer)
    with open(fname, "rb") as file:
        content = file.read()
    found, states = _parsed(content)
    if scalers and found and len(scalers) != len(found):
        raise StateError(f"{os.fspath(fname)!r} holds the states of {len(found)} loss scalers, the trainer has "
                         f"{len(scalers)}: give amp.initialize the same num_losses")
    try:
        trainers.load_optimizer_states(trainer, states)
    except Exception as error:
        raise ValueError(f"{os.fspath(fname)!r} holds no trainer states ({type(error).__name__}: {error}). Expected a "
                         "file written by amp.save_states or Trainer.save_states") from error
    for scaler, state in zip(scalers, found):
        scaler.load_state_dict(state)


def _parsed(content: bytes) -> tuple[list[Any], bytes]:
    if not content.startswith(_MAGIC):
        return [], content
    header, _, states = content[len(_MAGIC):].partition(b"\n")
    found = json.loads(header) or []
    return (found if isinstance(found, list) else [found]), states


def scalers_of(trainer: gluon.Trainer) -> list[LossScaler]:
    """Return the loss scalers of a trainer, none for one without AMP."""
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(expected("a gluon.Trainer", "trainer", trainer))
    found = trainers.attached(trainer)
    return found.scalers if isinstance(found, TrainerScaler) and not isinstance(found, UnscaledTrainer) else []
