"""``amp.preflight`` and ``amp.suggest_scale``: do weights fit in a type, and which loss scale makes gradients fit."""
from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Sequence

import numpy as np
from mxnet import Context, autograd, cpu, gluon
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from .. import checks
from .._mxnet import trainers
from .._mxnet.arrays import cast_arrays
from .._mxnet.symbols import dtype_name
from ..aliases import also
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32, FORMATS, LOW_PRECISION, normalize
from ..errors import DTypeError, StateError, expected
from ..session.autocast import active_dtype, autocast
from ..training.trainer_scaler import TrainerScaler
from .formats import Losses, losses
from .notebook import Shown
from .recording.events import FLOATS
from .report import report

if TYPE_CHECKING:
    from rich.table import Table

_LARGEST_SCALE, _SMALLEST_SCALE = 2.0 ** 24, 2.0 ** -24


@also(dtype="target_dtype")
def preflight(net: Block | Mapping[str, NDArray], data: Any = None, *, target_dtype: object = None) -> Preflight:
    """Say which weights overflow, or are flushed to zero, in low precision.

    Parameters
    ----------
    net : Block or dict of str to NDArray
        A network with initialized parameters, or parameters by name.
    data : NDArray or sequence of them, optional
        As :func:`gluon_amp.report` takes it. The network is then run once, in ``target_dtype`` or under the settings in
        force, to tell the parameters that are read in low precision from those that stay FP32. Without it, and where
        the machine cannot run the type, all are taken to be read so.
    target_dtype : {'float16', 'bfloat16'}, numpy dtype or None
        The type. None takes the one in force on the device that the parameters are on, else that of its kind:
        bfloat16 for a CPU, float16 for a GPU.

    Returns
    -------
    Preflight

    Raises
    ------
    DTypeError
        The type is unknown.
    TypeError
        ``net`` is of another type, or ``data`` is given for a dict.
    StateError
        Parameters are not initialized.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> found = amp.preflight({'w': mx.nd.array([1.0, 7e4, 1e-9])}, target_dtype='float16')
    >>> print(found.summary)
    1 of 1 parameters do not fit in float16: w (of 3 values 1 overflows, 1 becomes zero)
    """
    wanted = None if target_dtype is None else normalize(target_dtype)
    if isinstance(net, Mapping):
        if data is not None:
            raise TypeError(expected("no data beside a dict of parameters", "data", data))
        arrays, lowered = dict(net), None
        for name, array in arrays.items():
            checks.instance(f"net[{name!r}]", array, NDArray, "an NDArray")
    else:
        arrays, lowered = _parameters(net, "preflight"), None
    device = next((array.context for array in arrays.values()), cpu())
    target = wanted or active_dtype(device) or (FLOAT16 if device.device_type == "gpu" else BFLOAT16)
    if data is not None:
        lowered = _lowered(net, data, None if wanted in (None, active_dtype(device)) else wanted)
    rows = [ParameterRow(name, lowered is None or name in lowered, losses(_values(array), FORMATS[target]))
            for name, array in arrays.items() if dtype_name(array.dtype) in FLOATS]
    return Preflight(target, tuple(rows))


def _lowered(net: Any, data: Any, dtype: str | None) -> set[str] | None:
    """Name the parameters that are read in a type, that in force by default; None where the machine cannot run it."""
    try:
        region: Any = nullcontext() if dtype is None else autocast(dtype=dtype)
    except DTypeError:
        return None
    with region:
        return {read.name for row in report(net, data).operators for read in row.inputs
                if read.operator is None and read.dtype in LOW_PRECISION}


def _parameters(net: Any, caller: str) -> dict[str, NDArray]:
    if not isinstance(net, Block):
        raise TypeError(expected("a Gluon block, or a dict of names to arrays", "net", net))
    try:
        return {name: parameter.list_data()[0] for name, parameter in net.collect_params().items()}
    except RuntimeError as error:
        raise StateError(f"{caller}: {error}. Initialize the network, or load its parameters, first") from error


