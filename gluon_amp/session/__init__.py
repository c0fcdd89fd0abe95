"""Switching AMP on and off, and the names of MXNet that are replaced: read ``init`` and ``hooks`` first."""
