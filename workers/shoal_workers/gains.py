"""Whether all nodes that are ready, as fast as they are now, are worth a change of plan, and how much faster a job
would step with them.

It is found out in a thread: an observer must not wait.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping

import structlog

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.moving import Outlook
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.score import score
from shoal_planner.search import plan as search_plan
from shoal_workers.epoch_view import EpochView
from shoal_workers.record import JobRecord
from shoal_workers.slot_sizes import Sizes, slot_sizes

log = structlog.get_logger()

_Wanted = tuple[int, frozenset[str], frozenset[tuple[str, float]]]  # epoch, nodes, speeds of stragglers
_PLAN_LIMIT_S = 5.0


class Gains:
    """Use from one thread. `make_ready` is told, in another, what those that would come into the plan are to make ready
    before they do."""

    def __init__(self, spec: JobSpec, make_ready: Callable[[Mapping[str, Sizes]], None]) -> None:
        self._spec = spec
        self._make_ready = make_ready
        self._epoch = 0
        self._asked: set[_Wanted] = set()
        self._found: dict[_Wanted, float | None] = {}
        self._weighed: dict[tuple[int, ClusterSnapshot], tuple[Profile, Plan]] = {}

    def of(
        self, epoch: EpochView, ready: frozenset[str], record: JobRecord, snapshot: Callable[[], ClusterSnapshot]
    ) -> float | None:
        """How many times faster a step would be with these nodes, of which `snapshot` is made; 1 where that is not
        worth the move, None as long as it is not known."""
        speeds = record.speeds
        wanted = (epoch.number, ready, frozenset(speeds.items()))
        if epoch.number != self._epoch:
            self._epoch, self._asked, self._found, self._weighed = epoch.number, set(), {}, {}
        if wanted not in self._asked:
            self._asked.add(wanted)
            running = epoch.snapshot.at_speeds(speeds)
            outlook = record.outlook
            if running != epoch.snapshot:  # a change for speeds has to pay before the job ends
                outlook = dataclasses.replace(outlook, steps_left=self._spec.train.steps - epoch.last_step)
            arguments = (wanted, epoch.plan, running, record.profile, outlook, snapshot())
            threading.Thread(target=self._find, args=arguments, name="gain", daemon=True).start()
        return self._found.get(wanted)

    def plan(self, epoch: int, snapshot: ClusterSnapshot, profile: Profile) -> Plan | None:
        """What was weighed for these nodes, if it was with these figures: it need not be looked for again while the
        nodes that compute stand still."""
        known, plan = self._weighed.get((epoch, snapshot), (None, None))
        return plan if known == profile else None

    def _find(
        self,
        wanted: _Wanted,
        plan: Plan,
        running: ClusterSnapshot,
        profile: Profile,
        outlook: Outlook,
        snapshot: ClusterSnapshot,
    ) -> None:
        gain, weighed = self._gain(wanted[0], plan, running, profile, outlook, snapshot)
        self._found[wanted] = gain
        if weighed is not None:
            known = {node.id for node in running.nodes}
            sizes = slot_sizes(weighed, snapshot, self._spec.model)
            if newcomers := {node: needed for node, needed in sizes.items() if node not in known}:
                self._make_ready(newcomers)

    def _gain(
        self,
        epoch: int,
        plan: Plan,
        running: ClusterSnapshot,
        profile: Profile,
        outlook: Outlook,
        snapshot: ClusterSnapshot,
    ) -> tuple[float | None, Plan | None]:
        """Over this plan on the nodes that it runs on; and the plan that is worth the move."""
        known = profile.on((*running.nodes, *snapshot.nodes))
        try:
            found = search_plan(
                self._spec,
                snapshot,
                known,
                previous=plan,
                time_limit_s=_PLAN_LIMIT_S,
                outlook=outlook,
            )
            current = score(plan, self._spec, running, known)
        except (NoPlanFits, InvalidField) as error:
            log.warning("gain of a change not known", error=str(error))
            return None, None
        self._weighed[epoch, snapshot] = profile, found.plan
        if found.change is not None:
            log.info("change weighed", move=found.change.move, reason=found.change.reason)
            if not found.change.move:
                return 1.0, None
        assert found.plan.prediction is not None and current.prediction is not None
        return current.prediction.step_s / found.plan.prediction.step_s, found.plan
