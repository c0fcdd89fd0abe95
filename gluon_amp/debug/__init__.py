"""See what mixed precision did to a network, and find what went wrong.

A module or package per tool: ``report``, ``explain``, ``monitor``, ``overflow``, ``compare``, ``search``. They share
``recording``, ``differences`` and ``tables``. Nothing here runs, or costs anything, unless it is called.
"""
