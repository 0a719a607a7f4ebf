"""How many layers each stage of a pipeline gets: exact, under memory limits, for many numbers of micro-batches at once.

Owns the arithmetic alone; what a layer costs comes in as `StageCost`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Values of the bottleneck that are tried: all of them up to 4096 stages times layers.
MAX_BOUNDS = 4096
_PORTION = 2_000_000  # elements of the arrays that are computed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """A stage on some device, for one micro-batch of a fixed size.

    Seconds per micro-batch (forward and backward, and what it sends) and, once a step, of synchronisation; bytes of
    state, and of activations per micro-batch in flight. `least` is the smallest number of layers that it may hold.
    """

    per_layer_s: float
    capacity_bytes: float
    fixed_s: float = 0.0
    sync_per_layer_s: float = 0.0
    sync_fixed_s: float = 0.0
    layer_bytes: float = 0.0
    fixed_bytes: float = 0.0
    flight_layer_bytes: float = 0.0
    flight_fixed_bytes: float = 0.0
    least: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """For each number of micro-batches asked: seconds (inf: does not fit) and layers per stage."""

    seconds: Floats  # [M]
    layers: Ints  # [M, P]


def pipeline_seconds(stages: tuple[StageCost, ...], layers: Ints, micro_batches: Ints) -> Floats:
    """1F1B, PAPERS 1.4 2b: the slowest stage for all micro-batches but one, one micro-batch through all stages, and the
    synchronisation where it ends last: max_s((m-1) t_s + sync_s) + sum_s t_s. `layers` is [M, P], `micro_batches` [M].
    """
    seconds = layers * _row(stages, "per_layer_s") + _row(stages, "fixed_s")
    sync = layers * _row(stages, "sync_per_layer_s") + _row(stages, "sync_fixed_s")
    busy = (micro_batches[:, None] - 1) * seconds + sync
    total: Floats = busy.max(axis=1) + seconds.sum(axis=1)
    return total


def split_layers(stages: tuple[StageCost, ...], num_layers: int, micro_batches: Ints) -> Splits:
    """The split with the least `pipeline_seconds` for each number of micro-batches.

    The bottleneck of the best split is the busy time of some stage with some number of layers. For each such value,
    every stage may hold so many layers at most; within these limits the fastest stages are filled first, which makes
    the sum least. Trying all values is therefore exact; of more than `MAX_BOUNDS`, so many evenly chosen ones are
    tried, which miss the best by the distance of two neighbours at most.
    """
    least = np.array([stage.least for stage in stages])
    caps = _memory_caps(stages, num_layers, micro_batches)  # [M, P]
    seconds = np.full(len(micro_batches), np.inf)
    layers = np.zeros((len(micro_batches), len(stages)), dtype=np.int64)
    # What memory rules out needs no search; the rest in portions, as the arrays below are large.
    fits = np.flatnonzero((caps >= least).all(axis=1) & (caps.sum(axis=1) >= num_layers))
    num_bounds = min(MAX_BOUNDS, len(stages) * (num_layers + 1))
    portion = max(1, _PORTION // (num_bounds * len(stages)))
    for first in range(0, len(fits), portion):
        rows = fits[first : first + portion]
        seconds[rows], layers[rows] = _split(stages, num_layers, micro_batches[rows], caps[rows], least)
    return Splits(seconds=seconds, layers=layers)


def _split(
    stages: tuple[StageCost, ...], num_layers: int, micro_batches: Ints, caps: Floats, least: Ints
) -> tuple[Floats, Ints]:
    slope = (micro_batches[:, None] - 1) * _row(stages, "per_layer_s") + _row(stages, "sync_per_layer_s")
    base = (micro_batches[:, None] - 1) * _row(stages, "fixed_s") + _row(stages, "sync_fixed_s")
    counts = np.arange(num_layers + 1)
    bounds = (base[:, :, None] + slope[:, :, None] * counts).reshape(len(micro_batches), -1)  # [M, K]
    if bounds.shape[1] > MAX_BOUNDS:
        kept = np.linspace(0, bounds.shape[1] - 1, MAX_BOUNDS).round().astype(np.int64)
        bounds = np.sort(bounds, axis=1)[:, kept]
    room = bounds[:, :, None] - base[:, None, :]  # [M, K, P]
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.floor(room / slope[:, None, :] * (1 + 1e-12) + 1e-9)
    fits = np.where(slope[:, None, :] > 0, fits, np.where(room >= 0, num_layers, -1))
    limits = np.minimum(fits, caps[:, None, :])
    possible = (limits >= least).all(axis=2) & (limits.sum(axis=2) >= num_layers)  # [M, K]
    possible &= least.sum() <= num_layers
    chosen = _fill_fastest(stages, num_layers, limits, least)
    seconds = chosen * _row(stages, "per_layer_s") + _row(stages, "fixed_s")
    busy = base[:, None, :] + slope[:, None, :] * chosen
    total = np.where(possible, busy.max(axis=2) + seconds.sum(axis=2), np.inf)
    best = total.argmin(axis=1)
    rows = np.arange(len(micro_batches))
    return total[rows, best], chosen[rows, best].astype(np.int64)


def _fill_fastest(stages: tuple[StageCost, ...], num_layers: int, limits: Floats, least: Ints) -> Floats:
    order = np.argsort(_row(stages, "per_layer_s"), kind="stable")
    more = np.maximum(limits - least, 0)[:, :, order]
    left = num_layers - least.sum()
    before = np.cumsum(more, axis=2) - more
    given = np.clip(left - before, 0, more)
    chosen = np.empty_like(given)
    chosen[:, :, order] = given
    filled: Floats = chosen + least
    return filled


def _memory_caps(stages: tuple[StageCost, ...], num_layers: int, micro_batches: Ints) -> Floats:
    """The most layers whose memory fits: stage s of P keeps min(P - s, m) micro-batches in flight."""
    depth = np.arange(len(stages), 0, -1)
    in_flight = np.minimum(depth, micro_batches[:, None])  # [M, P]
    free = _row(stages, "capacity_bytes") - _row(stages, "fixed_bytes")
    free = free - in_flight * _row(stages, "flight_fixed_bytes")
    per_layer = _row(stages, "layer_bytes") + in_flight * _row(stages, "flight_layer_bytes")
    with np.errstate(divide="ignore", invalid="ignore"):
        caps = np.where(per_layer > 0, np.floor(free / per_layer), np.where(free >= 0, num_layers, -1))
    limited: Floats = np.where(free < 0, -1, np.minimum(caps, num_layers))
    return limited


def _row(stages: tuple[StageCost, ...], name: str) -> Floats:
    return np.array([getattr(stage, name) for stage in stages], dtype=np.float64)
