"""The layers of docs/design.md: imports point downwards, and MXNet's private names stay in one place."""
from __future__ import annotations

import ast
from pathlib import Path

import gluon_amp

ROOT = Path(gluon_amp.__file__).parent
# From the top to the bottom; a module may import from lower lines only, or from its own package.
LAYERS = ["__init__", "cli", "debug", "tune", "convert", "audit", "compatibility", "estimator", "checkpoint",
          "functions", "opt_level", "sync_batchnorm", "training", "trainer_scaler", "parallel", "autocast", "state",
          "devices", "_mxnet", "passes", "rules", "graph", "loss_scaler", "dtypes",
          "errors", "files", "_isa", "_compat"]
FREE_OF_MXNET = {"passes", "rules", "graph", "loss_scaler", "dtypes", "errors",
                 "files", "_isa", "_compat"}


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


def test_every_module_has_a_layer():
    assert {parts[0] for parts, _ in modules()} == set(LAYERS)


def test_imports_point_downwards():
    wrong = [("/".join(parts), name) for parts, tree in modules() for own, name in imports(parts, tree)
             if own and name != parts[0] and LAYERS.index(name) < LAYERS.index(parts[0])]
    assert wrong == []


def test_lower_layers_do_not_import_mxnet():
    wrong = ["/".join(parts) for parts, tree in modules() for own, name in imports(parts, tree)
             if not own and name == "mxnet" and parts[0] in FREE_OF_MXNET]
    assert wrong == []


def test_private_names_of_mxnet_stay_in_one_package():
    objects = {"mx", "mxnet", "gluon", "trainer", "block", "symbol", "parameter", "param"}
    wrong = [f"{'/'.join(parts)}:{node.lineno} {node.attr}" for parts, tree in modules() if parts[0] != "_mxnet"
             for node in ast.walk(tree)
             if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
             and isinstance(node.value, ast.Name) and node.value.id in objects]
    assert wrong == []


def test_every_public_name_is_documented():
    missing = [name for name in gluon_amp.__all__ if not (getattr(gluon_amp, name).__doc__ or "").strip()]
    assert missing == []
