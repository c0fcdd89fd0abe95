"""Operators whose gradient does not follow from the one that comes back: output layers with a loss in them."""
from __future__ import annotations

from .tables.groups.layers import LOSS_OUTPUTS

# SoftmaxOutput does so with ``out_grad=True``, too: MXNet multiplies by its output then.
IGNORE_GRADIENT = (*LOSS_OUTPUTS, "SVMOutput", "make_loss")
# Passes the gradient that comes back on, and adds one of its own.
ADDS_GRADIENT = "IdentityAttachKLSparseReg"
CUSTOM = "Custom"  # the user's own, which says for itself whether it reads the gradient that comes back
WITH_OWN_GRADIENT = frozenset((*IGNORE_GRADIENT, ADDS_GRADIENT))  # for their first input
