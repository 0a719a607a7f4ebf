"""Distinct numbers of an array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def distinct(values: Floats) -> Floats:
    """Sorted, each once. NumPy's own loads its masked arrays when it is first called, and looks for more kinds of
    input than there are here: it is called hundreds of times in a search."""
    found = np.sort(values)
    return found[np.concatenate(([True], found[1:] != found[:-1]))] if len(found) else found
