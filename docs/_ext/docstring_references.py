"""Lets docstrings refer to names as their module sees them.

A public name leads to its place in the reference, wherever it is defined. Names that exist but have no page become
plain text. What does not exist stays a warning.
"""
from __future__ import annotations

import sys
from contextlib import suppress
from operator import attrgetter
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import gluon_amp


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> nodes.Element | None:
    """Resolve a reference that Sphinx could not; None leaves it unresolved."""
    if node.get("refdomain") != "py" or not node.get("py:module", "").startswith("gluon_amp"):
        return None
    if node["reftype"] == "attr":
        return content if _documents(node, node["reftarget"]) else None
    found = _named(node["reftarget"], node["py:module"])
    name = getattr(found, "__name__", None)
    if name in gluon_amp.__all__ and getattr(gluon_amp, name) is found:
        return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, node["reftype"],
                                                 f"gluon_amp.{name}", node, content)
    return content if found is not None else None


def _named(target: str, module: str) -> Any:
    """Return what a name stands for in a module, else in any of the package, or by its full name; None for nothing."""
    package = sorted(name for name in sys.modules if name.split(".")[0] == "gluon_amp")
    for owner, path in [*((name, target) for name in (module, *package)), ("gluon_amp", target.partition(".")[2])]:
        with suppress(AttributeError):
            return attrgetter(path)(sys.modules[owner])
    return None


def _documents(node: pending_xref, attribute: str) -> bool:
    """Whether the docstring of the class around a reference lists an attribute."""
    owner = _named(node.get("py:class") or "", node["py:module"])
    return f"\n    {attribute} :" in (getattr(owner, "__doc__", "") or "")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the resolver."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
