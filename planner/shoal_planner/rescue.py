"""Plans where none fits otherwise: found as if devices had more memory, and eased until they fit into what there is;
and plans that need not recompute so much with state on hosts.

Owns how much more memory is pretended, and how many plans are eased. Does not own how (`relief`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from shoal_planner.catalogue import DeviceType
from shoal_planner.costs import CostModel
from shoal_planner.lending import lent
from shoal_planner.options import usable_nodes
from shoal_planner.plan import Plan
from shoal_planner.relief import eased, least_step_s, relieved, shared_by_room

# State takes a third of its memory without the optimizer's; more than three times as much room helps nobody.
_ROOMIER = (3.0, 2.0, 1.5, 1.2)
_EASED, _EASED_OF_OTHERS = 6, 3  # plans of each search, the fastest first, and with other numbers of pipelines
_MUCH = 0.35  # of all layers, from which on it may pay not to recompute so many
# On fewer, what needs no hosts is searched exactly; on more, easing a plan of as many stages takes too long.
LEAST_DEVICES, MOST_DEVICES = 9, 256

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


def rescue(costs: CostModel, searched: Searched, best_s: float, consider: Callable[[Plan], float]) -> None:
    """Offers `consider` plans that keep optimizer state on hosts or idle devices, or share it out by free memory, if
    they may take less than `best_s`; `searched` are those of a search, fastest first. A job whose state is held whole
    is left alone."""
    if costs.job.train.sharding == "none":
        return

    def may_pay(made: Plan) -> bool:
        return least_step_s(made, costs) < best_s

    for factor in _ROOMIER if math.isinf(best_s) else _ROOMIER[::2]:
        roomy = list(searched(RoomyCosts(costs, factor)))
        best = roomy[0].prediction if roomy else None
        if best is not None and best.step_s >= best_s:
            return  # memory is not what binds
        for found in _various(roomy):
            for made in eased(found, costs, may_pay):
                best_s = min(best_s, consider(made))
            with_holders = lent(found, costs) if may_pay(found) else None
            if with_holders is not None:
                best_s = min(best_s, consider(relieved(with_holders, costs, offload=False) or with_holders))


def _various(found: list[Plan]) -> list[Plan]:
    """The fastest, and the fastest with each other number of pipelines: the more there are, the less they may have to
    share out."""
    first, others = found[:_EASED], found[_EASED:]
    numbers = {len(each.pipelines) for each in others} - {len(each.pipelines) for each in first}
    alike = ([each for each in others if len(each.pipelines) == number] for number in sorted(numbers))
    return first + [each for some in alike for each in some[:_EASED_OF_OTHERS]]


def unburden(costs: CostModel, found: Plan, consider: Callable[[Plan], float]) -> None:
    """Offers `consider` a plan that recomputes much, with the state of some layers on hosts instead, where that is
    quicker."""
    num_devices = sum(node.devices for node in usable_nodes(costs.job, costs.snapshot))
    if costs.job.train.sharding == "none" or not LEAST_DEVICES <= num_devices <= MOST_DEVICES:
        return
    if _recomputed(found) < _MUCH:
        return
    for shared in {id(one): one for one in (found, shared_by_room(found, costs))}.values():
        made = relieved(shared, costs, offload=True)
        if made is not None:
            consider(made)


def is_pressed(plan: Plan) -> bool:
    """Whether memory binds somewhere, so that layers are computed again, weights come in slices, or devices hold state
    and do nothing else."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    holders = any(not replica.samples for stage in stages for replica in stage.replicas)
    return holders or any(stage.slices > 1 for stage in stages) or _recomputed(plan) > 0


def _recomputed(plan: Plan) -> float:
    """The share of layers, of all pipelines."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    plain = sum(stage.recomputed()["none"] for stage in stages)
    return 1 - plain / (plan.num_layers * len(plan.pipelines))
