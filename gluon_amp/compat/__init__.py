"""The faces for people from elsewhere.

``opt_level``    initialize: Apex's levels
``grad_scaler``  torch's GradScaler
``stand_in``     install: standing in for mxnet.contrib.amp, and names of MXNet 2
``views``        the tables in the form of MXNet's own lists
"""
