"""The layers of docs/design.md: imports point downwards, and MXNet's private names stay in one place.

    python tests/test_layers.py

writes the list in docs/design.md anew.
"""
from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import gluon_amp

ROOT = Path(gluon_amp.__file__).parent
DESIGN = ROOT.parent / "docs" / "design.md"
# From the top to the bottom: a module may import from lower lines only, or from its own package.
LAYERS = {
    "__init__": "the public names",
    "__main__": "python -m gluon_amp",
    "cli": "the command gluon-amp, and what its check measures",
    "compat": "the faces for people from elsewhere: Apex's levels, torch's GradScaler, mxnet.contrib.amp, MXNet 2",
    "debug": "report, explain, trace_overflow, compare, search_exclusions",
    "export": "ONNX files of trained networks",
    "convert": "conversion for inference",
    "training": "loss scaling: init_trainer, scale_loss and their kin, checkpoints, event handlers for Estimator",
    "parallel": "several processes and devices: KVStore, Horovod, batch normalization over them",
    "session": "what users switch on: init, regions, functions; the names of MXNet that are replaced",
    "plan": "what a graph becomes, made once, and what runs it: cached ops, executors",
    "eager": "one imperative call",
    "state": "what is in force: settings, exclusions, policies, devices",
    "native": "operators in C++ and their loader",
    "_mxnet": "MXNet's private names, and nothing that decides",
    "passes": "the driver, and the rewrites of graphs",
    "rules": "which precision an operator runs in, and why: tables, shapes, policy",
    "graph": "Graph, Node and Entry over symbol JSON; what attributes say; edits",
    "machine": "versions, CPUs, threads and GPUs; the data types that they run; what operators cost on a CPU",
    "base": "checks and names of arguments, values that nest, files that are whole or absent, distances of results",
    "errors": "exceptions, and their wording"}
# Lines of each room at the most, files of the package, and lines of what stands beside it: what is there now.
BUDGET = {
    "native": 197, "files of the package": 118, "tools": 2980,
    "benchmarks": 3525, "benchmarks/README.md": 295,
    "C++": 5270,  # swish, and sums and means of all values, which MXNet gives to one thread, have their own kernels
    "the package": 19936, "top level": 175,
    # Versions, NumPy 1's names and CUDA's libraries are 200 lines; threads, AMX, glibc and the CUDA driver 300.
    "machine": 824,
    "base": 366,
    "rules": 1144,  # the tables are 490 lines; user lists and policies from files are checked, 160 lines
    "graph": 514,  # nnvm's format is checked as it is read: MXNet itself reads beyond its arrays
    # 42 functions of one statement, which keep MXNet's private names here, are 230 lines. Optimizer states in files,
    # ONNX, INT8 and NumPy 2 are 630.
    "_mxnet": 2367,
    # 13 public names with their documentation and checks are a quarter; the choice of a type (gains, oneDNN, AMX, GPUs
    # and their variables) is 230 lines; the replacements of 26 of MXNet's names, and blocks' calls, are 370.
    "session and state": 1472,
    # 25 rewrites, drawn at the head of each file (190 lines). Attention is recognised in every form in which Gluon,
    # GluonNLP and scripts write it (400); the choice of kernels by cost is 255; the tables of passes, wrong gradients
    # and operators in C++ are 310.
    "passes": 3376,
    # Half is about symbols that are bound, for Module: shapes that change, and gradients that a conversion has spoilt.
    "plan": 942,
    # The search of types for INT8, its ranges and its operators are 610 lines; ConversionOptions is 250, a quarter of
    # it its documentation.
    "convert": 1686,
    # A run is recorded for graphs and for eager calls, with gradients on request (830 lines); trace_overflow tells
    # seven kinds of faults apart (420); each of the six lines of a report's summary looks at other facts (135).
    "debug": 2229,
    "cli": 759,  # 310 are what `check` measures, more than half of them the rows of rates.json
    # Losses that carry a scale, running statistics of skipped steps, users' operators in Python and wrong gradients
    # each need a call of their own: 540 lines beside the casts.
    "eager": 851,
    # The decision on a step is one object: sums over devices before gradients are clipped, and warnings of skipped
    # steps, are in it.
    "training": 1033,
    # Refusals of networks in which batch normalization over processes would hang or be wrong are 90 lines.
    "parallel": 764,
    # Half of it is the documentation and the checks of initialize and GradScaler; 11 names of MXNet 2 and 30 functions
    # that take `device`, as the AMP tutorial is written, are 85 lines.
    "compat": 779,
    "export": 458,  # a file is compared with MXNet tensor by tensor, rounded to float16 behind each operator (160)
    # Each operator in C++, each wrong gradient and each rule has its case; samples and networks in helpers are 3,000.
    "tests": 27000}
GROUPS = ("export/", "session/", "passes/", "machine/")  # each begins a group of the list
# Likewise, inside of a package.
INSIDE = {
    "parallel": ["sync_batchnorm", "__init__", "reduction", "groups"],
    "machine": ["costs", "dtypes", "host", "start", "__init__"],
    "base": ["metrics", "files", "context", "aliases", "checks", "__init__"],
    "compat": ["stand_in", "grad_scaler", "opt_level", "__init__"],
    "debug": ["search", "overflow", "explain", "compare", "report", "recorder", "recording", "records",
              "__init__"],
    "training": ["estimator", "checkpoint", "scaling", "trainer_scaler", "loss_scaler", "__init__"],
    "session": ["autocast", "init", "hooks", "block_calls", "__init__"],
    "plan": ["cached_op", "executors", "planner", "__init__"],
    "eager": ["applier", "loss_scale", "running_stats", "custom_operators", "gradient_fixes",
              "native", "__init__"],
    "state": ["blocks", "in_force", "state", "devices", "__init__"],
    "rules": ["__init__", "policy", "shapes", "tables", "decision"], "graph": ["__init__", "edit", "graph", "attrs"]}
