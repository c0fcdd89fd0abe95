"""``amp.compare``: how far every operator of a network in mixed precision is from FP32."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from ..aliases import also
from ..dtypes import FLOAT32
from ..errors import PolicyError, expected
from ..rules import Policy
from ..state.state import State
from .console import fitted, print_table
from .differences import SEED, OperatorError, difference, first_infinite, isolated_errors, relative_error
from .figures import new_figure, save_figure
from .notebook import Shown
from .recording.events import is_float
from .recording.runs import Run, arguments_of, dtype_of, float_arrays, make_ready, mixed_state, recorded_run, unchanged
from .report.plot import COLOURS

if TYPE_CHECKING:
    from rich.table import Table

_NEGLIGIBLE = 1e-3  # gradients smaller than this, beside a typical one, are sums that cancel: all rounding
_LABELLED = 3  # operators in a panel of the picture
_PANELS = (("output", "accumulated", "isolated"), ("gradient", "gradient", "isolated_gradient"))
ORDERS = ("accumulated", "isolated", "gradient", "isolated_gradient")


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """What :func:`compare` found.

    Attributes
    ----------
    dtype : str
        The low-precision type.
    operators : tuple of OperatorError
        In the order in which they ran.
    outputs : tuple of float
        Errors of the network's floating-point outputs.
    parameters : mapping of str to float
        Errors of the gradients of parameters, by name. Where a gradient is below a thousandth of a typical one, as that
        of a bias before batch normalization, the error is relative to that thousandth.
    """

    _rest: ClassVar[str] = "its print(count=1000)"
    dtype: str
    operators: tuple[OperatorError, ...]
    outputs: tuple[float, ...]
    parameters: Mapping[str, float]

    def worst(self, count: int = 10, by: str = "accumulated") -> list[OperatorError]:
        """Return the operators with the largest errors, worst first.

        Parameters
        ----------
        count : int
            How many.
        by : {'accumulated', 'isolated', 'gradient', 'isolated_gradient'}
            Which error counts.

        Raises
        ------
        ValueError
            There is no such error.
        """
        if by not in ORDERS:
            raise ValueError(expected(f"one of {', '.join(ORDERS)}", "by", by))
        return sorted(self.operators, key=lambda item: -_rank(getattr(item, by)))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, fit for JSON but for infinite and NaN errors."""
        return {"dtype": self.dtype, "operators": [asdict(item) for item in self.operators],
                "outputs": list(self.outputs), "parameters": dict(self.parameters)}

    def table(self, by: str = "accumulated", count: int = 15) -> Table:
        """Return a table for rich, worst operators first; parameters and errors are those of :meth:`worst`."""
        from rich.table import Table

        table = Table(title=self.summary, title_justify="left")
        for title in ("operator", "kind", "block", "type"):
            table.add_column(title, no_wrap=True)
        for order in ORDERS:
            table.add_column(order.replace("_", " "), justify="right")
        culprit = first_infinite(self.operators, "accumulated")
        for item in self.worst(count, by):
            name = item.name if culprit is None or item is not self.operators[culprit] else f"[red]{item.name}[/red]"
            table.add_row(name, item.op, item.block, item.dtype,
                          *(_number(getattr(item, order)) for order in ORDERS))
        return table

    @property
    def summary(self) -> str:
        """One line: how much runs in low precision, and how far the results are from FP32."""
        low = sum(item.dtype == self.dtype for item in self.operators)
        gradients = sorted(self.parameters.values(), key=_rank)
        told = (f"; gradients of parameters by {_number(gradients[len(gradients) // 2])} (median), at most "
                f"{_number(gradients[-1])}" if gradients else "")
        culprit = first_infinite(self.operators, "accumulated")
        blamed = f". The first infinite error is that of {self.operators[culprit].name}" if culprit is not None else ""
        return (f"{low} of {len(self.operators)} operators in {self.dtype}; outputs differ from float32 by "
                f"{', '.join(map(_number, self.outputs))}{told} (relative 2-norm){blamed}")

    def print(self, by: str = "accumulated", count: int = 15, wide: bool = False) -> None:
        """Print :meth:`table`, without blocks and kinds where there is little room, unless ``wide``."""
        print_table(lambda width: fitted(self.table(by, count), ("block", "kind"), width), wide)

    def __rich__(self) -> Table:
        return self.table()

    def _shown_table(self) -> Table:
        """Return the operators with the largest errors."""
        return self.table(count=20)

    def __str__(self) -> str:
        return self.summary

    def plot(self, path: Any = None) -> Any:
        """Draw the errors in the order of the operators with Matplotlib; return the figure.

        Parameters
        ----------
        path : path, optional
            Where to save it; Matplotlib takes the kind of picture from the suffix.

        Raises
        ------
        StateError
            Matplotlib is not installed.
        """
        return _draw(self.operators, self.dtype, self.summary, path)


