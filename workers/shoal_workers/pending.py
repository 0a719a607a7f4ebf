"""What is measured of a change of plan while it happens; it ends as a RecoveryDone in the journal. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_planner.cluster import DeviceRef
from shoal_recovery.decide import ChangePlan
from shoal_recovery.faults import Fault
from shoal_recovery.journal import RecoveryDone, ShardBrought, SourceFailed
from shoal_recovery.protection import Protection
from shoal_recovery.state import Tier
from shoal_workers.messages import Ready

_TOLD_SHARDS = 32


@dataclass(slots=True, kw_only=True)
class PendingChange:
    """`blow_s` is the last sign of life of what was lost (or when the change was wanted), `noticed_s` when it was
    noticed; `done_step` the last step done before, `safe_step` the last that stood on another node, in an epoch that
    began `since` a step; `vital_before` the nodes of the plan before, `doomed` those of all that are to go away. It
    goes on over attempts that are interrupted; `faults` are those of its sources of state, over all of them."""

    cause: str
    reason: str
    blow_s: float
    noticed_s: float
    done_step: int
    safe_step: int
    since: int
    protection: Protection
    vital_before: frozenset[str]
    plan_before: str = ""
    plan_after: str = ""
    faults: list[Fault] = field(default_factory=list)
    failed_sources: tuple[SourceFailed, ...] = ()
    answered: set[str] = field(default_factory=set)  # nodes that were there to say what they hold, in this attempt
    waited_less: set[str] = field(default_factory=set)  # nodes for which a wait for the store was ended
    nodes_lost: set[str] = field(default_factory=set)
    nodes_joined: frozenset[str] = frozenset()
    doomed: frozenset[str] = frozenset()
    nodes_drained: frozenset[str] = frozenset()
    epoch: int = 0
    step: int = 0
    decided_s: float = 0.0
    restore_s: float = 0.0
    rebuild_s: float = 0.0
    num_bytes: Counter[str] = field(default_factory=Counter)
    source_s: dict[str, float] = field(default_factory=dict)
    shards: list[ShardBrought] = field(default_factory=list)
    num_shards: int = 0

    def goes_on(self, decision: ChangePlan) -> None:
        """The attempt before was interrupted, or found no plan; this is what comes of it."""
        if decision.cause != "interrupted":
            self.reason += " " + decision.reason
        if decision.lost and not self.nodes_lost:
            self.cause = decision.cause

    def halted(self, done_step: int) -> None:
        """No rank steps any more, and this is the last step that any of them has done."""
        if done_step > self.done_step:
            self.done_step = done_step
            self.safe_step = max(self.safe_step, self.protection.newest(done_step - 1, self.since))

    def adopted(self, epoch: int, step: int, vital: frozenset[str], plan_id: str, now_s: float) -> None:
        """What was measured of an attempt before this one did not lead anywhere."""
        self.epoch, self.step, self.plan_after, self.decided_s = epoch, step, plan_id, now_s
        self.nodes_joined = vital - self.vital_before if self.vital_before else frozenset()
        self.nodes_drained = (self.vital_before & self.doomed) - vital
        self.restore_s = self.rebuild_s = 0.0

    def all_ready(self, answers: Mapping[DeviceRef, Ready], failed_sources: tuple[SourceFailed, ...]) -> None:
        self.failed_sources = failed_sources
        for device, ready in answers.items():
            self.num_shards += ready.num_shards
            self.shards += (
                ShardBrought(source=tier, node=node, shard=name, to=str(device), num_bytes=num_bytes, took_s=took_s)
                for tier, node, name, num_bytes, took_s in ready.shards
            )
            self.restore_s = max(self.restore_s, ready.restore_s)
            self.rebuild_s = max(self.rebuild_s, ready.rebuild_s)
            self.num_bytes.update(ready.num_bytes)
            for tier, took_s in ready.source_s.items():
                self.source_s[tier] = max(self.source_s.get(tier, 0.0), took_s)

    def done(self, now_s: float) -> RecoveryDone:
        lost_steps = max(0, self.safe_step - self.step)
        return RecoveryDone(
            epoch=self.epoch,
            cause=self.cause,
            reason=self.reason,
            step=self.step,
            redone_steps=max(0, self.done_step - self.step) - lost_steps,
            lost_steps=lost_steps,
            detect_s=self.noticed_s - self.blow_s,
            decide_s=self.decided_s - self.noticed_s,
            restore_s=self.restore_s,
            rebuild_s=self.rebuild_s,
            total_s=now_s - self.blow_s,
            num_bytes={tier.value: self.num_bytes[tier.value] for tier in Tier},
            nodes_lost=tuple(sorted(self.nodes_lost)),
            nodes_joined=tuple(sorted(self.nodes_joined)),
            nodes_drained=tuple(sorted(self.nodes_drained - self.nodes_lost)),
            source_s={tier.value: self.source_s.get(tier.value, 0.0) for tier in Tier},
            shards=self._largest_shards(),
            num_shards=self.num_shards,
            failed_sources=self.failed_sources,
            plan_before=self.plan_before,
            plan_after=self.plan_after,
        )

    def _largest_shards(self) -> tuple[ShardBrought, ...]:
        by_size = sorted(self.shards, key=lambda shard: (-shard.num_bytes, shard.to, shard.shard))
        return tuple(by_size[:_TOLD_SHARDS])
