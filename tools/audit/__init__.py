"""Audit of MXNet's operators in low precision: run each one, forward and backward, and compare with FP32.

``python tools/audit_operators.py --all --json docs/operator_audit.json --markdown docs/operator_audit.md`` repeats the
committed audit. Every operator runs in a process of its own, because some low-precision kernels corrupt memory.

``samples``    inputs and attributes of every operator; ``values`` says what the inputs are filled with
``modes``      the ways in which a sample runs; ``program`` builds the graph around the operator and runs it
``judge``      runs samples and FP32 references; ``verdicts`` says how far apart they are
``runner``     runs them in ``processes`` that may crash, and makes an operator's entry of what comes back
``results``    the JSON file; ``page`` makes the readable page of it
"""
