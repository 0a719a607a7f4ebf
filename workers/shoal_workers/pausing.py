"""The wish that a job rests, and how far its supervisor has come with it.

A job rests once its newest safe step stands in the object store. So nothing is stopped before the store is known to
take something; while it does not, training goes on and the job says so. Owns that knowledge; what follows from it is
decided in `decide`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal_planner.job import JobSpec
from shoal_recovery.decide import PauseSeen
from shoal_recovery.journal import JobState
from shoal_workers.checkpoint_commits import CheckpointCommits
from shoal_workers.epoch_view import EpochView
from shoal_workers.record import JobRecord
from shoal_workers.store_check import Tried, try_store

BY_USER = "paused_by_user", "on request"
_LOOK_S = 5.0
_SAVE_AGAIN_S = 5.0


class Pausing:
    """`want` may be called by any thread, everything else by one."""

    def __init__(
        self, spec: JobSpec, record: JobRecord, commits: CheckpointCommits, clock: Callable[[], float], wanted: bool
    ) -> None:
        self._uri = spec.checkpoint.uri
        self._record = record
        self._commits = commits
        self._clock = clock
        self._wanted = wanted
        self._asked = BY_USER
        self._looking: threading.Thread | None = None
        self._tried: Tried | None = None
        self._tried_s = 0.0
        self._said: str | None = None
        self._saving: int | None = None
        self._saving_s = 0.0

    def want(self, wanted: bool, code: str, why: str) -> None:
        """`code` and `why` as in a PauseSeen."""
        self._asked = code, why
        self._wanted = wanted

    @property
    def wanted(self) -> bool:
        return self._wanted

    def seen(self, epoch: EpochView | None) -> PauseSeen | None:
        """None where nobody wants a rest."""
        if not self._wanted:
            self._called_off()
            return None
        self._look()
        problem = None if self._tried is None else self._tried.refused or self._tried.problem
        if self._record.state is JobState.RUNNING and problem is not None:
            self._say(problem)
        return PauseSeen(
            stored=self._stored(epoch),
            saving=self._is_saving(),
            store_takes=self._tried is not None and problem is None,
            code=self._asked[0],
            why=self._asked[1],
        )

    def saves(self, step: int | None) -> None:
        """This step was ordered to be brought to the store; None: none is whole."""
        self._saving, self._saving_s = step, self._clock()

    def _stored(self, epoch: EpochView | None) -> str | None:
        """Ranks that stopped in order have left everything safe; otherwise the newest done step may be not."""
        newest, stored = self._record.newest_step, max(self._record.checkpoints, default=None)
        if newest == 0:
            return "no step was done yet"
        unsafe = 0 if epoch is not None and epoch.ended is not None else 1
        if stored is None or stored < newest - unsafe:
            return None
        return f"step {stored} stands in {self._uri}"

    def _is_saving(self) -> bool:
        if self._clock() - self._saving_s < _SAVE_AGAIN_S:
            return True
        return self._saving is not None and not self._commits.settled(self._saving)

    def _look(self) -> None:
        """Beside everything else: a store may take its time to answer."""
        if self._looking is not None and self._looking.is_alive():
            return
        if self._tried is None or self._clock() - self._tried_s >= _LOOK_S:
            self._looking = threading.Thread(target=self._try, name="store-look", daemon=True)
            self._looking.start()

    def _try(self) -> None:
        self._tried, self._tried_s = try_store(self._uri), self._clock()

    def _say(self, problem: str) -> None:
        if problem != self._said:
            self._said = problem
            reason = f"The pause waits for the object store, and training goes on: {self._uri}: {problem}"
            self._record.say("pause_waits", reason)

    def _called_off(self) -> None:
        self._tried, self._saving = None, None
        if self._said is not None:
            self._said = None
            self._record.say("running", "Training goes on; the pause was called off.")
