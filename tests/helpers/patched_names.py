"""Names that tests replace: one that is gone is said at collection, also of tests that this machine skips."""
from __future__ import annotations

import ast
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator, Mapping

_REPLACING = {"setattr", "delattr", "object"}  # of pytest's monkeypatch and of mock.patch


def gone_in(*folders: Path) -> list[str]:
    """Name what the loaded modules of some folders replace and what does not exist."""
    files = {module.__file__: vars(module) for module in list(sys.modules.values())
             if isinstance(module, ModuleType) and isinstance(getattr(module, "__file__", None), str)}
    return [line for path, names in sorted(files.items())
            if path.endswith(".py") and any(folder in Path(path).parents for folder in folders)
            for line in gone(path, Path(path).read_text(encoding="utf-8"), names)]


def gone(path: str, code: str, names: Mapping[str, Any]) -> list[str]:
    """Name the attributes of the names of a module that its code replaces and that do not exist."""
    return [f"{path}:{line}: {owner}.{attribute}" for line, owner, attribute in _replaced(ast.parse(code))
            if not _exists(names, *owner.split("."), attribute)]


def _replaced(node: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[tuple[int, str, str]]:
    """Yield line, owner and attribute where an attribute of what is no local name is replaced, both written out."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        local = local.union(each.arg if isinstance(each, ast.arg) else each.id for each in ast.walk(node)
                            if isinstance(each, ast.arg) or _is_assigned(each))
    if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _REPLACING
            and len(node.args) > 1 and not any(keyword.arg == "raising" for keyword in node.keywords)):
        owner, name = _dotted(node.args[0]), node.args[1]
        known = owner and owner.split(".")[0] not in local
        if known and isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield node.lineno, owner, name.value
    for child in ast.iter_child_nodes(node):
        yield from _replaced(child, local)


def _is_assigned(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _dotted(expression: ast.expr) -> str:
    if isinstance(expression, ast.Attribute):
        owner = _dotted(expression.value)
        return owner and f"{owner}.{expression.attr}"
    return expression.id if isinstance(expression, ast.Name) else ""


def _exists(names: Mapping[str, Any], first: str, *rest: str) -> bool:
    """Tell whether an attribute of a module's name exists; what only a function knows is left to its test."""
    try:
        attrgetter(".".join(rest))(names[first])
    except KeyError:
        return True
    except AttributeError:
        return False
    return True
