"""What is in force, and on which devices.

``devices``       what each kind of device runs in, and why
``gpus``          what has to be set for GPUs
``policies``      the policy of each device, with the user's lists
``state``         one way of running in mixed precision
``in_force``      the setting, and the regions that the code is in
``networks``      the networks of ``initialize``
``blocks``        what users said of single blocks
``exclusions``    the blocks that users keep in FP32
``recent``        dictionaries that keep the latest entries
``frame``         the calls of blocks that a thread is in
``eager_policy``  a policy prepared for imperative calls
"""
