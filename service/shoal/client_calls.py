"""What of Client is one request each: a job's verbs and its history, plans, clusters and nodes."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.client_text import given, matching, path_part
from shoal_planner.job import JobSpec, job_to_mapping


class Calls:
    """Answers are the JSON objects of the REST interface. Methods raise ShoalError. Verbs take `if_match`, an ETag
    (`etag`): they are refused where the job is not as it was then (RequestRefused, 412)."""

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _etag(self, path: str) -> str:
        raise NotImplementedError

    def _pages(self, path: str, limit: int | None, **wanted: Any) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _content(self, path: str, **arguments: Any) -> bytes:
        raise NotImplementedError

    def health(self) -> dict[str, Any]:
        """Whether control plane and database answer; no token is needed."""
        return self._call("GET", "/v1/health")

    def get(self, job_id: str) -> dict[str, Any]:
        return self._call("GET", _job(job_id))

    def etag(self, job_id: str) -> str:
        """Changes with the spec, the wish, the cluster and the state of the job, not with its progress."""
        return self._etag(_job(job_id))

    def cancel(self, job_id: str, *, if_match: str | None = None) -> dict[str, Any]:
        """Wishes the job to stop; it has stopped when its state is `cancelled`."""
        return self._verb(job_id, "cancel", if_match)

    def pause(self, job_id: str, *, if_match: str | None = None) -> dict[str, Any]:
        """Wishes the job to rest; its state is `paused` once its newest step stands in its object store: then it has no
        nodes. Raises Conflict where it has no store, has ended, or is wished to rest already."""
        return self._verb(job_id, "pause", if_match)

    def resume(self, job_id: str, *, if_match: str | None = None) -> dict[str, Any]:
        """Lets a job that rests go on, on whatever cluster suits it best now; or calls a pause off that has not come
        about yet. Raises Conflict where it is not wished to rest."""
        return self._verb(job_id, "resume", if_match)

    def checkpoint(self, job_id: str, *, if_match: str | None = None) -> dict[str, Any]:
        """Wishes the newest step into the object store, while training goes on; it stands there with the journal's next
        `checkpoint_committed`. Raises Conflict where the job has no store, rests or has ended."""
        return self._verb(job_id, "checkpoint", if_match)

    def set_limits(self, job_id: str, *, if_match: str | None = None, **limits: Any) -> dict[str, Any]:
        """Changes `budget_usd`, `max_price_per_hour`, `max_devices`, `deadline`, `max_duration`, `rent` or `priority`;
        None takes one away. A job that rests because of a limit goes on when it is resumed. Raises Conflict where it
        has ended."""
        return self._verb(job_id, "limits", if_match, json=limits)

    def resize(self, job_id: str, *, if_match: str | None = None, **size: int | None) -> dict[str, Any]:
        """Changes `max_devices` (None: all that there are), also of a job that runs, which leaves nodes or grows; and
        `min_devices` of one that has no nodes. Raises Conflict."""
        return self._verb(job_id, "resize", if_match, json=size)

    def _verb(self, job_id: str, verb: str, if_match: str | None, **body: Any) -> dict[str, Any]:
        headers = matching(if_match)
        return self._call("POST", f"{_job(job_id)}/{verb}", headers=headers, **body)

    def metrics(
        self, job_id: str, *, max_points: int | None = None, from_step: int | None = None, to_step: int | None = None
    ) -> dict[str, Any]:
        """The loss curve, or the part of it between two steps (both within it), of which more points are told."""
        asked = given(max_points=max_points, from_step=from_step, to_step=to_step)
        return self._call("GET", f"{_job(job_id)}/metrics", params=asked)

    def plan(self, job_id: str, *, epoch: int | None = None) -> dict[str, Any]:
        """The plan that the job runs by, or ran by in `epoch`."""
        return self._call("GET", f"{_job(job_id)}/plan", params=given(epoch=epoch))

    def plan_svg(self, job_id: str, *, epoch: int | None = None) -> str:
        """The same as a picture."""
        return self._content(f"{_job(job_id)}/plan.svg", params=given(epoch=epoch)).decode()

    def recoveries(self, job_id: str) -> dict[str, Any]:
        return self._call("GET", f"{_job(job_id)}/recoveries")

    def checkpoints(self, job_id: str) -> dict[str, Any]:
        """What stands whole in the job's object store now, newest first."""
        return self._call("GET", f"{_job(job_id)}/checkpoints")

    def bulk_losses(self, job_id: str) -> dict[str, Any]:
        """What of the job's state only its object store would hold, by what could be lost at once: each node, pool and
        zone, the costliest first."""
        return self._call("GET", f"{_job(job_id)}/bulk-losses")

    def cost(self, job_id: str) -> dict[str, Any]:
        """What the nodes that the job has had cost so far and cost now, in dollars, by type of node; None where nobody
        stated a price."""
        return self._call("GET", f"{_job(job_id)}/cost")

    def debug_dump(self, job_id: str) -> bytes:
        """A ZIP archive of all that helps to find out what is wrong with the job, without secrets."""
        return self._content(f"{_job(job_id)}/debug-dump")

    def prices(self) -> builtins.list[dict[str, Any]]:
        """What nodes of each cluster cost, by type, zone and market."""
        return [*self._pages("/v1/prices", None)]

    def spending(self) -> dict[str, Any]:
        """What jobs have cost, by project and by who created them."""
        return self._call("GET", "/v1/spending")

    def pools(self) -> builtins.list[dict[str, Any]]:
        """What nodes clusters can get: of each pool how many are there, asked for and starting, and their price."""
        return [*self._pages("/v1/pools", None)]

    def pool_events(
        self, *, job_id: str | None = None, cluster_id: str | None = None, after: int = 0
    ) -> builtins.list[dict[str, Any]]:
        """What was asked of pools and what came of it, oldest first; only for this job, of this cluster, or after the
        event of this id."""
        found: builtins.list[dict[str, Any]] = []
        while True:
            after = found[-1]["id"] if found else after
            asked = given(job_id=job_id, cluster_id=cluster_id, after=after)
            page = self._call("GET", "/v1/pool-events", params=asked)
            found += page["items"]
            if not page["more"]:
                return found

    def drills(self) -> builtins.list[dict[str, Any]]:
        """Notices that users had given to nodes, and that still hold."""
        return [*self._pages("/v1/drills", None)]

    def drill_history(self, *, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """All notices that users had ever given to nodes, newest first."""
        yield from self._pages("/v1/drill-history", limit)

    def clusters(self) -> builtins.list[dict[str, Any]]:
        """All that have connected, and their leases."""
        return [*self._pages("/v1/clusters", None)]

    def cluster(self, cluster_id: str) -> dict[str, Any]:
        """One, and all that was measured there (`profile`); its nodes are those of `nodes(cluster_id)`."""
        return self._call("GET", f"/v1/clusters/{path_part(cluster_id)}")

    def preempt(self, node: str, *, notice_s: float = 120.0, cluster_id: str | None = None) -> dict[str, Any]:
        """A drill: the node is told that it goes away, and jobs leave it; nothing ends it. `cluster_id` says whose it
        is where several clusters have one of that name."""
        body = given(notice_s=notice_s, cluster_id=cluster_id)
        return self._call("POST", f"/v1/nodes/{path_part(node)}/preempt", json=body)

    def preview(
        self, job: JobSpec | Mapping[str, Any], cluster: Mapping[str, Any] | None = None, *, seed: int = 0
    ) -> dict[str, Any]:
        """The plan of a job on a CLUSTER, or on the connected one. Creates nothing."""
        body = job_to_mapping(job) if isinstance(job, JobSpec) else dict(job)
        return self._call("POST", "/v1/plans", json=given(job=body, cluster=cluster, seed=seed))

    def login_link(self) -> dict[str, Any]:
        """A link that signs one browser in, once."""
        return self._call("POST", "/v1/login-links")


def _job(job_id: str) -> str:
    return f"/v1/jobs/{path_part(job_id)}"
