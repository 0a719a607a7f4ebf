"""The chart in a real API server of Kubernetes: installed by Helm, with what KubeRay's operator, the scheduler and the
kubelet would do to its pods done by the test, as nobody else is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from helm_ground import A100, CHART, CPU, L4, helm
from kube_server import Call, KubeServer, Refused

from shoal_workers.provisioner import Member, PoolOrder, Provisioner

RELEASE, RAY = "shoal", "shoal-ray"
HEAD, WORKER = f"{RAY}-head", f"{RAY}-worker"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
# Kubernetes 1.20 gives no volume of a class to a pod of its own.
VALUES: dict[str, Any] = {"pools": [{**A100, "scratch": {"size": "3Ti"}}, L4, CPU]}
# It has no policy/v1 either.
_OLDER = {"controlPlane": {"podDisruptionBudget": {"enabled": False}}}


@dataclass(frozen=True, slots=True)
class Grant:
    """One verb on one resource, as a role gives it; `namespace` is empty where it is the whole cluster."""

    verb: str
    group: str
    resource: str
    name: str
    namespace: str

    def covers(self, call: Call) -> bool:
        same = (self.verb, self.group, self.resource) == (call.verb, call.group, call.resource)
        return same and self.name in ("", call.name) and self.namespace in ("", call.namespace)


@dataclass
class Installed:
    """A release of the chart in a namespace of its own. `capacity`: for how many pods of each pool there are
    machines."""

    server: KubeServer
    folder: Path
    major: int
    namespace: str
    capacity: dict[str, int] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"/apis/ray.io/v1/namespaces/{self.namespace}/rayclusters/{RAY}"

    @property
    def pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def helm(self, *words: str, values: Mapping[str, Any]) -> None:
        """Without hooks, which wait for pods to run."""
        chart = self.folder / "chart"
        if not chart.exists():
            shutil.copytree(CHART, chart)
            about = chart / "Chart.yaml"
            about.write_text(re.sub(r"kubeVersion: .*", "", about.read_text()))  # the server's is older
        file = self.folder / "values.yaml"
        plane = {**_OLDER["controlPlane"], **values.get("controlPlane", {})}
        file.write_text(yaml.safe_dump({**values, "controlPlane": plane}))
        self._run(*words, RELEASE, str(chart), "--values", str(file))

    def roll_back(self, revision: int) -> None:
        self._run("rollback", RELEASE, str(revision))

    def _run(self, *words: str) -> None:
        named = ["--namespace", self.namespace, "--kubeconfig", str(self.server.config), "--no-hooks"]
        command = [str(helm(self.major)), *words, *named]
        own = {name: str(self.folder / name) for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=240, env={**os.environ, **own}
        )
        assert done.returncode == 0, done.stderr

    def groups(self) -> dict[str, dict[str, Any]]:
        found = self.server.ask("GET", self.path)["spec"]["workerGroupSpecs"]
        return {group["groupName"]: group for group in found}

    def replicas(self) -> dict[str, int]:
        return {name: group["replicas"] for name, group in self.groups().items()}

    def named(self, pool: str) -> list[str]:
        """Who is to go of this pool."""
        return list((self.groups()[pool].get("scaleStrategy") or {}).get("workersToDelete") or ())

    def environment(self, component: str) -> dict[str, str]:
        """Of the last container of such a pod, where that is no secret."""
        spec = self.server.ask("GET", self.path)["spec"]
        template = spec["headGroupSpec" if component == "head" else "workerGroupSpecs"]
        template = (template if component == "head" else template[0])["template"]
        told = template["spec"]["containers"][-1]["env"]
        return {variable["name"]: variable["value"] for variable in told if "value" in variable}

    # --- what the operator, the scheduler and the kubelet do ---

    def pods(self) -> dict[str, dict[str, Any]]:
        found = self.server.ask("GET", self.pods_path, params={"labelSelector": f"ray.io/cluster={RAY}"})["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def reconcile(self) -> None:
        """As KubeRay's operator does: who is named goes first and counts no more, then pods are made or deleted until
        the number of all others is right, those that are ending among them."""
        for name, group in self.groups().items():
            there, leaving = self.pods(), set(self.named(name))
            mine = [pod for pod in there.values() if pod["metadata"]["labels"]["ray.io/group"] == name]
            for pod in mine:
                if pod["metadata"]["name"] in leaving:
                    self.delete(pod["metadata"]["name"])
            mine = [pod for pod in mine if pod["metadata"]["name"] not in leaving]
            while len(mine) > group["replicas"]:
                self.delete(mine.pop(0)["metadata"]["name"])  # whichever
            for _ in range(group["replicas"] - len(mine)):
                self._make(name, group["template"])
            self._schedule(name)

    def _make(self, group: str, template: Mapping[str, Any]) -> None:
        known = {"ray.io/group": group, "ray.io/cluster": RAY, "ray.io/node-type": "worker"}
        about = {"generateName": f"{RAY}-{group}-worker-", "labels": {**template["metadata"]["labels"], **known}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": template["spec"]}
        self.server.create(pod, self.namespace)

    def _schedule(self, group: str) -> None:
        mine = [pod for pod in self.pods().values() if pod["metadata"]["labels"]["ray.io/group"] == group]
        placed = sum("nodeName" in pod["spec"] for pod in mine)
        for pod in mine:
            name = pod["metadata"]["name"]
            if "nodeName" in pod["spec"]:
                continue
            if placed < self.capacity.get(group, 0):
                placed += 1
                self._bind(name)
            else:
                said = {"reason": "Unschedulable", "message": "0/7 nodes are available: 7 Insufficient nvidia.com/gpu."}
                condition = {"type": "PodScheduled", "status": "False", **said}
                self.server.merge(f"{self.pods_path}/{name}/status", {"status": {"conditions": [condition]}})

    def _bind(self, pod: str) -> None:
        machine = f"machine-of-{self.namespace}-{pod}"
        self.server.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": machine}})
        target = {"apiVersion": "v1", "kind": "Node", "name": machine}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        self.server.ask("POST", f"{self.pods_path}/{pod}/binding", json=binding)
        self.server.merge(f"{self.pods_path}/{pod}/status", {"status": {"phase": "Running"}})

    def delete(self, pod: str) -> None:
        """As `kubectl delete pod`: it ends when its grace is over, at once where it has no machine yet."""
        self.server.ask("DELETE", f"{self.pods_path}/{pod}")

    def end_graces(self) -> None:
        """As the kubelet does once processes are gone."""
        for name, pod in self.pods().items():
            if "deletionTimestamp" in pod["metadata"]:
                self.server.ask("DELETE", f"{self.pods_path}/{name}", params={"gracePeriodSeconds": "0"})

    def members(self, pools: Collection[str]) -> tuple[Member, ...]:
        """Nodes of Ray: pods that have a machine."""
        return tuple(
            Member(node=f"node-of-{name}", incarnation=name, pool=pod["metadata"]["labels"]["ray.io/group"], host=name)
            for name, pod in sorted(self.pods().items())
            if pod["metadata"]["labels"]["ray.io/group"] in pools and "nodeName" in pod["spec"]
        )

    # --- what accounts may, and did ---

    def grants(self, account: str) -> set[Grant]:
        """By the bindings that stand there."""
        found: set[Grant] = set()
        for place, where in ((f"{RBAC}/namespaces/{self.namespace}/", self.namespace), (f"{RBAC}/cluster", "")):
            for binding in self.server.ask("GET", f"{place}rolebindings")["items"]:
                subjects = {(each.get("namespace"), each["name"]) for each in binding.get("subjects") or ()}
                if (self.namespace, account) in subjects:
                    role = self.server.ask("GET", f"{place}roles/{binding['roleRef']['name']}")
                    found |= {grant for rule in role["rules"] for grant in _single(rule, where)}
        return found

    def calls(self, account: str) -> set[Call]:
        user = f"{self.namespace}:{account}"
        return {call for call in self.server.calls() if call.user == user}

    def may(self, account: str, method: str, path: str, **body: Any) -> bool:
        """Whether the server lets this account do it, by its own token; what it then says of it counts for nothing."""
        try:
            self.server.ask(method, path, self.server.token_of(self.namespace, account), **body)
        except Refused as refused:
            assert refused.status != 401
            return refused.status != 403
        return True


def _single(rule: Mapping[str, Any], namespace: str) -> Iterator[Grant]:
    for verb in rule["verbs"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames") or ("",):
                    yield Grant(verb, group, resource, name, namespace)


def namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def order(**targets: int) -> dict[str, PoolOrder]:
    return {name: PoolOrder(target=target, release=frozenset()) for name, target in targets.items()}


def told(provisioner: Provisioner) -> dict[str, dict[str, Any]]:
    provisioner.turn()
    return {report["pool"]["name"]: report for report in provisioner.report() or ()}


def told_well(provisioner: Provisioner) -> dict[str, dict[str, Any]]:
    found = told(provisioner)
    assert found and all((report["problem"], report["unreached"]) == (None, None) for report in found.values()), found
    return found
