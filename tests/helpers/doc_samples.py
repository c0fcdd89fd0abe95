"""What the Markdown pages show: their Python samples as one program, the commands of their shell samples."""
from __future__ import annotations

import ast
import re
import shlex
from functools import lru_cache
from pathlib import Path
from typing import Callable, Iterator

import gluon_amp
from gluon_amp.cli import parser

ROOT = Path(gluon_amp.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]
# They show parts of the programs beside them, which have tests of their own.
EXCERPTS = [*sorted((ROOT / "examples").glob("*/README.md")), ROOT / "notebooks" / "README.md"]

# Samples that are not to run, such as those of other packages, are fenced as `py`.
_FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
_SHELL = ("", "sh", "bash", "console")
# Programs of others, whose arguments are not for us to know.
_FOREIGN = (".", "apt-get", "cd", "export", "git", "gunicorn", "jupyter", "source")
_READERS_SCRIPT = "train.py"


def program(text: str) -> str:
    """Join the Python samples of a page, each on the lines that it has there, so that errors name these."""
    lines = [""] * (text.count("\n") + 1)
    for fence in _FENCE.finditer(text):
        if fence[2] == "python":
            first = text.count("\n", 0, fence.start(3))
            sample = fence[3].splitlines()
            lines[first:first + len(sample)] = sample
    return "\n".join(lines)


def sides(text: str) -> tuple[str, str]:
    """Return what the one ``diff`` of a page was made from, and what it leads to."""
    (changes,) = (fence[3].splitlines() for fence in _FENCE.finditer(text) if fence[2] == "diff")
    before, after = ([line[1:] for line in changes if line[:1] not in signs] for signs in ("+", "-"))
    return "\n".join([*before, ""]), "\n".join([*after, ""])


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in the shell samples of a page."""
    for _, language, code in _FENCE.findall(text):
        if language in _SHELL:
            for line in code.replace("\\\n", " ").splitlines():
                yield from _split(re.sub(r"^\$ ", "", line.strip()))


def _split(line: str) -> Iterator[list[str]]:
    """Split a line at ``;``, ``&&`` and ``|``; leave out variables that are set for a command."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|"):
            if words:
                yield words
            words = []
        elif words or not re.match(r"[A-Za-z_]\w*=", word):
            words.append(word)


def complaint(words: list[str]) -> str | None:
    """Say what in a command does not exist; None when all does."""
    if "python" in words[1:]:  # behind a launcher
        words = words[words.index("python"):]
    known = _CHECKS.get(words[0])
    if known is not None:
        return known(words[1:])
    return None if words[0] in _FOREIGN or (ROOT / words[0]).is_file() else f"nothing checks {words[0]}"


def _check_make(words: list[str]) -> str | None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return _first_missing((word for word in words if "=" not in word), targets, "target")


def _check_pip(words: list[str]) -> str | None:
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    asked = [name for word in words for extras in re.findall(r"^\.\[(.*)\]$", word) for name in extras.split(",")]
    return _first_missing(asked, re.findall(r"^(\w+) = \[", section, re.MULTILINE), "extra")


def _check_python(words: list[str]) -> str | None:
    """Check that a script or module exists and that its directory has the options as strings."""
    if words[:1] == ["-c"]:
        compile(words[1], "sample", "exec")
        return None
    module = words[:1] == ["-m"]
    if words[:2] == ["-m", "venv"] or words[0] == _READERS_SCRIPT:
        return None
    script = ROOT.joinpath(*words[1].split(".")) / "__main__.py" if module else ROOT / words[0]
    if not script.is_file():
        return f"no file {script.relative_to(ROOT)}"
    options = (word.split("=")[0] for word in words if word.startswith("--"))
    return _first_missing(options, strings(script.parent), "option")


def _check_command_line(words: list[str]) -> str | None:
    try:
        parser().parse_args(words)
    except SystemExit as error:
        return f"gluon-amp ends with {error.code}"
    return None


@lru_cache(maxsize=None)
def strings(directory: Path) -> frozenset[str]:
    """Return every string in a directory's Python files: the options that argparse is told about are among them."""
    return frozenset(node.value for path in directory.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
                     if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _first_missing(names: Iterator[str] | list[str], known: frozenset[str] | list[str], kind: str) -> str | None:
    return next((f"no {kind} {name}" for name in names if name not in known), None)


_CHECKS: dict[str, Callable[[list[str]], str | None]] = {
    "gluon-amp": _check_command_line, "make": _check_make, "pip": _check_pip, "python": _check_python}
