"""How the benchmarks measure and report."""
