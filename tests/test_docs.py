"""Every Python sample of the README and the docs runs; links lead somewhere."""
from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gluon_amp

ROOT = Path(gluon_amp.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md",
         ROOT / "CONTRIBUTING.md"]
SAMPLES = [(page, number, code) for page in PAGES
           for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))]
MODULES = [module.name for module in pkgutil.walk_packages(gluon_amp.__path__, "gluon_amp.")
           if not module.name.endswith("__main__")]


@pytest.mark.parametrize(("page", "number", "code"), SAMPLES, ids=lambda value: getattr(value, "name", None))
def test_samples_run(page, number, code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.mark.bf16
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
