"""``amp.trace_overflow``: what made a training step overflow."""
from .findings import OverflowReport
from .tracer import OverflowTracer, trace_overflow

__all__ = ["OverflowReport", "OverflowTracer", "trace_overflow"]
