"""Measure what each graph pass of gluon_amp is worth: networks that it acts on, with the pass and without.

    python benchmarks/passes.py
    python benchmarks/passes.py --passes fuse,align_channels --networks resnet50,ssd512 --rounds 5
    python benchmarks/passes.py --small --rounds 1          # tiny networks, to see whether everything works

The network with all passes and those without one of them each are processes of their own that take turns.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, replace
from time import monotonic
from typing import Any, Iterator, Mapping, Sequence

from benchmarks.harness import cli, machine, report, suites, tables
from benchmarks.harness.compare import Plan
from benchmarks.harness.registry import OURS

TRAINING, INFERENCE = "training", "inference"
_SUITES = {TRAINING: suites.TRAINING, INFERENCE: replace(suites.INFERENCE, inspects=False)}

# pass -> workload -> networks that it acts on. A new pass needs a line: a test says so.
MEASURED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "shape_operands": {TRAINING: ("ssd512",), INFERENCE: ("ssd512",)},
    "channels_last": {TRAINING: ("mobilenet_v2",)},
    "native_operators": {TRAINING: ("mobilenet_v2", "lstm", "encoder")},
    "native_activations": {TRAINING: ("mobilenet_v2",)},
    "align_channels": {TRAINING: ("ssd512", "mobilenet_v2"), INFERENCE: ("ssd512", "mobilenet_v2")},
    "fold_stride": {TRAINING: ("resnet50", "ssd512")},
    "drop_training": {INFERENCE: ("vgg16",)},
    "fold_batch_norm": {INFERENCE: ("resnet50", "mobilenet_v2", "densenet121")},
    "dilate_pointwise": {INFERENCE: ("resnet50", "mobilenet_v2")},
    "cast_params_offline": {INFERENCE: ("resnet50", "vgg16")},
    "fuse": {INFERENCE: ("resnet50", "mobilenet_v2", "densenet121", "ssd512")},
}
BATCH_SIZES = {
    TRAINING: {"ssd512": 2, "resnet50": 4, "mobilenet_v2": 4, "densenet121": 4, "lstm": 4, "encoder": 4},
    INFERENCE: {"ssd512": 2, "resnet50": 8, "mobilenet_v2": 8, "densenet121": 8, "vgg16": 8},
}
_NETWORKS = sorted({name for sizes in BATCH_SIZES.values() for name in sizes})


def without(name: str) -> str:
    """Return the implementation that leaves a pass out.

    Examples
    --------
    >>> without("fuse")
    'amp~fuse'
    """
    return f"{OURS}~{name}"


def jobs(passes: Sequence[str], networks: Sequence[str] | None = None) -> Iterator[tuple[str, str, list[str]]]:
    """Yield what is compared at once: a workload, a network, and the passes to leave out in turn.

    Examples
    --------
    >>> list(jobs(["fuse", "cast_params_offline"], ["resnet50"]))
    [('inference', 'resnet50', ['fuse', 'cast_params_offline'])]
    """
    for workload, sizes in BATCH_SIZES.items():
        for network in sizes:
            chosen = [name for name in passes if network in MEASURED[name].get(workload, ())]
            if chosen and (networks is None or network in networks):
                yield workload, network, chosen


def measure(args: argparse.Namespace, end: float = math.inf) -> dict[str, Any]:
    """Measure what the arguments ask for, show each comparison, and return everything, ready for JSON."""
    passes = list(MEASURED) if args.passes is None else cli.names("--passes", args.passes, "pass", MEASURED)
    networks = None if args.networks is None else cli.names("--networks", args.networks)
    common = suites.common_settings(args)
    compared, skipped = [], []
    planned = list(jobs(passes, networks))
    for number, (workload, network, chosen) in enumerate(planned):
        plan = suites.share_of(cli.plan(args), end - monotonic(), [1.0] * (len(planned) - number))
        if plan is None:
            skipped.append([workload, network])
            continue
        result = _compared(workload, network, chosen, common, plan)
        compared.append({"workload": workload, **result.as_dict()})
        for comparison in result.comparisons:
            report.show(result.settings, comparison)
    return {"settings": common, "plan": asdict(cli.plan(args)), "machine": machine.describe(),
            "text": report.machine_text(), "versions": machine.versions(), "compared": compared,
            "skipped": skipped}


def _compared(workload: str, network: str, passes: Sequence[str], common: Mapping[str, Any],
              plan: Plan) -> suites.Result:
    batch_size = BATCH_SIZES[workload][network]
    wanted = [OURS, *map(without, passes)]
    with report.TqdmProgress() as progress:
        progress.say(f"{network}, {workload}, batch {batch_size}")
        return suites.measure(_SUITES[workload], network, batch_size, wanted, common, plan, progress)


def markdown(measured: Mapping[str, Any]) -> str:
    """Return the table of what `measure` returned, and the conditions under it."""
    order = ["", *MEASURED]
    rows = sorted((row for each in measured["compared"] for row in _rows(each)), key=lambda row: order.index(row[0]))
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    heading = ("pass", "network", "off", "on", "off / on (lowest to highest)")
    table = tables.table(heading, [[f"`{name}`" if name else "all", *cells] for name, *cells in rows])
    return (f"{table}\n{measured['text']}Python {measured['machine']['python']}, {versions}; "
            f"OMP_NUM_THREADS={measured['settings']['threads']}\n")


def _rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each pass that was left out, '' for none; a reason in the place of figures where that failed."""
    dtypes = [track["about"]["dtype"] for track in tables.tracks(result).values()][:1]
    where = ", ".join([tables.NAMES[result["network"]], result["workload"], f"batch {result['batch_size']}", *dtypes])
    for name, reason in result["failures"].items():
        yield [name.partition("~")[2], where, reason.replace("|", "/"), "", ""]
    for comparison in result["comparisons"]:
        on, *others = comparison["implementations"]
        for off in others if on["name"] == OURS else ():
            ratio = comparison["speed_ratios"][f"{on['name']} vs {off['name']}"]
            times = [tables.seconds(track["seconds_per_step"]["median"]) for track in (off, on)]
            yield [off["name"].partition("~")[2], where, *times,
                   f"**{ratio['median']:.2f}x** ({tables.span(ratio)})"]


def run(argv: Sequence[str] | None) -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--passes", metavar="NAMES", help=f"some of {', '.join(MEASURED)} (default: all)")
    parser.add_argument("--networks", metavar="NAMES", help=f"some of {', '.join(_NETWORKS)} (default: all)")
    parser.add_argument("--small", action="store_true", help="tiny networks, to see whether everything works")
    cli.add_measuring(parser, budget=60.0, plots=False)
    args = parser.parse_args(argv)
    if args.networks is not None:
        cli.names("--networks", args.networks, "network", _NETWORKS)
    measured = measure(args)
    print(markdown(measured))
    cli.write_json(args.json, measured)



if __name__ == "__main__":
    sys.exit(cli.main(run))
