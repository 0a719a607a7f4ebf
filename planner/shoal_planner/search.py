"""The search for a plan: one space, one objective, `predict`.

Owns which clusters are searched, and the choice from what is found there; how one is searched is up to
`cluster_search`.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal_planner.circles import with_device_groups
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.cluster_search import Search
from shoal_planner.costs import CostModel
from shoal_planner.errors import HostTooSmall, NoPlanFits
from shoal_planner.exact import is_proven
from shoal_planner.explain import describe, no_plan_fits, plain_constraint, reason
from shoal_planner.group_choice import with_groups
from shoal_planner.job import JobSpec
from shoal_planner.lasting import Expected, Losses
from shoal_planner.machines import exchange_parts
from shoal_planner.moving import UNKNOWN, Outlook
from shoal_planner.options import group_kinds, usable_nodes
from shoal_planner.overlap import NOTHING, Overlap
from shoal_planner.overlap_choice import overlapping, with_like_overlap, with_overlap
from shoal_planner.plainer import alone, plainer, plainest
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.replan import Replan, choose, explained
from shoal_planner.reschedule import with_schedules
from shoal_planner.rescue import RoomyCosts
from shoal_planner.score import by_step, step_s
from shoal_planner.sharding import shares_inside

# Devices so many times slower than the fastest are also left out from the start: as far as they are but one in so many,
# or in every combination where there is much to win.
_MUCH_SLOWER, _FEW, _ALL_OF = 5, 8, 3
# Where there is most to win, so many kinds of nodes that are no more than one device in so many are left out, too.
_HANDFULS = 2
# So far above the least possible, each kind of node that could be as fast is searched alone, too, and the plainest
# cluster, if these are but so many devices; farther, however many they are; and farther yet, so are plainer clusters:
# that takes as long again, twice or three times.
_NOT_NEAR, _RATHER_FAR, _FARTHER = 1.1, 1.5, 2.25
_FEW_ALONE = 9
_FINALISTS = 5  # plans that are shown, and looked at more closely
# So many more are looked at that would be first if all that may overlap were hidden, and as many teams, which exchange
# most; fewer where each takes longer.
_PROMISING, _PROMISING_DEVICES = 16, 1024
_NEAR = 1.15  # where nothing overlaps, those that take so many times the best at most
# Other schedules keep more in memory, so for them plans are tried, too, that need so much of it under 1F1B.
_LESS_ROOM = (0.85, 0.7, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """`candidates` are the finalists, described, with their predicted seconds, best first; `finalists` those plans.
    `change` says whether to leave the running plan, if there is one, and why; `expected` what preemptions leave of the
    plan's speed, where it is known how often nodes are lost."""

    plan: Plan
    search_s: float
    truncated: bool
    num_candidates: int
    candidates: tuple[tuple[str, float], ...]
    finalists: tuple[Plan, ...]
    change: Replan | None = None
    expected: Expected | None = None


