"""``amp.advise``: in words, what holds mixed precision back on this machine."""
from .advising import advices, advise
from .situation import Advice, Advices, Situation

__all__ = ["Advice", "Advices", "Situation", "advices", "advise"]
