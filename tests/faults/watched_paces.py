"""What a supervisor hears of how long nodes compute, kept for whoever judges whether it finds stragglers."""

from __future__ import annotations

import time
from collections.abc import Mapping

from faults.judging import PACES, Pace

from shoal_recovery.stragglers import Finding, PaceRules, Paces, Step
from shoal_workers.supervisor import Supervisor


class WatchedPaces(Paces):
    def __init__(self, kept: list[Pace]) -> None:
        super().__init__(PaceRules())
        self._kept = kept
        self._epoch = kept[-1].epoch if kept else 0  # counted on, whoever supervises

    def begin(self) -> None:
        self._epoch += 1
        super().begin()

    def add(
        self, step: Step, duration_s: float, slow: Mapping[str, float], times: Mapping[str, int]
    ) -> tuple[Finding, ...]:
        paces: dict[str, float] = {}
        for device, pace in step.items():
            paces[device.node] = max(pace, paces.get(device.node, 0.0))
        known = frozenset(slow)
        self._kept.append(Pace(epoch=self._epoch, at_s=time.time(), duration_s=duration_s, times=paces, known=known))
        return super().add(step, duration_s, slow, times)


def watch(supervisor: Supervisor, kept: list[Pace]) -> None:
    """Before it begins."""
    supervisor._stragglers.paces = WatchedPaces(kept)


def judge_short_steps(supervisor: Supervisor) -> None:
    """From now on. Predictions of steps as short as those of drills are so far off that nobody judges by them
    otherwise."""
    stragglers = supervisor._stragglers
    stragglers.least_s, stragglers.paces.rules = 0.0, PACES
    stragglers._epoch = 0  # its thread finds out anew who is to be judged
