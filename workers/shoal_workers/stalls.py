"""A rank may stand still although its process shows life: in a read that never ends, or in a library. Where it has
peers, these notice when what they exchange takes too long; of one that is alone nobody would.

Owns for how long the ranks of an epoch may say nothing. What is done about it is decided in `decide`.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal_planner.job import JobSpec
from shoal_recovery.journal import JobState
from shoal_workers.epoch_view import EpochView
from shoal_workers.record import JobRecord

_STEPS = 20  # of the longest kind: data may be late


class Stalls:
    """`least_s` is the shortest silence that counts, 0: none does; `silent_s` for how long none of some nodes' ranks
    said a word. After each stall it is twice as long until a step is done, for what is only slow must come through."""

    def __init__(
        self, spec: JobSpec, record: JobRecord, least_s: float, silent_s: Callable[[frozenset[str]], float]
    ) -> None:
        self._steps = _STEPS + (0 if spec.train.eval_every is None else spec.train.eval_batches)
        self._least_s = least_s
        self._silent_s = silent_s
        self._record = record
        self._times = 0
        self._found = 0

    def seen(self, epoch: EpochView | None) -> float | None:
        """For how long nobody has said anything, where that is too long."""
        if not self._least_s or epoch is None or self._record.state not in (JobState.RUNNING, JobState.DRAINING):
            return None
        if epoch.last_step > epoch.step:
            self._times = 0
        predicted_s = 0.0 if epoch.plan.prediction is None else epoch.plan.prediction.step_s
        step_s = max(predicted_s, *self._record.recent_steps_s, 0.0)  # of all epochs: the first of one is as long
        times = self._times - (epoch.number == self._found)
        silent_s = self._silent_s(epoch.computing)
        limit_s = max(self._least_s * 2.0 ** max(0, times), self._steps * step_s)
        if epoch.ended is not None or silent_s <= limit_s:
            return None
        if epoch.number != self._found:
            self._found, self._times = epoch.number, self._times + 1
        return silent_s
