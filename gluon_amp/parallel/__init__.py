"""Training on several processes, through MXNet's KVStore or Horovod; ``amp.init_trainer`` needs nothing from here.

``groups``     sums over processes, with one interface for every engine, which is a KVStore for ``gluon.Trainer``, too
``world``      which processes this one works with, and their sums
``reduction``  a trainer's gradients, and the decision to step
"""
from .groups import Group, GroupStore
from .reduction import Reduction, distribute
from .world import allreduce, engine, kvstore, prepare, rank, size, world

__all__ = ["Group", "GroupStore", "Reduction", "allreduce", "distribute", "engine", "kvstore", "prepare", "rank",
           "size", "world"]
