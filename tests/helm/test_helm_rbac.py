"""Roles of the chart are what the programs ask of Kubernetes: all of it, and nothing else. What they ask is recorded
from the programs themselves, by a server that answers as the API does."""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import certifi
import pytest
from helm_ground import COMBINATIONS, NAMESPACE, ROOT, of_kind, pod_templates, rendered

from shoal_workers.kubernetes import Kubernetes

RAY = "shoal-ray"
CLUSTER = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/{RAY}"
GROUP = {"groupName": "l4", "replicas": 1, "minReplicas": 0, "maxReplicas": 4}
POD = {
    "metadata": {"name": "l4-worker-x", "labels": {"ray.io/group": "l4", "ray.io/cluster": RAY}},
    "spec": {"nodeName": "gpu-3"},
    "status": {"phase": "Running"},
}
# The only files that speak to Kubernetes; one more needs a look at the Roles.
SPEAKERS = {"kubernetes.py", "pools_kuberay.py"}


@dataclass(frozen=True, slots=True)
class Call:
    """As rules of a Role have it; `namespace` is empty for what belongs to the whole cluster."""

    verb: str
    group: str
    resource: str
    name: str
    namespace: str


def call_of(method: str, path: str) -> Call:
    pattern = r"/(?:api|apis/([^/]+))/[^/]+(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/?]+))?"
    found = re.fullmatch(pattern, urlsplit(path).path)
    assert found, path
    group, namespace, resource, name = (each or "" for each in found.groups())
    verb = {"GET": "get" if name else "list", "PATCH": "patch"}[method]
    return Call(verb, group, resource, name, namespace)


@dataclass
class Recording(ThreadingHTTPServer):
    calls: set[Call] = field(default_factory=set)

    def __post_init__(self) -> None:
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), Answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        server = cast(Recording, self.server)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        call = call_of(self.command, self.path)
        server.calls.add(call)
        body: dict[str, Any] = {"metadata": {"name": call.name}, "spec": {}}
        if call.resource == "rayclusters":
            body["spec"] = {"workerGroupSpecs": [GROUP]}
        elif call.verb == "list":
            body = {"items": [POD]}
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PATCH = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Not on the screen."""


@pytest.fixture
def api() -> Iterator[Recording]:
    server = Recording()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "namespace").write_text(NAMESPACE)
    (tmp_path / "token").write_text("of-the-pod")
    (tmp_path / "ca.crt").write_bytes(Path(certifi.where()).read_bytes())
    return tmp_path


def rules_of(combination: str, component: str) -> list[tuple[dict[str, Any], str]]:
    """What the service account of these pods may, and in which namespace (empty: everywhere), by bindings."""
    documents = rendered(4, combination)
    accounts = {
        template["spec"].get("serviceAccountName", "default")
        for _, template in pod_templates(documents)
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == component
    }
    found = []
    for binding in documents:
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        subjects = {subject["name"] for subject in binding["subjects"] if subject["namespace"] == NAMESPACE}
        if subjects & accounts:
            kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
            (role,) = (each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name)
            where = NAMESPACE if binding["kind"] == "RoleBinding" else ""
            found += [(rule, where) for rule in role["rules"]]
    return found


def allows(rule: dict[str, Any], where: str, call: Call) -> bool:
    """As Kubernetes decides it."""
    names = rule.get("resourceNames")
    return (
        call.namespace == where
        and call.group in rule["apiGroups"]
        and call.resource in rule["resources"]
        and call.verb in rule["verbs"]
        and (names is None or call.name in names)
    )


def check(combination: str, component: str, calls: set[Call]) -> None:
    rules = rules_of(combination, component)
    for call in calls:
        assert any(allows(rule, where, call) for rule, where in rules), f"{component} may not {call}"
    for rule, where in rules:
        for verb in rule["verbs"]:
            for resource in rule["resources"]:
                single = {**rule, "verbs": [verb], "resources": [resource]}
                assert any(allows(single, where, call) for call in calls), f"{component} never does {verb} {resource}"


def test_nodes_may_what_their_agents_ask(api: Recording, account: Path) -> None:
    asks = Kubernetes(api.url, account, node="gpu-3", pod="l4-worker-x")
    assert [asks.notice(source) for source in asks.sources] == [None, None]
    assert {(call.verb, call.resource) for call in api.calls} == {("get", "nodes"), ("get", "pods")}
    check("pools", "ray-worker", api.calls)
    check("own pods alone", "ray-worker", {call for call in api.calls if call.resource == "pods"})
    assert not rules_of("no roles", "ray-worker")


def test_the_head_may_what_the_connector_asks(api: Recording, account: Path) -> None:
    try:
        pools = importlib.import_module("shoal_workers.pools_kuberay")
    except ModuleNotFoundError:
        pytest.skip("this tree gets no nodes from Kubernetes")
    provisioner = importlib.import_module("shoal_workers.provisioner")
    asked = pools.KubeRayPools(pools.KubernetesApi(api.url, account), RAY)
    asked.look(["l4"], [])
    asked.obey({"l4": provisioner.PoolOrder(target=3, release=frozenset())}, [])
    assert Call("patch", "ray.io", "rayclusters", RAY, NAMESPACE) in api.calls
    check("pools", "ray-head", api.calls)
    for combination in ("no provisioning", "no roles", "default"):
        assert not rules_of(combination, "ray-head")


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_who_asks_nothing_has_no_token_and_may_nothing(combination: str) -> None:
    for where, template in pod_templates(rendered(4, combination)):
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        told = {variable["name"] for variable in template["spec"]["containers"][0].get("env", ())}
        asks = component == "ray-worker" or "SHOAL_PROVISIONER" in told
        assert template["spec"]["automountServiceAccountToken"] is asks, where
        assert bool(rules_of(combination, component)) is (asks and combination != "no roles"), where
    for account in of_kind(combination, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_no_other_file_speaks_to_kubernetes() -> None:
    """What is not recorded here would be refused there."""
    found = set()
    for package in ("planner", "recovery", "service", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            if re.search(r'"/apis?/|/apis/[a-z]', path.read_text(encoding="utf-8")):
                found.add(path.name)
    assert found <= SPEAKERS and "kubernetes.py" in found