def _number(error: float) -> str:
    return "" if np.isnan(error) else f"{error:.2g}"


def _rank(error: float) -> float:
    return -1.0 if np.isnan(error) else error


@also(dtype="target_dtype")
def compare(net: Block, data: Any, loss: Callable[[Any], NDArray] | None = None, *, target_dtype: object = None,
            policy: Policy | None = None, loss_scale: float = 1.0, train_mode: bool = True,
            gradients: bool = True) -> Comparison:
    """Run a network in FP32 and in mixed precision on the same data, and compare every operator.

    Random operators draw the same numbers in both runs: MXNet's random numbers are seeded. Parameters, their gradients
    and running statistics stay as they are.

    Parameters
    ----------
    net : Block
        Hybridized or not, with initialized parameters.
    data : NDArray or tuple
        The arguments of its call: a small batch, since all intermediate results are kept, twice.
    loss : callable, optional
        Takes what the network returns and gives the loss to differentiate. Without it the gradients are those of the
        outputs multiplied by random numbers of a normal distribution, and added.
    target_dtype : {'float16', 'bfloat16'}, optional
        The low-precision type. Without it and ``policy`` the setting of :func:`~gluon_amp.init` holds where AMP is on,
        else the device's type.
    policy : Policy, optional
        The policy to compare, such as one of :func:`~gluon_amp.search_exclusions`.
    loss_scale : float
        Multiplies the gradient that the backward pass begins with, which float16 may need.
    train_mode : bool
        False for Dropout and BatchNorm to behave as in inference.
    gradients : bool
        Whether to compare gradients.

    Returns
    -------
    Comparison

    Raises
    ------
    DTypeError
        This machine cannot run the type.
    StateError
        Parameters are not initialized.
    PolicyError
        Both ``target_dtype`` and ``policy`` are given.
    TypeError
        ``net`` is not a block, or ``data`` holds no array.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(4, in_units=8)
    >>> net.initialize()
    >>> comparison = amp.compare(net, mx.nd.ones((2, 8)), target_dtype='float16')
    >>> [(item.op, item.dtype) for item in comparison.operators]
    [('FullyConnected', 'float16')]
    >>> comparison.outputs[0] < 0.001
    True
    """
    if target_dtype is not None and policy is not None:
        raise PolicyError("expected target_dtype or policy, received both: a policy has its type")
    arguments = arguments_of(data)
    make_ready(net, arguments)
    state = mixed_state(target_dtype, policy)
    fp32, mixed = run_both(net, arguments, state, train_mode, loss_scale if gradients else None, loss)
    return _compared(fp32, mixed, state)


def run_both(net: Block, arguments: Sequence[Any], state: State, train_mode: bool, scale: float | None = 1.0,
             loss: Callable[[Any], NDArray] | None = None) -> tuple[Run, Run]:
    """Run a network in FP32 and in a state with the same random numbers; without a scale there is no backward pass."""
    def run(state: State | None) -> Run:
        with unchanged(net):
            mx.random.seed(SEED)
            made = recorded_run(net, arguments, state, train_mode, None if scale is None else loss)
            if scale is not None:
                made.tape.backward(_seeds(made, scale), scale)
        return made
    return run(None), run(state)


