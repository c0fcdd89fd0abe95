"""What a graph becomes under a setting, and what runs it.

``planner``            the planner, and the plans that it keeps
``traced``             a graph as MXNet traced it
``cached_op``          cached ops that run what was planned
``gradient_order``     the order in which gradients are computed
``executors``          symbols that are bound, as by Module
``converted_symbols``  symbols that were converted, and what is bound to them
``observers``          what monitors and hooks of users are told
"""