def plan(
    job: JobSpec,
    snapshot: ClusterSnapshot,
    profile: Profile | None = None,
    *,
    previous: Plan | None = None,
    seed: int = 0,
    time_limit_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
    outlook: Outlook = UNKNOWN,
    thorough: bool = True,
) -> PlanResult:
    """The best plan found, with its prediction and its reason. The same arguments give the same plan unless the time
    limit ended the search between two rounds, or two steps (`truncated`); the first round that finds a plan is never
    cut.

    With a `previous` plan that runs, the plan that gets most steps done until the next change, as far as `outlook`
    tells: perhaps that one. It is mended first, and nothing is searched for where that is good enough.

    Devices and layers are chosen under the direct exchange of gradients; the best plans then get other algorithms where
    these make a step shorter.

    `thorough`: where there are few devices the best plan is proven, and where the best so far is far from what the
    devices could do, parts of the cluster and state on hosts are tried, too; without it, plans are merely compared.

    Raises NoPlanFits, naming the constraint that binds, and InvalidField for unknown device types.
    """
    started_s = clock()
    costs = CostModel(job, snapshot, profile or Profile())
    for node in snapshot.nodes:
        costs.device(node.id)

    def late() -> bool:
        return clock() - started_s > time_limit_s

    copies, why = _copies(job, snapshot), ""
    before = None
    if previous is not None:
        before = dataclasses.replace(previous, groups=(), device_groups=(), overlap=NOTHING)
    try:
        search = _searched(costs, copies, before, late, thorough)
    except HostTooSmall as error:
        if job.checkpoint.copies != "auto" or not copies:
            raise
        search = _searched(costs, 0, before, late, thorough)
        why = f" Its state has no copies on other nodes, as the plans with one do not fit: {error}."
    scored, running = _closer(_scheduled(search), search, costs, NOTHING if previous is None else previous.overlap)
    losses = Losses(costs, outlook)
    change = None if running is None else choose(running, scored, costs, outlook, losses)
    found = losses.best(scored) if change is None else change.plan
    chosen, expected = losses.settled(found, runs=change is not None and not change.move)
    chosen = with_device_groups(chosen, snapshot)
    compared = [other for other in scored if other is not found]
    if job.train.schedule not in ("1f1b", "auto"):  # what the schedule brings is said all the same
        compared += [other for other in search.scored.values() if other.schedule == "1f1b"]
    text = reason(chosen, costs, compared) + why
    if expected is not None and expected.reason:
        text += f" With preemptions, {expected.reason}."
    elif job.checkpoint.copies == "auto" and len(snapshot.nodes) == 1:
        text += " Its state has no copies, as there is no other node."
    if change is not None:
        change = explained(dataclasses.replace(change, plan=chosen), text)
    return PlanResult(
        plan=dataclasses.replace(chosen, reason=text) if change is None else change.plan,
        search_s=clock() - started_s,
        truncated=search.truncated,
        num_candidates=max(search.num_drafts, len(scored)),
        candidates=tuple((describe(each, snapshot), step_s(each)) for each in scored[:_FINALISTS]),
        finalists=tuple(scored[:_FINALISTS]),
        change=change,
        expected=expected,
    )


def _searched(
    costs: CostModel,
    copies: int,
    previous: Plan | None,
    late: Callable[[], bool],
    thorough: bool,
) -> Search:
    """A search that found something, with so many copies of the state. Raises NoPlanFits."""
    plain_constraint(costs, copies)
    search = Search(costs, copies, late)
    for others in _apart(costs) if previous is None else ():
        _look_at(_Look(others, thorough), search)
    search.look(thorough=thorough, previous=previous and dataclasses.replace(previous, copies=copies))
    is_whole = previous is not None or is_proven(costs) or search.is_spoilt_by_copies()
    exhausted: set[ClusterSnapshot] = set()
    for look in () if is_whole else _looks(costs, search, thorough):
        if search.scored and late():
            search.truncated = True
            break
        if look.others not in exhausted and _look_at(look, search):
            exhausted.add(look.others)
    if costs.has_machines and previous is None:
        for found in search.best(_FINALISTS):
            exchange_parts(found, step_s(found), costs, search.consider)
    if not search.scored:
        raise no_plan_fits(costs, search.refusal)
    return search


def _scheduled(search: Search) -> list[Plan]:
    """All plans that fit, best first, under the schedules that the job asks for. Raises NoPlanFits."""
    plans = search.best(len(search.scored))
    wanted = search.costs.job.train.schedule
    if wanted == "1f1b":
        return plans
    plain = [found for found in plans if found.schedule == "1f1b"]
    made = {found.plan_id: found for found in with_schedules(plain, search.costs, search.scored_or_none)}
    for room in _LESS_ROOM:
        tighter = map(search.scored_or_none, search.on_other_devices(RoomyCosts(search.costs, room)))
        more = [found for found in tighter if found is not None]
        made |= {found.plan_id: found for found in with_schedules(more, search.costs, search.scored_or_none)}
    made |= {found.plan_id: found for found in plans if found.schedule == wanted}  # the running plan perhaps
    if not made:
        raise search.refusal or NoPlanFits(f"no plan that was found fits with train.schedule {wanted}")
    return sorted(made.values(), key=by_step)


