"""Benchmarks of gluon_amp: one script a benchmark, and what they share.

- ``harness``: how to measure (processes that take turns, sizes, statistics) and how to report it
- ``networks``: the networks, in Gluon and in PyTorch, with their data and their training
- ``voc``: training and evaluation on directories in Pascal VOC's format
"""
