"""The machine at hand: versions, CPUs and GPUs, the data types that they run, and what operators cost there."""
