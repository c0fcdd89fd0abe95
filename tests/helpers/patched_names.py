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


def _replaced(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, owner and attribute of every call that replaces an attribute and writes both of them out."""
    for call in ast.walk(tree):
        if (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _REPLACING
                and len(call.args) > 1 and not any(keyword.arg == "raising" for keyword in call.keywords)):
            owner, name = _dotted(call.args[0]), call.args[1]
            if owner and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield call.lineno, owner, name.value


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
