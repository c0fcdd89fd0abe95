"""GluonCV's training scripts follow FP32's losses, where GLUON_AMP_GLUONCV names a copy of them."""
from __future__ import annotations

import os
from pathlib import Path

import pytest
from gluoncv_scripts import SCRIPTS, Settings, both_losses, compared

VARIABLE = "GLUON_AMP_GLUONCV"
CHECKOUT = os.environ.get(VARIABLE, "")
STEPS = 2

pytestmark = [pytest.mark.slow, pytest.mark.bf16, pytest.mark.skipif(
    not CHECKOUT, reason=f"{VARIABLE} is not set: expected the folder of a copy of dmlc/gluon-cv, version 0.10")]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    data = pytest.importorskip("gluoncv_data", reason="GluonCV or OpenCV is not installed")
    home = tmp_path_factory.mktemp("home")
    data.write_all(home, 4 * STEPS)
    return Settings(Path(CHECKOUT), home, steps=STEPS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_follows_fp32(name, settings):
    if SCRIPTS[name].reads_coco:
        pytest.importorskip("pycocotools", reason="pycocotools is not installed: pip install pycocotools")
    stock, found = both_losses(SCRIPTS[name], settings)
    assert len(stock) == STEPS
    assert compared(stock, found) == "", f"FP32 {stock}, AMP {found}"
