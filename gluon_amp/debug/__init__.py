"""See what mixed precision did to a network, and find what went wrong.

``recording`` runs a network and makes one record for each operator (``records``): planned, observed, and why.
``report``, ``explain``, ``compare``, ``overflow`` and ``search`` read these records.
Nothing here runs, or costs anything, unless it is called.
"""
