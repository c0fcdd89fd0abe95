"""See what mixed precision did to a network, and find what went wrong.

A module or package per tool: ``report``, ``explain``, ``advise``, ``preflight``, ``monitor``, ``overflow``,
``compare``, ``search``; ``recording`` and ``differences`` are what they have in common. Nothing here runs, or costs
anything, unless it is called.
"""
