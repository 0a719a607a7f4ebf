"""Before a job with modules of the user's own has a supervisor: somebody looks at them, and the journal says what was
found. Owns these first entries of a journal. Does not own the look (`own_look`) nor where it happens (`code_ray`)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import structlog

from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec, parse_job
from shoal_planner.own_model import OwnShape, seen_model, with_seen_model
from shoal_planner.strict import read
from shoal_recovery.journal import Entry, Event, JobState, ModelSeen, StateChanged, entry_to_mapping
from shoal_workers.cluster_ray import RayCluster
from shoal_workers.code_ray import CodeRefused, environment_of, look_at, packages_of
from shoal_workers.control_plane import ControlPlane, Wish

log = structlog.get_logger()


class Looker:
    """`wanted` says whether the job still is to run, `told` what was said of jobs that wait for their code."""

    def __init__(
        self, plane: ControlPlane, cluster: RayCluster, wanted: Callable[[], bool], told: dict[str, str]
    ) -> None:
        self._told = told
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
            if shape is None:
                return None
            model, packages = _model(job, read(OwnShape, shape)), packages_of(environment)
            spec = with_seen_model(wish.spec, model, packages)
            parse_job(spec)
        except CodeRefused as error:
            self._refuse(wish, job, error.code, error.problem)
            return None
        except InvalidField as error:  # what was built is not what the rest of the job is for
            self._refuse(wish, job, "user_code_failed", str(error))
            return None
        if not self._append(wish, ModelSeen(model=model, packages=packages)):
            return None
        return dataclasses.replace(wish, spec=spec, last_seq=wish.last_seq + 1)

    def cancel(self, wish: Wish) -> None:
        """Before anybody has looked there is nobody who could hear it."""
        said = "Cancelled on request."
        self._append(wish, StateChanged(state=JobState.CANCELLED, code="cancelled_by_user", reason=said))

    def _refuse(self, wish: Wish, job: JobSpec, code: str, problem: str) -> None:
        """A job that has begun on a cluster that has its code does not fail because another one lacks it: it waits."""
        log.warning("code of a job refused", job=wish.id, code=code, why=problem)
        state = JobState.WAITING if job.model.is_known else JobState.FAILED
        if state is JobState.FAILED or self._told.get(wish.id) != problem:
            self._told[wish.id] = problem
            self._append(wish, StateChanged(state=state, code=code, reason=problem))

    def _append(self, wish: Wish, event: Event) -> bool:
        entry = Entry(seq=wish.last_seq + 1, at_s=time.time(), event=event)
        return self._plane.append(wish.id, [entry_to_mapping(entry)]) == entry.seq

    def _nodes(self) -> list[str]:
        """Where the job may run, by Ray's ids."""
        return [seen.incarnation for seen in self._cluster.nodes()]


def _model(job: JobSpec, shape: OwnShape) -> dict[str, Any]:
    assert job.model.module is not None
    return dict(seen_model(dataclasses.asdict(job.model.module), shape))
