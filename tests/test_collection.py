"""What the tests say of themselves: names that they replace exist, and what this CPU leaves out is counted."""
from __future__ import annotations

import pytest
from cpu_kinds import run_on
from patched_names import gone

import gluon_amp

NAMES = {"amp": gluon_amp, "pytest": pytest}


@pytest.mark.parametrize("code", [
    'monkeypatch.setattr(amp.errors, "PolicyMistake", None)', 'mock.patch.object(amp, "initialise", None)',
    'def test(monkeypatch):\n    monkeypatch.delattr(amp.Policy, "decides")',
    'monkeypatch.setattr(amp.mistakes, "PolicyError", None)'])
def test_a_replaced_name_that_is_gone_is_told(code):
    assert len(gone("test.py", code, NAMES)) == 1


@pytest.mark.parametrize("code", [
    'monkeypatch.setattr(amp.errors, "PolicyError", None)', 'mock.patch.object(amp, "init", None)',
    'monkeypatch.setattr(amp, "initialise", None, raising=False)', 'monkeypatch.setattr(local, "anything", None)',
    'def test(monkeypatch, amp):\n    monkeypatch.setattr(amp, "initialise", None)',
    'def test():\n    amp = make()\n    mock.patch.object(amp, "initialise", None)',
    'net.collect_params().setattr("grad_req", "add")', 'monkeypatch.setattr(amp, name, None)'])
def test_all_others_are_left_to_their_tests(code):
    assert gone("test.py", code, NAMES) == []


def test_the_last_line_counts_what_the_cpu_leaves_out():
    done = run_on("AVX2", "import pytest; raise SystemExit(pytest.main(['-q', 'tests/plan/test_partitioned.py']))")
    assert done.returncode == 0, done.stdout
    *_, counted, last = done.stdout.splitlines()
    skipped = int(last.split(" skipped")[0].split()[-1])
    assert skipped > 0
    assert counted.startswith(f"{skipped} of ")
    assert counted.endswith("were SKIPPED FOR WANT OF THE CPU: run them on one that has what they need")
