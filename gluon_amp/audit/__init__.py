"""Audit of MXNet's operators in low precision: run each one, forward and backward, and compare with FP32.

``python -m gluon_amp.audit --all --json docs/operator_audit.json --markdown docs/operator_audit.md`` repeats the
committed audit. Every operator runs in a process of its own, because some low-precision kernels corrupt memory.

``samples``   inputs and attributes of every operator; ``records`` says what a sample and a mode are, ``values`` what
              the inputs are filled with
``program``   the graph around the operator; ``execute`` runs it and the FP32 reference; ``compare`` judges
``worker``    runs requests in forked processes; ``pool`` talks to workers; ``runner`` makes verdicts of outcomes
``report``    the JSON file, and the page generated from it
"""
