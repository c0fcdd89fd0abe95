"""Binary floating-point formats, and rounding to them in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import helpers  # noqa: F401  finds gluon_amp

# isort: split
import numpy as np

from gluon_amp.audit.values import round_to


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Parameters
    ----------
    name : {'float32', 'float16', 'bfloat16'}
        What MXNet calls it.
    exponent_bits, fraction_bits : int
        How its bits are spent, beside the one for the sign.
    """

    name: str
    exponent_bits: int
    fraction_bits: int

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2.0 - 2.0**-self.fraction_bits) * 2.0 ** (2 ** (self.exponent_bits - 1) - 1)

    @property
    def smallest_normal(self) -> float:
        """The smallest number that has all bits of its fraction."""
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))

    @property
    def smallest(self) -> float:
        """The smallest number above 0."""
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.fraction_bits

    def round(self, values: np.ndarray) -> np.ndarray:
        """Return the nearest numbers of the format, ties to even, beyond its range infinity.

        Parameters
        ----------
        values : array_like
            Finite numbers of any shape.

        Returns
        -------
        numpy.ndarray
            float32.

        Examples
        --------
        >>> FLOAT16.round([1e-8, 1.0001, 70000.0])
        array([ 0.,  1., inf], dtype=float32)
        """
        with np.errstate(over="ignore"):
            return round_to(np.asarray(values, np.float32), self.name)


FLOAT32 = Format("float32", exponent_bits=8, fraction_bits=23)
FLOAT16 = Format("float16", exponent_bits=5, fraction_bits=10)
BFLOAT16 = Format("bfloat16", exponent_bits=8, fraction_bits=7)
