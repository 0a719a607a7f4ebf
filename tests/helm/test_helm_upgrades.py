"""What an upgrade takes over from what is there: secrets that were made, and numbers of nodes that the connector has
set. Helm asks a server that answers as the API of Kubernetes does, as far as it is asked here."""

from __future__ import annotations

import base64
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from helm_ground import A100, CPU, L4, MAJORS, NAMESPACE, Document, rendered, run_helm

_PLURALS = {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"}
MADE = ("shoal-auth", "shoal-ray-token", "shoal-postgresql", "shoal-redis")


def plural(kind: str) -> str:
    return _PLURALS.get(kind, f"{kind.lower()}s")


def place(document: Document) -> str:
    group = document["apiVersion"]
    api = f"/api/{group}" if "/" not in group else f"/apis/{group}"
    return f"{api}/namespaces/{NAMESPACE}/{plural(document['kind'])}/{document['metadata']['name']}"


@dataclass
class Cluster(ThreadingHTTPServer):
    """Knows every kind of the chart, and has these objects, by path."""

    objects: dict[str, Document] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), Answers)

    def add(self, *documents: Document) -> None:
        """As Helm installs them: it takes nothing over that is not its own."""
        for document in documents:
            owner = {"meta.helm.sh/release-name": "shoal", "meta.helm.sh/release-namespace": NAMESPACE}
            document["metadata"].setdefault("annotations", {}).update(owner)
            self.objects[place(document)] = document

    def answer(self, path: str) -> Document | None:
        kinds: dict[str, set[str]] = defaultdict(set)
        for document in rendered(3, "pools"):
            kinds[document["apiVersion"]].add(document["kind"])
        if path == "/version":
            return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(each) for each in kinds if "/" in each],
            }
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in kinds:
            found = [_resource(kind) for kind in sorted(kinds[version])]
            return {"kind": "APIResourceList", "groupVersion": version, "resources": found}
        return self.objects.get(path)


def _group(version: str) -> Document:
    group, _, number = version.partition("/")
    known = {"groupVersion": version, "version": number}
    return {"name": group, "versions": [known], "preferredVersion": known}


def _resource(kind: str) -> Document:
    is_namespaced = not kind.startswith("Cluster")
    named = {"name": plural(kind), "singularName": kind.lower(), "kind": kind}
    return {**named, "namespaced": is_namespaced, "verbs": ["get", "list", "create", "patch"]}


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = cast(Cluster, self.server).answer(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        text = json.dumps(body or missing).encode()
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Not on the screen."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    server = Cluster()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def upgraded(major: int, cluster: Cluster, folder: Path, values: dict[str, Any]) -> dict[tuple[str, str], Document]:
    """What the next release would be, by kind and name."""
    context = {"cluster": "it", "user": "me"}
    entries = {
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{cluster.server_port}"}}],
        "contexts": [{"name": "it", "context": context}],
        "users": [{"name": "me", "user": {}}],
    }
    config = folder / "kubeconfig"
    config.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "it", **entries}))
    asking = ("--dry-run=server", "--disable-openapi-validation", "--kubeconfig", str(config))
    done = run_helm(major, "template", values, *asking)
    assert done.returncode == 0, done.stderr
    found = [document for document in yaml.safe_load_all(done.stdout) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


@pytest.mark.parametrize("major", MAJORS)
def test_secrets_that_were_made_are_kept_and_lacking_keys_are_added(
    major: int, cluster: Cluster, tmp_path: Path
) -> None:
    first = upgraded(major, cluster, tmp_path, {})
    made = [first["Secret", name] for name in MADE]
    values = [value for document in made for value in document["data"].values()]
    assert len(set(values)) == len(values) == 6
    assert all(len(base64.b64decode(value)) == 48 for value in values)
    assert all(document["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for document in made)

    del made[0]["data"]["metrics-token"]  # as one that an older version of the chart has made
    cluster.add(*made)
    again = upgraded(major, cluster, tmp_path, {})
    for document in made:
        kept = again["Secret", document["metadata"]["name"]]["data"]
        assert document["data"].items() <= kept.items()
    assert len(base64.b64decode(again["Secret", "shoal-auth"]["data"]["metrics-token"])) == 48


@pytest.mark.parametrize("major", MAJORS)
def test_an_upgrade_leaves_numbers_of_nodes_and_who_is_to_go_as_the_connector_has_set_them(
    major: int, cluster: Cluster, tmp_path: Path
) -> None:
    values = {"pools": [A100, L4, CPU]}
    there = upgraded(major, cluster, tmp_path, values)["RayCluster", "shoal-ray"]
    assert replicas(there) == {"a100-spot": 0, "l4": 2, "cpu": 0}
    for group, number in zip(there["spec"]["workerGroupSpecs"], (5, 4, 3), strict=True):
        group["replicas"] = number
        group["scaleStrategy"] = {"workersToDelete": [f"a-pod-of-{group['groupName']}"]}
    cluster.add(there)
    less = [A100, {**L4, "max": 3}, {**CPU, "name": "other"}]
    after = upgraded(major, cluster, tmp_path, {"pools": less})["RayCluster", "shoal-ray"]
    assert replicas(after) == {"a100-spot": 5, "l4": 3, "other": 0}, "no more than there may be"
    named = {group["groupName"]: group.get("scaleStrategy") for group in after["spec"]["workerGroupSpecs"]}
    kept = {name: {"workersToDelete": [f"a-pod-of-{name}"]} for name in ("a100-spot", "l4")}
    assert named == {**kept, "other": None}, "else others would go in their place"
    fixed = upgraded(major, cluster, tmp_path, {"pools": less, "provisioning": {"enabled": False}})
    assert replicas(fixed["RayCluster", "shoal-ray"]) == {"a100-spot": 0, "l4": 2, "other": 0}
    assert all("scaleStrategy" not in group for group in fixed["RayCluster", "shoal-ray"]["spec"]["workerGroupSpecs"])


def replicas(cluster: Document) -> dict[str, int]:
    return {group["groupName"]: group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]}
