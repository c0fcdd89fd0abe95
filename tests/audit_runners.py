"""Requests that workers of test_audit.py run instead of operators: each ends in another way."""
from __future__ import annotations

import ctypes
import os
import time


def _modes(request, behaviour):
    keys = request["only"] or [["default", mode] for mode in ("eager/plain/infer", "eager/plain/write")]
    for key in keys:
        if "write" in key[1]:
            behaviour()
        yield {"done": key, "verdict": "ok", "detail": "", "error": 0.0, "bias": 0.0, "gradient": True}


def dispatch(request):
    """Behave as the request's operator is called."""
    return globals()[request["op"]](request)


def well(request):
    yield from _modes(request, lambda: None)


def segfault(request):
    yield from _modes(request, lambda: ctypes.string_at(0))


def abort(request):
    def complain():
        os.write(2, b"malloc(): invalid size (unsorted)\n")
        os.abort()
    yield from _modes(request, complain)


def leave(request):
    yield from _modes(request, lambda: os._exit(255))


def sleep(request):
    yield from _modes(request, lambda: time.sleep(1000))


def spin(request):
    def forever():
        while True:
            pass
    yield from _modes(request, forever)


def fail(request):
    def complain():
        raise ValueError("no good")
    yield from _modes(request, complain)
