"""Imperative calls of operators: the inputs of each are cast as the policy says.

``applier``           one call
``casts``             casts of arrays
``native``            calls that run in C++
``sound_calls``       calls that MXNet gets wrong, made in another way
``loss_scale``        which losses carry the loss scale, and operators that ignore the gradient behind them
``zero_gradients``    operators without a gradient, which would end the process
``second_gradients``  gradients of gradients
``running_stats``     arrays that operators write, and a skipped step puts back
``custom_operators``  users' operators in Python
"""
