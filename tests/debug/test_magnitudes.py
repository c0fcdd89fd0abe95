"""The arithmetic behind the debugging tools: ranges of types, errors, operations, searches."""
from __future__ import annotations

import math

import numpy as np

from gluon_amp.debug.flops import flops
from gluon_amp.debug.overflow import Magnitude
from gluon_amp.dtypes import FORMATS, Format
from gluon_amp.graph import Entry, Node
from gluon_amp.judging import relative_error


def test_ranges_of_types():
    form = FORMATS["float16"]
    assert (Format.of(10, 15).largest, Format.of(10, 15).overflow) == (65504.0, 65520.0)
    assert (form.headroom(65504.0 / 8), form.headroom(0.0)) == (3.0, math.inf)


def test_errors_and_magnitudes():
    assert relative_error([(np.array([3.0, 4.0]), np.array([3.0, 4.5]))]) == 0.1
    assert str(Magnitude.of("x", "float32", np.array([1, -3, np.inf]))) == (
        "x (float32): largest inf, 1 infinite of 3, finite ones up to 3")


def test_operations():
    x, w = (Node("null", name, shapes=[shape]) for name, shape in [("x", (4, 8)), ("w", (16, 8))])
    assert flops(Node("FullyConnected", "fc", {}, [Entry(x), Entry(w)], shapes=[(4, 16)])) == 2 * 4 * 8 * 16
