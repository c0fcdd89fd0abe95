"""The only modules that touch MXNet's private names, and the reason for each.

``symbols``    symbol to graph and back, type and shape inference of every tensor
``operators``  names of registered operators
``arrays``     casts of arrays in nested arguments
``eager``      imperative operator calls, cast as the policy says
``invoke``     any registered operator, called by its registered name
``cached_op``  the cached op that rewrites its symbol when it is first called
``hooks``      the places where MXNet hands out symbols for execution
``trainers``   what the loss scaler needs of ``gluon.Trainer``
"""
