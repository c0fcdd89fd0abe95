"""Imperative calls of operators: the inputs of each are cast as the policy says. Read ``applier`` first."""
