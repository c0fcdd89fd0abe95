"""See what mixed precision did to a network, and find what went wrong.

One module per function: ``report``, ``explain``, ``advise``, ``preflight``, ``monitor``, ``overflow``, ``compare``,
``search``. Nothing here runs, or costs anything, unless it is called.
"""
