"""What users switch on, and the names of MXNet that are replaced: read ``init`` and ``hooks`` first."""
