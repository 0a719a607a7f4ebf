"""What a running job would be with other nodes than it has: faster with those that joined, able to go on without those
that are to go away. Nothing here waits, and nothing is done about it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan
from shoal_recovery.journal import JobState, NodeStays
from shoal_workers.epoch_view import EpochView
from shoal_workers.foresight import Foresight
from shoal_workers.gains import Gains
from shoal_workers.leaving import Leaving
from shoal_workers.measuring import Measuring
from shoal_workers.record import JobRecord
from shoal_workers.rescue import Rescue
from shoal_workers.slot_files import Sizes


class TellSizes(Protocol):
    def __call__(self, sizes: Mapping[str, Sizes], /, *, joining: bool = False) -> None: ...


class Prospects:
    """Use from one thread. `snapshot` makes a cluster of nodes that are ready."""

    def __init__(
        self,
        spec: JobSpec,
        record: JobRecord,
        measuring: Measuring,
        snapshot: Callable[[frozenset[str]], ClusterSnapshot],
        make_ready: TellSizes,
    ) -> None:
        """`make_ready` is told, in a thread, what memory the nodes may need for snapshots: after a loss, or with those
        that are `joining`."""
        self._record = record
        self._measuring = measuring
        self._snapshot = snapshot
        self._gains = Gains(spec, partial(make_ready, joining=True))
        self._leaving = Leaving(spec)
        self._foresight = Foresight(spec, make_ready)
        self.rescue = Rescue(spec)

    def join_gain(self, epoch: EpochView | None, ready: frozenset[str], *, repaced: bool = False) -> float | None:
        """As `Gains.of`; None where there is nothing to gain: nobody is new, nor slower or faster than the plan takes
        them for (`repaced`)."""
        if epoch is None or self._record.state is not JobState.RUNNING or (ready <= epoch.vital and not repaced):
            return None
        computing = frozenset(device.node for device in epoch.plan.devices())
        if self._measuring.beside(ready, ready - computing):
            return None
        return self._gains.of(epoch, ready, self._record, lambda: self._snapshot(ready))

    def expect(self, epoch: EpochView | None, nodes: frozenset[str], coming: frozenset[str]) -> None:
        """Weighs these nodes that are ready with those that are `coming`, which may make memory ready meanwhile."""
        if epoch is None or self._record.state is not JobState.RUNNING or not coming:
            return
        with contextlib.suppress(KeyError):  # one of them is not coming any more
            self._gains.of(epoch, nodes | coming, self._record, lambda: self._snapshot(nodes | coming))

    def leave_fits(self, epoch: EpochView | None, ready: frozenset[str], going: frozenset[str]) -> bool | None:
        """Whether a plan fits without nodes that are `going`; None where none of them matters, or it is not known."""
        if epoch is None or self._record.state is not JobState.RUNNING or not epoch.vital & going:
            return None
        rest, record = ready - going, self._record
        obstacle: str | None = "all nodes are to go away"
        if rest:
            obstacle = self._leaving.obstacle(rest, epoch.plan, record.profile, record.outlook, self._snapshot)
        if obstacle:
            self._stay(epoch.vital & going, obstacle)
        return None if obstacle is None else not obstacle

    def look_ahead(self, epoch: EpochView, ready: frozenset[str]) -> None:
        """At what a loss of a node would lead to. To be called now and then. Not when the epoch is about to end: the
        next one would wait for memory that is made ready for nothing."""
        if self._record.state is JobState.RUNNING and epoch.vital <= ready and self._foresight.due(epoch.number):
            self._foresight.look(epoch, self._snapshot(ready), self._record.profile, self._record.outlook)

    def foreseen(self, epoch: EpochView | None, snapshot: ClusterSnapshot) -> Plan | None:
        """The plan for these nodes, if it was looked for."""
        if epoch is None:
            return None
        wanted = epoch.number, snapshot, self._record.profile
        return self._foresight.plan(*wanted) or self._gains.plan(*wanted)

    def cannot_leave(self, nodes: frozenset[str], rest: frozenset[str], obstacle: str) -> None:
        """It was tried to go on without these nodes, with the `rest` alone."""
        self._leaving.no_plan(rest, obstacle)
        self._stay(nodes, obstacle)

    def _stay(self, nodes: frozenset[str], obstacle: str) -> None:
        """Said once of each node."""
        for node in sorted(nodes - self._record.staying):
            reason = f"No plan fits without it ({obstacle}); the job goes on with it until it is gone."
            self._record.append(NodeStays(node=node, reason=reason))
