"""How MXNet is made to run in mixed precision.

``devices``        what each kind of device runs in, and why
``policies``       the policy of each device, with the user's lists and measurements
``state``          what is in force: the process-wide setting, regions, exclusions
``exclusions``     the blocks that users keep in FP32
``plans``          what a graph becomes under a setting, made once
``graph_applier``  cached ops that run what was planned
``executors``      symbols that are bound, as by Module
``observers``      what monitors and hooks of users are told
``eager_applier``  imperative calls, whose inputs are cast as the policy says (``eager_policy``, ``eager_casts``)
``frame``          the calls of blocks that a thread is in
``block_calls``    calls of blocks: where low precision begins and ends
``hooks``          the few names of MXNet that are replaced
``autocast``       init, deinit, autocast, exclude
``functions``      the precision of users' own functions and operators
"""
