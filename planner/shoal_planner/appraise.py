"""What a fleet of rented nodes is worth: the plan found for it, its expected goodput, its price.

Owns asking the planner, each question once and so many at most. Does not own which fleets are asked about (`rent`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.goodput import Goodput, RecoveryFigures, choose_copies
from shoal_planner.job import JobSpec
from shoal_planner.market import Market, Offer
from shoal_planner.moving import Outlook
from shoal_planner.plan import Plan
from shoal_planner.pool_history import HOUR_S, Observed
from shoal_planner.pools import PoolNode, PoolRate, pool_rates
from shoal_planner.preemption import (
    ON_DEMAND,
    PUBLIC_PRIOR,
    PreemptionRate,
    RatePrior,
    estimates,
    known_rate,
    unknown_rate,
)
from shoal_planner.profile import Profile
from shoal_planner.score import score
from shoal_planner.search import plan as find_plan

Counts = tuple[int, ...]  # of nodes of each offer, in the order of the market


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraisal:
    """A fleet with its plan; nodes that the plan left unused are not in it any more. `job_tokens` are those that are
    still to be trained; `rates` by offer."""

    counts: Counts
    snapshot: ClusterSnapshot
    plan: Plan
    goodput: Goodput
    copies_reason: str
    price_per_hour: float
    job_tokens: int
    rates: tuple[PoolRate, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.goodput.tokens_per_s

    @property
    def hours(self) -> float:
        """That the job is expected to take."""
        return self.job_tokens / self.tokens_per_s / HOUR_S if self.tokens_per_s else math.inf

    @property
    def usd_per_million_tokens(self) -> float:
        return self.price_per_hour / HOUR_S / self.tokens_per_s * 1e6 if self.tokens_per_s else math.inf


class Appraiser:
    """Fleets are appraised until so many devices have been planned for, or until `time_limit_s`; then no more.

    The number of devices is what planning takes time by, so the first limit makes the same answer on any machine. The
    clock is looked at between two fleets alone. `done_steps` of the job are behind it.
    """

    def __init__(
        self,
        job: JobSpec,
        market: Market,
        *,
        profile: Profile,
        rates: Mapping[str, PreemptionRate],
        figures: RecoveryFigures,
        seed: int,
        most_devices: int,
        done_steps: int,
        time_limit_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self.market = market
        self.figures = figures
        self.rates = {offer.name: rates.get(offer.name) or rate_of(offer) for offer in market.offers}
        self.refusal: tuple[Counts, str] = ((), "")  # of the largest fleet for which there is no plan, and why
        self.num_plans = 0
        self.truncated = False
        self._profile = profile
        self._seed = seed
        self.tokens_left = (job.train.steps - done_steps) * job.train.tokens_per_step
        self._devices_left = most_devices
        self._devices_kept = most_devices // 2
        self._ends_s = clock() + time_limit_s
        self._half_s = clock() + time_limit_s / 2
        self._clock = clock
        # What part of a fleet can train is asked without a limit that is meant for the whole.
        self._part_job = dataclasses.replace(job, limits=dataclasses.replace(job.limits, min_devices=1))
        self._plans: dict[tuple[JobSpec, Counts], Plan | None] = {}
        self._appraisals: dict[Counts, Appraisal | None] = {}

    def snapshot(self, counts: Counts) -> ClusterSnapshot:
        names = (offer.name for offer in self.market.offers)
        return self.market.snapshot(dict(zip(names, counts, strict=True)))

    def part(self, counts: Counts) -> Plan | None:
        """The plan for exactly these nodes as a part of a fleet; None if none fits, or if what may be spent on parts is
        spent: half of it all."""
        if (self._part_job, counts) not in self._plans:
            if self._clock() >= self._half_s:
                self.truncated = True
            if self.truncated or self._devices_left <= self._devices_kept:
                return None
        return self._plan(self._part_job, counts)

    def _plan(self, job: JobSpec, counts: Counts) -> Plan | None:
        key = (job, counts)
        if key not in self._plans:
            self._plans[key] = self._find(job, counts)
        return self._plans[key]

    def over(self, counts: Counts) -> bool:
        """Whether no more will be learned of this fleet than is known. Of one fleet at least something is."""
        if counts in self._appraisals or not self.appraised():
            return False
        self.truncated = self.truncated or self._clock() >= self._ends_s
        return self.truncated or self._devices_left <= 0

    def appraise(self, counts: Counts) -> Appraisal | None:
        """None if no plan fits, or `over`."""
        if counts not in self._appraisals:
            if self.over(counts):
                return None
            found = self._plan(self.job, counts)
            self._appraisals[counts] = None if found is None else self._appraisal(counts, found)
        return self._appraisals[counts]

    def appraised(self) -> tuple[Appraisal, ...]:
        """All that were, in the order in which they were asked for."""
        return tuple(found for found in self._appraisals.values() if found is not None)

    def _find(self, job: JobSpec, counts: Counts) -> Plan | None:
        snapshot = self.snapshot(counts)
        self.num_plans += 1
        self._devices_left -= snapshot.num_devices
        try:
            result = find_plan(
                job,
                snapshot,
                self._profile.on(snapshot.nodes),
                seed=self._seed,
                time_limit_s=math.inf,  # a plan that a clock cut short would make fleets incomparable
                outlook=Outlook(restart_s=self.figures.fixed_s, pools=self._pools(snapshot)),
                thorough=False,
            )
        except NoPlanFits as error:
            self.refusal = max(self.refusal, (counts, error.constraint), key=lambda entry: sum(entry[0]))
            return None
        return result.plan

    def _appraisal(self, counts: Counts, found: Plan) -> Appraisal:
        """Without what the plan does not use, if it still fits then: unused nodes may keep copies for others."""
        used = {ref.node for ref in found.devices()}
        whole = self.snapshot(counts)
        for snapshot in (whole.without(node.id for node in whole.nodes if node.id not in used), whole):
            made = self._kept(found, snapshot, fewer=snapshot is whole)
            if made is not None:
                return made
        raise AssertionError("a plan that was found for a cluster fits it")

    def _kept(self, found: Plan, snapshot: ClusterSnapshot, *, fewer: bool) -> Appraisal | None:
        """With the best number of copies; with another one only if it may be `fewer`, where hosts have no room for more
        beside what else a plan keeps there."""
        profile = self._profile.on(snapshot.nodes)
        try:
            choice = choose_copies(found, self.job, snapshot, self._pools(snapshot), figures=self.figures)
        except InvalidField:  # too few nodes for the copies
            return None
        for goodput in choice.ranked() if fewer else (choice.best,):
            try:
                scored = score(dataclasses.replace(found, copies=goodput.copies), self.job, snapshot, profile)
            except (InvalidField, NoPlanFits):
                continue
            return self._appraised(scored, goodput, choice.reason_of(goodput), snapshot)
        return None

    def _appraised(self, scored: Plan, goodput: Goodput, copies_reason: str, snapshot: ClusterSnapshot) -> Appraisal:
        counted = Counter(self._offer(node) for node in snapshot.nodes)
        return Appraisal(
            counts=tuple(counted[offer.name] for offer in self.market.offers),
            snapshot=snapshot,
            plan=scored,
            goodput=goodput,
            copies_reason=copies_reason,
            price_per_hour=self.market.price_per_hour(counted),
            job_tokens=self.tokens_left,
            rates=pool_rates(self._pools(snapshot)),
        )

    def _offer(self, node: Node) -> str:
        return node.id.rsplit("-", 1)[0]

    def _pools(self, snapshot: ClusterSnapshot) -> dict[str, PoolNode]:
        names = {node.id: self._offer(node) for node in snapshot.nodes}
        return {node_id: PoolNode(pool=name, rate=self.rates[name]) for node_id, name in names.items()}


def rate_of(offer: Offer, prior: RatePrior = PUBLIC_PRIOR) -> PreemptionRate:
    """What the offer says of itself, else what is expected of any spot node."""
    if not offer.node.spot:
        return ON_DEMAND
    stated = offer.node.preemptions_per_hour
    return unknown_rate(prior) if stated is None else known_rate(stated, prior)


def offer_rates(market: Market, histories: Sequence[Observed]) -> dict[str, PreemptionRate]:
    """For every offer, from what became of pools: those of its name, and others that say what pools are like. A history
    goes before what an offer says of itself."""
    prior, rates = estimates(histories)
    return {offer.name: rates.get(offer.name) or rate_of(offer, prior) for offer in market.offers}
