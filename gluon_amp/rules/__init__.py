"""Which precision an operator runs in, and why: ``policy`` reads the tables and the rules on shapes. No MXNet."""
from __future__ import annotations

from .decision import FP32, KEEP, LOWER, NEUTRAL, RULES, WIDEST, Cause, Decision, Rule, precision
from .policy import ANY_DEVICE, ConditionalOp, Device, Policy, make_policy

__all__ = ["ANY_DEVICE", "FP32", "KEEP", "LOWER", "NEUTRAL", "RULES", "WIDEST", "Cause", "ConditionalOp", "Decision",
           "Device", "Policy", "Rule", "make_policy", "precision"]
