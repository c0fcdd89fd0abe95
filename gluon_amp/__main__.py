"""``python -m gluon_amp``: the command line."""
import sys

from .cli import main

sys.exit(main())
