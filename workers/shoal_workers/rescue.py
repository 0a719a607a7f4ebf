"""Where nodes are to go away that a job cannot go on without, and its state could go with them: whether that was
brought to the object store meanwhile.

Owns what was brought for which nodes; that ranks stop for it, and that it is saved, is decided in `decide`.
"""

from __future__ import annotations

from shoal_planner.job import JobSpec
from shoal_workers.epoch_view import EpochView

_TRIES = 3  # one of several nodes that go away may be gone in the middle of one


class Rescue:
    """Use from one thread."""

    def __init__(self, spec: JobSpec) -> None:
        self._has_store = spec.checkpoint.uri is not None
        self._wanted: frozenset[str] = frozenset()
        self._saved: frozenset[str] = frozenset()
        self._tries = 0

    def wanted(self, epoch: EpochView | None, going: frozenset[str], leave_fits: bool | None) -> bool:
        """`leave_fits` as `Prospects` has it. As long as fewer nodes go than there are copies, state stays behind."""
        self._saved &= going
        self._wanted &= going
        if not self._wanted:
            self._tries = 0
        if self._has_store and epoch is not None and leave_fits is False:
            leaving = epoch.vital & going
            if len(leaving) > epoch.plan.copies or leaving == epoch.vital:
                self._wanted |= leaving - self._saved
        return bool(self._wanted)

    def saves(self, step: int | None) -> None:
        """That step is on its way; None: of this try nothing came. All ranks stand still meanwhile, so they go on after
        a few."""
        self._tries += 1
        if step is not None or self._tries == _TRIES:
            self._saved, self._wanted, self._tries = self._saved | self._wanted, frozenset(), 0
