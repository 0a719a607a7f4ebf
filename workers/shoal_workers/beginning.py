"""How a supervisor begins with its job: a fresh one, one that rested, or one that another life of a cluster had.

Owns what the journal says of that, and that nobody begins who could not store anything. What comes then is decided like
everything else.
"""

from __future__ import annotations

from shoal_planner.job import JobSpec
from shoal_recovery.journal import ClusterEntered, JobState, StateChanged
from shoal_workers.checkpoint_commits import CheckpointCommits
from shoal_workers.nodes import Cluster
from shoal_workers.record import JobRecord
from shoal_workers.store_check import try_store


class Beginning:
    def __init__(self, spec: JobSpec, cluster: Cluster, record: JobRecord, commits: CheckpointCommits) -> None:
        self._uri = spec.checkpoint.uri
        self._cluster = cluster
        self._record = record
        self._commits = commits

    def fresh(self) -> None:
        """What the store refuses now it will refuse after hours of training, too."""
        self._record.enter(JobState.STARTING, "starting", "Waiting for the nodes of the cluster to answer.")
        self.enter_cluster()
        tried = try_store(self._uri)
        if tried.refused is not None:
            reason = f"checkpoint.uri = {self._uri!r}: cannot be written from the cluster: {tried.refused}"
            self._record.enter(JobState.FAILED, "store_refused", reason)
        elif tried.problem is not None:
            self._commits.fails(0, tried.problem)

    def again(self, pause_wanted: bool) -> None:
        """The job rests. It goes on, unless it is to rest: then that is said again, for who asks was not told."""
        if pause_wanted:
            said = StateChanged(state=JobState.PAUSED, code="paused_by_user", reason=self._record.reason)
            self._record.append(said)
        else:
            self._record.enter(JobState.STARTING, "resumed", "Resumed: waiting for the nodes of the cluster to answer.")
            self.enter_cluster()

    def enter_cluster(self) -> None:
        """What ran in another life of a cluster runs there no more, or must not: it is gone on with here."""
        before, life = self._record.life, self._cluster.life()
        if before == life:
            return
        if before is not None:
            self._commits.take_over()
            reason = f"Cluster {before.cluster}, or what its head knew, is gone; going on with cluster {life.cluster}."
            self._record.enter(JobState.STARTING, "cluster_lost", reason)
        self._record.append(ClusterEntered(cluster=life.cluster, incarnation=life.incarnation))
