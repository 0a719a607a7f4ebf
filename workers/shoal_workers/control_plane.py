"""The REST calls that a connector makes to its control plane. Owns paths and bodies; retries are the caller's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import structlog

from shoal_workers.provisioner import PoolOrder
from shoal_workers.share import ToldShare

log = structlog.get_logger()


class ControlPlaneDown(Exception):
    """It did not answer, or with an error of its own; trying again later is right."""


class JobElsewhere(Exception):
    """The job is not this cluster's any more: another one has it, or nobody, as it was cancelled meanwhile."""


class LeaseRefused(Exception):
    """Another connector speaks for this cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the control plane wants of a job (`run`, `paused`, `cancelled`), the last journal entry that it has, and how
    often its users have asked for a checkpoint. `why` are code and words of a pause that no user asked for. `share` is
    which nodes the job may use; None where the control plane is one that does not say: then one job has them all."""

    id: str
    spec: dict[str, Any]
    wish: str
    last_seq: int
    saves: int = 0
    why: tuple[str, str] | None = None
    share: ToldShare | None = None

    @property
    def has_nodes(self) -> bool:
        return self.share is None or self.share.nodes is None or bool(self.share.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A node is to be told that it goes away in `left_s`."""

    id: str
    node: str
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """All that is wished of a cluster; `version` is another when that changes. `pools` by name; None: nothing was
    decided about them yet."""

    version: int
    jobs: tuple[Wish, ...]
    drills: tuple[Drill, ...]
    pools: Mapping[str, PoolOrder] | None = None


class ControlPlane:
    """Any thread may call. All methods raise ControlPlaneDown."""

    def __init__(self, server: str, token: str, cluster: str, holder: str) -> None:
        self._cluster = cluster
        self._holder = holder
        self._http = httpx.Client(base_url=server, headers={"Authorization": f"Bearer {token}"}, timeout=30.0)

    def close(self) -> None:
        self._http.close()

    def offer(
        self,
        snapshot: dict[str, Any],
        profile: dict[str, Any],
        lease_s: float,
        *,
        fault_tolerant_head: bool,
        pools: Sequence[Mapping[str, Any]] | None = None,
        signs: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`pools` as Provisioner reports them, `signs` as Signs does. Raises LeaseRefused."""
        body = {
            "holder": self._holder,
            "snapshot": snapshot,
            "profile": profile,
            "lease_s": lease_s,
            "fault_tolerant_head": fault_tolerant_head,
            **({} if pools is None else {"pools": list(pools)}),
            **({"signs": list(signs)} if signs else {}),
        }
        response = self._call("PUT", f"/v1/clusters/{self._cluster}", json=body)
        if response.status_code == httpx.codes.CONFLICT:
            raise LeaseRefused(response.text)
        _expect(response)

    def profile(self) -> dict[str, Any]:
        """What was measured of the cluster, as the control plane was last told; nothing if it does not know it."""
        response = self._call("GET", f"/v1/clusters/{self._cluster}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return {}
        found: dict[str, Any] = _expect(response)["profile"]
        return found

    def wishes(self, after: int, wait_s: float) -> Wishes:
        """All jobs of this cluster that are not over, and its drills; waits for a version other than `after`."""
        response = self._call("GET", f"/v1/clusters/{self._cluster}/wishes", params={"after": after, "wait_s": wait_s})
        body = _expect(response)
        jobs = tuple(_wish(job) for job in body["jobs"])
        drills = tuple(Drill(id=each["id"], node=each["node"], left_s=each["left_s"]) for each in body["drills"])
        return Wishes(version=body["version"], jobs=jobs, drills=drills, pools=_orders(body.get("pools")))

    def append(self, job: str, entries: list[dict[str, Any]]) -> int:
        """The number of the last entry that the control plane has now. Raises JobElsewhere."""
        sent = [{name: _jsonable(value) for name, value in entry.items()} for entry in entries]
        body = {"cluster_id": self._cluster, "holder": self._holder, "entries": sent}
        response = self._call("POST", f"/v1/jobs/{job}/journal", json=body)
        if response.status_code == httpx.codes.CONFLICT and "expected_seq" in response.json():
            return int(response.json()["expected_seq"]) - 1  # it lacks earlier ones, or has had these from another
        if response.status_code == httpx.codes.CONFLICT and response.json().get("code") == "wrong_cluster":
            raise JobElsewhere(response.json()["detail"])
        return int(_expect(response)["last_seq"])

    def bring_logs(self, job: str, sources: list[dict[str, Any]]) -> None:
        """Lines that were printed, as LogCourier has them; those of a job that is not known, or not this cluster's, and
        those that cannot be read, are nobody's."""
        body = {"cluster_id": self._cluster, "holder": self._holder, "sources": sources}
        response = self._call("POST", f"/v1/jobs/{job}/logs", json=body)
        unreadable = (httpx.codes.REQUEST_ENTITY_TOO_LARGE, httpx.codes.UNPROCESSABLE_ENTITY)
        foreign = response.status_code == httpx.codes.CONFLICT and response.json().get("code") == "wrong_cluster"
        if response.status_code in unreadable or foreign or "job_not_found" in response.text:
            log.warning("printed lines refused", job=job, why=response.text[:500])
            return
        _expect(response)

    def wants(self, job: str) -> bool:
        """Whether this cluster is to run the job, as far as is known: one that the control plane never heard of is not
        its to end."""
        response = self._call("GET", f"/v1/jobs/{job}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return True
        if response.status_code == httpx.codes.CONFLICT:  # it is another cluster's, and none of our business
            return False
        found = _expect(response)
        at_rest = found["status"]["state"] in ("succeeded", "failed", "cancelled", "paused")
        return found["cluster_id"] == self._cluster and not at_rest

    def history(self, job: str) -> list[dict[str, Any]]:
        """All journal entries that the control plane has of this job, as they were sent."""
        entries: list[dict[str, Any]] = []
        while True:
            after = entries[-1]["seq"] if entries else 0
            page = _expect(self._call("GET", f"/v1/jobs/{job}/events", params={"after": after}))["items"]
            if not page:
                return entries
            entries.extend({name: value for name, value in entry.items() if name != "at"} for entry in page)

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise ControlPlaneDown(f"{method} {path}: {error}") from error


def _wish(job: dict[str, Any]) -> Wish:
    why, share = job.get("why"), job.get("share")
    if share is not None:
        nodes = share["nodes"]
        share = ToldShare(
            version=share["version"], nodes=None if nodes is None else tuple(nodes), reason=share["reason"]
        )
    return Wish(
        id=job["id"],
        spec=job["spec"],
        wish=job["wish"],
        last_seq=job["last_seq"],
        saves=job.get("saves", 0),
        why=None if why is None else (why["code"], why["words"]),
        share=share,
    )


def _orders(pools: Sequence[Mapping[str, Any]] | None) -> Mapping[str, PoolOrder] | None:
    if pools is None:
        return None
    return {each["name"]: PoolOrder(target=each["target"], release=frozenset(each["release"])) for each in pools}


def _jsonable(value: Any) -> Any:
    # JSON has no NaN, as the loss of a step that was skipped may be; as text it reads back as the same float.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _expect(response: httpx.Response) -> dict[str, Any]:
    if not response.is_success:
        raise ControlPlaneDown(
            f"{response.request.method} {response.request.url}: {response.status_code} {response.text}"
        )
    body: dict[str, Any] = response.json()
    return body