def _seeds(run: Run, scale: float) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield the gradients that the backward pass begins with."""
    random = np.random.RandomState(SEED)
    for array in run.outputs if run.loss is None else float_arrays(run.loss):
        values = np.ones(array.shape) if run.loss is not None else random.normal(size=array.shape)
        yield array, mx.nd.array(values * scale, ctx=array.context, dtype=array.dtype)


def _compared(fp32: Run, mixed: Run, state: State) -> Comparison:
    eager = state.eager(fp32.outputs)
    if eager is None:
        raise PolicyError("the policy is not for the device that the network is on")
    target = eager.target
    in_mixed = {event.key: event for event in mixed.operators()}
    rounded = _rounded(mixed, target)
    rows = []
    for event in fp32.operators():
        other = in_mixed.get(event.key)
        if other is not None and any(map(is_float, event.outputs)):
            low = other.runs_in(target)
            alone = low and other.is_decided and event.repeatable
            isolated = isolated_errors(event, fp32.tape, eager) if alone else (0.0, 0.0)
            rows.append(OperatorError(
                event.name, event.op, event.block, target if low else FLOAT32, isolated[0],
                difference(fp32.tape, event.outputs, mixed.tape, rounded.get(id(other), other.outputs)),
                isolated[1] if event.marked and any(event.marked) else float("nan"),
                difference(fp32.tape, event.gradients, mixed.tape, other.gradients)))
    return Comparison(target, tuple(rows), tuple(difference(fp32.tape, [a], mixed.tape, [b])
                                                 for a, b in zip(fp32.outputs, mixed.outputs)),
                      dict(_parameter_errors(fp32, mixed)))


def _rounded(run: Run, target: str) -> dict[int, list[NDArray]]:
    """Return the outputs of operators in an imitated type, which compute in FP32, after their rounding."""
    rounded: dict[int, list[NDArray]] = {}
    for event in run.tape.events:
        source = event.sources[0] if event.sources else None
        if (event.is_inserted_cast and source is not None and source.event.runs_in(target)
                and not source.event.inserted and dtype_of(event.outputs[0]) == target):
            outputs = rounded.setdefault(id(source.event), list(source.event.outputs))
            outputs[source.output] = event.outputs[0]
    return rounded


def _parameter_errors(fp32: Run, mixed: Run) -> Iterator[tuple[str, float]]:
    in_mixed = mixed.tape.parameter_gradients
    pairs = {fp32.names[key]: (fp32.tape.values(gradient).astype("float64"), mixed.tape.values(in_mixed[key]))
             for key, gradient in fp32.tape.parameter_gradients.items() if key in fp32.names and key in in_mixed}
    squares = [expected_.ravel() ** 2 for expected_, _ in pairs.values()]
    typical = np.sqrt(np.concatenate(squares).mean()) if squares else 0.0
    for name, pair in pairs.items():
        yield name, relative_error([pair], _NEGLIGIBLE * typical * np.sqrt(pair[0].size))


def _draw(rows: Sequence[OperatorError], dtype: str, title: str, path: Any = None) -> Any:
    """Draw outputs' errors above, gradients' below, in the order of the operators; return the figure."""
    panels = [panel for panel in _PANELS if any(getattr(row, panel[1]) > 0 for row in rows)] or [_PANELS[0]]
    figure = new_figure(figsize=(11, 3.6 * len(panels)), layout="constrained")
    for axes, panel in zip(np.atleast_1d(figure.subplots(len(panels), 1, sharex=True)), panels):
        _panel(axes, rows, dtype, *panel)
    figure.axes[-1].set_xlabel("operator, in the order of the forward pass")
    figure.suptitle(title, fontsize=9)
    if path is not None:
        save_figure(figure, path)
    return figure


def _panel(axes: Any, rows: Sequence[OperatorError], dtype: str, title: str, accumulated: str, isolated: str) -> None:
    positions = np.arange(len(rows))
    together = np.array([getattr(row, accumulated) for row in rows])
    alone = np.array([getattr(row, isolated) for row in rows])
    low = np.array([row.dtype == dtype for row in rows], dtype=bool)
    axes.plot(positions, np.where(np.isfinite(together), together, np.nan), color="#999999", linewidth=1,
              label="accumulated")
    axes.scatter(positions[low], alone[low], s=14, color=COLOURS[dtype], label=f"isolated, in {dtype}")
    axes.scatter(positions[~low], together[~low], s=9, color=COLOURS["float32"], label="accumulated, in float32")
    culprit = first_infinite(rows, accumulated)
    if culprit is not None:
        axes.axvline(culprit, color="#D55E00", linewidth=1, label="first infinite error")
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylabel(f"relative error of the {title}")
    axes.legend(fontsize=8, loc="lower right")
    for position in np.argsort(-np.nan_to_num(alone, nan=-1.0, posinf=-1.0))[:_LABELLED]:
        if low[position] and alone[position] > 0:
            axes.annotate(rows[position].name, (position, alone[position]), fontsize=7, xytext=(3, 3),
                          textcoords="offset points")
