"""The benchmarked networks, with their data and their training."""