FREE_OF_MXNET = {"passes", "rules", "graph", "machine", "base", "errors", "training/loss_scaler"}
MAY_USE_PRIVATE_NAMES = ("_mxnet", "session/hooks")  # to replace names of MXNet is what hooks are
OF_PYTHON = {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
OF_MXNETS_EXECUTORS = {"_ctx", "_grad_req", "_group2ctx", "_monitor_all"}  # which plan/executors derives its class from


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield parts, ast.parse(path.read_text())


def imports(parts, tree):
    """Yield (is the package's own, first part of the module) of every import statement."""
    package = parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((False, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[:len(package) - node.level + 1], *(node.module or "").split("."))
            names = [base[0]] if base[0] else [alias.name for alias in node.names]
            yield from ((True, name) for name in names)
        elif isinstance(node, ast.ImportFrom):
            yield False, node.module.split(".")[0]


def listing():
    """Return the list of docs/design.md."""
    names = [f"{name}/" if (ROOT / name).is_dir() else name for name in LAYERS]
    width = max(map(len, names)) + 2
    return "\n".join(f"{'' if name not in GROUPS else chr(10)}    {name:<{width}}{text}"
                     for name, text in zip(names, LAYERS.values()))


def written_anew(text):
    return re.sub(r"(## Layers\n\n.*?\n\n).*?(?=\n\nFrom `passes`)", lambda found: found[1] + listing(), text,
                  flags=re.DOTALL)


def test_the_design_lists_what_is_tested_here():
    assert written_anew(DESIGN.read_text()) == DESIGN.read_text(), "run python tests/test_layers.py"


def test_every_module_has_a_layer():
    assert {parts[0] for parts, _ in modules()} == set(LAYERS)


def test_imports_point_downwards():
    order = list(LAYERS)
    wrong = [("/".join(parts), name) for parts, tree in modules() for own, name in imports(parts, tree)
             if own and name != parts[0] and order.index(name) < order.index(parts[0])]
    assert wrong == []


def at_import(tree):
    """Yield the statements that run when a module is imported, without those for type checkers."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
            yield node


def test_imports_inside_of_packages_point_downwards_too():
    for package, order in INSIDE.items():
        found = {parts[1] for parts, _ in modules() if parts[0] == package}
        assert found == set(order), package
        for parts, tree in modules():
            if parts[0] != package:
                continue
            for node in at_import(tree):
                if not (isinstance(node, ast.ImportFrom) and node.level == len(parts) - 1):
                    continue
                names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                for name in names:
                    if name != parts[1]:
                        assert order.index(name) > order.index(parts[1]), f"{'/'.join(parts)} imports {name}"


def test_lower_layers_do_not_import_mxnet():
    wrong = ["/".join(parts) for parts, tree in modules() for own, name in imports(parts, tree)
             if not own and name == "mxnet" and FREE_OF_MXNET & {parts[0], "/".join(parts)}]
    assert wrong == []


def private_names(tree):
    """Yield (line, name) of each private attribute that is read, and of each private name taken from MXNet."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "mxnet":
            yield from ((node.lineno, f"mxnet's {alias.name}") for alias in node.names if is_private(alias.name))


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined(tree):
    """Yield the names that a module defines, of attributes too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_private_names_of_mxnet_stay_in_one_package():
    own = {name for _, tree in modules() for name in defined(tree)} | OF_PYTHON
    wrong = [f"{'/'.join(parts)}:{line} {name}" for parts, tree in modules()
             if not "/".join(parts).startswith(MAY_USE_PRIVATE_NAMES)
             for line, name in private_names(tree)
             if name not in own and not (parts == ("plan", "executors") and name in OF_MXNETS_EXECUTORS)]
    assert wrong == []


def sizes():
    """Return what BUDGET bounds."""
    def lines(*paths):
        return sum(path.read_text().count("\n") for path in paths)

    rooms = Counter()
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0] if path.parent != ROOT else "top level"
        rooms["session and state" if room in ("session", "state") else room] += lines(path)
    project = ROOT.parent
    return {**rooms, "the package": sum(rooms.values()), "C++": lines(*(ROOT / "native" / "src").iterdir()),
            "files of the package": len(list(ROOT.rglob("*.py"))),
            **{name: lines(*(path for path in (project / name).rglob("*.py")))
               for name in ("tests", "tools", "benchmarks")},
            "benchmarks/README.md": lines(project / "benchmarks" / "README.md")}


def test_nothing_is_above_its_budget():
    found = sizes()
    assert set(found) == set(BUDGET)
    assert {name: f"{found[name]} of {BUDGET[name]}" for name in BUDGET if found[name] > BUDGET[name]} == {}


def test_every_public_name_is_documented():
    missing = [name for name in gluon_amp.__all__ if not (getattr(gluon_amp, name).__doc__ or "").strip()]
    assert missing == []


if __name__ == "__main__":
    DESIGN.write_text(written_anew(DESIGN.read_text()))
