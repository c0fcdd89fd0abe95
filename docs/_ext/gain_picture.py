"""Draws the front page's picture, img/gain.png, anew when benchmarks/facts.json says something else than it shows."""
from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib
from PIL import Image
from sphinx.application import Sphinx

matplotlib.use("agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "img" / "gain.png"
FP32, FAST, INK = "#b9c0c8", "#1f77b4", "#22272e"


def rows() -> list[tuple[str, str, float, float, str]]:
    """Return machine, type, seconds of a step in FP32 and with gluon_amp, and how many times as fast that is."""
    facts = json.loads((ROOT / "benchmarks" / "facts.json").read_text())
    return [(re.sub(r" (?=\(|whose )", "\n", fact["machine"]) + f", batch {fact['batch']}", fact["dtype"],
             *(float(fact["figures"][side].rstrip(" sx")) for side in ("MXNet FP32", "gluon_amp")),
             fact["figures"]["speed"].rstrip("x")) for fact in facts if "batch" in fact]


def shown() -> str:
    """Return the rows that the picture says it shows."""
    return Image.open(PICTURE).text.get("Description", "") if PICTURE.exists() else ""


def draw(app: Sphinx) -> None:
    """Draw the picture, unless it shows the rows already."""
    found = rows()
    if shown() == str(found):
        return
    figure, axes = plt.subplots(figsize=(9, 0.95 * len(found) + 0.7), dpi=150, layout="constrained")
    for place, (_, dtype, slow, fast, ratio) in enumerate(found):
        axes.barh(place - 0.19, slow, 0.34, color=FP32, label=None if place else "MXNet, FP32")
        axes.barh(place + 0.19, fast, 0.34, color=FAST, label=None if place else "gluon_amp")
        axes.text(slow + 0.07, place - 0.19, f"{slow:.2f} s", va="center", color=INK)
        axes.text(fast + 0.07, place + 0.19, f"{fast:.2f} s: {ratio} times as fast, {dtype}", va="center",
                  color=INK, weight="bold")
    axes.set_yticks(range(len(found)), [machine for machine, *_ in found])
    axes.invert_yaxis()
    axes.set(xlabel="seconds for a training step of SSD-512 ResNet-50 on 2 cores: shorter is better",
             xlim=(0, 2 * max(slow for _, _, slow, *_ in found)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(PICTURE, metadata={"Description": str(found), "Software": None})


def setup(app: Sphinx) -> dict[str, bool]:
    """Draw before the pages are read."""
    app.connect("builder-inited", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
