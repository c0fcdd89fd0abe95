"""``python -m gluon_amp.cli``."""
import sys

from .main import main

sys.exit(main())
