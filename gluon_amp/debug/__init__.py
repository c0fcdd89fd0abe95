"""See what mixed precision did to a network, and find what went wrong.

A package or module per tool: ``report``, ``explain``, ``advise``, ``preflight``, ``monitor``, ``overflow``,
``compare``, ``search``; ``recording`` is what they have in common. Nothing here runs, or costs anything, unless it is
called.
"""
