"""Notices stragglers among the nodes of one job, from what its ranks tell of each step, and writes them into the
journal. What follows from it is decided elsewhere: plans are made for the speeds that the record knows.

A straggler that has nothing to do, or hardly anything, cannot be timed: it is forgotten after a while, which is twice
as long each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal_planner.busy import busy_s
from shoal_planner.cluster import DeviceRef
from shoal_planner.costs import CostModel
from shoal_planner.job import JobSpec
from shoal_recovery.journal import NodeRecovered, NodeSlowed
from shoal_recovery.stragglers import Finding, PaceRules, Paces
from shoal_workers import messages as m
from shoal_workers.epoch_view import EpochView
from shoal_workers.record import JobRecord

_FIRST_STEPS = 2  # they allocate, and load what later ones find loaded
# Who has less to do than this, or than this share of what the busiest device has, says little of its speed: in so short
# a time who shares its host and how soon it is woken count for more.
_LEAST_S = 0.01
_LEAST_SHARE = 0.05
_FORGET_S = 600.0
_LONGEST_FORGET_S = 24 * 3600.0


class Stragglers:
    """Use from one thread. `paces` has the rules; devices that should compute for less than `least_s` in a step are not
    judged."""

    def __init__(self, spec: JobSpec, record: JobRecord, clock: Callable[[], float]) -> None:
        self._spec = spec
        self._record = record
        self._clock = clock
        self.paces = Paces(PaceRules())
        self.least_s = _LEAST_S
        self._epoch = 0
        self._planned: dict[str, float] = {}  # speeds that the plan of this epoch takes nodes to have, if not the usual
        self._expected: Mapping[DeviceRef, float] | None = None
        self._steps: dict[int, dict[DeviceRef, float]] = {}
        self._idle_since_s: dict[str, float] = {}

    def heard(self, epoch: EpochView, device: DeviceRef, said: m.Stepped) -> None:
        """Of one rank; the last one of a step completes it."""
        self._follow(epoch)
        if said.epoch != epoch.number or said.step <= epoch.step + _FIRST_STEPS:
            return
        if self._expected is None:
            self._expected = self._predicted(epoch)
        if device not in self._expected:
            return
        step = self._steps.setdefault(said.step, {})
        step[device] = said.computed_s / self._expected[device]
        if len(step) == len(self._expected):
            self._steps = {number: other for number, other in self._steps.items() if number > said.step}
            known = {node: slowed.slowdown for node, slowed in self._record.slow.items()}
            for finding in self.paces.add(step, said.duration_s, known, self._record.times_slowed):
                self._tell(finding)

    def repaced(self, epoch: EpochView | None, ready: frozenset[str]) -> tuple[tuple[str, str], ...]:
        """Nodes that are not as fast as the plan of the epoch takes them to be, and what to say of each. Also forgets
        what was long not seen."""
        if epoch is None:
            return ()
        self._follow(epoch)
        for node in sorted(self._record.slow) if self._expected is not None else ():
            self._forget(node, is_idle=all(device.node != node for device in self._expected or ()))
        speeds = self._record.speeds
        changed = {node for node, _ in self._planned.items() ^ speeds.items()}
        return tuple((node, self._said(node)) for node in sorted(changed & ready))

    def _said(self, node: str) -> str:
        slowed = self._record.slow.get(node)
        if slowed is None:
            return "counts as no straggler any more"
        return f"is {slowed.slowdown:.2g} times slower than it should be"

    def _follow(self, epoch: EpochView) -> None:
        if epoch.number != self._epoch:
            self._epoch, self._expected, self._steps = epoch.number, None, {}
            self._planned = {node.id: node.speed for node in epoch.snapshot.nodes if node.speed != 1}
            self.paces.begin()

    def _predicted(self, epoch: EpochView) -> dict[DeviceRef, float]:
        """What devices that have enough to do should compute in a step, at full speed. Nobody counts where a GPU's time
        of computing has waits for other nodes in it."""
        plan, snapshot = epoch.plan, epoch.snapshot.at_speeds({})
        costs = CostModel(self._spec, snapshot, self._record.profile.on(snapshot.nodes))
        if "cluster" in (plan.sharding.weights, plan.sharding.gradients) and any(map(costs.on_gpu, epoch.computing)):
            return {}
        found = busy_s(plan, costs)
        least_s = max(self.least_s, _LEAST_SHARE * max(found.values()))
        return {device: seconds for device, seconds in found.items() if seconds > least_s}

    def _tell(self, finding: Finding) -> None:
        node, known = finding.node, self._record.slow.get(finding.node)
        if finding.slowdown > 1:
            times = f"{finding.slowdown:.2g} times slower" + (
                "" if known is None else f" ({known.slowdown:.2g} before)"
            )
            reason = f"It computes {times} than it should, as its steps compare with those of others or before"
            reason += f"; the slowest of its devices is {finding.device}."
            self._record.append(NodeSlowed(node=node, slowdown=finding.slowdown, reason=reason))
        elif known is not None:
            reason = f"It computes as fast as it should again; it was {known.slowdown:.2g} times slower."
            self._record.append(NodeRecovered(node=node, reason=reason))

    def _forget(self, node: str, *, is_idle: bool) -> None:
        if not is_idle:
            self._idle_since_s.pop(node, None)
            return
        since_s = self._idle_since_s.setdefault(node, self._clock())
        patience_s = min(_FORGET_S * 2.0 ** min(self._record.times_slowed[node] - 1, 20), _LONGEST_FORGET_S)
        if self._clock() - since_s >= patience_s:
            del self._idle_since_s[node]
            minutes = patience_s / 60
            reason = f"It has had next to nothing to do for {minutes:.0f} min, so nobody knows how fast it is now."
            self._record.append(NodeRecovered(node=node, reason=reason))
