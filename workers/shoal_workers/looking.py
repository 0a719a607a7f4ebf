"""Before a job with modules of the user's own has a supervisor: somebody looks at them, and the journal says what was
found. Owns these first entries of a journal. Does not own the look (`own_look`) nor where it happens (`code_ray`)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import structlog

from shoal_planner.job import JobSpec
from shoal_planner.own_model import OwnShape, seen_model
from shoal_planner.strict import read
from shoal_recovery.journal import Entry, Event, JobState, ModelSeen, StateChanged, entry_to_mapping
from shoal_workers.cluster_ray import RayCluster
from shoal_workers.code_ray import CodeRefused, environment_of, look_at, packages_of
from shoal_workers.control_plane import ControlPlane, Wish

log = structlog.get_logger()


class Looker:
    """`wanted` says whether the job still is to run."""

    def __init__(self, plane: ControlPlane, cluster: RayCluster, wanted: Callable[[], bool]) -> None:
        self._plane = plane
        self._cluster = cluster
        self._wanted = wanted

    def prepared(self, wish: Wish, job: JobSpec) -> Wish | None:
        """With a model whose shape is known; None where the job failed, is not wanted any more, or had an entry that
        this wish does not know: then it is wished again. Raises ControlPlaneDown, JobElsewhere."""
        try:
            environment = environment_of(job.code)
            if job.model.is_known:
                return wish
            shape = look_at(wish.spec, environment, self._nodes, self._wanted)
        except CodeRefused as error:
            log.warning("code of a job refused", job=wish.id, code=error.code, why=error.problem)
            self._append(wish, StateChanged(state=JobState.FAILED, code=error.code, reason=error.problem))
            return None
        if shape is None:
            return None
        assert job.model.module is not None
        model = dict(seen_model(dataclasses.asdict(job.model.module), read(OwnShape, shape)))
        code = dataclasses.asdict(dataclasses.replace(job.code, packages=packages_of(environment)))
        if not self._append(wish, ModelSeen(model=model, code=code)):
            return None
        return dataclasses.replace(wish, spec={**wish.spec, "model": model, "code": code}, last_seq=wish.last_seq + 1)

    def _append(self, wish: Wish, event: Event) -> bool:
        entry = Entry(seq=wish.last_seq + 1, at_s=time.time(), event=event)
        return self._plane.append(wish.id, [entry_to_mapping(entry)]) == entry.seq

    def _nodes(self) -> list[str]:
        """Where the job may run, by Ray's ids."""
        return [seen.incarnation for seen in self._cluster.nodes()]
