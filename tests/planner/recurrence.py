"""One strategy for each layer of a stage where layers differ, or where a change of strategy between two of them costs:
PAPERS 5.2, exactly, for every amount of memory at once.

Equal layers without such costs are for `mixes`, which is faster and needs no units of memory. Does not own what a
strategy costs.

Array shapes: L layers, S strategies, V amounts of memory from 0 to the most, in units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal_planner.choices import Floats
from shoal_planner.errors import InvalidField

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picked:
    """By units of memory: the fewest seconds of all layers together (infinite where they do not fit), and the strategy
    of each layer (-1 where they do not fit)."""

    seconds_V: Floats
    strategies_VL: Ints


def pick(seconds_LS: ArrayLike, units_LS: ArrayLike, most_units: int, relayout_SS: ArrayLike | None = None) -> Picked:
    """Layer l with strategy s takes `seconds_LS` and keeps `units_LS`; going from strategy r of a layer to s of the
    next takes `relayout_SS[r, s]` more (nothing unless given). Raises InvalidField."""
    seconds, units = np.asarray(seconds_LS, float), np.asarray(units_LS)
    num_layers, num_strategies = seconds.shape
    relayout = np.zeros((num_strategies, num_strategies)) if relayout_SS is None else np.asarray(relayout_SS, float)
    _check(seconds, units, most_units, relayout)
    free = np.zeros_like(relayout)  # nothing comes before the first layer
    best_VS = np.zeros((most_units + 1, num_strategies))
    before_LVS = np.zeros((num_layers, most_units + 1, num_strategies), dtype=np.int64)
    for layer in range(num_layers):
        # f(i-1, v, s') + R(s', s), and the s' that is best.
        arriving_VSS = best_VS[:, :, None] + (relayout if layer else free)[None, :, :]
        from_VS = arriving_VSS.argmin(axis=1)
        arriving_VS = np.take_along_axis(arriving_VSS, from_VS[:, None, :], axis=1)[:, 0, :]
        best_VS = np.full_like(best_VS, np.inf)
        for strategy in range(num_strategies):
            need = int(units[layer, strategy])
            if need <= most_units:
                rest = most_units + 1 - need
                best_VS[need:, strategy] = arriving_VS[:rest, strategy] + seconds[layer, strategy]
                before_LVS[layer, need:, strategy] = from_VS[:rest, strategy]
    return Picked(seconds_V=best_VS.min(axis=1), strategies_VL=_trace(best_VS, before_LVS, units))


def whole_units(num_bytes: ArrayLike, unit_bytes: float) -> Ints:
    """Bytes as units, rounded up: what fits in units fits in bytes."""
    units: Ints = np.ceil(np.asarray(num_bytes, float) / unit_bytes).astype(np.int64)
    return units


def _trace(best_VS: Floats, before_LVS: Ints, units_LS: Ints) -> Ints:
    """The way back from the last layer, for every amount of memory."""
    num_layers, num_amounts, _ = before_LVS.shape
    picked_VL = np.full((num_amounts, num_layers), -1, dtype=np.int64)
    possible = np.flatnonzero(np.isfinite(best_VS.min(axis=1)))
    left, strategies = possible.copy(), best_VS[possible].argmin(axis=1)
    for layer in reversed(range(num_layers)):
        picked_VL[possible, layer] = strategies
        before = before_LVS[layer, left, strategies]
        left = left - units_LS[layer, strategies]
        strategies = before
    return picked_VL


def _check(seconds: Floats, units: Ints, most_units: int, relayout: Floats) -> None:
    if units.shape != seconds.shape:
        raise InvalidField("units", units.shape, f"must have the shape of seconds {seconds.shape}")
    if relayout.shape != (seconds.shape[1], seconds.shape[1]):
        raise InvalidField("relayout", relayout.shape, f"must be a square of {seconds.shape[1]} strategies")
    if most_units < 0 or (units < 0).any() or not np.issubdtype(units.dtype, np.integer):
        raise InvalidField("units", most_units, "must be whole and zero or more, of every strategy as of the memory")
    if np.isnan(seconds).any() or np.isnan(relayout).any():
        raise InvalidField("seconds", "nan", "must be numbers")
