"""Training on several processes, through MXNet's KVStore or Horovod.

``amp.init_trainer`` needs nothing from here. ``engine``, ``rank`` and ``size`` say where a process stands among the
others; ``allreduce`` adds small arrays up over all of them; ``kvstore`` is a store for ``gluon.Trainer`` that works
with either engine.

``groups``     sums over processes, one interface for every engine
``world``      which processes this one works with
``stores``     a group as a KVStore for ``gluon.Trainer``
``reduction``  a trainer's gradients, and the decision to step
"""
from .groups import Group
from .reduction import Reduction, distribute
from .stores import GroupStore, kvstore
from .world import allreduce, engine, prepare, rank, size, world

__all__ = ["Group", "GroupStore", "Reduction", "allreduce", "distribute", "engine", "kvstore", "prepare", "rank",
           "size", "world"]
