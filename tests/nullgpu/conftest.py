"""These tests run on the null GPU only, where dispatch is verified and numbers never: `make test-gpu` starts them."""
from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
device = importlib.import_module("device")


def _reason() -> str | None:
    if device.missing() is not None:
        return device.missing()
    if str(device.build()) != os.environ.get("LD_PRELOAD", ""):
        return "this process has no null GPU: `make test-gpu` runs these tests"
    if os.environ["NULLGPU_DEVICES"] == "0":
        return "the null GPU has no devices here: `make test-gpu` runs these tests"
    return None


REASON = _reason()


def pytest_collection_modifyitems(items):
    if REASON is None:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def _plain_settings(monkeypatch):
    """Every test starts with a GPU of 8.0 that works."""
    settings = {name for name in os.environ if name.startswith("NULLGPU_")}
    for name in settings - {"NULLGPU_DEVICES"}:  # MXNet counts devices once
        monkeypatch.delenv(name)
