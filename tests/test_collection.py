"""What the tests say of themselves: what this CPU leaves out is counted."""
from __future__ import annotations

from cpu_kinds import run_on


def test_the_last_line_counts_what_the_cpu_leaves_out():
    done = run_on("AVX2", "import pytest; raise SystemExit(pytest.main(['-q', 'tests/plan/test_partitioned.py']))")
    assert done.returncode == 0, done.stdout
    *_, counted, last = done.stdout.splitlines()
    skipped = int(last.split(" skipped")[0].split()[-1])
    assert skipped > 0
    assert counted.startswith(f"{skipped} of ")
    assert counted.endswith("were SKIPPED FOR WANT OF THE CPU: run them on one that has what they need")
