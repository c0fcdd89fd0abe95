"""One training run of `voc` in a process of its own.

Usage: ``python _voc_worker.py RESULT.json '{"data_dir": "...", "amp": true, "steps": 600, ...}'``

The second argument holds the arguments of `voc.train`. The process that starts this one sets the number of
threads in the environment, before anything loads OpenMP.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import _machine
import voc


def main(result: str, arguments: str) -> int:
    """Train and write the result; an unusable request is one line on standard error and exit code 2."""
    try:
        trained = voc.train(**json.loads(arguments))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = {"versions": _machine.versions(), "peak_memory": _machine.peak_memory()}
    Path(result).write_text(json.dumps({**trained.as_dict(), **about}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
