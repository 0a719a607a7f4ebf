"""What the same training would take on nodes of one kind: what mixed and spot nodes are compared with.

Owns how many such nodes that is. What they do is the search's to say.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.limits import LimitsSpec
from shoal_planner.pool_history import HOUR_S
from shoal_planner.profile import Profile
from shoal_planner.search import plan as find_plan

MOST_DEVICES = 128  # of a fleet: planning for more takes too long for a comparison
TIME_LIMIT_S = 10.0
_AS_FAST = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformFleet:
    """`count` nodes like `node`, and what is predicted for the plan that was found for them, if nothing happens.
    `as_fast`: that is the speed that was asked for; else no number of such nodes was found that has it."""

    node: Node
    count: int
    step_s: float
    tokens_per_s: float
    as_fast: bool

    @property
    def price_per_hour(self) -> float:
        return self.node.price_per_hour * self.count

    @property
    def usd_per_million_tokens(self) -> float:
        return self.price_per_hour / HOUR_S / self.tokens_per_s * 1e6


def cheapest_uniform(
    job: JobSpec,
    nodes: Iterable[Node],
    tokens_per_s: float,
    *,
    beside: ClusterSnapshot,
    profile: Profile,
    time_limit_s: float = TIME_LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> UniformFleet | None:
    """Of fleets of one of these kinds of nodes each, as many as are needed for this speed: the cheapest per token;
    where none has it, the fastest. The limits of the job do not count. `beside` is what is known of devices. Nothing
    more is tried after `time_limit_s`; None where nothing that was tried fits."""
    unlimited = dataclasses.replace(job, limits=LimitsSpec())
    ends_s = clock() + time_limit_s
    found = []
    for node in nodes:
        fleet = _Fleets(unlimited, node, tokens_per_s, beside, profile, clock, ends_s).smallest()
        if fleet is not None:
            found.append(fleet)
    fast = [fleet for fleet in found if fleet.as_fast]
    if fast:
        return min(fast, key=lambda fleet: (fleet.usd_per_million_tokens, fleet.node.id))
    return max(found, key=lambda fleet: (fleet.tokens_per_s, fleet.node.id), default=None)


class _Fleets:
    """Of one kind of nodes."""

    def __init__(
        self,
        job: JobSpec,
        node: Node,
        tokens_per_s: float,
        beside: ClusterSnapshot,
        profile: Profile,
        clock: Callable[[], float],
        ends_s: float,
    ) -> None:
        self._job = job
        self._node = dataclasses.replace(
            node, host=None, spot=False, reclaim_at_s=None, speed=1.0, preemptions_per_hour=None
        )
        self._tokens_per_s = tokens_per_s
        self._beside = beside
        self._profile = profile
        self._clock = clock
        self._ends_s = ends_s

    def _left_s(self) -> float:
        return max(0.0, self._ends_s - self._clock())

    def smallest(self) -> UniformFleet | None:
        """By doubling and halving: of the fleets that are tried the smallest that is fast enough, else the fastest."""
        best: UniformFleet | None = None
        below = 0
        for count in self._doubled():
            found = self._of(count)
            if found is not None and found.as_fast:
                return self._halved(below, found)
            if found is not None and best is not None and found.tokens_per_s <= best.tokens_per_s:
                break  # they do not scale any further
            best, below = found or best, count
        return best

    def _doubled(self) -> Iterator[int]:
        count = 1
        while count * self._node.devices <= MOST_DEVICES and (count == 1 or self._left_s() > 0):
            yield count
            count *= 2

    def _halved(self, below: int, enough: UniformFleet) -> UniformFleet:
        while enough.count - below > 1 and self._left_s() > 0:
            middle = (below + enough.count) // 2
            found = self._of(middle)
            if found is not None and found.as_fast:
                enough = found
            else:
                below = middle
        return enough

    def _of(self, count: int) -> UniformFleet | None:
        nodes = tuple(dataclasses.replace(self._node, id=f"n-{index}") for index in range(count))
        snapshot = dataclasses.replace(self._beside, nodes=nodes, links=())
        try:
            result = find_plan(
                self._job,
                snapshot,
                self._profile.on(nodes),
                time_limit_s=self._left_s(),
                clock=self._clock,
                thorough=False,
            )
        except (NoPlanFits, InvalidField):
            return None
        predicted = result.plan.prediction
        assert predicted is not None, "the search predicts what it finds"
        return UniformFleet(
            node=self._node,
            count=count,
            step_s=predicted.step_s,
            tokens_per_s=predicted.tokens_per_s,
            as_fast=predicted.tokens_per_s >= _AS_FAST * self._tokens_per_s,
        )
