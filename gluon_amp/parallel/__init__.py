"""Training on several processes, through MXNet's KVStore or Horovod; ``amp.init_trainer`` needs nothing from here.

``groups``     sums over processes, with one interface for every engine, which is a KVStore for ``gluon.Trainer``, too;
               which processes this one works with
``reduction``  a trainer's gradients, and the decision to step
"""
from .groups import Group, GroupStore, allreduce, engine, kvstore, prepare, rank, size, world
from .reduction import Reduction, distribute

__all__ = ["Group", "GroupStore", "Reduction", "allreduce", "distribute", "engine", "kvstore", "prepare", "rank",
           "size", "world"]
