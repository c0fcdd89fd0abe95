"""Which precision an operator runs in, and why. No MXNet.

``decision``  what follows for an operator
``tables``    the rules of every operator, by target type: data
``shapes``    shapes for which there is no sound or fast kernel
``policy``    all of that, and the operator lists that users give, together
"""
from __future__ import annotations

from .decision import FP32, KEEP, LOWER, NEUTRAL, RULES, WIDEST, Cause, Decision, Rule, precision
from .policy import ANY_DEVICE, ConditionalOp, Device, Policy, make_policy

__all__ = ["ANY_DEVICE", "FP32", "KEEP", "LOWER", "NEUTRAL", "RULES", "WIDEST", "Cause", "ConditionalOp", "Decision",
           "Device", "Policy", "Rule", "make_policy", "precision"]
