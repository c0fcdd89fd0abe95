"""Save and resume: loss scalers, and trainers with theirs."""
from __future__ import annotations

import json
import os
from typing import Any, Mapping

from mxnet import gluon

from ._mxnet import trainers
from .errors import StateError, expected
from .files import replacing
from .training import TrainerScaler, attached_scalers

__all__ = ["load_state_dict", "load_states", "save_states", "state_dict"]

_MAGIC = b"gluon_amp trainer states 1\n"


def state_dict() -> dict[str, dict[str, float]]:
    """Return the state of every loss scaler in use, in the order of ``init_trainer``.

    Returns
    -------
    dict
        ``'loss_scaler0'``, ``'loss_scaler1'``, ... to the scaler's state; plain numbers, fit for JSON or pickle.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.load_state_dict(amp.state_dict())
    """
    return {f"loss_scaler{number}": item.scaler.state_dict() for number, item in enumerate(attached_scalers())}


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
    items = attached_scalers()
    if sorted(state) != sorted(f"loss_scaler{number}" for number in range(len(items))):
        raise StateError(f"the state holds {len(state)} loss scalers ({', '.join(state) or 'none'}), there are "
                         f"{len(items)} trainers with one: call amp.init_trainer on the same trainers first")
    before = state_dict()
    try:
        _load(items, state)
    except ValueError:
        _load(items, before)
        raise


def _load(items: list[TrainerScaler], state: Mapping[str, Mapping[str, float]]) -> None:
    for number, item in enumerate(items):
        item.scaler.load_state_dict(state[f"loss_scaler{number}"])


def save_states(trainer: gluon.Trainer, fname: str | os.PathLike) -> None:
    """Write the optimizer's states and the loss scaler's into one file, atomically.

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
    scaler = _scaler_of(trainer)
    header = json.dumps(scaler.scaler.state_dict() if scaler else None).encode()
    content = _MAGIC + header + b"\n" + trainers.optimizer_states(trainer)
    with replacing(fname) as (temporary,):
        with open(temporary, "wb") as file:
            file.write(content)


def load_states(trainer: gluon.Trainer, fname: str | os.PathLike) -> None:
    """Read a file of :func:`save_states`, or of plain ``Trainer.save_states``.

    Parameters
    ----------
    trainer : gluon.Trainer
        Its optimizer, and its loss scaler where the file and the trainer have one, continue from the file.
    fname : path
        The file.

    Raises
    ------
    ValueError
        The file is of neither kind.

    Examples
    --------
    ::

        net.load_parameters('net.params')
        amp.load_states(trainer, 'trainer.states')
    """
    scaler = _scaler_of(trainer)
    with open(fname, "rb") as file:
        content = file.read()
    state, states = _parsed(content)
    try:
        trainers.load_optimizer_states(trainer, states)
    except Exception as error:
        raise ValueError(f"{os.fspath(fname)!r} holds no trainer states ({type(error).__name__}: {error}). Expected a "
                         "file written by amp.save_states or Trainer.save_states") from error
    if scaler is not None and state is not None:
        scaler.scaler.load_state_dict(state)


def _parsed(content: bytes) -> tuple[Any, bytes]:
    if not content.startswith(_MAGIC):
        return None, content
    header, _, states = content[len(_MAGIC):].partition(b"\n")
    return json.loads(header), states


def _scaler_of(trainer: gluon.Trainer) -> TrainerScaler | None:
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(expected("a gluon.Trainer", "trainer", trainer))
    found = trainers.attached(trainer)
    return found if isinstance(found, TrainerScaler) else None
