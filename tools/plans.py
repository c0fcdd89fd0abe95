"""Write down what the rewriter makes of every network of the tests' zoo, and compare two such notes.

    python tools/plans.py --write DIR [NETWORK ...]
    python tools/plans.py --compare DIR [NETWORK ...]

A change that moves code leaves every plan as it was: write the plans before it, compare them after. Networks run once
in FP32, for their graphs and shapes; the plans are made for devices that this machine need not have.
"""
from __future__ import annotations

import argparse
import difflib
import gzip
import hashlib
import multiprocessing
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

DEVICES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bfloat16": ("bfloat16", {"channel_multiple": 16}),
    "bfloat16_amx": ("bfloat16", {"channel_multiple": 32, "amx": True}),
    "float16_gpu": ("float16", {"channel_multiple": 8}), "float16_imitated": ("float16", {"imitated": True})}
SHOWN = 6  # lines of a difference


class Call(NamedTuple):
    """A graph that ran: its symbol, inputs, and which of them are data."""

    symbol: Any
    names: Sequence[str]
    arrays: Sequence[Any]
    data: frozenset[int]


def calls_of(name: str) -> list[Call]:
    """Run a network's inference and loss hybridized, in FP32, and return every graph that ran."""
    import gluon_amp  # noqa: F401  before MXNet

    # isort: split
    import mxnet as mx
    from mxnet import autograd
    from zoo_networks import make_task

    task = make_task(name)
    found: dict[str, Call] = {}
    stock = mx.ndarray.CachedOp

    class Noting(stock):  # type: ignore[misc, valid-type]
        """Notes what it is called with."""

        def __init__(self, symbol: Any, flags: Any = ()):
            super().__init__(symbol, flags)
            self.noted = symbol, tuple(symbol.list_inputs()), frozenset(dict(flags).get("data_indices", ()))

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            symbol, names, data = self.noted
            key = symbol.tojson(remove_amp_cast=False) + str([(array.shape, array.dtype) for array in args])
            found.setdefault(key, Call(symbol, names, args, data))
            return super().__call__(*args, **kwargs)

    mx.ndarray.CachedOp = Noting
    try:
        task.net.hybridize()
        task.infer(task.net, task.data)
        task.net.hybridize()  # networks that ask whether they train are traced anew
        with autograd.record():
            task.loss(task.net, task.data)
        mx.nd.waitall()
    finally:
        mx.ndarray.CachedOp = stock
    return list(found.values())


def policy_of(device: str) -> tuple[Any, Any]:
    """Return the policy for a kind of device, and the device."""
    from gluon_amp._mxnet.invoke import registered_operators
    from gluon_amp.rules import Device, Policy, make_policy

    dtype, settings = DEVICES.get(device, ("float32", {}))
    return Policy(dtype) if dtype == "float32" else make_policy(dtype, registered_operators()), Device(**settings)


