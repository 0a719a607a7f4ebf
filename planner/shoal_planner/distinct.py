"""Distinct numbers of an array."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.float64, np.int64)


def distinct(values: NDArray[Number]) -> NDArray[Number]:
    """Sorted, each once. NumPy's own loads its masked arrays when it is first called, and looks for more kinds of
    input than there are here: it is called hundreds of times in a search."""
    found = np.sort(values)
    return found[np.concatenate(([True], found[1:] != found[:-1]))] if len(found) else found
