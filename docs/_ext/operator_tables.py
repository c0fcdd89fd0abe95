"""The ``operator-table`` directive: gluon_amp's rules for one target type as a table, read from the package itself.

Every operator becomes an object of Sphinx's search, with its row as the target.
"""
from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar, Iterator, Sequence

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.domains import Domain, ObjType

from gluon_amp._mxnet.invoke import registered_operators
from gluon_amp.compat.stand_in import INPUT_NAMES
from gluon_amp.rules import LOWER, Rule
from gluon_amp.rules.tables import table

HEADINGS = ("Operator, and its other names", "Rule", "Holds for", "Why", "May be forced low")
WIDTHS = (34, 10, 14, 33, 9)


class OperatorTable(Directive):
    """``{operator-table} bfloat16``: one row per record, in order of precedence, operators sorted by name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        dtype = self.arguments[0]
        domain = self.state.document.settings.env.get_domain(OperatorDomain.name)
        domain.data["pages"][dtype] = self.state.document.settings.env.docname
        group = nodes.tgroup(cols=len(HEADINGS))
        group += [nodes.colspec(colwidth=width) for width in WIDTHS]
        group += nodes.thead("", _row([[_text(heading)] for heading in HEADINGS]))
        group += nodes.tbody("", *_rows(dtype))
        return [nodes.table("", group, classes=["operator-table", "colwidths-given"])]


class OperatorDomain(Domain):
    """Makes operators known to the search."""

    name = "operator"
    label = "MXNet"
    object_types: ClassVar = {"rule": ObjType("operator")}
    initial_data: ClassVar[dict[str, Any]] = {"pages": {}}

    def get_objects(self) -> Iterator[tuple[str, str, str, str, str, int]]:
        """Yield name, shown name, kind, page, anchor and priority of every operator."""
        for dtype, page in self.data["pages"].items():
            for name in table(dtype):
                yield name, f"{name} ({dtype})", "rule", page, _anchor(name), 1

    def clear_doc(self, docname: str) -> None:
        """Forget a page that is read anew."""
        self.data["pages"] = {dtype: page for dtype, page in self.data["pages"].items() if page != docname}

    def merge_domaindata(self, docnames: Sequence[str], otherdata: dict[str, Any]) -> None:
        """Take over what a parallel reader found."""
        self.data["pages"].update(otherdata["pages"])


def _rows(dtype: str) -> Iterator[nodes.row]:
    aliases = _aliases()
    for name, records in sorted(table(dtype).items(), key=lambda item: _public_first(item[0])):
        for index, record in enumerate(records):
            first = index == 0
            yield _row([_names(name, aliases[name] if first else (), first), [nodes.literal("", record.rule)],
                        [_text(_condition(record))], [_text(_reason(name, record))], [_text(_forced(record))]])


def _public_first(name: str) -> tuple[bool, str]:
    return name.startswith("_"), name.lower()


def _condition(record: Rule) -> str:
    parts = [f"{record.when[0]} = {' or '.join(record.when[1])}"] if record.when else []
    if record.min_channels:
        parts.append(f"{record.min_channels} input channels or more; any number with AMX")
    return ", ".join(parts)


def _reason(name: str, record: Rule) -> str:
    known = INPUT_NAMES.get(name, ())
    inputs = [known[index] if index < len(known) else f"input {index}" for index in record.fp32_inputs]
    return f"{record.note} (FP32: {', '.join(inputs)})" if inputs else record.note


def _forced(record: Rule) -> str:
    return "runs low" if record.rule == LOWER else "yes" if record.safe else "no"


def _aliases() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, registered in sorted(registered_operators().items()):
        if name != registered:
            found[registered].append(name)
    return found


def _names(name: str, aliases: Sequence[str], first: bool) -> list[nodes.Node]:
    """Return an operator's cell: its name, which the first of its rows makes a target, and its aliases."""
    found: list[nodes.Node] = [nodes.literal("", name, ids=[_anchor(name)] if first else [])]
    for alias in aliases:
        found += [nodes.Text(" "), nodes.literal("", alias, classes=["alias"])]
    return found


def _anchor(name: str) -> str:
    return f"operator-{name}"


def _text(text: str) -> nodes.Text:
    return nodes.Text(text)


def _row(cells: Sequence[Sequence[nodes.Node]]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and the domain."""
    app.add_directive("operator-table", OperatorTable)
    app.add_domain(OperatorDomain)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
