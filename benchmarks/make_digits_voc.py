"""Make a Pascal-VOC-format directory of handwritten digits.

    python benchmarks/make_digits_voc.py OUT_DIR
"""

from __future__ import annotations

import argparse
import sys
from typing import Sequence

from benchmarks.voc.digits import Settings, make


def main(argv: Sequence[str] | None = None) -> int:
    """Make the directory and return the exit code."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out_dir", help="directory to create")
    parser.add_argument("--images", type=int, default=defaults.images, help="training images")
    parser.add_argument("--val", type=int, default=defaults.val, help="validation images")
    parser.add_argument("--size", type=int, default=defaults.size, help="pixels, at least 64")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    options = parser.parse_args(argv)
    try:
        root = make(progress=True, **vars(options))
    except (ValueError, OSError) as error:
        print(f"make_digits_voc: {error}", file=sys.stderr)
        return 1
    print(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
