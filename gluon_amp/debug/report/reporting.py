"""``amp.report``: every operator of a network, the precision planned for it and the one it really runs in."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet.gluon import Block

from ... import checks
from ...elsewhere import answers
from ...errors import expected
from ...state.in_force import in_force
from ..tables import print_table, text_table
from .capture import capture
from .picture import draw
from .rows import InsertedRow, OperatorRow, make_rows
from .summary import LOW, size_of, summarized

if TYPE_CHECKING:
    from rich.table import Table


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
    Next: for inference amp.convert_hybrid_block(net) casts 2 parameters once, not at each call
    >>> amp.deinit()
    """
    checks.true_or_false("train", train)
    checks.true_or_false("time", time)
    captured = capture(net, data, train, time)
    operators, inserted = make_rows(captured.ran, net if isinstance(net, Block) else None)
    is_on, device = in_force.is_on(), captured.device or mx.cpu()
    policies = [record.policy for record in captured.ran if record.policy is not None and is_on]
    current = in_force.policy(device)
    return Report(tuple(operators), tuple(inserted), train, time, captured.other_milliseconds,
                  tuple(sorted({policy.target_dtype for policy in policies if policy.lowers})),
                  any(policy.imitated for policy in policies), device.device_type,
                  tuple(sorted({name for policy in policies for name in policy.disabled_passes})),
                  current.reason if current is not None else "", device.device_id)


@dataclass(frozen=True, repr=False)
class Report:
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
        return not (self.target_dtypes or self.reason or any(row.precision in LOW for row in self.operators))

    def arithmetic_share(self, dtype: str | None = None) -> float:
        """Return the share of the arithmetic, 0 to 1, that runs in a type; by default in any low-precision type."""
        wanted = LOW if dtype is None else (dtype,)
        return _share(sum(row.flops for row in self.operators if row.precision in wanted), self.flops)

    @property
    def summary(self) -> str:
        """At most six lines: what runs low, what stays wide and why, and what to do next."""
        return summarized(self)

    @property
    def _first_line(self) -> str:
        return self.summary.partition("\n")[0]

    @property
    def measure(self) -> str:
        """What :meth:`share` is a part of: ``'time'`` where it was taken, else ``'arithmetic'``."""
        return "time" if self.timed else "arithmetic"

    def share(self, rows: Sequence[OperatorRow]) -> float:
        """Return the part of the network, 0 to 1, that some operators are."""
        if self.timed:
            return _share(sum(row.milliseconds for row in rows), self.milliseconds)
        return _share(sum(row.flops for row in rows), self.flops)

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

    def table(self, by: str = "operator", wide: bool = False) -> Table:
        """Return a table for rich, with the summary around it.

        Parameters
        ----------
        by : {'operator', 'block', 'op'}
            A line per operator, per block, or per kind of operator.
        wide : bool
            Whether a line per operator has blocks, what was planned, rules and reasons, too.

        Raises
        ------
        ValueError
            ``by`` is something else.
        """
        if by not in ("operator", *_GROUPS):
            raise ValueError(expected("'operator', 'block' or 'op'", "by", by))
        if by != "operator":
            return text_table(list(self._group_lines(by)), _NUMBERS, self.summary)
        red = [number for number, row in enumerate(self.operators) if row in self.mismatches]
        return text_table(list(self._operator_lines(wide)), _NUMBERS, self.summary, red)

    def _operator_lines(self, wide: bool) -> Iterator[dict[str, str]]:
        for row in self.operators:
            yield {"operator": row.name, "kind": f"{row.op} (C++)" if row.native else row.op,
                   **({"block": row.path or row.block, "planned": str(row.planned)} if wide else {}),
                   "observed": str(row.observed), **self._shares([row], wide),
                   **({"rule": row.rule, "reason": row.reason} if wide else {})}

    def _group_lines(self, by: str) -> Iterator[dict[str, str]]:
        groups: dict[str, list[OperatorRow]] = defaultdict(list)
        for row in self.operators:
            groups[_GROUPS[by](row)].append(row)
        for name, rows in sorted(groups.items(), key=lambda item: -sum(row.flops for row in item[1])):
            low = sum(row.precision in LOW for row in rows)
            yield {by: name, "operators": str(len(rows)), "in low precision": str(low), **self._shares(rows, True)}

    def _shares(self, rows: Sequence[OperatorRow], wide: bool) -> dict[str, str]:
        casts = sum(row.casts for row in rows)
        converted = sum(row.bytes_converted for row in rows)
        return {"arithmetic": f"{_share(sum(row.flops for row in rows), self.flops):.1%}",
                "casts": str(casts or ""), **({"converted": size_of(converted) if casts else ""} if wide else {}),
                **({"time": f"{self.share(rows):.1%}"} if self.timed else {})}

    def print(self, by: str = "operator", wide: bool = False) -> None:
        """Print :meth:`table`: as wide as the terminal, or with all columns and as wide as they are."""
        print_table(self.table(by, wide), wide)

    @answers(backend="pictures are Matplotlib's", by="there is a bar for each operator")
    def plot(self, path: Any = None) -> Any:
        """Draw each operator's part of the time, or of the arithmetic, coloured by precision.

        Parameters
        ----------
        path : path, optional
            Where to write it; Matplotlib takes the kind of picture from the suffix.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        StateError
            Matplotlib is not installed.
        """
        return draw(self.operators, self._first_line, self.timed, path)

    def __rich__(self) -> Table:
        return self.table()

    def _repr_mimebundle_(self, include: Any = (), exclude: Any = (), **_: Any) -> dict[str, str]:
        return self.table("op")._repr_mimebundle_(include, exclude)

    def __repr__(self) -> str:
        return f"<Report: {self._first_line}>"

    def __str__(self) -> str:
        return self.summary


_NUMBERS = ("arithmetic", "casts", "converted", "time", "operators", "in low precision")
_GROUPS: dict[str, Callable[[OperatorRow], str]] = {"block": lambda row: row.path or row.block,
                                                    "op": lambda row: row.op}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