def _values(array: NDArray) -> np.ndarray:
    with autograd.pause():
        return cast_arrays(array, FLOAT32).asnumpy()


@dataclass(frozen=True)
class ParameterRow:
    """One parameter.

    Attributes
    ----------
    name : str
        Its name.
    is_lowered : bool
        Whether it is read in low precision, as far as that is known.
    losses : Losses
        What the type cannot hold of it.
    """

    name: str
    is_lowered: bool
    losses: Losses

    @property
    def fits(self) -> bool:
        """Whether no value overflows, becomes zero, or is not finite as it is."""
        return not (self.losses.overflowed or self.losses.flushed or self.losses.not_finite)


@dataclass(frozen=True, repr=False)
class Preflight(Shown):
    """What :func:`gluon_amp.preflight` found.

    Attributes
    ----------
    target_dtype : str
        The type.
    parameters : tuple of ParameterRow
        All of them.
    """

    _rest: ClassVar[str] = "its parameters"
    target_dtype: str
    parameters: tuple[ParameterRow, ...]

    @property
    def problems(self) -> tuple[ParameterRow, ...]:
        """The parameters that are read in low precision and do not fit, those with most such values first."""
        misfits = [row for row in self.parameters if row.is_lowered and not row.fits]
        return tuple(sorted(misfits, key=lambda row: -(row.losses.overflowed + row.losses.not_finite
                                                       + row.losses.flushed / row.losses.count)))

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        problems, count = self.problems, sum(row.is_lowered for row in self.parameters)
        if self.parameters and not count:
            return "no parameter is read in low precision"
        read = f"{count} parameters" + (" read in low precision" if count < len(self.parameters) else "")
        if not problems:
            return f"all {read} fit in {self.target_dtype}"
        shown = "; ".join(f"{row.name} ({_faults(row.losses)})" for row in problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        return f"{len(problems)} of {read} do not fit in {self.target_dtype}: {shown}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers."""
        return {"summary": self.summary, "target_dtype": self.target_dtype,
                "parameters": [{**asdict(row), "fits": row.fits} for row in self.parameters]}

    def table(self) -> Table:
        """Return a table for rich: the parameters that do not fit, or lose resolution."""
        from rich.table import Table

        table = Table("parameter", "values", "largest", "overflow", "become zero", "lose resolution", "not finite",
                      title=self.summary, title_justify="left")
        rows = [*self.problems, *(row for row in self.parameters
                                  if row.is_lowered and row.fits and row.losses.subnormal)]
        for row in rows:
            lost = row.losses
            table.add_row(row.name, str(lost.count), f"{lost.largest:.4g}", str(lost.overflowed),
                          str(lost.flushed), str(lost.subnormal), str(lost.not_finite))
        return table

    def __rich__(self) -> Table:
        return self.table()

    def _shown_table(self) -> Table:
        """Return the parameters that do not fit."""
        return self.table()

    def __str__(self) -> str:
        return self.summary


def _faults(lost: Losses) -> str:
    verbs = ((lost.overflowed, "overflows", "overflow"), (lost.flushed, "becomes zero", "become zero"),
             (lost.not_finite, "is not finite", "are not finite"))
    told = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in verbs if count)
    return f"of {lost.count} values {told}"


@dataclass(frozen=True)
class ScaleSuggestion:
    """A static loss scale, and what it does.

    Attributes
    ----------
    scale : float
        The largest power of two that leaves the headroom asked for; 1.0 for bfloat16.
    target_dtype : str
        The type of the gradients.
    largest : float
        The largest gradient, or norm of gradients, that it was made from; without scale.
    flushed_without, flushed : float or None
        The part of all gradients that become zero in the type, without the scale and with it. None when only norms are
        known.
    """

    scale: float
    target_dtype: str
    largest: float
    flushed_without: float | None = None
    flushed: float | None = None

    def __str__(self) -> str:
        text = f"a static loss scale of {self.scale:g} fits gradients up to {self.largest:.4g} in {self.target_dtype}"
        if self.flushed is None or self.flushed_without is None:
            return text
        return f"{text}; {self.flushed:.2%} of them become zero with it, {self.flushed_without:.2%} without"