class _Look(NamedTuple):
    """At another cluster, whose plans are plans of this one. Not thorough, but not `briefly` either: with as many steps
    as on the whole cluster. How much there is to win is measured by `least_s`, if it is given."""

    others: ClusterSnapshot
    thorough: bool
    briefly: bool = True
    least_s: float = 0.0


def _looks(costs: CostModel, search: Search, thorough: bool) -> Iterator[_Look]:
    """At simpler clusters, as far as there is something to win when it is their turn."""
    for others, closely in _simpler(costs, search):
        yield _Look(others, thorough and closely)
    if not thorough:
        return
    for others in _without_few(costs, search):
        yield _Look(others, thorough=False, briefly=False)
    for others in (*plainest(costs), *alone(costs)) if search.is_far(_NOT_NEAR) else ():
        closely = search.is_far(_RATHER_FAR)
        if (closely or others.num_devices <= _FEW_ALONE) and search.may_win(others):
            yield _Look(others, closely, briefly=False, least_s=search.least_s())


def _look_at(look: _Look, search: Search) -> bool:
    """What is not there to tempt the search does it no harm. Whether no other look at this cluster would see more."""
    others = look.others
    fewer = min(search.copies, len(others.nodes) - 1)  # nodes that are left out may hold copies
    costs = search.costs
    simple = Search(CostModel(costs.job, others, costs.profile), fewer, search.late, search.known, look.least_s)
    simple.look(thorough=look.thorough, briefly=look.briefly)
    search.truncated = search.truncated or simple.truncated
    closely = simple.finalists.union(found.plan_id for found in simple.best(_FINALISTS))
    for found in simple.best(len(simple.scored)):
        here = dataclasses.replace(found, copies=search.copies)
        search.consider(here)
        if found.plan_id in closely:
            search.finalists.add(here.plan_id)
    # Where the least possible is that of a larger cluster, there is the more to win, and the more is tried.
    return look.thorough and (look.least_s > 0 or is_proven(simple.costs) or simple.is_far())


def _apart(costs: CostModel) -> Iterator[ClusterSnapshot]:
    """Without machines of several nodes, which tell equal nodes apart: with them a plan only gets faster."""
    if costs.has_machines:
        nodes = tuple(dataclasses.replace(node, host=None) for node in costs.snapshot.nodes)
        yield dataclasses.replace(costs.snapshot, nodes=nodes)


def _simpler(costs: CostModel, search: Search) -> Iterator[tuple[ClusterSnapshot, bool]]:
    """Clusters whose plans are plans of this one, and whether to look closely. Without the slowest types of devices as
    far as they are few, and, where there is much to win, without ever more of those that are far slower than the
    fastest, so that one of them more never hides what is found without it. Where there is much to win also without
    others of these types, and where there is most plainer clusters of what then is left."""
    slow, num_few = _stragglers(costs)
    far, farther = search.is_far(), search.is_far(_FARTHER)

    def without(names: Iterable[str]) -> ClusterSnapshot:
        return costs.snapshot.without(_of(names, costs))

    several = [slow[:count] for count in range(1, len(slow) + 1)] if far else [slow[: min(1, num_few)], slow[:num_few]]
    closely = dict.fromkeys(filter(None, several))
    yield from ((without(names), True) for names in closely)
    if far:
        yield from ((without(names), False) for names in _combinations(slow) if names not in closely)
    if farther:
        yield from ((plain, True) for plain in plainer(CostModel(costs.job, without(slow), costs.profile)))


