"""``amp.report``: what ran, operator by operator."""
from .reporting import Report, report

__all__ = ["Report", "report"]
