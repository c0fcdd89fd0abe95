"""Lets pages be Markdown that any viewer of the repository shows, and the site have what only Sphinx reads.

``<!-- site:`` and ``-->`` enclose text for the site alone, such as a table of contents. ``[`init`](api/switching.md)``
leads to the name on its page. An item ``- `init` `` of a page of the reference becomes the name's documentation;
``- `Policy` and its members`` has those too.
"""
from __future__ import annotations

import inspect
import re
from operator import attrgetter

from sphinx.application import Sphinx

import gluon_amp


def for_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Put Sphinx's own notation into a page."""
    text = re.sub(r"<!-- site:\n(.*?)\n-->", r"\1", source[0], flags=re.DOTALL)
    text = re.sub(r"\[`((?:amp\.)?)([\w.]+)`\]\([./]*api/\w+\.md\)", r"{py:obj}`\1\2 <gluon_amp.\2>`", text)
    if page.startswith("api/"):
        text = re.sub(r"^- `([\w.]+)`( and its members)?$", _documentation, text, flags=re.MULTILINE)
    source[0] = text


def _documentation(item: re.Match[str]) -> str:
    name = item[1]
    found = attrgetter(name)(gluon_amp)
    exception = inspect.isclass(found) and issubclass(found, Exception)
    kind = "exception" if exception else "class" if inspect.isclass(found) else "function"
    option = "\n   :show-inheritance:" if exception else "\n   :members:" if item[2] else ""
    return f"```{{eval-rst}}\n.. currentmodule:: gluon_amp\n.. auto{kind}:: gluon_amp.{name}{option}\n```"


def setup(app: Sphinx) -> dict[str, bool]:
    """Change pages when they are read."""
    app.connect("source-read", for_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
