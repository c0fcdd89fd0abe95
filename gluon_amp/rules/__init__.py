"""Which precision an operator runs in, and why. No MXNet.

``tables``  the rules of every operator, by target type: data
``shapes``  shapes for which there is no sound or fast kernel
``lists``   the operator lists that users give
``policy``  all of that together: operator, attributes and shape to a decision
``views``   the tables in the form of MXNet's own lists
"""
from __future__ import annotations

from .decision import FP32, KEEP, LOWER, NEUTRAL, RULES, WIDEST, Cause, Decision, Rule, precision
from .lists import ConditionalOp, make_policy
from .policy import Policy

__all__ = ["FP32", "KEEP", "LOWER", "NEUTRAL", "RULES", "WIDEST", "Cause", "ConditionalOp", "Decision", "Policy",
           "Rule", "make_policy", "precision"]
