"""How much faster a job would step with all nodes that are ready, found out in a thread: an observer must not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.features import ENGINE
from shoal_planner.job import JobSpec
from shoal_planner.profile import Profile
from shoal_planner.score import score
from shoal_planner.search import plan as search_plan
from shoal_workers.epoch_view import EpochView

log = structlog.get_logger()

_PLAN_LIMIT_S = 5.0


class Gains:
    """Use from one thread."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._found: dict[tuple[int, frozenset[str]], float | None] = {}
        self._wanted: tuple[int, frozenset[str]] | None = None

    def of(
        self, epoch: EpochView, ready: frozenset[str], profile: Profile, snapshot: Callable[[], ClusterSnapshot]
    ) -> float | None:
        """With these nodes, of which `snapshot` is made; None as long as it is not known."""
        wanted = (epoch.number, ready)
        if wanted != self._wanted:
            self._wanted = wanted
            arguments = (wanted, epoch, profile, snapshot())
            threading.Thread(target=self._find, args=arguments, name="gain", daemon=True).start()
        return self._found.get(wanted)

    def _find(
        self, wanted: tuple[int, frozenset[str]], epoch: EpochView, profile: Profile, snapshot: ClusterSnapshot
    ) -> None:
        self._found[wanted] = self._gain(epoch, profile.on((*epoch.snapshot.nodes, *snapshot.nodes)), snapshot)

    def _gain(self, epoch: EpochView, profile: Profile, snapshot: ClusterSnapshot) -> float | None:
        try:
            better = search_plan(
                self._spec, snapshot, profile, previous=epoch.plan, time_limit_s=_PLAN_LIMIT_S, features=ENGINE
            ).plan
            current = score(epoch.plan, self._spec, epoch.snapshot, profile)
        except (NoPlanFits, InvalidField) as error:
            log.warning("gain of new nodes not known", error=str(error))
            return None
        assert better.prediction is not None and current.prediction is not None
        return current.prediction.step_s / better.prediction.step_s
