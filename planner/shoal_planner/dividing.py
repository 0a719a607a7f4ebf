"""How many layers each stage of a pipeline gets.

Owns the choice alone: what a stage takes for each number of layers, and how many fit, is known to whoever asks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal_planner.distinct import distinct
from shoal_planner.options import Floats, Ints

_BOUNDS = 12  # values of the slowest stage that are tried, from the smallest that is possible


class Divisions(NamedTuple):
    """Layers [K, S], one of which is best however many micro-batches there are, and the seconds [K] that follow: from
    one micro-batch to the next, and of one through all stages."""

    layers: Ints
    period_s: Floats
    fill_s: Floats

    def best(self, number: int) -> int:
        """Which, of so many micro-batches."""
        return int(np.argmin((number - 1) * self.period_s + self.fill_s))


def divide(times: Floats, least: Ints, num_layers: int, number: int, hidden: Floats | None = None) -> Ints | None:
    """Layers [S] with the least seconds of so many micro-batches; else as `divisions`."""
    found = divisions(times, least, num_layers, hidden, once=number == 1)
    return None if found is None else found.layers[found.best(number)]


def divisions(
    times: Floats, least: Ints, num_layers: int, hidden: Floats | None = None, *, once: bool = False
) -> Divisions | None:
    """Of which each stage has at least `least` [S]; none if too few fit. `times` [S, L+1] are seconds by number of
    layers, which never fall, inf where they do not fit, and `hidden` those for which only the first micro-batch waits
    (`paced`). `once`: for a single micro-batch, else for two and more.

    The bottleneck is some stage with some number of layers; under each bound the cheapest layers are taken. Bounds from
    the least possible one upwards are tried, as a higher one pays only by what the sum gains.
    """
    rows = np.arange(len(times))
    # With so many of all times within a bound, the stages together hold enough layers.
    enough = num_layers + len(times)
    values = np.sort(times, axis=None)
    lowest_s = max(values[enough - 1], times[rows, least].max()) if enough <= len(values) else np.inf
    if not lowest_s < np.inf:
        return None
    tried = values[values < np.inf][-1:] if once else _bounds(values, lowest_s)
    limits = (times <= tried[:, None, None]).sum(axis=2) - 1  # [K, S]
    layers = _cheapest(times if hidden is None else times + hidden, limits, least, num_layers)
    if not len(layers):
        return None
    return Divisions(layers, *paced(times[rows, layers], None if hidden is None else hidden[rows, layers]))


def paced(exposed_s: Floats, hidden_s: Floats | None) -> tuple[Floats, Floats]:
    """From one micro-batch to the next, and of one through all stages [..], given what each stage [.., S] takes beside
    what it hides: as in `predict.pipeline_s`."""
    slowest_s = exposed_s.max(axis=-1)
    if hidden_s is None:
        return slowest_s, exposed_s.sum(axis=-1)
    ways_s = np.cumsum((exposed_s + hidden_s)[..., ::-1], axis=-1)
    round_s = (ways_s / np.arange(1, ways_s.shape[-1] + 1)).max(axis=-1)
    return np.maximum(slowest_s, round_s), ways_s[..., -1]


def _bounds(values: Floats, lowest_s: float) -> Floats:
    """The first distinct ones from the lowest on, of sorted values."""
    first, most = int(np.searchsorted(values, lowest_s)), _BOUNDS
    while True:
        found = distinct(values[first : first + most])
        if len(found) >= _BOUNDS or first + most >= len(values):
            return found[found < np.inf][:_BOUNDS]
        most *= 2


def _cheapest(times: Floats, limits: Ints, least: Ints, num_layers: int) -> Ints:
    """[<=K, P]: layers within limits whose seconds add up to least, for those limits that allow enough. A stage's
    marginal seconds hardly ever fall, so taking the cheapest next layer each time is as good as it gets."""
    limits = limits[(limits >= least).all(axis=1) & (limits.sum(axis=1) >= num_layers)]
    left = num_layers - int(least.sum())
    if left < 0 or not len(limits):
        return np.zeros((0, len(times)), dtype=np.int64)
    most = int(limits.max())
    with np.errstate(invalid="ignore"):
        steps = times[:, 1 : most + 1] - times[:, :most]
    stage, place = np.divmod(steps.argsort(axis=None, kind="stable"), max(1, most))
    free = (place >= least[stage]) & (place < limits[:, stage])
    taken = free & (free.cumsum(axis=1) <= left)
    of_stage = stage[:, None] == np.arange(len(times))
    layers: Ints = least + (taken.astype(np.float64) @ of_stage.astype(np.float64)).astype(np.int64)
    return layers
