"""Brings the newest whole step that agents hold into the object store: while a job has to wait for nodes, and before it
is paused.

Owns the orders to agents. What arrives, and the manifest, are `CheckpointCommits`' business.
"""

from __future__ import annotations

import structlog

from shoal_planner.job import JobSpec
from shoal_workers import messages as m
from shoal_workers.change import Found
from shoal_workers.checkpoint_commits import CheckpointCommits
from shoal_workers.record import JobRecord
from shoal_workers.roster import Contact, ask
from shoal_workers.safekeeping import newest_whole
from shoal_workers.wire import ConnectionClosed

log = structlog.get_logger()


class Saving:
    """`timeout_s` is the patience with an agent."""

    def __init__(
        self, job: str, spec: JobSpec, record: JobRecord, commits: CheckpointCommits, timeout_s: float
    ) -> None:
        self._job = job
        self._spec = spec
        self._record = record
        self._commits = commits
        self._timeout_s = timeout_s

    def bring(self, found: Found, agents: tuple[Contact, ...]) -> int | None:
        """The step that is on its way now, or stands there; None where there is no store, or no step is whole."""
        uri = self._spec.checkpoint.uri
        whole = newest_whole(found.intact, self._record.plans, self._spec.model)
        if uri is None or whole is None:
            return None
        if whole.step in self._record.checkpoints:
            return whole.step
        self._commits.try_again(whole.epoch, whole.step)
        self._commits.expect(whole.epoch, self._record.starts[whole.epoch], whole.names)
        self._commits.safe(whole.step)
        addresses = {agent.node: agent.address for agent in agents}
        for snapshot in whole.snapshots:
            order = m.Upload(job=self._job, name=snapshot.name, step=snapshot.step, uri=uri)
            try:
                problem = ask(addresses[snapshot.node], order, self._timeout_s).problem
            except ConnectionClosed as error:
                problem = str(error)
            if problem:
                log.warning("state not brought to the store", node=snapshot.node, step=whole.step, problem=problem)
        return whole.step
