"""``amp.report``: every operator of a network, the precision planned for it and the one it really runs in."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterator, Sequence

import mxnet as mx
from mxnet.gluon import Block

from ... import checks
from ...dtypes import FLOAT16, INT8, LOW_PRECISION
from ...errors import expected
from ...state.in_force import in_force
from ..console import fitted, print_table
from ..notebook import Shown
from .capture import capture
from .plot import plot
from .rows import InsertedRow, OperatorRow, make_rows

if TYPE_CHECKING:
    from rich.table import Table
_LOW = (*LOW_PRECISION, INT8)


def report(net: Block | mx.sym.Symbol, data: Any, *, train: bool = False, time: bool = False) -> Report:
    """Run a network once and say what mixed precision did to it, operator by operator.

    Hybridized blocks are reported as the graphs that they run, with the types that the engine gives for every output;
    code that is not hybridized as the operators that were called. Converted networks are reported as they are. The
    network is left as it was.

    Parameters
    ----------
    net : Block or Symbol
        The network. A block must be initialized. A symbol is run under the settings that are in force now; inputs that
        ``data`` does not name are filled with ones.
    data : NDArray, or sequence of them
        The argument of the network's call, or all its arguments in a tuple. For a symbol a dict of input names to
        arrays or shapes.
    train : bool
        Run as in training: ``autograd.record`` is on. Running statistics and gradients are put back afterwards.
    time : bool
        Take the time of every operator with MXNet's profiler, which nothing else may use meanwhile: the median of three
        runs. With ``train`` the backward pass, from the sum of the outputs, is part of it.

    Returns
    -------
    Report

    Raises
    ------
    TypeError
        ``net`` is neither a block nor a symbol, or ``data`` holds no array.
    StateError
        The network's parameters are not initialized.
    GraphError
        ``data`` names an input that the symbol does not have, or leaves a shape unknown.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> amp.init('bfloat16')
    >>> net = mx.gluon.nn.Dense(4, in_units=8, prefix='fc_')
    >>> net.initialize()
    >>> net.hybridize()
    >>> found = amp.report(net, mx.nd.ones((2, 8)))
    >>> found.operators[0].name, found.operators[0].observed
    ('fc_fwd', 'bfloat16')
    >>> print(found.summary)
    1 of 1 operators in bfloat16, 100% of the arithmetic, 4 casts (360 bytes)
    >>> amp.deinit()
    """
    checks.true_or_false("train", train)
    checks.true_or_false("time", time)
    captured = capture(net, data, train, time)
    operators, inserted = make_rows(captured.ran, net if isinstance(net, Block) else None)
    is_on, device = in_force.is_on(), captured.device or mx.cpu()
    policies = [record.policy for record in captured.ran if record.policy is not None and is_on]
    return Report(tuple(operators), tuple(inserted), train, time, captured.other_milliseconds,
                  tuple(sorted({policy.target_dtype for policy in policies if policy.lowers})),
                  device.device_type != "gpu" and any(policy.target_dtype == FLOAT16 for policy in policies),
                  device.device_type,
                  tuple(sorted({name for policy in policies for name in policy.disabled_passes})),
                  in_force.device(device).reason if in_force.policy(device) is not None else "", device.device_id)


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """What one run of a network showed; made by :func:`gluon_amp.report`.

    Attributes
    ----------
    operators : tuple of OperatorRow
        The network's own operators, in the order in which they ran.
    inserted : tuple of InsertedRow
        What AMP added: casts, and helpers such as the padding of channels.
    train, timed : bool
        Whether it ran as in training, and whether times were taken.
    other_milliseconds : float
        Time of what belongs to no operator, such as sums of gradients and the backward pass of plain code.
    target_dtypes : tuple of str
        The low-precision types in force; empty when AMP was off.
    imitated : bool
        Whether low precision was imitated.
    device_type : str
        The kind of device that it ran on, ``'cpu'`` or ``'gpu'``.
    disabled_passes : tuple of str
        The graph passes that are switched off.
    reason : str
        Why AMP keeps everything in FP32 on this device; empty where it does not.
    device_id : int
        Which device of its kind it ran on: GPUs of one machine may differ.

    Examples
    --------
    ::

        found = amp.report(net, data)
        print(found.summary)
        found.print(by='block')
        found.plot('net.png')
        json.dump(found.to_dict(), file)
    """

    _rest: ClassVar[str] = "print() of it lists the operators; amp.explain(net, name) says why"
    operators: tuple[OperatorRow, ...]
    inserted: tuple[InsertedRow, ...]
    train: bool
    timed: bool
    other_milliseconds: float
    target_dtypes: tuple[str, ...]
    imitated: bool
    device_type: str = "cpu"
    disabled_passes: tuple[str, ...] = ()
    reason: str = ""
    device_id: int = 0

    @property
    def device(self) -> mx.Context:
        """The device that it ran on."""
        return mx.Context(self.device_type, self.device_id)

    @property
    def casts(self) -> tuple[InsertedRow, ...]:
        """The casts between operators of different precision."""
        return tuple(row for row in self.inserted if row.is_cast)

    @property
    def flops(self) -> int:
        """The arithmetic of the forward pass."""
        return sum(row.flops for row in self.operators)

    @property
    def milliseconds(self) -> float:
        """All time taken."""
        rows: Sequence[Any] = (*self.operators, *self.inserted)
        return sum(row.milliseconds for row in rows) + self.other_milliseconds

    @property
    def mismatches(self) -> tuple[OperatorRow, ...]:
        """The operators that ran in another precision than planned."""
        return tuple(row for row in self.operators if row.observed not in (None, row.planned))

    @property
    def is_off(self) -> bool:
        """Whether AMP was off, and nothing ran in low precision by itself."""
        return not (self.target_dtypes or self.reason or any(row.precision in _LOW for row in self.operators))

    def arithmetic_share(self, dtype: str | None = None) -> float:
        """Return the share of the arithmetic, 0 to 1, that runs in a type; by default in any low-precision type."""
        wanted = _LOW if dtype is None else (dtype,)
        return _share(sum(row.flops for row in self.operators if row.precision in wanted), self.flops)

    @property
    def summary(self) -> str:
        """One sentence on what happened, and one for each point that needs attention."""
        return ". ".join([self._counts(), *self._remarks()])

    def _counts(self) -> str:
        low = [row for row in self.operators if row.precision in _LOW]
        if self.reason and not low:
            return (f"float32: {self.reason}. All {len(self.operators)} operators run in FP32, {len(self.inserted)} "
                    "were added to make them faster")
        kinds = " and ".join(sorted({str(row.precision) for row in low})) or "low precision"
        return (f"{len(low)} of {len(self.operators)} operators in {kinds}, {self.arithmetic_share():.0%} of the "
                f"arithmetic, {len(self.casts)} casts ({_bytes(sum(row.bytes_converted for row in self.casts))})")

    def _remarks(self) -> Iterator[str]:
        if self.is_off:
            yield "AMP is off"
        if self.imitated:
            yield "Low precision is imitated, and its casts are not counted"
        if self.disabled_passes:
            yield f"Passes that are off: {', '.join(self.disabled_passes)}"
        natively = sum(row.native for row in self.operators)
        if natively:
            yield f"{natively} of the operators ran in C++ of this package"
        eager = sum(not row.in_graph for row in self.operators)
        if eager:
            yield (f"{eager} operators ran outside of graphs, as the code called them: only these calls are covered, "
                   "not their backward pass, nor array methods that make views")
        if self.mismatches:
            yield f"Not as planned: {', '.join(row.name for row in self.mismatches)}"
        silent = sum(row.observed is None for row in self.operators)
        if silent:
            yield f"The engine reported nothing of {silent} operators"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers.

        Examples
        --------
        ::

            sorted(found.to_dict())
            # ['arithmetic_share', 'flops', 'imitated', 'inserted', 'milliseconds', 'operators', 'summary', ...]
        """
        return {"summary": self.summary, "target_dtypes": list(self.target_dtypes), "imitated": self.imitated,
                "disabled_passes": list(self.disabled_passes), "reason": self.reason,
                "device_type": self.device_type, "device_id": self.device_id, "train": self.train, "timed": self.timed,
                "flops": self.flops, "arithmetic_share": self.arithmetic_share(), "milliseconds": self.milliseconds,
                "operators": [asdict(row) for row in self.operators],
                "inserted": [{**asdict(row), "is_cast": row.is_cast} for row in self.inserted]}

    def table(self, by: str = "operator", width: int | None = None) -> Table:
        """Return a table for rich.

        Parameters
        ----------
        by : {'operator', 'block', 'op'}
            A line per operator, per block, or per kind of operator.
        width : int, optional
            The columns that there is room for: where there is little, the columns that matter least are left out.

        Raises
        ------
        ValueError
            ``by`` is something else.
        """
        from rich.table import Table

        if by not in ("operator", *_GROUPS):
            raise ValueError(expected("'operator', 'block' or 'op'", "by", by))
        table = Table(title=self.summary, title_justify="left", caption_justify="left")
        lines = self._operator_lines() if by == "operator" else self._group_lines(by)
        for number, line in enumerate(lines):
            if not number:
                for name in line:
                    table.add_column(name, no_wrap=name != "reason", min_width=30 if name == "reason" else None,
                                     justify="right" if name in _NUMBERS else "left")
            table.add_row(*line.values())
        table = fitted(table, _DISPENSABLE, width)
        if by == "operator" and not any(column.header == "reason" for column in table.columns):
            table.caption = "amp.explain() gives the reasons; on the command line --wide and --json do, too"
        return table

    def _operator_lines(self) -> Iterator[dict[str, str]]:
        for row in self.operators:
            observed = str(row.observed) if row.observed in (None, row.planned) else f"[red]{row.observed}[/red]"
            yield {"operator": row.name, "kind": f"{row.op} (C++)" if row.native else row.op,
                   "block": row.path or row.block, "planned": str(row.planned),
                   "observed": observed, **self._shares([row]), "rule": row.rule, "reason": row.reason}

    def _group_lines(self, by: str) -> Iterator[dict[str, str]]:
        groups: dict[str, list[OperatorRow]] = defaultdict(list)
        for row in self.operators:
            groups[_GROUPS[by](row)].append(row)
        for name, rows in sorted(groups.items(), key=lambda item: -sum(row.flops for row in item[1])):
            low = sum(row.precision in _LOW for row in rows)
            yield {by: name, "operators": str(len(rows)), "in low precision": str(low), **self._shares(rows)}

    def _shares(self, rows: Sequence[OperatorRow]) -> dict[str, str]:
        cells = {"arithmetic": f"{_share(sum(row.flops for row in rows), self.flops):.1%}",
                 "casts": "", "converted": ""}
        if any(row.casts for row in rows):
            cells["casts"] = str(sum(row.casts for row in rows))
            cells["converted"] = _bytes(sum(row.bytes_converted for row in rows))
        if self.timed:
            cells["time"] = f"{_share(sum(row.milliseconds for row in rows), self.milliseconds):.1%}"
        return cells

    def print(self, by: str = "operator", wide: bool = False) -> None:
        """Print :meth:`table`, without the columns that matter least where there is little room, unless ``wide``."""
        print_table(lambda width: self.table(by, width), wide)

    def plot(self, path: Any = None, backend: str = "matplotlib", by: str = "operator") -> Any:
        """Draw the network coloured by precision.

        Parameters
        ----------
        path : path, optional
            Where to write it. Matplotlib takes the kind of picture from the suffix. Graphviz writes its source to
            ``.gv`` and ``.dot`` files; other suffixes need Graphviz's program ``dot``.
        backend : {'matplotlib', 'graphviz'}
            What draws it.
        by : {'operator', 'block'}
            A box per operator, or per block.

        Returns
        -------
        matplotlib.figure.Figure or graphviz.Digraph

        Raises
        ------
        ValueError
            ``backend`` or ``by`` has another value.
        StateError
            The backend, or the program ``dot``, is not installed.
        """
        return plot(self.operators, self.summary, path, backend, by)

    def __rich__(self) -> Table:
        return self.table()

    def _shown_table(self) -> Table:
        """Return a line for each kind of operator, the largest share of the arithmetic first."""
        return self.table("op")

    def __str__(self) -> str:
        return self.summary


# What a narrow terminal does without, first to last: the observed precision is shown.
_DISPENSABLE = ("rule", "planned", "converted", "reason", "block", "casts", "kind")
_NUMBERS = {"arithmetic", "casts", "converted", "time", "operators", "in low precision"}
_GROUPS: dict[str, Callable[[OperatorRow], str]] = {"block": lambda row: row.path or row.block,
                                                    "op": lambda row: row.op}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _bytes(count: int) -> str:
    from rich.filesize import decimal

    return decimal(count)
