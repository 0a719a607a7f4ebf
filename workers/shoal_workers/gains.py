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
from shoal_workers.slot_files import Sizes
from shoal_workers.slot_sizes import slot_sizes

log = structlog.get_logger()

_Wanted = tuple[frozenset[str], frozenset[tuple[str, float]]]  # nodes, speeds of stragglers
_PLAN_LIMIT_S = 5.0


class Gains:
    """Use from one thread. `make_ready` is told, in another, what the nodes of a plan that takes others in are to make
    ready, and first those that come."""

    def __init__(self, spec: JobSpec, make_ready: Callable[[Mapping[str, Sizes]], None]) -> None:
        self._spec = spec
        self._make_ready = make_ready
        self._known: tuple[int, Profile] | None = None
        self._asked: set[_Wanted] = set()
        self._found: dict[_Wanted, float | None] = {}
        self._weighed: dict[ClusterSnapshot, Plan] = {}

    def of(
        self, epoch: EpochView, ready: frozenset[str], record: JobRecord, snapshot: Callable[[], ClusterSnapshot]
    ) -> float | None:
        """How many times faster a step would be with these nodes, of which `snapshot` is made; 1 where that is not
        worth the move, None as long as it is not known. Raises what `snapshot` does."""
        speeds, profile = record.speeds, record.profile
        wanted = (ready, frozenset(speeds.items()))
        if self._known != (epoch.number, profile):  # who still weighs for what was known before writes into what was
            self._known, self._asked, self._found, self._weighed = (epoch.number, profile), set(), {}, {}
        if wanted not in self._asked:
            given = snapshot()
            self._asked.add(wanted)
            running = epoch.snapshot.at_speeds(speeds)
            outlook = record.outlook
            if running != epoch.snapshot:  # a change for speeds has to pay before the job ends
                outlook = dataclasses.replace(outlook, steps_left=self._spec.train.steps - epoch.last_step)
            results = wanted, self._found, self._weighed
            arguments = (*results, epoch.plan, running, profile, outlook, given)
            threading.Thread(target=self._find, args=arguments, name="gain", daemon=True).start()
        return self._found.get(wanted)

    def plan(self, epoch: int, snapshot: ClusterSnapshot, profile: Profile) -> Plan | None:
        """What was weighed for these nodes, if it was with these figures: it need not be looked for again while the
        nodes that compute stand still."""
        return self._weighed.get(snapshot) if self._known == (epoch, profile) else None

    def _find(
        self,
        wanted: _Wanted,
        found: dict[_Wanted, float | None],
        weighed: dict[ClusterSnapshot, Plan],
        plan: Plan,
        running: ClusterSnapshot,
        profile: Profile,
        outlook: Outlook,
        snapshot: ClusterSnapshot,
    ) -> None:
        known = profile.on((*running.nodes, *snapshot.nodes))
        gain, best = self._gain(plan, running, known, outlook, snapshot)
        if best is not None:
            weighed[snapshot] = best
        found[wanted] = gain
        if best is not None and gain is not None and gain > 1 and found is self._found:
            sizes, there = slot_sizes(best, snapshot, self._spec.model), {node.id for node in running.nodes}
            if sizes.keys() - there:
                self._make_ready({node: sizes[node] for node in sorted(sizes, key=there.__contains__)})

    def _gain(
        self, plan: Plan, running: ClusterSnapshot, profile: Profile, outlook: Outlook, snapshot: ClusterSnapshot
    ) -> tuple[float | None, Plan | None]:
        """Over this plan on the nodes that it runs on, and the plan to go on with."""
        try:
            found = search_plan(
                self._spec,
                snapshot,
                profile,
                previous=plan,
                time_limit_s=_PLAN_LIMIT_S,
                outlook=outlook,
            )
            current = score(plan, self._spec, running, profile)
        except (NoPlanFits, InvalidField) as error:
            log.warning("gain of a change not known", error=str(error))
            return None, None
        if found.change is not None:
            log.info("change weighed", move=found.change.move, reason=found.change.reason)
            if not found.change.move:
                return 1.0, None if found.truncated else found.plan
        assert found.plan.prediction is not None and current.prediction is not None
        gain = current.prediction.step_s / found.plan.prediction.step_s
        return gain, None if found.truncated else found.plan
