"""Weights with what adapters add to them: a checkpoint of adapters as one of the model that they were trained beside.

Owns this sum, W + alpha / rank * B A in float32. Does not own where either is read (`first_weights`, `reading`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shoal_planner.architecture import ModelSpec
from shoal_planner.parameters import ADAPTER_A, ADAPTER_B, Parameter, is_summed_over_rows, parameters
from shoal_recovery.reading import MasterIntervals

Array = npt.NDArray[np.float32]
ReadWeights = Callable[[Parameter, int, int], Array]
"""Elements [first, last) of a flattened parameter."""

_BLOCK = 1 << 16  # elements


class MergedWeights:
    """`model` has the adapters whose masters are in `stored`; `base` reads what they are beside."""

    def __init__(self, model: ModelSpec, base: ReadWeights, stored: MasterIntervals) -> None:
        assert model.lora is not None
        self._lora = model.lora
        self._base = base
        self._stored = stored
        self._adapters = {parameter.fqn: parameter for parameter in parameters(model)}
        self._last: tuple[str, Array] | None = None

    def read(self, parameter: Parameter, first: int, last: int) -> Array:
        """A `ReadWeights` of the model without adapters."""
        values = self._base(parameter, first, last)
        name = parameter.fqn.removesuffix(".weight")
        cut, whole = f"{name}.{ADAPTER_B}.weight", f"{name}.{ADAPTER_A}.weight"
        if cut not in self._adapters:
            return values
        if is_summed_over_rows(name.split(".", 2)[2]):
            cut, whole = whole, cut
        columns, rank = parameter.shape[1], self._lora.rank
        low, high = first // columns, -(-last // columns)
        rows_R = self._matrix(cut, low * rank, high * rank)
        added = _product(rows_R, self._turned(whole, columns)) * np.float32(self._lora.scale)
        return values + added.reshape(-1)[first - low * columns : last - low * columns]

    def _turned(self, fqn: str, columns: int) -> Array:
        """All of the one of two adapters that tensor parallelism does not cut, as [rank, columns]; kept for the next
        interval."""
        if self._last is None or self._last[0] != fqn:
            found = self._matrix(fqn, 0, self._adapters[fqn].numel)
            self._last = (
                fqn,
                found if self._adapters[fqn].fqn.endswith(f".{ADAPTER_A}.weight") else np.ascontiguousarray(found.T),
            )
        return self._last[1]

    def _matrix(self, fqn: str, first: int, last: int) -> Array:
        flat = np.frombuffer(self._stored.read(fqn, first, last), dtype="<f4")
        return flat.reshape(-1, self._adapters[fqn].shape[1])


def _product(left_IR: Array, right_RJ: Array) -> Array:
    """Their matrix product, added up over R in order: each element has the same bits whatever interval it is read with
    and on whatever machine. A BLAS takes other kernels for other shapes and processors, and replicas would begin apart.
    """
    total_IJ = np.zeros((left_IR.shape[0], right_RJ.shape[1]), dtype=np.float32)
    step = max(1, _BLOCK // max(1, right_RJ.shape[1]))  # rows whose sums stay in a processor's cache
    for first in range(0, len(total_IJ), step):
        block, left = total_IJ[first : first + step], left_IR[first : first + step]
        term = np.empty_like(block)
        for index, row_J in enumerate(right_RJ):
            np.multiply(left[:, index, None], row_J, out=term)
            block += term
    return total_IJ