def training_plan(call: Call, device: str, accumulated: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the lines of what a graph becomes in training."""
    from gluon_amp._mxnet.symbols import dtype_name
    from gluon_amp.passes import Facts
    from gluon_amp.plan.planner import Planner
    from gluon_amp.state.state import State

    kind = "gpu" if device.endswith("gpu") else "cpu"
    facts = Facts(dtypes=tuple(dtype_name(array.dtype) for array in call.arrays), device=kind, accumulated=accumulated,
                  dense=False)
    shapes = [array.shape for array in call.arrays]
    policy, runs = policy_of(device)
    state = State({kind: policy}, {kind: runs})
    yield from lines(Planner(call.symbol).plan(state, facts, shapes, lambda: shapes).graph)


def conversion_plan(call: Call, device: str) -> Iterator[str]:
    """Yield the lines of what a graph becomes when it is converted; float32 when no device is named."""
    import mxnet as mx

    from gluon_amp._mxnet.symbols import dtype_name, to_graph
    from gluon_amp.convert.convert import Network, convert

    arrays = {name: array for position, (name, array) in enumerate(zip(call.names, call.arrays))
              if position not in call.data}
    policy, runs = policy_of(device)
    data = {call.names[position]: call.arrays[position] for position in call.data}
    made = convert(Network(call.symbol, arrays, list(data), replace(policy, training=False), runs,
                           [mx.gpu() if device.endswith("gpu") else mx.cpu()], data))
    record = made.record
    steps = ", ".join(f"{name} {count}" for name, count in record.steps.items())
    yield (f"{record.target_dtype}: {record.low_precision} of {record.operators} operators in low precision, "
           f"{record.casts} casts" + f"; {steps}" * bool(steps))
    yield from (f"parameter {name} {dtype_name(array.dtype)} {array.shape}"
                for name, array in sorted(made.arrays.items()))
    yield from lines(to_graph(made.symbol))


def lines(graph: Any) -> Iterator[str]:
    """Yield one line for each operator, and one for the outputs; what a pass put in has a plus sign."""
    from gluon_amp.graph import Role

    def name(entry: Any) -> str:
        return entry.node.name + (f".{entry.output}" if entry.output else "")

    for node in graph.operators():
        attrs = " ".join(f"{key}={value}" for key, value in sorted(node.attrs.items()) if not key.startswith("__"))
        # What MXNet writes of fused operators differs from run to run in its order.
        fused = sorted(inner["op"] for graph in node.extra.get("subgraphs", ()) for inner in graph["nodes"]
                       if inner["op"] != "null")
        inside = f"[{' '.join(fused)}]" if fused else ""
        decision = f" | {node.decision.rule} | {node.decision.note}" if node.decision is not None else ""
        types = ", ".join(map(str, node.planned or node.dtypes))
        mark = " " if node.role is Role.OWN else "+"
        yield (f"{mark} {node.op} {node.name}({', '.join(map(name, node.inputs))}) {attrs}{inside} -> {types}"
               f"{decision}")
    yield f"  out: {', '.join(map(name, graph.heads))}"


def plans(name: str) -> dict[str, list[str]]:
    """Return the lines of every plan of a network."""
    found: dict[str, list[str]] = {}
    for number, call in enumerate(calls_of(name)):
        weights = frozenset(name for position, name in enumerate(call.names) if position not in call.data)
        for device in DEVICES:
            found[f"{name}.{number}.train.{device}"] = list(training_plan(call, device))
            found[f"{name}.{number}.convert.{device}"] = list(conversion_plan(call, device))
        found[f"{name}.{number}.train.bfloat16.add"] = list(training_plan(call, "bfloat16", weights))
        found[f"{name}.{number}.convert.float32"] = list(conversion_plan(call, ""))
    return found


def digest(text: Sequence[str]) -> str:
    """Return a short hash of lines."""
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def write(name: str, folder: Path) -> list[str]:
    """Write the plans of a network; return a line for each."""
    told = []
    for title, text in plans(name).items():
        (folder / f"{title}.txt.gz").write_bytes(gzip.compress("\n".join(text).encode(), mtime=0))
        told.append(f"{digest(text)}  {title}  {len(text)} lines")
    return told


def compare(name: str, folder: Path, ignored: Sequence[str]) -> list[str]:
    """Return the differences between the plans of a network and those in a folder."""
    told: list[str] = []
    now = plans(name)
    known = {path.name[:-len(".txt.gz")] for path in folder.glob(f"{name}.*.txt.gz")}
    told += [f"{title}: is new" for title in sorted(now.keys() - known)]
    told += [f"{title}: is missing" for title in sorted(known - now.keys())]
    for title in sorted(now.keys() & known):
        before = gzip.decompress((folder / f"{title}.txt.gz").read_bytes()).decode().split("\n")
        pair = [[_without(line, ignored) for line in text] for text in (before, now[title])]
        changes = [line for line in difflib.unified_diff(*pair, lineterm="", n=0)
                   if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        if changes:
            counts = Counter(line[0] for line in changes)
            told.append(f"{title}: {counts['-']} lines gone, {counts['+']} new")
            told += [f"    {line[:200]}" for line in changes[:SHOWN]]
    return told


def _without(line: str, ignored: Sequence[str]) -> str:
    if "roles" in ignored and line[:2] == "+ ":
        line = f"  {line[2:]}"
    parts = line.split(" | ")
    return " | ".join(parts[:1] if "rules" in ignored else parts[:2] if "notes" in ignored else parts)


def _work(task: tuple[str, Path, str, Sequence[str]]) -> tuple[str, list[str]]:
    name, folder, what, ignored = task
    return name, write(name, folder) if what == "write" else compare(name, folder, ignored)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", metavar="DIR", type=Path)
    group.add_argument("--compare", metavar="DIR", type=Path)
    parser.add_argument("--ignore", action="append", default=[], choices=["roles", "rules", "notes"],
                        help="who put a node there; why it runs in its precision; the reasons that people read")
    parser.add_argument("networks", nargs="*")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import zoo_networks

    names = options.networks or list(zoo_networks.NETWORKS)
    folder = options.write or options.compare
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [(name, folder, "write" if options.write else "compare", options.ignore) for name in names]
    # Names of layers are numbered from the start of a process: each network gets one of its own.
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        results = list(pool.imap_unordered(_work, tasks, chunksize=1))
    told = [line for name in names for found, text in results if found == name for line in text]
    print("\n".join(told) or f"all plans of {len(names)} networks are equal")
    return int(bool(options.compare and told))


if __name__ == "__main__":
    sys.exit(main())
