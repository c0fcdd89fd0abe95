"""Draw docs/img/gain.png from the README's table of machines: `python tools/gain_picture.py`."""
from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (CPU [^|]*), batch (\d+) \| (\w+) \| ([\d.]+) s [^|]*\*\*([\d.]+) s\*\*[^|]*\| \**([\d.]+)x",
                 re.MULTILINE)
FP32, FAST, INK = "#b9c0c8", "#1f77b4", "#22272e"


def rows() -> list[tuple[str, str, float, float, str]]:
    """Return machine, type, seconds of a step in FP32 and with gluon_amp, and how many times as fast that is."""
    return [(f"{machine.replace(' (', chr(10) + '(')}, batch {batch}", dtype, float(slow), float(fast), ratio)
            for machine, batch, dtype, slow, fast, ratio in ROW.findall((ROOT / "README.md").read_text())]


def main() -> None:
    found = rows()
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
             xlim=(0, 1.12 * max(slow for _, _, slow, *_ in found)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(ROOT / "docs" / "img" / "gain.png")


if __name__ == "__main__":
    main()
