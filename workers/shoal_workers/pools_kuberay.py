"""Pools that are worker groups of a RayCluster of KubeRay: nodes are asked for by `replicas`, and given back by name.

Owns what is read and changed of these objects. A group is named like its pool. Where Ray's own autoscaler scales the
RayCluster (`enableInTreeAutoscaling`), it changes the same fields: then pools are asked for by `pools_ray`.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from shoal_workers.provisioner import Member, PoolOrder, PoolsUnreachable, Supply

_ANSWER_S = 10.0
_GROUP = "/apis/ray.io/v1/namespaces"
_JSON_PATCH = "application/json-patch+json"


class KubernetesApi:
    """What a pod may ask the API of its cluster. Its token is read each time, as it changes, and may come late; whom to
    trust after each failure. Raises PoolsUnreachable."""

    def __init__(self, url: str, account_dir: Path) -> None:
        self._url = url
        self._account_dir = account_dir
        self._opened: httpx.Client | None = None

    @property
    def namespace(self) -> str:
        return self._account("namespace")

    def get(self, path: str, **params: str) -> dict[str, Any]:
        return self._call("GET", path, params=params)

    def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> None:
        # By this name others are told whose fields these are.
        named = {"fieldManager": "shoal-connector"}
        self._call("PATCH", path, headers={"Content-Type": _JSON_PATCH}, params=named, json=list(operations))

    def _call(self, method: str, path: str, headers: Mapping[str, str] | None = None, **given: Any) -> dict[str, Any]:
        token = self._account("token")
        allowed = {"Authorization": f"Bearer {token}", "Accept": "application/json", **(headers or {})}
        try:
            response = self._http().request(method, path, headers=allowed, **given)
            body = response.json()
        except (OSError, httpx.HTTPError, ValueError) as error:
            self.close()
            raise PoolsUnreachable(f"Kubernetes: {method} {path}: {error}") from error
        if not response.is_success or not isinstance(body, dict):
            why = body.get("message", "") if isinstance(body, dict) else ""
            raise PoolsUnreachable(f"Kubernetes: {method} {path}: status {response.status_code} {why}".rstrip())
        return body

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _http(self) -> httpx.Client:
        if self._opened is None:
            secured: ssl.SSLContext | bool = True
            if self._url.startswith("https:"):
                secured = ssl.create_default_context(cafile=self._account_dir / "ca.crt")
            # Never through a proxy, which is for what lies outside of the cluster.
            self._opened = httpx.Client(base_url=self._url, verify=secured, timeout=_ANSWER_S, trust_env=False)
        return self._opened

    def _account(self, name: str) -> str:
        try:
            return (self._account_dir / name).read_text().strip()
        except OSError as error:
            raise PoolsUnreachable(f"no account to ask Kubernetes with: {error}") from error


class KubeRayPools:
    """Those of the RayCluster of this name, in the namespace of the pod."""

    def __init__(self, api: KubernetesApi, cluster: str) -> None:
        self._api = api
        self._cluster = cluster

    @property
    def _path(self) -> str:
        return f"{_GROUP}/{self._api.namespace}/rayclusters/{self._cluster}"

    def obey(self, orders: Mapping[str, PoolOrder], members: Sequence[Member]) -> None:
        """In one patch: requests that are taken back and new ones cannot come apart."""
        groups, pods = self._groups(), self._pods()
        operations: list[dict[str, Any]] = []
        for index, group in enumerate(groups):
            name = str(group.get("groupName"))
            if name in orders:
                mine = [pod for pod in pods if _group(pod) == name]
                operations += _changes(index, group, orders[name], mine, members)
        if operations:
            self._api.patch(self._path, operations)

    def look(self, pools: Sequence[str], members: Sequence[Member]) -> Mapping[str, Supply]:
        groups = {group.get("groupName"): group for group in self._groups()}
        pods = self._pods()
        joined = {member.host for member in members}
        return {name: self._supply(name, groups, pods, joined) for name in pools}

    def _supply(
        self, name: str, groups: Mapping[Any, Any], pods: Sequence[Mapping[str, Any]], joined: set[str]
    ) -> Supply:
        if name not in groups:
            return Supply(problem=f"RayCluster {self._cluster} has no worker group {name}")
        coming = [pod for pod in pods if _group(pod) == name and not _ends(pod) and _name(pod) not in joined]
        starting = sum(bool(pod.get("spec", {}).get("nodeName")) for pod in coming)
        said = next((text for text in map(_unscheduled, coming) if text), None)
        return Supply(starting=starting, said=said)

    def _groups(self) -> list[dict[str, Any]]:
        return list(self._api.get(self._path).get("spec", {}).get("workerGroupSpecs") or ())

    def _pods(self) -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/{self._api.namespace}/pods"
        return list(self._api.get(path, labelSelector=f"ray.io/cluster={self._cluster}").get("items") or ())


def _changes(
    index: int,
    group: Mapping[str, Any],
    order: PoolOrder,
    pods: Sequence[Mapping[str, Any]],
    members: Sequence[Member],
) -> list[dict[str, Any]]:
    """Operator and patch go by names: fewer replicas alone would let the operator choose who goes, and it does not know
    on which pods a plan stands. It counts a pod that is ending as any other until it is gone, unless that is named:
    else another one would go in its place."""
    hosts = {member.host: member.node for member in members}
    alive = [pod for pod in pods if not _ends(pod)]
    going = [_name(pod) for pod in alive if hosts.get(_name(pod)) in order.release]
    idle = [pod for pod in alive if _name(pod) not in hosts]
    idle.sort(key=lambda pod: (bool(pod.get("spec", {}).get("nodeName")), _name(pod)))
    excess = len(alive) - len(going) - order.target
    going += [_name(pod) for pod in idle[: max(0, excess)]]
    replicas = max(order.target, len(alive) - len(going))
    going += [_name(pod) for pod in pods if _is_deleted(pod)]
    wanted = {"replicas": replicas, "scaleStrategy": {"workersToDelete": sorted(going)}}
    now = {
        "replicas": group.get("replicas") or 0,
        "scaleStrategy": {"workersToDelete": sorted((group.get("scaleStrategy") or {}).get("workersToDelete") or ())},
    }
    changed = [name for name in wanted if wanted[name] != now[name]]
    if not changed:
        return []
    path = f"/spec/workerGroupSpecs/{index}"
    same = {"op": "test", "path": f"{path}/groupName", "value": group["groupName"]}
    return [same, *({"op": "add", "path": f"{path}/{name}", "value": wanted[name]} for name in changed)]


def _name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def _group(pod: Mapping[str, Any]) -> str | None:
    found: str | None = (pod["metadata"].get("labels") or {}).get("ray.io/group")
    return found


def _ends(pod: Mapping[str, Any]) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return _is_deleted(pod) or phase in ("Failed", "Succeeded")


def _is_deleted(pod: Mapping[str, Any]) -> bool:
    """It stays until its grace period is over."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def _unscheduled(pod: Mapping[str, Any]) -> str | None:
    """What the scheduler says of a pod that has no node. That is no refusal: it makes autoscalers of nodes act."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "not scheduled")
    return None