@also(dtype="target_dtype")
def suggest_scale(source: gluon.Trainer | Block | Sequence[float], *, target_dtype: object = None,
                  headroom: float = 16.0) -> ScaleSuggestion:
    """Suggest a static loss scale from gradients, or from norms of gradients that were observed.

    Parameters
    ----------
    source : gluon.Trainer, Block or sequence of float
        A trainer after a backward pass and before its step: its gradients, without the loss scale that they carry. A
        network after a backward pass of a loss that was not scaled. Or norms of whole gradients without a loss scale,
        as :class:`gluon_amp.DriftMonitor` records them: no gradient is larger than its norm. Norms that are not finite
        are left out.
    target_dtype : {'float16', 'bfloat16'}, numpy dtype or None
        The type that gradients pass through. None takes the one in force where the gradients are, else float16.
    headroom : float
        How many times larger than all observed gradients may later ones be, those of layers' outputs among them.

    Returns
    -------
    ScaleSuggestion
        Its ``scale`` goes into ``amp.init_trainer(trainer, loss_scaler=...)``.

    Raises
    ------
    StateError
        All gradients are zero, missing or not finite.
    TypeError, ValueError, DTypeError
        An argument has a wrong type or value.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.suggest_scale([3.0, 5.0], target_dtype='float16', headroom=8).scale
    1024.0
    """
    if not checks.is_number(headroom) or not 1 <= headroom < math.inf:
        raise ValueError(expected("a number from 1 on", "headroom", headroom))
    device, gradients = _observed(source)
    target = normalize(target_dtype) if target_dtype is not None else active_dtype(device) or FLOAT16
    finite = [values for values in gradients if np.isfinite(values).all()]
    largest = max((float(np.abs(values).max()) for values in finite), default=0.0)
    if largest == 0:
        raise StateError("suggest_scale: all gradients are zero or not finite: run a backward pass first")
    scale = _scale(largest, target, headroom)
    if not isinstance(source, (gluon.Trainer, Block)):
        return ScaleSuggestion(scale, target, largest)
    return ScaleSuggestion(scale, target, largest, _flushed(finite, target, 1.0), _flushed(finite, target, scale))


def _observed(source: Any) -> tuple[Context, list[np.ndarray]]:
    """Return the device of gradients, and their values without loss scale; norms count as gradients on the CPU."""
    if isinstance(source, gluon.Trainer):
        attached = trainers.attached(source)
        carried = attached.carried if isinstance(attached, TrainerScaler) else 1.0
        return trainers.contexts(source)[0], [gradient.asnumpy() / carried
                                              for _, gradient in trainers.named_gradients(source)]
    if isinstance(source, Block):
        arrays = _parameters(source, "suggest_scale")
        return (next((array.context for array in arrays.values()), cpu()),
                [_values(parameter.list_grad()[0]) for parameter in source.collect_params().values()
                 if parameter.grad_req != "null"])
    try:
        return cpu(), [np.array(float(norm)) for norm in source]
    except (TypeError, ValueError) as error:
        raise TypeError(expected("a gluon.Trainer, a Gluon block or norms of gradients", "source", source)) from error


def _scale(largest: float, target: str, headroom: float) -> float:
    if target == BFLOAT16:
        return 1.0
    exact = 2.0 ** math.floor(math.log2(FORMATS[target].largest / (headroom * largest)))
    return min(max(exact, _SMALLEST_SCALE), _LARGEST_SCALE)


def _flushed(gradients: Sequence[np.ndarray], target: str, scale: float) -> float:
    counts = [losses(values * scale, FORMATS[target]) for values in gradients]
    return sum(item.flushed for item in counts) / sum(item.count for item in counts)
