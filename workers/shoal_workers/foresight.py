"""What becomes of a running job if it loses a node, found out before it does: the plan that it goes on with, and the
memory that its snapshots will lie in.

It is found out in a thread while the job steps, for each node whose loss would be felt, unless these are many; and
again when other nodes are ready, or more is known of them. Owns what was found. Does not own the search, and takes
nothing for certain: what is asked for must be what was looked at.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping

import structlog

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.moving import Outlook
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.search import plan as search_plan
from shoal_workers.epoch_view import EpochView
from shoal_workers.slot_files import Sizes
from shoal_workers.slot_sizes import slot_sizes

log = structlog.get_logger()

_MOST_NODES = 8
_PLAN_LIMIT_S = 5.0
_AGAIN_S = 5.0  # at the earliest, in the same epoch

_Plans = dict[tuple[int, ClusterSnapshot], tuple[Profile, Plan]]


class Foresight:
    """Use from one thread. `make_ready` is told, in another, what the nodes are to make ready."""

    def __init__(
        self,
        spec: JobSpec,
        make_ready: Callable[[Mapping[str, Sizes]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._make_ready = make_ready
        self._clock = clock
        self._epoch = 0
        self._seen: tuple[ClusterSnapshot, Profile] | None = None
        self._looking = threading.Thread()
        self._looked_s = -math.inf
        self._found: _Plans = {}
        self._before: _Plans = {}

    def look(self, epoch: EpochView, snapshot: ClusterSnapshot, profile: Profile, outlook: Outlook) -> None:
        """To be called when it is `due`. `snapshot` has all nodes that could be used; nothing is done where they were
        looked at already. What was found for other epochs is forgotten."""
        self._looked_s, before, self._seen = self._clock(), self._seen, (snapshot, profile)
        if epoch.number != self._epoch:
            self._epoch, self._before = epoch.number, {}
        elif before == self._seen:
            return
        else:
            self._before = self._found  # who has just come may go again
        self._found = {}
        arguments = (epoch, snapshot, profile, outlook, self._found)
        self._looking = threading.Thread(target=self._look, args=arguments, name="foresight", daemon=True)
        self._looking.start()

    def due(self, epoch: int) -> bool:
        """Whether nobody has looked in this epoch, or not for a while."""
        waits = self._looking.is_alive() or self._clock() < self._looked_s + _AGAIN_S
        return epoch != self._epoch or not waits

    def plan(self, epoch: int, snapshot: ClusterSnapshot, profile: Profile) -> Plan | None:
        """What the search finds for these nodes, if that was looked for with these figures."""
        for plans in (self._found, self._before):
            known, plan = plans.get((epoch, snapshot), (None, None))
            if known == profile:
                return plan
        return None

    def _look(
        self,
        epoch: EpochView,
        snapshot: ClusterSnapshot,
        profile: Profile,
        outlook: Outlook,
        found: _Plans,
    ) -> None:
        ready: dict[str, Sizes] = {}
        for lost in sorted(epoch.vital) if len(epoch.vital) <= _MOST_NODES else ():
            rest = dataclasses.replace(snapshot, nodes=tuple(node for node in snapshot.nodes if node.id != lost))
            plan = self._search(rest, epoch.plan, profile, outlook)
            if self._epoch != epoch.number:
                return
            if plan is not None:
                found[epoch.number, rest] = profile, plan
                for node, sizes in slot_sizes(plan, rest, self._spec.model).items():
                    ready[node] = sizes.or_more(ready.get(node, Sizes()))
        if ready:
            self._make_ready(ready)

    def _search(self, rest: ClusterSnapshot, previous: Plan, profile: Profile, outlook: Outlook) -> Plan | None:
        if not rest.nodes:
            return None
        known, limit_s = profile.on(rest.nodes), _PLAN_LIMIT_S
        try:
            found = search_plan(self._spec, rest, known, previous=previous, time_limit_s=limit_s, outlook=outlook)
        except (NoPlanFits, InvalidField) as error:
            log.info("nothing to go on with after a loss", left=[node.id for node in rest.nodes], why=str(error))
            return None
        return found.plan
