"""Checks and names of arguments, values that nest, files, and comparisons of results."""
