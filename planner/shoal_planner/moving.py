"""What it takes to change from a running plan to another, and how long that will have to pay.

Owns the price of a change: bytes that must cross between nodes, seconds without a step, and the time until the next
change. An estimate by whole units: which byte comes from where is decided at the change itself, by the recovery.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.costs import CostModel
from shoal_planner.goodput import DEFAULT_FIGURES
from shoal_planner.loads import Holder, Segment, segments
from shoal_planner.memory import ELEMENT_BYTES, OPTIMIZER_BYTES, unit_elements
from shoal_planner.parameters import without_adapters
from shoal_planner.plan import Plan
from shoal_planner.pool_history import HOUR_S
from shoal_planner.pools import Pools, interruptions_per_h, node_pools
from shoal_planner.ranges import check_range

# Plans are not expected to live longer than this whatever the rates say: jobs end, and people change their minds.
LONGEST_UPTIME_S = 7 * 24 * HOUR_S

Span = tuple[float, float]  # of the elements of a unit, as fractions


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of the time after a change. `restart_s` is what a change takes beside moving state: halting,
    planning and meeting again, as measured on this cluster; the default is that of the goodput estimate. `uptime_s`
    until the next change follows from the rates of nodes where it is not stated: `pools` are those that were seen to
    fail here. `steps_left` of the job, if known, are an end as well."""

    restart_s: float = DEFAULT_FIGURES.fixed_s
    uptime_s: float | None = None
    steps_left: int | None = None
    pools: Pools | None = None

    def __post_init__(self) -> None:
        check_range("restart_s", self.restart_s, 0, 1e7)
        if self.uptime_s is not None:
            check_range("uptime_s", self.uptime_s, 0, 1e10)
        if self.steps_left is not None:
            check_range("steps_left", self.steps_left, 0, 1e12)


UNKNOWN = Outlook()


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """From one plan to another: bytes that nodes get from others, and seconds until the first step can begin."""

    moved_bytes: float
    pause_s: float

    def steps(self, step_s: float, uptime_s: float) -> float:
        """The value of a plan that is moved to: its steps until the next change. `step_s` for each that lasts."""
        return max(0.0, uptime_s - self.pause_s) / step_s


STAY = Move(moved_bytes=0.0, pause_s=0.0)


def uptime_s(snapshot: ClusterSnapshot, outlook: Outlook) -> float:
    """Until a node of this cluster is expected to be lost: the same for all plans, so that their steps compare."""
    if outlook.uptime_s is not None:
        return outlook.uptime_s
    per_h = interruptions_per_h(node_pools(snapshot, outlook.pools).values())
    return min(LONGEST_UPTIME_S, HOUR_S / per_h if per_h else LONGEST_UPTIME_S)


def move(before: Plan, after: Plan, costs: CostModel, outlook: Outlook) -> Move:
    """What nodes must get that they do not hold under `before`, over their own interfaces; those who send are many, and
    share it evenly. What moves within a node is not counted."""
    arriving = arriving_bytes(before, after, costs)
    total = sum(arriving.values())
    rates = [costs.node_rate(node.id) for node in costs.snapshot.nodes]
    slowest_s = max((num_bytes / rate_into(node_id, costs) for node_id, num_bytes in arriving.items()), default=0.0)
    return Move(moved_bytes=total, pause_s=outlook.restart_s + max(slowest_s, total / sum(rates)))


def rate_into(node_id: str, costs: CostModel) -> float:
    """Bytes per second into a node: of its interfaces, over the best link that it has to any other node, as measured
    where that was."""
    most, nics, best, kinds = costs.node_rate(node_id), costs.node(node_id).nics, 0.0, set[int]()
    for other in costs.snapshot.nodes:
        if other.id != node_id and costs.kind(other.id) not in kinds:
            kinds.add(costs.kind(other.id))
            best = max(best, costs.link(other.id, node_id).bytes_per_s)
            if best * nics >= most:
                break
    return min(most, best * nics) if kinds else most


def rates_into(costs: CostModel) -> dict[str, float]:
    """`rate_into` of each node."""
    nodes = [node.id for node in costs.snapshot.nodes]
    of_kind = {kind: rate_into(node_id, costs) for kind, node_id in {costs.kind(one): one for one in nodes}.items()}
    return {node_id: of_kind[costs.kind(node_id)] for node_id in nodes}


def arriving_bytes(before: Plan, after: Plan, costs: CostModel) -> dict[str, float]:
    """By node, what it must hold under `after` and does not hold under `before`: weights of units that are new to it,
    and optimizer state of shares that are."""
    found: dict[str, float] = defaultdict(float)
    weight_bytes, model = ELEMENT_BYTES[costs.job.train.precision], costs.job.model
    split = after.sharding.optimizer == before.sharding.optimizer == "cluster"  # else nodes have all that they hold
    for old, new, count in _together(segments(before, costs), segments(after, costs)):
        elements = count * unit_elements(model, new.first, 1)
        held = {holder.node for holder in old.holders}
        still = count * unit_elements(without_adapters(model), new.first, 1) if model.lora is not None else 0
        for node_id in {holder.node for holder in new.holders} - held:
            found[node_id] += (elements + still) * weight_bytes
        for node_id, share in _new_shares(old.holders, new.holders, split=split):
            found[node_id] += share * elements * OPTIMIZER_BYTES
    return dict(found)


def _together(before: tuple[Segment, ...], after: tuple[Segment, ...]) -> Iterator[tuple[Segment, Segment, int]]:
    """Runs of units that have the same holders under either plan, and how many units they are."""
    i, first = 0, 0
    for new in after:
        while first < new.last:
            while before[i].last <= first:
                i += 1
            last = min(before[i].last, new.last)
            yield before[i], new, last - first
            first = last


def _new_shares(before: tuple[Holder, ...], after: tuple[Holder, ...], *, split: bool) -> Iterator[tuple[str, float]]:
    """Of a unit's optimizer state, the share that each node must get. Where tensor parallelism cuts the unit in other
    places than before, what a node held is spread evenly over what it needs."""
    if not split:
        held = {holder.node for holder in before}
        yield from ((node_id, 1.0) for node_id in {holder.node for holder in after} - held)
        return
    alike = {holder.tp for holder in before} == {holder.tp for holder in after}
    old = _spans(before)
    for node_id, spans in _spans(after).items():
        need = sum(last - first for first, last in spans)
        mine = old.get(node_id, [])
        if alike:
            kept = sum(max(0.0, min(one[1], other[1]) - max(one[0], other[0])) for one in spans for other in mine)
        else:
            kept = need * sum(last - first for first, last in mine)
        if need - kept > 1e-12:
            yield node_id, need - kept


def _spans(holders: tuple[Holder, ...]) -> dict[str, list[Span]]:
    """By node, the parts that its replicas own: neighbouring ones, in the order of the plan."""
    total, reached = sum(holder.share for holder in holders), 0.0
    found: dict[str, list[Span]] = defaultdict(list)
    for holder in holders:
        first, reached = reached, reached + holder.share / total
        found[holder.node].append((first, reached))
    return found
