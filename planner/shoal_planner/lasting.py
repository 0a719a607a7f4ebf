"""What preemptions leave of the speed of plans on one cluster: which plan gets most done, with how many copies, sent or
kept live.

Owns where expectation enters the choice of a plan: only where somebody knows how often nodes of the cluster are lost.
Does not own the expectation (`goodput`) nor whose word on rates counts (`pools`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal_planner.costs import CostModel
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.goodput import (
    COPIES_SHARE,
    CopiesChoice,
    Goodput,
    RecoveryFigures,
    choose_copies,
    expected_goodput,
)
from shoal_planner.levels import Level
from shoal_planner.moving import Outlook, rates_into
from shoal_planner.plan import Plan
from shoal_planner.pools import PoolRate, node_pools, pool_rates, rates_known
from shoal_planner.score import score_with

# A plan whose steps are longer than this times the shortest ones is not saved by losing less.
_NEAR = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a plan is expected to get done. `options` are the numbers of copies that were compared, fewest first."""

    goodput: Goodput
    options: tuple[Goodput, ...]
    reason: str
    rates: tuple[PoolRate, ...]


class Losses:
    """On a cluster of whose nodes nobody knows how often they are lost, plans count as they are predicted."""

    def __init__(self, costs: CostModel, outlook: Outlook) -> None:
        self.costs = costs
        self.known = rates_known(costs.snapshot, outlook.pools)
        self._pools = node_pools(costs.snapshot, outlook.pools)
        self._into = rates_into(costs) if self.known else {}
        self._figures = RecoveryFigures(fixed_s=min(1e6, outlook.restart_s))
        self._choices: dict[str, CopiesChoice] = {}

    def step_s(self, plan: Plan) -> float:
        """Seconds for each step that lasts, under the number of copies that is best for this plan."""
        assert plan.prediction is not None
        if not self.known:
            return plan.prediction.step_s
        share = self._choice(plan).best.share
        return plan.prediction.step_s / share if share > 0 else plan.prediction.step_s

    def best(self, scored: list[Plan]) -> Plan:
        """Of plans in the order of their steps, the shortest first."""
        if not self.known:
            return scored[0]
        assert scored[0].prediction is not None
        longest_s = scored[0].prediction.step_s * _NEAR
        best, best_s = scored[0], self.step_s(scored[0])
        for plan in scored[1:]:
            assert plan.prediction is not None
            if plan.prediction.step_s >= min(best_s, longest_s):  # as if all of its steps lasted
                break
            seconds = self.step_s(plan)
            if seconds < best_s:
                best, best_s = plan, seconds
        return best

    def settled(self, plan: Plan, *, runs: bool = False) -> tuple[Plan, Expected | None]:
        """With the number of copies that is best for it, and what is expected of it then. Optimizer state that is not
        split between nodes is live on several: where that gets more done than to send copies, a plan that does not run
        yet keeps it so."""
        if not self.known:
            return plan, None
        found = self._with_copies(plan)
        if found is None:
            return plan, None
        for unsplit, what in () if runs else self._unsplit(plan):
            other = self._with_copies(unsplit)
            if other is None or other[0].copies < min(1, found[0].copies):  # no protection is given up for speed
                continue
            split, whole = found[1].goodput, other[1].goodput
            if whole.tokens_per_s > split.tokens_per_s * (1 + COPIES_SHARE):
                reason = f"{other[1].reason}; {what}, as with copies that are sent it would be {split.share:.1%}"
                found = other[0], dataclasses.replace(other[1], reason=reason)
        return found

    def _with_copies(self, plan: Plan) -> tuple[Plan, Expected] | None:
        """None where nothing fits."""
        choice = self._choice(plan)
        for option in choice.ranked():
            try:
                made = score_with(dataclasses.replace(plan, copies=option.copies), self.costs)
            except (InvalidField, NoPlanFits):  # what a plan keeps on hosts besides snapshots may want the room
                continue
            return made, self._expected(option, choice.options, choice.reason_of(option))
        return None

    def _unsplit(self, plan: Plan) -> Iterator[tuple[Plan, str]]:
        """The plan with its optimizer state whole on each device, or each node, that computes with it; and in words."""
        sharding = plan.sharding
        if self.costs.job.train.sharding != "auto" or sharding.optimizer != "cluster":
            return
        levels: tuple[tuple[Level, str], ...] = (
            ("none", "every device keeps the optimizer state of all that it computes with"),
            ("node", "every node keeps the optimizer state of all that it computes with"),
        )
        for level, what in levels:
            try:
                changed = dataclasses.replace(sharding, optimizer=level)
                yield score_with(dataclasses.replace(plan, sharding=changed), self.costs), what
            except (InvalidField, NoPlanFits):  # devices have no room for that, or gradients are split further
                continue

    def expected(self, plan: Plan) -> Expected | None:
        """Of a plan as it is, with the copies that it states; None where no rates are known."""
        if not self.known:
            return None
        found = expected_goodput(
            plan,
            self.costs.job,
            self.costs.snapshot,
            self._pools,
            copies=plan.copies,
            figures=self._figures,
            into=self._into,
        )
        return self._expected(found, (found,), "")

    def _choice(self, plan: Plan) -> CopiesChoice:
        if plan.plan_id not in self._choices:
            self._choices[plan.plan_id] = choose_copies(
                plan, self.costs.job, self.costs.snapshot, self._pools, figures=self._figures, into=self._into
            )
        return self._choices[plan.plan_id]

    def _expected(self, goodput: Goodput, options: tuple[Goodput, ...], reason: str) -> Expected:
        return Expected(goodput=goodput, options=options, reason=reason, rates=pool_rates(self._pools))


def expected_to_mapping(expected: Expected | None) -> dict[str, Any] | None:
    """As answers publish it: plain JSON values; None where no rates are known."""
    if expected is None:
        return None
    return {
        **dataclasses.asdict(expected.goodput),
        "reason": expected.reason,
        "options": [dataclasses.asdict(option) for option in expected.options],
        "rates": [dataclasses.asdict(rate) for rate in expected.rates],
    }
