"""Every sample of the README and the docs runs; links lead somewhere; the API reference has every public name."""
from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys

import pytest
from doc_samples import DOCS, EXCERPTS, PAGES, ROOT, commands, complaint, program, sides, strings

import gluon_amp

PROGRAMS = {page: program(page.read_text()) for page in PAGES}
MODULES = [module.name for module in pkgutil.walk_packages(gluon_amp.__path__, "gluon_amp.")
           if not module.name.endswith(("__main__", "._core"))]  # the latter is no module but a library of operators
# Their examples name bfloat16, to show what it does.
SHOW_BFLOAT16 = ("gluon_amp.debug.explain", "gluon_amp.debug.report")


def page_id(page):
    return str(page.relative_to(ROOT))


@pytest.mark.machine
@pytest.mark.parametrize("page", [page for page, code in PROGRAMS.items() if code.strip()], ids=page_id)
def test_python_samples_of_a_page_run_in_order(page, tmp_path):
    script = tmp_path / f"{page.stem}.py"
    script.write_text(PROGRAMS[page])
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


THREE_LINES = ROOT / "examples" / "three_lines"


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=page_id)
def test_the_diff_has_the_two_scripts_as_its_sides(page):
    assert sides(page.read_text()) == tuple((THREE_LINES / f"{side}.py").read_text() for side in ("before", "after"))


@pytest.mark.machine
@pytest.mark.parametrize("side", ["before", "after"])
def test_the_two_scripts_of_the_readme_print_their_speed(side, tmp_path):
    code = (THREE_LINES / f"{side}.py").read_text().replace("resnet50_v1()", "resnet18_v1()").replace("224", "32")
    (tmp_path / "script.py").write_text(code)
    # On Python 3.12 MXNet alone cannot be imported: the README names this way.
    runner = ["-m", "gluon_amp", "run", "--no-init"] if side == "before" and sys.version_info >= (3, 12) else []
    done = subprocess.run([sys.executable, *runner, "script.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(step \d: [\d.]+ images a second\n){5}", done.stdout)


@pytest.mark.parametrize("page", [*PAGES, *EXCERPTS], ids=page_id)
def test_shell_samples_name_what_exists(page):
    assert [complaint(words) for words in commands(page.read_text()) if complaint(words)] == []


@pytest.mark.parametrize("page", [*PAGES, *EXCERPTS], ids=page_id)
def test_links_lead_to_files(page):
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def test_the_reference_has_every_public_name_once():
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    named = re.findall(r"^- `(\w+)`(?: and its members)?$", pages, re.MULTILINE)
    assert sorted(named) == sorted(gluon_amp.__all__)


def test_the_navigation_has_every_page():
    entries = {str((page.parent / entry.strip()).with_suffix(".md").resolve().relative_to(DOCS.resolve()))
               for page in DOCS.rglob("*.md")
               for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
               for entry in tree.splitlines() if entry and not entry.startswith(":")}
    assert entries == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}


def test_messages_that_troubleshooting_quotes_are_raised():
    table = (DOCS / "troubleshooting.md").read_text().split("| Message begins | Cause |")[1]
    messages = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    directories = {path.parent for path in (ROOT / "gluon_amp").rglob("*.py")}
    texts = "\n".join(text for directory in directories for text in strings(directory))
    parts = [part.strip() for message in messages for part in message.split("...")]
    assert len(messages) > 5
    assert [part for part in parts if part not in texts] == []


@pytest.mark.machine
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.bf16) if name in SHOW_BFLOAT16 else name
                                  for name in MODULES])
def test_examples_in_docstrings_hold(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
