"""oneDNN's own log of what it ran, as data and as a table against the machine's ceilings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable, Iterator, Mapping, Sequence

from . import tables

_EXECUTIONS = re.compile(r"^(?:dnnl|onednn)_verbose,exec,cpu,(.+)$", re.MULTILINE)
_BYTES = {"f32": 4, "s32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1}
_ROWS = 25


@dataclass(frozen=True)
class Execution:
    """One line of oneDNN's log.

    Attributes
    ----------
    primitive, kernel, direction : str
        Such as ``'convolution'``, ``'jit:avx512_core_amx_bf16'``, ``'backward_data'``.
    tensors : str
        Types and layouts: ``'src_bf16:acdb ...'``.
    shape : str
        oneDNN's own description.
    seconds : float
        What it took.
    """

    primitive: str
    kernel: str
    direction: str
    tensors: str
    shape: str
    seconds: float

    @property
    def precision(self) -> str:
        """``'bf16'`` or ``'f32'``, the type of the first tensor."""
        return "bf16" if "bf16" in self.tensors.partition(" ")[0] else "f32"

    @property
    def gflop(self) -> float:
        """1e9 operations of a convolution or inner product, 0 for others."""
        return _operations(self) / 1e9

    @property
    def gigabytes(self) -> float:
        """What it has to read and write at least: every tensor once, 0 where the shape does not tell."""
        return _traffic(self) / 1e9


def executions(log: str) -> Iterator[Execution]:
    """Read oneDNN's log.

    Examples
    --------
    >>> line = ("dnnl_verbose,exec,cpu,eltwise,jit:avx512_core_bf16,forward_training,"
    ...         "data_bf16::blocked:acdb:f0 diff_undef::undef::f0,,alg:eltwise_relu,8x64x4x4,0.5")
    >>> next(executions(line)).tensors
    'data_bf16:acdb'
    """
    for match in _EXECUTIONS.finditer(log):
        primitive, kernel, direction, tensors, *_, shape, milliseconds = match.group(1).split(",")
        yield Execution(primitive, kernel, direction, _short(tensors), shape, float(milliseconds) / 1e3)


def _short(tensors: str) -> str:
    """Keep the type and layout of each tensor that there is."""
    found = []
    for text in tensors.split():
        name, *rest = text.split(":")
        layout = next((part for part in rest if re.fullmatch(r"[A-Za-z0-9]*[a-e][A-Za-z0-9]*", part)
                       and part != "blocked" and not re.fullmatch(r"f[0-9a-f]+", part)), "")
        if not name.endswith("undef"):
            found.append(f"{name}:{layout}" if layout else name)
    return " ".join(found)


def _dimensions(shape: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"([a-z]+)(\d+)", shape)}


def _operations(run: Execution) -> float:
    size = _dimensions(run.shape)
    if run.primitive == "convolution" and {"mb", "ic", "oc", "oh", "ow"} <= size.keys():
        channels = size["ic"] * size["oc"] / size.get("g", 1)
        return 2.0 * size["mb"] * channels * size["oh"] * size["ow"] * size.get("kh", 1) * size.get("kw", 1)
    if run.primitive == "inner_product" and {"mb", "ic", "oc"} <= size.keys():
        return 2.0 * size["mb"] * size["ic"] * size["oc"] * size.get("ih", 1) * size.get("iw", 1)
    return 0.0


def _traffic(run: Execution) -> float:
    plain = re.fullmatch(r"\d+(?:x\d+)*", run.shape)
    size = _dimensions(run.shape)
    if plain:
        values = float(_product(int(part) for part in run.shape.split("x")))
    elif run.primitive == "batch_normalization" and {"mb", "ic"} <= size.keys():
        values = float(_product(size[name] for name in ("mb", "ic", "ih", "iw") if name in size))
    else:
        return 0.0
    types = [_BYTES.get(tensor.split(":")[0].rpartition("_")[2], 0) for tensor in run.tensors.split()]
    if len(types) == 1:  # data in and out, one description
        types *= 2
    if run.primitive in ("batch_normalization", "eltwise") and len(types) == 2 and "backward" in run.direction:
        types.append(types[1])
    return values * sum(types)


def _product(values: Iterable[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


def table_of(runs: Sequence[Execution], step: float, by: Sequence[str], ceilings: Mapping[str, float]) -> str:
    """Return the table of a step.

    Parameters
    ----------
    runs : sequence of Execution
        The primitives of the step.
    step : float
        Its seconds.
    by : sequence of str
        Attributes of an execution that make a row.
    ceilings : mapping
        ``bf16`` and ``f32`` in 1e9 operations a second, ``memory`` in 1e9 bytes a second.
    """
    rows: dict[tuple[str, ...], list[Execution]] = {}
    for run in runs:
        rows.setdefault(tuple(getattr(run, name) for name in by), []).append(run)
    ordered = sorted(rows.items(), key=lambda row: -_total(row[1]))
    lines = [_row(key, group, step, ceilings) for key, group in ordered[:_ROWS]]
    lines.append(["other primitives", *_time([run for _, group in ordered[_ROWS:] for run in group], step), "", ""])
    outside = step - _total(runs)
    lines.append(["outside oneDNN", "", f"{outside * 1e3:.1f}", f"{outside / step:.0%}", "", ""])
    return tables.table([", ".join(by), "calls", "ms", "share", "speed", "of the ceiling"], lines)


def _total(runs: Iterable[Execution]) -> float:
    return sum(run.seconds for run in runs)


def _time(group: Sequence[Execution], step: float) -> list[str]:
    return [str(len(group)), f"{_total(group) * 1e3:.1f}", f"{_total(group) / step:.0%}"]


def _row(key: Sequence[str], group: Sequence[Execution], step: float, ceilings: Mapping[str, float]) -> list[str]:
    seconds = max(_total(group), 1e-9)
    gflop, gigabytes = sum(run.gflop for run in group), sum(run.gigabytes for run in group)
    low = group[0].precision
    speed = of = ""
    if gflop:
        speed, of = f"{gflop / seconds:.0f} GFLOP/s", f"{gflop / seconds / ceilings[low]:.0%} of {low}"
    elif gigabytes:
        speed, of = f"{gigabytes / seconds:.1f} GB/s", f"{gigabytes / seconds / ceilings['memory']:.0%} of memory"
    return [", ".join(key), *_time(group, step), speed, of]