def _combinations(types: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What is left out together; whatever that is, the slowest type may be left out, too. All combinations of a few
    types; of more, the slowest ones and at most one other."""
    if len(types) <= _ALL_OF:
        counts = range(1, len(types) + 1)
        yield from itertools.chain.from_iterable(itertools.combinations(types, count) for count in counts)
        return
    for count in range(len(types)):
        yield from ((*types[:count], one) for one in types[count:])


def _stragglers(costs: CostModel) -> tuple[tuple[str, ...], int]:
    """Types of devices that are far slower than the fastest, the slowest first, and how many of these are few devices
    together."""
    nodes = usable_nodes(costs.job, costs.snapshot)
    rate = {node.device_label: 1 / costs.part("block", node.id, 1, 1).total_s for node in nodes}
    slow = tuple(
        sorted((name for name in rate if rate[name] * _MUCH_SLOWER < max(rate.values())), key=lambda name: rate[name])
    )
    number = Counter[str]()
    for node in nodes:
        number[node.device_label] += node.devices
    reached = itertools.accumulate(number[name] for name in slow)
    return slow, sum(count <= max(1, number.total() // _FEW) for count in reached)


def _without_few(costs: CostModel, search: Search) -> Iterator[ClusterSnapshot]:
    """Clusters without a few nodes that are like no others: they may hide as much as slow ones, however fast."""
    kinds = group_kinds(usable_nodes(costs.job, costs.snapshot), costs)
    few = sum(kind.devices for kind in kinds) // _FEW
    for kind in sorted(kinds, key=lambda kind: (kind.devices, kind.node.id))[:_HANDFULS]:
        if kind.devices <= few and search.is_far(_FARTHER):
            yield costs.snapshot.without(kind.nodes)


def _of(types: Iterable[str], costs: CostModel) -> list[str]:
    return [node.id for node in usable_nodes(costs.job, costs.snapshot) if node.device_label in types]


def _closer(scored: list[Plan], search: Search, costs: CostModel, overlap: Overlap) -> tuple[list[Plan], Plan | None]:
    """With collectives, and what overlaps, for the best plans, for these, and for the one that runs. That one keeps its
    `overlap`: it is to be the plan that runs, or another. What was made of it in a hurry takes it over where it can."""
    running = search.running

    def change(found: Plan) -> Plan:
        grouped = with_groups(found, costs)
        if running is not None and found.plan_id == running.plan_id:
            return overlapping(grouped, costs, overlap)
        return with_like_overlap(grouped, costs, overlap) if search.mended else with_overlap(grouped, costs)

    first = [*scored[:_FINALISTS], *_promising(scored, costs), *_near(scored, costs), *([running] if running else ())]
    closer = search.finalists.union(found.plan_id for found in first)
    changed = {found.plan_id: change(found) for found in scored if found.plan_id in closer}
    scored = sorted((changed.get(found.plan_id, found) for found in scored), key=by_step)
    return scored, running and changed.get(running.plan_id, running)


def _promising(scored: list[Plan], costs: CostModel) -> list[Plan]:
    """What overlaps turns the order of plans around: those that are the fastest but for what they exchange."""

    def alone_s(found: Plan) -> float:
        assert found.prediction is not None
        terms = found.prediction.terms
        return step_s(found) - terms.tensor_s - terms.pipeline_s - terms.gradient_s

    if costs.job.train.overlap == "none":
        return []
    number = min(_PROMISING, _PROMISING_DEVICES // costs.snapshot.num_devices)
    ordered = sorted(scored, key=lambda found: (alone_s(found), found.plan_id))
    apart = (found for found in ordered if not shares_inside(found))
    teams = (found for found in ordered if shares_inside(found))
    return [*itertools.islice(apart, number), *itertools.islice(teams, number)]


def _near(scored: list[Plan], costs: CostModel) -> list[Plan]:
    """Other algorithms for gradients turn the order of plans around, too: those that are the fastest but for these."""

    def rest_s(found: Plan) -> float:
        assert found.prediction is not None
        return step_s(found) - found.prediction.terms.gradient_s

    if costs.job.train.overlap != "none":  # then they are among the promising
        return []
    number = min(_PROMISING, _PROMISING_DEVICES // costs.snapshot.num_devices)
    near = [found for found in scored if step_s(found) <= step_s(scored[0]) * _NEAR]
    return sorted(near, key=lambda found: (rest_s(found), found.plan_id))[:number]


def _copies(job: JobSpec, snapshot: ClusterSnapshot) -> int:
    others = len(snapshot.nodes) - 1
    if job.checkpoint.copies == "auto":
        return min(job.checkpoint.num_copies, max(0, others))
    if job.checkpoint.num_copies > others:
        raise NoPlanFits(
            f"checkpoint.copies = {job.checkpoint.num_copies} needs {job.checkpoint.num_copies + 1} nodes, "
            f"and the cluster has {len(snapshot.nodes)}"
        )
    return job.checkpoint.num_copies
