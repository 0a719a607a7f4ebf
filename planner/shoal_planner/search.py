"""The search for a plan: one space, one objective, `predict`.

Owns the choice and the order in which the space is looked through; every round of it is counted in templates and
drafts, not in seconds, so that the same arguments give the same plan. What a round knows comes from `columns` (which
pipelines are worth having), `packing` (how many of each), `assembly` (on which devices), `finish` (layers, samples)
and, on small clusters, `exact`.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.costs import CostModel
from shoal_planner.errors import HostTooSmall, InvalidField, NoPlanFits
from shoal_planner.exact import is_proven, num_devices, search_exactly
from shoal_planner.explain import describe, no_plan_fits, plain_constraint, reason
from shoal_planner.features import ALL, Features, check_job_runs, check_plan_runs
from shoal_planner.finish import Draft, Finisher, Word
from shoal_planner.group_choice import with_groups
from shoal_planner.halving import halve
from shoal_planner.improve import Improver
from shoal_planner.job import JobSpec
from shoal_planner.lasting import Expected, Losses
from shoal_planner.moving import UNKNOWN, Outlook
from shoal_planner.options import group_kinds, usable_nodes
from shoal_planner.parts import least_s
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.replan import Replan, choose, explained, mend_plan
from shoal_planner.reschedule import with_schedules
from shoal_planner.rescue import recomputes, rescue, unburden
from shoal_planner.rounds import Lead, rounds
from shoal_planner.score import score_with
from shoal_planner.standing import word_of
from shoal_planner.teams import try_teams
from shoal_planner.ways import ground_of, ways_of

# Devices so many times slower than the fastest are also left out from the start: if they are but one in so many, or in
# every combination where there is much to win.
_MUCH_SLOWER, _FEW = 5, 8
# On so many devices pipelines are bettered step by step, in so many tries, where the best so far takes so many times
# the least possible.
_IMPROVED, _TRIES, _MUCH_TO_WIN = 80, 60, 1.6
# A running job waits for its new plan: on more devices than these none is proven again, which may take seconds.
_PROVEN_AGAIN = 6
_FINALISTS = 5  # drafts that are scored, of each round
# Rounds that go on after being scouted, and explored; fewer where each is dear.
_KEPT = ((8, (6, 4)), (16, (3, 1)), (256, (4, 3)), (1 << 30, (2, 1)))  # by the number of devices up to which that holds


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
    features: Features = ALL,
    outlook: Outlook = UNKNOWN,
    prove: bool = True,
) -> PlanResult:
    """The best plan found, with its prediction and its reason. The same arguments give the same plan unless the time
    limit ended the search between two rounds (`truncated`); the first round that finds a plan is never cut.

    With a `previous` plan that runs, the plan that gets most steps done until the next change, as far as `outlook`
    tells: perhaps that one. It is mended first, and nothing is searched for where that is good enough.

    Devices and layers are chosen under the direct exchange of gradients; the best plans then get other algorithms where
    these make a step shorter. The plan asks for nothing beyond `features`.

    Raises NoPlanFits, naming the constraint that binds, and InvalidField for unknown device types and for jobs beyond
    `features`.
    """
    started_s = clock()
    check_job_runs(job, features)
    costs = CostModel(features.planning_job(job), snapshot, profile or Profile())
    for node in snapshot.nodes:
        costs.device(node.id)

    def late() -> bool:
        return clock() - started_s > time_limit_s

    copies, why = _copies(job, snapshot), ""
    before = dataclasses.replace(previous, groups=()) if previous is not None and _runs(previous, features) else None
    try:
        search = _searched(costs, copies, before, late, features, prove)
    except HostTooSmall as error:
        if job.checkpoint.copies != "auto" or not copies:
            raise
        search = _searched(costs, 0, before, late, features, prove)
        why = f" Its state has no copies on other nodes, as the plans with one do not fit: {error}."
    scored = _scheduled(search)
    running = search.running
    if features.collectives:
        scored, running = _grouped(scored, running, costs)
    losses = Losses(costs, outlook)
    change = None if running is None else choose(running, scored, costs, outlook, losses)
    found = losses.best(scored) if change is None else change.plan
    chosen, expected = losses.settled(found)
    compared = [other for other in scored if other is not found]
    if job.train.schedule not in ("1f1b", "auto"):  # what the schedule brings is said all the same
        compared += [other for other in search.scored.values() if other.schedule == "1f1b"]
    text = reason(chosen, costs, compared) + why
    if expected is not None and expected.reason:
        text += f" With preemptions, {expected.reason}."
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
    features: Features,
    prove: bool,
) -> Search:
    """A search that found something, with so many copies of the state. Raises NoPlanFits."""
    plain_constraint(costs, copies)
    search = Search(costs, copies, late)
    if previous is None:
        search.run(prove=prove)
    elif not search.mend(dataclasses.replace(previous, copies=copies)):
        mended, search.scored = search.scored, {}  # what is known would make the search give up other ways early
        search.run(prove=prove and num_devices(costs) <= _PROVEN_AGAIN)
        search.scored = mended | search.scored
    apart = previous is None and not is_proven(costs)
    for others in _without_stragglers(costs, every=search.is_far()) if apart else ():
        fast = Search(CostModel(costs.job, others, costs.profile), copies, late)
        fast.run()
        if features.sharded:
            try_teams(fast.costs, copies, fast.best_s(), fast.consider)
        for found in fast.scored.values():  # what is not there to tempt the search does it no harm
            search.consider(found)
    fits = bool(search.scored)
    if features.sharded:
        try_teams(costs, copies, search.best_s(), search.consider)
    if not fits and features.offload:
        refusal = search.refusal
        rescue(costs, lambda roomy: _fastest(roomy, copies, late), search.consider)
        if not (copies and isinstance(search.refusal, HostTooSmall)):  # else fewer copies may make room
            search.refusal = refusal
    elif features.offload and is_proven(costs) and search.is_far() and recomputes(search.best()):
        # What is found where nothing fits must not be lost where something fits.
        rescue(costs, lambda roomy: _fastest(roomy, copies, late), search.consider)
    elif features.offload:
        unburden(costs, search.best(), search.consider)
    if not search.scored:
        raise no_plan_fits(costs, search.refusal)
    return search


def _fastest(costs: CostModel, copies: int, late: Callable[[], bool]) -> list[Plan]:
    found = Search(costs, copies, late)
    found.run(prove=False)
    return sorted(found.scored.values(), key=step_s)


def _scheduled(search: Search) -> list[Plan]:
    """All plans that fit, best first, under the schedules that the job asks for. Raises NoPlanFits."""
    by_step = sorted(search.scored.values(), key=_by_step)
    wanted = search.costs.job.train.schedule
    if wanted == "1f1b":
        return by_step
    plain = [found for found in by_step if found.schedule == "1f1b"]
    made = {found.plan_id: found for found in with_schedules(plain, search.costs, search.scored_or_none)}
    made |= {found.plan_id: found for found in by_step if found.schedule == wanted}  # the running plan perhaps
    if not made:
        raise search.refusal or NoPlanFits(f"no plan that was found fits with train.schedule {wanted}")
    return sorted(made.values(), key=_by_step)


def _without_stragglers(costs: CostModel, *, every: bool) -> Iterator[ClusterSnapshot]:
    """The cluster without the types of devices that are far slower than the fastest, if they are few; or without some
    or all of them in `every` way, so that one of them more never hides what is found without it."""
    nodes = usable_nodes(costs.job, costs.snapshot)
    rate = {node.device: 1 / costs.part("block", node.id, 1, 1).total_s for node in nodes}
    slow = sorted(name for name, blocks in rate.items() if blocks * _MUCH_SLOWER < max(rate.values()))
    num_devices, num_slow = (sum(node.devices for node in some) for some in (nodes, _of(slow, nodes)))
    if slow and (every or num_slow <= max(1, num_devices // _FEW)):
        for count in range(1 if every else len(slow), len(slow) + 1):
            for gone in itertools.combinations(slow, count):
                yield costs.snapshot.without(node.id for node in _of(gone, nodes))


def _of(types: Iterable[str], nodes: tuple[Node, ...]) -> list[Node]:
    return [node for node in nodes if node.device in types]


def _runs(plan: Plan, features: Features) -> bool:
    try:
        check_plan_runs(plan, features)
    except InvalidField:
        return False
    return True


def _grouped(scored: list[Plan], running: Plan | None, costs: CostModel) -> tuple[list[Plan], Plan | None]:
    """With collectives for the best plans, and for the one that runs."""
    mine = [found for found in scored if running is not None and found.plan_id == running.plan_id]
    grouped = {found.plan_id: with_groups(found, costs) for found in (*scored[:_FINALISTS], *mine)}
    scored = sorted((grouped.get(found.plan_id, found) for found in scored), key=_by_step)
    return scored, running and grouped.get(running.plan_id, running)


def _by_step(plan: Plan) -> tuple[float, str]:
    return step_s(plan), plan.plan_id


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


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


class Search:
    """Collects scored plans. `late` tells whether the time is over."""

    def __init__(self, costs: CostModel, copies: int, late: Callable[[], bool]) -> None:
        self.costs = costs
        self.copies = copies
        self.late = late
        self.truncated = False
        self.num_drafts = 0
        self.refusal: NoPlanFits | None = None  # what a device or a host lacks for a plan that was tried
        self.scored: dict[str, Plan] = {}
        self.running: Plan | None = None
        self._finisher = Finisher(costs, copies)
        self._seen: set[tuple[object, ...]] = set()

    def run(self, *, prove: bool = True) -> None:
        """All rounds are scouted, fewer explored, and the best ones followed to plans; then, if asked for, what is best
        on a small cluster is proven."""
        nodes = usable_nodes(self.costs.job, self.costs.snapshot)
        leads = [Lead(this, self.costs, self.copies) for this in rounds(group_kinds(nodes, self.costs), self.costs)]
        num_devices = sum(node.devices for node in nodes)
        kept = next(numbers for limit, numbers in _KEPT if num_devices <= limit)
        # Groups take little time, and how they begin says little of how they end.
        grouped = [lead for lead in leads if lead.round.groups > 1]
        for lead in grouped:
            lead.scout()
            lead.explore(self.best_s())
        whole = halve([lead for lead in leads if lead.round.groups == 1], (Lead.scout, Lead.explore), kept)
        for lead in itertools.chain(grouped, whole):
            if self.scored and self.late():
                self.truncated = True
                return
            drafts = sorted(self._drafts(lead), key=lambda draft: draft.seconds)
            for draft in drafts[:_FINALISTS]:
                self.consider(self._finisher.plan(draft))
        if not is_proven(self.costs):
            self._improve(nodes)
        if prove:
            search_exactly(self.costs, self.copies, self.best_s(), self.consider)

    def best(self) -> Plan:
        return min(self.scored.values(), key=_by_step)

    def is_far(self) -> bool:
        """Whether there may be much to win, on a cluster where looking further does not take long."""
        nodes = usable_nodes(self.costs.job, self.costs.snapshot)
        few = sum(node.devices for node in nodes) <= _IMPROVED
        return few and self.best_s() > _MUCH_TO_WIN * least_s(nodes, self.costs, self._finisher.sizes)

    def _improve(self, nodes: tuple[Node, ...]) -> None:
        """Step by step from the best plans so far, if there is much to win."""
        if not self.is_far():
            return
        best = sorted(self.scored.values(), key=_by_step)
        starts = [ways_of(tuple(map(word_of, found.pipelines))) for found in best]
        Improver(ground_of(nodes, self.costs), self._judged, _TRIES).run(starts)

    def _judged(self, words: tuple[Word, ...]) -> float:
        draft = self._finisher.draft(words) if self._enough_devices(words) else None
        return float("inf") if draft is None else self.consider(self._finisher.plan(draft))

    def mend(self, running: Plan) -> bool:
        """Looks at the running plan and at what can be made of it; whether no search is needed."""
        self.running = running
        self.consider(running)
        return mend_plan(running, self.costs, self._finisher, self.consider)

    def consider(self, made: Plan) -> float:
        """Scores a plan, and keeps it if it fits. Its seconds; inf if it does not."""
        try:
            scored = score_with(made, self.costs)
        except (InvalidField, NoPlanFits) as error:  # a previous plan may name nodes that are gone
            if isinstance(error, NoPlanFits) and not isinstance(self.refusal, HostTooSmall):
                self.refusal = error
            return float("inf")
        self.scored[scored.plan_id] = scored
        return step_s(scored)

    def scored_or_none(self, made: Plan) -> Plan | None:
        """Of a variant of a plan that is known."""
        return self.scored[made.plan_id] if self.consider(made) < float("inf") else None

    def _drafts(self, lead: Lead) -> Iterator[Draft]:
        for words in lead.words(self.best_s()):
            key = tuple(sorted(self._finisher.key(word) for word in words))
            if key not in self._seen and self._enough_devices(words):
                self._seen.add(key)
                self.num_drafts += 1
                draft = self._finisher.draft(words)
                if draft is not None:
                    yield draft

    def best_s(self) -> float:
        return min((step_s(found) for found in self.scored.values()), default=float("inf"))

    def _enough_devices(self, words: tuple[Word, ...]) -> bool:
        return sum(unit.tp for word in words for unit in word) >= self.costs.job.limits.min_devices
