"""Training on several processes, through MXNet's KVStore or Horovod; ``amp.init_trainer`` needs nothing from here."""
from .groups import Group, GroupStore, allreduce, engine, kvstore, prepare, rank, size, world
from .reduction import Reduction, distribute

__all__ = ["Group", "GroupStore", "Reduction", "allreduce", "distribute", "engine", "kvstore", "prepare", "rank",
           "size", "world"]
