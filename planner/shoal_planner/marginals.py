"""What other devices would bring: plans anew on the cluster with one device or node more. Each question costs a search,
so their number is bounded by the size of the cluster.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.explain import describe
from shoal_planner.explanation import Explanation, Marginal, explanation, prediction_of
from shoal_planner.left_out import left_out
from shoal_planner.plan import Plan
from shoal_planner.search import plan as search

# The most searches for one explanation, by the most devices for which it holds; beyond them the last.
_BUDGETS = ((64, 12), (256, 8), (1024, 6))
_LEAST_BUDGET = 3
_ADDED = "added"  # the name of a node that is not there


class Asker:
    """Plans the same job on other clusters, at most `budget` times."""

    def __init__(self, costs: CostModel, *, seed: int, time_limit_s: float, budget: int) -> None:
        self.costs = costs
        self.seed = seed
        self.time_limit_s = time_limit_s
        self.budget = budget
        self.num_plans = 0

    def exhausted(self) -> bool:
        return self.num_plans >= self.budget

    def plan(self, snapshot: ClusterSnapshot) -> Plan:
        """Raises NoPlanFits."""
        self.num_plans += 1
        profile = self.costs.profile.on(snapshot.nodes)
        return search(self.costs.job, snapshot, profile, seed=self.seed, time_limit_s=self.time_limit_s).plan


def explain_fully(
    plan: Plan,
    costs: CostModel,
    finalists: tuple[Plan, ...] = (),
    *,
    seed: int = 0,
    time_limit_s: float = 10.0,
    budget: int | None = None,
) -> Explanation:
    """As `explanation`, with devices left out and what one more of each kind would bring. `budget` bounds the number of
    searches (by default 12 up to 64 devices, 3 above 1,024), `time_limit_s` each of them."""
    asker = Asker(
        costs, seed=seed, time_limit_s=time_limit_s, budget=_budget(costs.snapshot) if budget is None else budget
    )
    found, skipped = [], []
    for like, node in _additions(costs):
        if asker.exhausted():
            skipped.append(_added_text(node))
        else:
            found.append(_marginal(plan, asker, like, node))
    return dataclasses.replace(
        explanation(plan, costs, finalists),
        left_out=left_out(plan, costs),
        marginals=tuple(found),
        num_plans=asker.num_plans,
        skipped=f"not asked, to bound the searches: {', '.join(skipped)}" if skipped else "",
    )


def _budget(snapshot: ClusterSnapshot) -> int:
    return next((budget for most, budget in _BUDGETS if snapshot.num_devices <= most), _LEAST_BUDGET)


def _additions(costs: CostModel) -> Iterator[tuple[str, Node]]:
    """One more device of each kind of node that the job may use, then one more node; the most frequent kinds first."""
    allowed = costs.job.limits.device_types
    kinds: dict[object, list[Node]] = defaultdict(list)
    for node in costs.snapshot.nodes:
        if not allowed or node.device in allowed:
            alike = kinds[node.device, node.devices, node.zone, node.spot, node.price_per_hour]
            alike.append(dataclasses.replace(node, speed=1.0))  # one that is added is no straggler
    ordered = sorted(kinds.values(), key=lambda nodes: (-len(nodes) * nodes[0].devices, nodes[0].id))
    name = _free_name(costs.snapshot)
    singles: set[tuple[str, str, bool]] = set()
    for nodes in ordered:
        first = nodes[0]
        if first.devices > 1 and (first.device, first.zone, first.spot) not in singles:
            singles.add((first.device, first.zone, first.spot))
            yield first.id, _one_device(first, name)
    for nodes in ordered:
        yield nodes[0].id, dataclasses.replace(nodes[0], id=name, host=None, reclaim_at_s=None)


def _one_device(like: Node, name: str) -> Node:
    """A machine with one device of that kind, and its share of everything else."""
    return dataclasses.replace(
        like,
        id=name,
        host=None,
        devices=1,
        device_group=1,
        nics=1,
        host_memory_bytes=like.host_memory_bytes // like.devices,
        disk_bytes=like.disk_bytes // like.devices,
        price_per_hour=like.price_per_hour / like.devices,
        reclaim_at_s=None,
    )


def _free_name(snapshot: ClusterSnapshot) -> str:
    taken = Counter(node.id for node in snapshot.nodes)
    return next(name for name in (_ADDED, *(f"{_ADDED}-{i}" for i in range(len(taken) + 1))) if name not in taken)


def _added_text(node: Node) -> str:
    return f"one {node.device} more" if node.devices == 1 else f"one node of {node.devices} {node.device} more"


def _marginal(plan: Plan, asker: Asker, like: str, node: Node) -> Marginal:
    """The plan that there is stays possible on a larger cluster, so no addition makes things worse."""
    snapshot = dataclasses.replace(asker.costs.snapshot, nodes=(*asker.costs.snapshot.nodes, node))
    now = prediction_of(plan)
    try:
        best = asker.plan(snapshot)
    except NoPlanFits:  # cut short by its time limit: the plan that there is still fits
        best = plan
    used = any(place.device.node == node.id for place in best.places())
    if not used or prediction_of(best).tokens_per_s <= now.tokens_per_s:
        best, used = plan, False
    then = prediction_of(best)
    return Marginal(
        adds="device" if node.devices == 1 else "node",
        like=like,
        device_type=node.device,
        num_devices=node.devices,
        step_s=then.step_s,
        tokens_per_s=then.tokens_per_s,
        gain=then.tokens_per_s / now.tokens_per_s - 1,
        price_per_million_tokens=then.price_per_million_tokens,
        used=used,
        plan=describe(best, snapshot),
    )
