"""Imperative calls of operators: the inputs of each are cast as the policy says.

``applier``           one call
``casts``             casts of arrays
``native``            calls that run in C++
``gradient_fixes``    calls whose gradient MXNet gets wrong, made in another way
``own_gradients``     losses that ignore the gradient behind them carry the scale
``scaled_losses``     whether what is differentiated is a scaled loss
``written``           states that operators write, and a skipped step puts back
``custom_operators``  users' operators in Python
"""
