"""The Ray actor around a supervisor: detached, named after its job, restarted by Ray wherever it can run."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray
import structlog

from shoal_planner.code_spec import NO_CODE
from shoal_planner.script_spec import ScriptSpec, parse_any_job
from shoal_recovery.journal import entry_from_mapping, entry_to_mapping
from shoal_workers.cluster_key import join_cluster
from shoal_workers.cluster_ray import NAMESPACE, Figures, RayCluster, connector_name
from shoal_workers.script_ray import RayScripts
from shoal_workers.script_supervisor import ScriptSupervisor
from shoal_workers.settings import WorkerSettings
from shoal_workers.share import ToldShare
from shoal_workers.supervisor import Supervisor
from shoal_workers.unanswered import Patience, Unanswered

log = structlog.get_logger()

_LOOK_S = 15.0


@ray.remote
class SupervisorActor:
    """`figures` as they come from `figures_of`; `history` are the journal entries that the control plane
    has, for a job that another cluster, or an earlier life of this one, has begun; `paused`: it is wished to rest;
    `share`: version, nodes and reason of the share that it was told."""

    def __init__(
        self,
        job: str,
        spec: dict[str, Any],
        cluster_id: str,
        figures: Figures,
        history: list[dict[str, Any]],
        paused: bool,
        share: tuple[int, list[str] | None, str] | None = None,
    ) -> None:
        join_cluster()
        self._job = job
        self._cluster_id = cluster_id
        again = ray.get_runtime_context().was_current_actor_reconstructed
        parsed = parse_any_job(spec)
        code = NO_CODE if isinstance(parsed, ScriptSpec) else parsed.code
        common: dict[str, Any] = {
            "job": job,
            "cluster": RayCluster(cluster_id, figures, code),
            "settings": WorkerSettings(),
            "restarted": again,
            "history": tuple(entry_from_mapping(entry) for entry in history),
            "paused": paused and not again,  # the wish may be another one by now; it is told again
            "share": None if share is None else _told_share(*share),
        }
        self._supervisor: Supervisor | ScriptSupervisor
        if isinstance(parsed, ScriptSpec):
            self._supervisor = ScriptSupervisor(spec=parsed, scripts=RayScripts(job), **common)
        else:
            self._supervisor = Supervisor(spec=parsed, **common)
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()
        threading.Thread(target=self._watch_connector, name="watch connector", daemon=True).start()

    def entries_after(self, seq: int, wait_s: float) -> list[dict[str, Any]]:
        return [entry_to_mapping(entry) for entry in self._supervisor.entries_after(seq, wait_s)]

    def last_seq(self) -> int | None:
        """Of the last journal entry that it knows; None while it still looks for what was written before it."""
        return self._supervisor.last_seq()

    def signs(self) -> dict[str, float]:
        """By node, for how many seconds nothing was heard of it."""
        return self._supervisor.signs()

    def cancel(self) -> None:
        self._supervisor.cancel()

    def pause(self, wanted: bool, *why: str) -> bool:
        """Whether it comes in time: a job that rests already stays as it is."""
        return self._supervisor.pause(wanted, *why)

    def share(self, version: int, nodes: list[str] | None, reason: str) -> None:
        self._supervisor.share(_told_share(version, nodes, reason))

    def checkpoint(self, number: int) -> None:
        assert isinstance(self._supervisor, Supervisor)  # a script stores when it reports
        self._supervisor.checkpoint(number)

    def of_script(self, what: str, *arguments: Any) -> dict[str, Any] | None:
        """What the processes of a job of kind `ray_train` say and ask."""
        assert isinstance(self._supervisor, ScriptSupervisor)
        return self._supervisor.of_script(what, *arguments)

    def ended(self) -> bool:
        return self._supervisor.ended.is_set()

    def pid(self) -> int:
        return os.getpid()

    def _watch_connector(self) -> None:
        """It watches us alike, and ends us when the job is over."""
        patience = Patience()
        while True:
            time.sleep(_LOOK_S)
            try:
                connector = ray.get_actor(connector_name(self._cluster_id), namespace=NAMESPACE)
                patience.wait(connector.alive.remote())
            except Unanswered as error:
                anew = patience.give_up(connector)
                log.warning("connector does not answer", why=str(error), anew=anew)
            except (ValueError, ray.exceptions.RayError) as error:
                log.info("connector not found", why=str(error))

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except Exception:
            # A defect of ours. Ranks step on; a new process that reads the journal is the best there is.
            log.exception("supervisor failed", job=self._job)
            os._exit(1)


def _told_share(version: int, nodes: list[str] | None, reason: str) -> ToldShare:
    return ToldShare(version=version, nodes=None if nodes is None else tuple(nodes), reason=reason)
