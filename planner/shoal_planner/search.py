"""The search for a plan: exact on small clusters, a heuristic above; the best few by estimate are simulated.

Owns the choice. What pipelines there are comes from `layouts` and `heuristic`, what they cost from `candidates`, and
what a plan really takes from `simulate` through `score`.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal_planner.candidates import Candidate, Pricer, Word, usable_nodes
from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.explain import binding_constraint, describe, plain_constraint, reason
from shoal_planner.heuristic import MOVE_SHARE, large_candidates
from shoal_planner.job import JobSpec
from shoal_planner.layouts import Key, arrangements, layouts, tp_degrees
from shoal_planner.loads import replica_loads, segments
from shoal_planner.node_kinds import told_apart
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.score import check_memory, score_with

EXACT_DEVICES = 6
# By estimate, of which the best by simulation is taken: the estimate prices a pipeline's fill and drain only roughly.
FINALISTS = 12
LARGE_FINALISTS = 6
# A plan that keeps devices at what they hold may be this much slower: moving state costs a pause.
KEEP_SHARE = 0.02
# Of plans that differ by less than the prediction's error, the one with the shallowest pipelines.
SIMPLER_SHARE = 0.01
# The large search sees few micro-batch sizes at first: most of its time goes into forming pipelines.
COARSE_SIZES = (1, 2, 4, 8)
COARSE_SPLITS = 4
FINE_SPLITS = 16
# A search that has found nothing goes on after its time limit for so long: cut short at once, it would call a job
# impossible that is not.
GRACE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """`candidates` are the finalists, described, with their predicted seconds, best first; `finalists` the plans."""

    plan: Plan
    search_s: float
    truncated: bool
    num_candidates: int
    candidates: tuple[tuple[str, float], ...]
    finalists: tuple[Plan, ...] = ()


def plan(
    job: JobSpec,
    snapshot: ClusterSnapshot,
    profile: Profile | None = None,
    *,
    previous: Plan | None = None,
    seed: int = 0,
    time_limit_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> PlanResult:
    """The best plan found, with its prediction and its reason. The same arguments give the same plan unless the time
    limit cut the search short (`truncated`).

    Raises NoPlanFits, naming the constraint that binds, and InvalidField for unknown device types.
    """
    started_s = clock()
    costs = CostModel(job, snapshot, profile or Profile())
    for node in snapshot.nodes:
        costs.device(node.id)
    copies = _copies(job, snapshot)
    if plain := plain_constraint(costs, copies):
        raise NoPlanFits(plain)
    search = Search(
        costs,
        copies,
        seed,
        late=lambda share: clock() - started_s > share * time_limit_s,
        lost=lambda: clock() - started_s > time_limit_s + GRACE_S,
    )
    search.run()
    scored = search.scored(previous)
    if not scored and search.gave_up:
        likely = binding_constraint(costs, copies, search.refusal)
        raise NoPlanFits(f"none was found within {time_limit_s + GRACE_S:g} s, and the search is not over; {likely}")
    if not scored:
        raise NoPlanFits(binding_constraint(costs, copies, search.refusal))
    chosen = _choose(scored, previous)
    explained = dataclasses.replace(
        chosen, reason=reason(chosen, costs, [found for found in scored if found != chosen])
    )
    return PlanResult(
        plan=explained,
        search_s=clock() - started_s,
        truncated=search.truncated,
        num_candidates=search.num_candidates,
        candidates=tuple((describe(found, snapshot), step_s(found)) for found in scored),
        finalists=tuple(scored),
    )


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
    """Collects the best candidates by estimate. `late` tells whether this share of the time is over, `lost` whether
    the search must end even if it has found nothing."""

    def __init__(
        self,
        costs: CostModel,
        copies: int,
        seed: int,
        late: Callable[[float], bool],
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self.costs = costs
        self.copies = copies
        self.seed = seed
        self.late = late
        self.lost = lost
        self.truncated = False
        self.gave_up = False
        self.num_finalists = FINALISTS
        self.num_candidates = 0
        self.refusal = ""  # what a host lacks for a candidate whose devices suffice
        self.pricer = Pricer(costs, late=lambda: late(1))
        self._best: list[tuple[float, int, Candidate]] = []  # a heap, worst first

    def best(self) -> list[Candidate]:
        """What `run` found, best estimate first."""
        return [candidate for _, _, candidate in sorted(self._best, key=lambda entry: (-entry[0], -entry[1]))]

    def run(self) -> None:
        nodes = usable_nodes(self.costs.job, self.costs.snapshot)
        if not nodes:
            return
        degrees = tp_degrees(self.costs.job.model, max(node.devices for node in nodes))
        if sum(node.devices for node in nodes) <= EXACT_DEVICES:
            self._exact(nodes, degrees)
        else:
            self._large(nodes, degrees)

    def scored(self, previous: Plan | None) -> list[Plan]:
        """The finalists that pass every check of `score`, and the previous plan if it still does; best first."""
        plans: dict[str, Plan] = {}
        if previous is not None:
            kept = dataclasses.replace(previous, copies=self.copies)
            plans[kept.plan_id] = kept
        for candidate in self.best():
            made = self.pricer.plan(candidate, self.copies)
            plans[made.plan_id] = made
        scored: list[Plan] = []
        for made in plans.values():
            if scored and self.late(1):
                self.truncated = True
                break
            try:
                scored.append(score_with(made, self.costs))
            except (InvalidField, NoPlanFits):
                continue  # the previous plan may name nodes that are gone
        return sorted(scored, key=lambda found: (step_s(found), found.plan_id))

    def _exact(self, nodes: tuple[Node, ...], degrees: tuple[int, ...]) -> None:
        batch = self.costs.job.train.global_batch
        seen: set[Key] = set()
        for units in layouts(nodes, degrees, told_apart(self.costs.profile), {}):
            for words in arrangements(units, batch, seen):
                if self._over():
                    return
                self._offer(words)

    def _over(self) -> bool:
        """Whether the search must end here."""
        if self._best:
            self.truncated = self.truncated or self.late(1)
            return self.truncated
        self.gave_up = self.lost()
        return self.gave_up

    def _large(self, nodes: tuple[Node, ...], degrees: tuple[int, ...]) -> None:
        self.num_finalists = LARGE_FINALISTS
        coarse = Pricer(self.costs, COARSE_SIZES, COARSE_SPLITS, late=lambda: self.late(MOVE_SHARE))
        apart = told_apart(self.costs.profile)
        found = large_candidates(nodes, degrees, apart, coarse, self.seed, self.late, self.lost)
        self.truncated = self.late(MOVE_SHARE)
        self.gave_up = not found and self.lost()
        self.pricer = Pricer(self.costs, max_splits=FINE_SPLITS, late=lambda: self.late(1))
        self.num_candidates += coarse.num_estimates
        for _, words in found:
            if self._over():
                return
            self._offer(words)

    def _offer(self, words: tuple[Word, ...]) -> None:
        if sum(len(unit.devices) for word in words for unit in word) < self.costs.job.limits.min_devices:
            return
        self.num_candidates += 1
        worst = -self._best[0][0] if len(self._best) >= self.num_finalists else float("inf")
        if not self.pricer.floor(words) < worst or not self.pricer.estimate(words) < worst:
            return
        candidate = self.pricer.price(words)
        if candidate is not None and candidate.seconds < worst and self._fits(candidate):
            heapq.heappush(self._best, (-candidate.seconds, -self.num_candidates, candidate))
            if len(self._best) > self.num_finalists:
                heapq.heappop(self._best)

    def _fits(self, candidate: Candidate) -> bool:
        try:
            made = self.pricer.plan(candidate, self.copies)
            check_memory(made, self.costs, replica_loads(made, self.costs, segments(made, self.costs)))
        except NoPlanFits as error:
            self.refusal = error.constraint
            return False
        return True


def _choose(scored: list[Plan], previous: Plan | None) -> Plan:
    """The fastest; of those hardly slower, the one in which devices keep most of what the previous plan gave them, or
    without a previous plan the one with the shallowest pipelines."""
    if previous is None:
        limit_s = step_s(scored[0]) * (1 + SIMPLER_SHARE)
        near = itertools.takewhile(lambda found: step_s(found) <= limit_s, scored)
        return min(near, key=lambda found: (max(len(pipeline.stages) for pipeline in found.pipelines), step_s(found)))
    limit_s = step_s(scored[0]) * (1 + KEEP_SHARE)
    near = itertools.takewhile(lambda found: step_s(found) <= limit_s, scored)
    before = set(_holdings(previous))
    return max(near, key=lambda found: (len(before.intersection(_holdings(found))), -step_s(found)))


def _holdings(plan: Plan) -> Iterator[tuple[str, int, int, int]]:
    """What each device holds: (device, layer, tp, tp rank)."""
    for place in plan.places():
        stage = plan.pipelines[place.pipeline].stages[place.stage]
        for layer in range(stage.first, stage.last):
            yield str(place.device), layer, place.tp, place.tp_rank
