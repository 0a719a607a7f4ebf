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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shoal_planner.assembly import assemble, bundle
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.columns import Columns
from shoal_planner.costs import CostModel
from shoal_planner.errors import HostTooSmall, InvalidField, NoPlanFits
from shoal_planner.explain import describe, no_plan_fits, plain_constraint, reason
from shoal_planner.features import ALL, Features, check_job_runs, check_plan_runs
from shoal_planner.finish import Draft, Finisher, Word
from shoal_planner.job import JobSpec
from shoal_planner.options import Kind, group_kinds, options_of, usable_nodes
from shoal_planner.packing import pack
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.score import score_with
from shoal_planner.templates import Sequence

# Templates that a round generates, by the number of devices up to which that holds.
_MOST_TEMPLATES = ((8, 800), (16, 1500), (64, 4000), (256, 8000), (1 << 30, 24000))
# Times, as multiples of the least that fractions of templates allow, for which devices are packed.
_STRETCHES = (0.997, 1.002, 1.007, 1.014, 1.025, 1.04, 1.07, 1.12, 1.2)
_PACKINGS, _ALONE = 3, 6  # drafts made of each
_NEAR = 1.02  # what cannot come nearer to the best so far is not packed
_FINALISTS = 5  # drafts that are scored, of each round
_SLICES = (1, 2, 4, 8)
# Sets of nodes on ever faster links that are looked at, and how much faster.
_MOST_REACHES, _MUCH_FASTER = 3, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """`candidates` are the finalists, described, with their predicted seconds, best first; `finalists` those plans."""

    plan: Plan
    search_s: float
    truncated: bool
    num_candidates: int
    candidates: tuple[tuple[str, float], ...]
    finalists: tuple[Plan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Nodes of these kinds, each cut into so many equal slices that hold the same layers in different pipelines."""

    kinds: tuple[Kind, ...]
    slices: int


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
) -> PlanResult:
    """The best plan found, with its prediction and its reason. The same arguments give the same plan unless the time
    limit ended the search between two rounds (`truncated`); the first round that finds a plan is never cut.

    The plan asks for nothing beyond `features`. Raises NoPlanFits, naming the constraint that binds, and InvalidField
    for unknown device types and for jobs beyond `features`.
    """
    started_s = clock()
    check_job_runs(job, features)
    costs = CostModel(features.planning_job(job), snapshot, profile or Profile())
    for node in snapshot.nodes:
        costs.device(node.id)

    def late() -> bool:
        return clock() - started_s > time_limit_s

    copies, why = _copies(job, snapshot), ""
    before = previous if previous is not None and _runs(previous, features) else None
    try:
        search = _searched(costs, copies, before, late)
    except HostTooSmall as error:
        if job.checkpoint.copies != "auto" or not copies:
            raise
        search = _searched(costs, 0, before, late)
        why = f" Its state has no copies on other nodes, as the plans with one do not fit: {error}."
    kept = "" if previous is None else previous.plan_id  # of equally fast plans, the one that runs
    scored = sorted(search.scored.values(), key=lambda found: (step_s(found), found.plan_id != kept, found.plan_id))
    chosen = scored[0]
    explained = dataclasses.replace(
        chosen, reason=reason(chosen, costs, [found for found in scored if found != chosen]) + why
    )
    return PlanResult(
        plan=explained,
        search_s=clock() - started_s,
        truncated=search.truncated,
        num_candidates=search.num_drafts,
        candidates=tuple((describe(found, snapshot), step_s(found)) for found in scored[:_FINALISTS]),
        finalists=tuple(scored[:_FINALISTS]),
    )


def _searched(costs: CostModel, copies: int, previous: Plan | None, late: Callable[[], bool]) -> Search:
    """A search that found something, with so many copies of the state. Raises NoPlanFits."""
    plain_constraint(costs, copies)
    search = Search(costs, copies, late)
    if previous is not None:
        search.consider(dataclasses.replace(previous, copies=copies))
    search.run()
    if not search.scored:
        raise no_plan_fits(costs, search.refusal)
    return search


def _runs(plan: Plan, features: Features) -> bool:
    try:
        check_plan_runs(plan, features)
    except InvalidField:
        return False
    return True


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
        self._finisher = Finisher(costs, copies)
        self._seen: set[tuple[object, ...]] = set()

    def run(self) -> None:
        nodes = usable_nodes(self.costs.job, self.costs.snapshot)
        kinds = group_kinds(nodes, self.costs)
        for this in rounds(kinds, self.costs):
            if self.scored and self.late():
                self.truncated = True
                return
            drafts = sorted(self._drafts(this), key=lambda draft: draft.seconds)
            for draft in drafts[:_FINALISTS]:
                self.consider(self._finisher.plan(draft))

    def consider(self, made: Plan) -> None:
        """Scores a plan, and keeps it if it fits."""
        try:
            scored = score_with(made, self.costs)
        except (InvalidField, NoPlanFits) as error:  # a previous plan may name nodes that are gone
            if isinstance(error, NoPlanFits) and not isinstance(self.refusal, HostTooSmall):
                self.refusal = error
            return
        self.scored[scored.plan_id] = scored

    def _drafts(self, this: Round) -> Iterator[Draft]:
        for words in self._words(this):
            key = tuple(sorted(self._finisher.key(word) for word in words))
            if key not in self._seen and self._enough_devices(words):
                self._seen.add(key)
                self.num_drafts += 1
                draft = self._finisher.draft(words)
                if draft is not None:
                    yield draft

    def _enough_devices(self, words: tuple[Word, ...]) -> bool:
        return sum(unit.tp for word in words for unit in word) >= self.costs.job.limits.min_devices

    def _words(self, this: Round) -> Iterator[tuple[Word, ...]]:
        """Sets of pipelines that promise most, in no order."""
        options = options_of(this.kinds, self.costs)
        batch = -(-self.costs.job.train.global_batch // this.slices)
        num_devices = sum(kind.devices for kind in this.kinds)
        most = next(count for limit, count in _MOST_TEMPLATES if num_devices * this.slices <= limit)

        def columns(holders: int, most: int) -> Columns:
            return Columns(self.costs, this.kinds, options, holders, batch, most)

        best_s = min((step_s(found) for found in self.scored.values()), default=float("inf"))
        alone = columns(this.slices, most)
        alone.start()
        alone.grow_alone(best_s)
        order = np.argsort(alone.alone_s(), kind="stable")[:_ALONE]
        sequences = [[alone.templates[row][0]] for row in order]
        # How far optimizer state is split, and what its exchange takes, follows from how many pipelines there are.
        first = columns(self._holders(num_devices) * this.slices, most // 3)
        first.start()
        time_s = first.grow(best_s)
        together = first
        if np.isfinite(time_s):
            together = columns(first.num_pipelines(time_s) * this.slices, most)
            together.add(first.templates)
            time_s = together.grow(best_s)
        if time_s < best_s * _NEAR:
            together.grow_rest(time_s * _STRETCHES[1])
        for stretch in _STRETCHES:
            if time_s * stretch < best_s * _NEAR:
                sequences.extend(_packed(together, time_s * stretch))
        for found in sequences:
            words = assemble(found, options, this.kinds)
            if words is not None:
                yield tuple(itertools.chain.from_iterable(bundle(word, this.slices) for word in words))

    def _holders(self, num_devices: int) -> int:
        """How many pipelines there may be, for a first idea of how far optimizer state is split."""
        return max(1, min(self.costs.job.train.global_batch, num_devices // 4))


def _packed(columns: Columns, time_s: float) -> Iterator[list[Sequence]]:
    packings = pack(columns.values(time_s), columns.needs, columns.stock, wanted=columns.batch)
    for packing in packings[:_PACKINGS]:
        yield [columns.templates[row][0] for row, count in packing.counts for _ in range(count)]


def rounds(kinds: tuple[Kind, ...], costs: CostModel) -> Iterator[Round]:
    """All nodes; then without those on the slowest links, again and again; each with nodes whole and in slices."""
    for chosen in _reachable(kinds, costs):
        widest = max(kind.node.devices for kind in chosen)
        for slices in _SLICES:
            cut = tuple(
                dataclasses.replace(kind, slice=kind.node.devices // slices)
                for kind in chosen
                if kind.node.devices >= slices
            )
            if slices <= widest and cut:
                yield Round(kinds=cut, slices=slices)


def _reachable(kinds: tuple[Kind, ...], costs: CostModel) -> Iterator[tuple[Kind, ...]]:
    """Sets of kinds whose nodes reach each other at some rate at least, all first."""
    rates = sorted({_rate(one, other, costs) for one, other in itertools.combinations_with_replacement(kinds, 2)})
    seen: set[tuple[int, ...]] = set()
    for slower, rate in zip([0.0, *rates], rates, strict=False):
        if len(seen) == _MOST_REACHES or rate < slower * _MUCH_FASTER:
            continue
        left = list(kinds)
        while left:
            slow = [sum(_rate(kind, other, costs) < rate for other in left) for kind in left]
            if not any(slow):
                break
            left.pop(slow.index(max(slow)))
        key = tuple(kind.number for kind in left)
        if left and key not in seen:
            seen.add(key)
            yield tuple(left)


def _rate(one: Kind, other: Kind, costs: CostModel) -> float:
    """Bytes per second between nodes of these kinds; of a single node, of its interfaces."""
    there = next((node for node in other.nodes if node != one.node.id), None)
    return one.node.inter_bytes_per_s if there is None else costs.link(one.node.id, there).bytes_per_s
