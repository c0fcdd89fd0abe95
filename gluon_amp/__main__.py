"""``python -m gluon_amp``."""
from .cli import __main__ as __main__
