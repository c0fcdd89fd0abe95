"""Draws the front page's picture, img/gain.png, anew when benchmarks/facts.json says something else than it shows."""
from __future__ import annotations

import json
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
    return [(fact["machine"] + f", batch {fact['batch']}", fact["dtype"],
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
    plt.rcParams["font.size"] = 12  # to be read on phones, which show the picture at half of its size
    figure, axes = plt.subplots(figsize=(5, 0.95 * len(found) + 0.9), dpi=150, layout="constrained")
    for place, (machine, dtype, slow, fast, ratio) in enumerate(found):
        axes.text(0, place - 0.36, machine, va="center", color=INK, size=11)
        axes.barh(place - 0.1, slow, 0.26, color=FP32, label=None if place else "MXNet, FP32")
        axes.barh(place + 0.18, fast, 0.26, color=FAST, label=None if place else "gluon_amp")
        axes.text(slow + 0.1, place - 0.1, f"{slow:.2f} s", va="center", color=INK, size=10)
        axes.text(fast + 0.1, place + 0.18, f"{fast:.2f} s: {ratio}x, {dtype}", va="center", color=INK, size=10,
                  weight="bold")
    axes.set_yticks([])
    axes.set_ylim(len(found) - 0.6, -0.6)
    axes.set(xlabel="seconds for a training step of\nSSD-512 ResNet-50: shorter is better",
             xlim=(0, 1.6 * max(slow for _, _, slow, *_ in found)))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    figure.savefig(PICTURE, metadata={"Description": str(found), "Software": None})


def setup(app: Sphinx) -> dict[str, bool]:
    """Draw before the pages are read."""
    app.connect("builder-inited", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
