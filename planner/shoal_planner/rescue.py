"""Plans where none fits otherwise: found as if devices had more memory, and eased until they fit into what there is.

Owns how much more memory is pretended, and how many plans are eased. Does not own how (`relief`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from shoal_planner.catalogue import DeviceType
from shoal_planner.costs import CostModel
from shoal_planner.plan import Plan
from shoal_planner.relief import eased

# State takes a third of its memory without the optimizer's; more than three times as much room helps nobody.
_ROOMIER = (1.2, 1.5, 2.0, 3.0)
_EASED = 6  # plans of each search, the fastest first

Searched = Callable[[CostModel], Iterable[Plan]]


class RoomyCosts(CostModel):
    """As if every device had so many times its memory."""

    def __init__(self, costs: CostModel, factor: float) -> None:
        super().__init__(costs.job, costs.snapshot, costs.profile)
        self._factor = factor
        self._roomy: dict[str, DeviceType] = {}

    def device(self, node_id: str) -> DeviceType:
        if node_id not in self._roomy:
            found = super().device(node_id)
            self._roomy[node_id] = dataclasses.replace(found, memory_bytes=int(found.memory_bytes * self._factor))
        return self._roomy[node_id]


def rescue(costs: CostModel, searched: Searched, consider: Callable[[Plan], float]) -> None:
    """Offers `consider` plans that keep optimizer state on hosts or share it out by free memory; `searched` are those
    of a search, fastest first. A job whose state is held whole is left alone."""
    if costs.job.train.sharding == "none":
        return
    for factor in _ROOMIER:
        for found in list(searched(RoomyCosts(costs, factor)))[:_EASED]:
            for made in eased(found, costs):
                consider(made)
