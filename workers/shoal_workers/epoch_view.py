"""What a supervisor knows of the epoch under way, as its ranks tell it. Pure bookkeeping over messages."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Literal, Self

from shoal_planner.cluster import ClusterSnapshot, DeviceRef
from shoal_planner.plan import Plan
from shoal_recovery.decide import TroubleSeen
from shoal_recovery.journal import PredictionChecked
from shoal_workers import messages as m
from shoal_workers.errors import DataDiffers, DataError

_FIRST_STEPS = 2  # the first ones allocate, and load what later ones find loaded
_TIMED_STEPS = 5


@dataclass(slots=True, kw_only=True)
class EpochView:
    """`step` is where the epoch began; `last_step` the newest that was reported done in it, at `stepped_s`."""

    number: int
    plan: Plan
    snapshot: ClusterSnapshot
    vital: frozenset[str]
    step: int
    last_step: int
    ready: dict[DeviceRef, m.Ready] = field(default_factory=dict)
    left: dict[DeviceRef, m.Left] = field(default_factory=dict)
    troubles: dict[DeviceRef, tuple[m.Trouble, float]] = field(default_factory=dict)
    durations_s: list[float] = field(default_factory=list)
    stepped_s: float = -math.inf

    @classmethod
    def begun(cls, number: int, plan: Plan, snapshot: ClusterSnapshot, step: int, vital: frozenset[str]) -> Self:
        return cls(number=number, plan=plan, snapshot=snapshot, vital=vital, step=step, last_step=step)

    def hear(self, device: DeviceRef, message: m.Ready | m.Left | m.Trouble, now_s: float) -> None:
        if message.epoch != self.number:
            return
        match message:
            case m.Ready():
                self.ready[device] = message
            case m.Left():
                self.left[device] = message
            case m.Trouble():
                self.troubles.setdefault(device, (message, now_s))

    def compare(self, device: DeviceRef, done: m.Stepped, differs: DataError | None, now_s: float) -> None:
        """`differs`: how the data that this rank reads differs from the others'."""
        if differs is not None:
            local, code = isinstance(differs, DataDiffers), "data_broken"
            trouble = m.Trouble(epoch=done.epoch, problem=str(differs), fatal=not local, local=local, code=code)
            self.hear(device, trouble, now_s)

    def timed(self, done: m.Stepped) -> PredictionChecked | None:
        """Takes the time of a step; with some of them, how they compare with what the plan predicted."""
        self.durations_s.append(done.duration_s)
        if len(self.durations_s) != _FIRST_STEPS + _TIMED_STEPS or self.plan.prediction is None:
            return None
        return PredictionChecked(
            epoch=self.number,
            step=done.step,
            num_steps=_TIMED_STEPS,
            predicted_s=self.plan.prediction.step_s,
            measured_s=statistics.median(self.durations_s[_FIRST_STEPS:]),
        )

    @property
    def computing(self) -> frozenset[str]:
        """The nodes of its ranks."""
        return frozenset(device.node for device in self.plan.devices())

    @property
    def all_ready(self) -> bool:
        return self.plan.devices() <= self.ready.keys()

    @property
    def all_at_fault(self) -> bool:
        """Every rank, on several nodes, says that the fault is with its own node: then it is not."""
        devices = self.plan.devices()
        local = {device for device, (trouble, _) in self.troubles.items() if trouble.local}
        return devices <= local and len({device.node for device in devices}) > 1

    @property
    def has_lost_peers(self) -> bool:
        """A rank cannot go on for reasons that are not its own."""
        return any(not trouble.fatal and not trouble.local for trouble, _ in self.troubles.values())

    @property
    def ended(self) -> Literal["finished", "stopped"] | None:
        if not self.plan.devices() <= self.left.keys():
            return None
        return "finished" if all(left.finished for left in self.left.values()) else "stopped"

    def troubles_seen(self, now_s: float) -> tuple[TroubleSeen, ...]:
        return tuple(
            TroubleSeen(
                node=device.node,
                name=f"rank process {device}",
                problem=trouble.problem,
                fatal=trouble.fatal,
                local=trouble.local,
                code=trouble.code,
                age_s=now_s - since_s,
            )
            for device, (trouble, since_s) in sorted(self.troubles.items())
        )
