"""Apex's levels, torch's GradScaler, and names of mxnet.contrib.amp and MXNet 2."""
