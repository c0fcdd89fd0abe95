"""The faces for people from elsewhere.

``opt_level``    initialize: Apex's levels
``grad_scaler``  torch's GradScaler
``stand_in``     install: standing in for mxnet.contrib.amp, its lists, and names of MXNet 2
"""
