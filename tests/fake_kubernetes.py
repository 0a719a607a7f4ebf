"""An API server of Kubernetes with one RayCluster, and what stands behind it: an operator that makes and deletes pods
as the RayCluster says, and machines for so many pods of each worker group. Answers as the real one does, over HTTP."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE, CLUSTER, TOKEN = "training", "shoal", "a-token"
_RAYCLUSTER = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/{CLUSTER}"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class FakeKubernetes:
    """`capacity` says how many pods of each group get a machine; a test may change it. `joins`: whether their raylets
    then come up. `lingers`: whether pods that are deleted stay, as long as their grace period lasts. `away`: whether
    the API answers with errors only."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self.capacity = dict(capacity)
        self.joins = True
        self.lingers = False
        self.away = False
        self.patches: list[list[dict[str, Any]]] = []
        self._lock = threading.Lock()
        self._groups: list[dict[str, Any]] = [
            {"groupName": name, "replicas": 0, "minReplicas": 0, "maxReplicas": 10} for name in capacity
        ]
        self._pods: dict[str, dict[str, Any]] = {}
        self._num_made = 0

    def running(self) -> dict[str, str]:
        """Pods whose raylets have joined, and their groups."""
        with self._lock:
            self._reconcile()
            return {
                name: pod["metadata"]["labels"]["ray.io/group"]
                for name, pod in sorted(self._pods.items())
                if self.joins and "nodeName" in pod["spec"]
            }

    def replicas(self) -> dict[str, int]:
        with self._lock:
            return {group["groupName"]: group["replicas"] for group in self._groups}

    def lose(self, pod: str) -> None:
        """Its machine is taken away."""
        with self._lock:
            del self._pods[pod]

    def delete(self, pod: str) -> None:
        """As `kubectl delete pod`, or whoever drains its machine."""
        with self._lock:
            self._delete(pod)

    def end_graces(self) -> None:
        """Pods that linger are gone."""
        with self._lock:
            for name in [name for name, pod in self._pods.items() if "deletionTimestamp" in pod["metadata"]]:
                del self._pods[name]

    def answer(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        parts = urlsplit(url)
        if self.away:
            return 503, {"kind": "Status", "message": "etcdserver: request timed out"}
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"kind": "Status", "message": "Unauthorized"}
        with self._lock:
            if (method, parts.path) == ("GET", _RAYCLUSTER):
                self._reconcile()
                return 200, self._object()
            if (method, parts.path) == ("GET", _PODS):
                assert parse_qs(parts.query) == {"labelSelector": [f"ray.io/cluster={CLUSTER}"]}
                self._reconcile()
                return 200, {"kind": "PodList", "items": [*self._pods.values()]}
            if (method, parts.path) == ("PATCH", _RAYCLUSTER):
                if headers.get("Content-Type") != "application/json-patch+json":
                    return 415, {"kind": "Status", "message": "unsupported patch"}
                return self._patch(json.loads(body))
        return 404, {"kind": "Status", "message": f"{parts.path} not found"}

    def _object(self) -> dict[str, Any]:
        return {"kind": "RayCluster", "metadata": {"name": CLUSTER}, "spec": {"workerGroupSpecs": self._groups}}

    def _patch(self, operations: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        groups: list[dict[str, Any]] = json.loads(json.dumps(self._groups))
        for each in operations:
            _, spec, specs, index, name = each["path"].split("/")
            assert (spec, specs) == ("spec", "workerGroupSpecs")
            if each["op"] == "test":
                if groups[int(index)].get(name) != each["value"]:
                    return 422, {"kind": "Status", "message": "the server rejected our request: test failed"}
            else:
                assert each["op"] in ("add", "replace")
                groups[int(index)][name] = each["value"]
        self.patches.append(operations)
        self._groups = groups
        self._reconcile()
        return 200, self._object()

    def _reconcile(self) -> None:
        """As KubeRay's operator: who is named goes first and counts no more, then pods are made or deleted until the
        number of all others is right, those that are ending among them."""
        for group in self._groups:
            name = group["groupName"]
            named = set((group.get("scaleStrategy") or {}).get("workersToDelete") or ())
            for pod in named & self._pods.keys():
                self._delete(pod)
            mine = [pod for pod in self._pods.values() if pod["metadata"]["labels"]["ray.io/group"] == name]
            mine = [pod for pod in mine if pod["metadata"]["name"] not in named]
            while len(mine) > group["replicas"]:
                self._delete(mine.pop(0)["metadata"]["name"])  # whichever: it knows nothing of plans
            while len(mine) < group["replicas"]:
                mine.append(self._made(name))
            self._schedule(name, mine)

    def _delete(self, pod: str) -> None:
        if self.lingers:
            self._pods[pod]["metadata"].setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")
        else:
            del self._pods[pod]

    def _made(self, group: str) -> dict[str, Any]:
        self._num_made += 1
        name = f"{CLUSTER}-{group}-worker-{self._num_made:03}"
        labels = {"ray.io/group": group, "ray.io/cluster": CLUSTER}
        pod = {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {"phase": "Pending"}}
        self._pods[name] = pod
        return pod

    def _schedule(self, group: str, pods: list[dict[str, Any]]) -> None:
        placed = sum("nodeName" in pod["spec"] for pod in pods)
        for pod in pods:
            if "nodeName" in pod["spec"]:
                continue
            if placed < self.capacity[group]:
                placed += 1
                pod["spec"]["nodeName"] = f"machine-of-{pod['metadata']['name']}"
                pod["status"] = {"phase": "Running"}
            else:
                message = "0/7 nodes are available: 7 Insufficient nvidia.com/gpu."
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                pod["status"] = {"phase": "Pending", "conditions": [condition]}


@contextlib.contextmanager
def serving(kubernetes: FakeKubernetes) -> Iterator[str]:
    """The URL of its API."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, value = kubernetes.answer(self.command, self.path, dict(self.headers), body)
            raw = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_PATCH = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def account(folder: Path) -> Path:
    """What a pod is given to ask the API with."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(TOKEN)
    (folder / "namespace").write_text(NAMESPACE)
    return folder
