"""Every figure of the README and of the first pages was measured, as `benchmarks/facts.json` says."""
from __future__ import annotations

import json
import re
import statistics

import pytest
from doc_samples import DOCS, ROOT

FACTS = json.loads((ROOT / "benchmarks" / "facts.json").read_text())
SSD = [fact for fact in FACTS if "batch" in fact]  # the machines of the README's first table
MEASURED = (ROOT / "benchmarks" / "README.md").read_text()
NUMBER = r"\d+(?:\.\d+)?"
KNOWN = {number for fact in FACTS for figure in fact["figures"].values() for number in re.findall(NUMBER, figure)}
_RANGE = rf"({NUMBER})(?: (?:to|and|of) ({NUMBER}))?"
_UNIT = re.compile(rf"{_RANGE}(?:x\b| times\b| s\b|%| images a second| networks)|\b(?:all|mAP|least) ({NUMBER})\b")
_IN_TABLES = re.compile(r"()()(\d+\.\d+)")
_VERSIONS = re.compile(r"compute capability.*|(?:Python|NumPy) [\d.]+(?: to [\d.]+)?")
# Columns of the zoos' table, whose first one is the network's name.
ZOOS = {("training", "Intel Xeon 6/207, AMX hidden"): 1, ("converted", "Intel Xeon 6/207, AMX hidden"): 3,
        ("training", "AMD EPYC 25/1 (AVX2)"): 4, ("converted", "AMD EPYC 25/1 (AVX2)"): 6,
        ("training", "AMD EPYC 26/2, AVX512-BF16"): 7, ("converted", "AMD EPYC 26/2, AVX512-BF16"): 9}


def unknown(text):
    """Return the figures of a page that no fact has."""
    lines = [_VERSIONS.sub("", line) for line in text.splitlines()]
    found = [number for line in lines for pattern in (_UNIT, *[_IN_TABLES] * line.startswith("|"))
             for match in pattern.findall(line) for number in match if number]
    return [number for number in found if number not in KNOWN]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/getting_started.md", "docs/faq.md"])
def test_figures_are_measured(page):
    assert unknown((ROOT / page).read_text()) == []


@pytest.mark.parametrize("text", ["1.9x", "2.5 times", "1.01 to 9.9 times", "0.51x the memory", "48 of 49 networks",
                                  "all 37 serve", "mAP 0.99", "0.4%", "3.96 s", "| LSTM | 1.9 to 4.13 |"])
def test_others_are_found(text):
    assert len(unknown(text)) == 1


def test_the_table_of_machines_says_what_the_facts_say():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if ", batch " in line]
    assert rows == ["| {machine}, batch {batch} | {dtype} | {0} | **{1}** | **{2}** | {3} | {4} |".format(
        *fact["figures"].values(), **fact) for fact in SSD]


@pytest.mark.parametrize("fact", [fact for fact in FACTS if fact not in SSD], ids=lambda fact: fact["what"])
def test_other_facts_are_in_the_tables_of_benchmarks(fact):
    numbers = [number for figure in fact["figures"].values() for number in re.findall(NUMBER, figure)]
    if fact["what"].startswith("zoos"):
        rows = [row.split("|")[1:-1] for row in MEASURED.splitlines() if row.startswith("| `") and row.count("|") == 11]
        column = ZOOS[fact["what"].split(", ")[1], fact["machine"]]
        ratios = [float(re.search(rf"({NUMBER})x", row[column])[1]) for row in rows if row[column].strip()]
        expected = [len(ratios), min(ratios), statistics.median(ratios), max(ratios)]
        assert [float(number) for number in numbers] == pytest.approx(expected, abs=0.016)
    else:
        assert [number for number in numbers if not re.search(rf"(?<![\d.]){number}(?![\d.]*\d)", MEASURED)] == []


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact['what']}, {fact['machine']}")
def test_facts_say_where_they_are_from(fact):
    assert fact["machine"]
    assert fact["command"].startswith(("make ", "python "))
    assert re.fullmatch(r"20\d\d-\d\d-\d\d, [0-9a-f]{7}", fact["recorded"])


def test_the_front_pages_picture_is_of_the_facts(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    import gain_picture

    assert [(f"{slow:g}", f"{fast:g}", ratio) for _, _, slow, fast, ratio in gain_picture.rows()] == [
        (f"{float(fact['figures']['MXNet FP32'][:-2]):g}", f"{float(fact['figures']['gluon_amp'][:-2]):g}",
         fact["figures"]["speed"][:-1]) for fact in SSD]
    assert gain_picture.shown() == str(gain_picture.rows())  # `make docs` draws it anew
