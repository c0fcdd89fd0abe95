"""Imperative calls of operators: the inputs of each are cast as the policy says.

``applier``           one call
``casts``             casts of arrays
``native``            calls that run in C++
``gradient_fixes``    calls whose gradient MXNet gets wrong, made in another way
``loss_scale``        which losses carry the loss scale, and operators that ignore the gradient behind them
``running_stats``     arrays that operators write, and a skipped step puts back
``custom_operators``  users' operators in Python
"""
