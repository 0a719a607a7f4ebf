"""The chart and the programs in it against a real API server: what pods' accounts may suffices for what the programs
ask, and is nothing else; what they ask stands among writers who know nothing of each other. Nobody here watches: all
that is looked at is read again and again, so no place in a stream can be too old."""

from __future__ import annotations

import copy
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helm_ground import COMBINATIONS, NAMESPACE, Document, pod_templates, rendered
from kube_ground import HEAD, RAY, RBAC, RELEASE, WORKER, Grant, Installed, order, told, told_well
from kube_server import KubeServer, Refused
from waiting import eventually

from shoal_workers import cloud_words as words
from shoal_workers.clouds import CloudWatch, MetadataSilent
from shoal_workers.kubernetes import find_kubernetes
from shoal_workers.messages import Noticed, Withdrawn
from shoal_workers.notices import Notices
from shoal_workers.pools_kuberay import KubeRayPools, KubernetesApi
from shoal_workers.provisioner import PoolOrder, PoolsUnreachable, Provisioner
from shoal_workers.settings import WorkerSettings

# The server is built once, which takes some minutes.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def refusals(server: KubeServer, documents: list[Document]) -> list[str]:
    """What the server says against them; it keeps none."""
    found = []
    for document in documents:
        place = server.place(document, document["metadata"].get("namespace", NAMESPACE))
        try:
            server.ask("POST", place, json=document, params={"dryRun": "All"})
        except Refused as refused:
            if refused.status != 409:  # it is there by this name
                found.append(f"{document['kind']} {document['metadata']['name']}: {refused}")
    return found


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_server_takes_all_that_is_rendered(server: KubeServer, combination: str) -> None:
    """It knows what no schema says: which mounts have no volume, which ports are there twice, which tolerations cannot
    be. Pods of a RayCluster are asked about, too, as its operator would make them."""
    rendering = copy.deepcopy(rendered(4, combination))
    documents = [each for each in rendering if each["kind"] not in ("PodDisruptionBudget", "ServiceMonitor")]
    for where, template in pod_templates(tuple(documents)):
        for volume in template["spec"].get("volumes", ()):
            if "ephemeral" in volume:  # what Kubernetes 1.20 has no volumes for
                del volume["ephemeral"]
                volume["emptyDir"] = {}
        if where.startswith("RayCluster"):
            about = {**template["metadata"], "name": re.sub("[^a-z0-9]+", "-", where.lower())}
            documents.append({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": template["spec"]})
    assert len(documents) > 5 and refusals(server, documents) == []


def check_every_grant_was_used(release: Installed, account: str, granted: set[Grant]) -> None:
    """And nothing that was asked was refused, and nothing watched."""

    def is_used() -> bool:
        calls = release.calls(account)
        return (
            release.grants(account)
            == granted
            == {grant for grant in granted if any(call.is_allowed and grant.covers(call) for call in calls)}
        )

    eventually(is_used, 10)


def test_the_head_may_what_its_connector_asks_and_asks_all_that_it_may(
    installed: Installed, connector: Callable[[], Provisioner]
) -> None:
    provisioner = connector()
    told_well(provisioner)
    assert installed.replicas() == {"a100-spot": 0, "l4": 2, "cpu": 0}, "nobody has said yet what is wanted"
    provisioner.told(order(l4=3, cpu=2))
    told_well(provisioner)
    assert installed.replicas() == {"a100-spot": 0, "l4": 3, "cpu": 2}
    installed.reconcile()
    cpu = told_well(provisioner)["cpu"]
    assert cpu["said"] == "0/7 nodes are available: 7 Insufficient nvidia.com/gpu."
    # The one that waits for a machine goes, and at once; not the other.
    (working,) = (member.host for member in installed.members(["cpu"]))
    provisioner.told(order(l4=3, cpu=1))
    told_well(provisioner)
    installed.reconcile()
    assert [name for name in installed.pods() if "-cpu-" in name] == [working]
    # One that is released ends over its grace period; meanwhile no other goes in its place.
    leaving, *staying = (member.host for member in installed.members(["l4"]))
    provisioner.told({**order(cpu=1), "l4": PoolOrder(target=2, release=frozenset({f"node-of-{leaving}"}))})
    for _ in range(3):
        told_well(provisioner)
        assert installed.named("l4") == [leaving] and installed.replicas()["l4"] == 2
        installed.reconcile()
    ending = {name for name, pod in installed.pods().items() if "deletionTimestamp" in pod["metadata"]}
    assert ending == {leaving}
    installed.end_graces()
    assert sorted(told_well(provisioner)["l4"]["nodes"]) == sorted(f"node-of-{name}" for name in staying)
    assert installed.named("l4") == []
    cluster = {(verb, "ray.io", "rayclusters", RAY) for verb in ("get", "patch")}
    granted = {Grant(*each, NAMESPACE) for each in (*cluster, ("list", "", "pods", ""))}
    check_every_grant_was_used(installed, HEAD, granted)
    assert all(call.is_allowed for call in installed.calls(HEAD))


def test_nodes_may_what_their_agents_ask_and_ask_all_that_they_may(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.reconcile()
    pod, *_ = (member.host for member in installed.members(["l4"]))
    machine = installed.pods()[pod]["spec"]["nodeName"]
    account = installed.server.account_folder(tmp_path / "account", NAMESPACE, WORKER)
    for name, value in installed.environment("worker").items():
        monkeypatch.setenv(name, value)
    settings = WorkerSettings(
        kubernetes_url=installed.server.url, kubernetes_account_dir=account, kubernetes_pod=pod, kubernetes_node=machine
    )
    kubernetes = find_kubernetes(settings)
    assert kubernetes is not None
    notices = Notices("n0")
    events: queue.SimpleQueue[Noticed | Withdrawn] = queue.SimpleQueue()
    notices.watch(events)
    watch = CloudWatch(notices, lambda: kubernetes, settings.kubernetes_period_s)
    watch.look(kubernetes)
    assert events.empty()
    taint = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
    place = f"/api/v1/nodes/{machine}"
    installed.server.merge(place, {"spec": {"taints": [taint]}})
    watch.look(kubernetes)
    noticed = events.get_nowait()
    assert isinstance(noticed, Noticed)
    assert (noticed.source, noticed.why) == (words.KUBERNETES_NODE, "removed by Karpenter")
    installed.server.merge(place, {"spec": {"taints": []}})
    watch.look(kubernetes)
    assert events.get_nowait() == Withdrawn(source=words.KUBERNETES_NODE)
    installed.delete(pod)
    watch.look(kubernetes)
    noticed = events.get_nowait()
    assert isinstance(noticed, Noticed) and noticed.source == words.KUBERNETES_POD
    assert 95 < noticed.lead_s <= 105, "of its grace period of 120 s Ray's own end has 15"
    # Its machine is gone with it: who asks hears so, and what was told stands.
    installed.end_graces()
    installed.server.ask("DELETE", place)
    with pytest.raises(MetadataSilent, match="status 404"):
        kubernetes.notice(words.KUBERNETES_NODE)
    watch.look(kubernetes)
    assert events.empty()
    check_every_grant_was_used(
        installed, WORKER, {Grant("get", "", "pods", "", NAMESPACE), Grant("get", "", "nodes", "", "")}
    )
    assert all(call.is_allowed for call in installed.calls(WORKER))


def forbidden(account: str) -> list[tuple[str, str]]:
    """What whoever runs code in such a pod might like to do."""
    core, ray = f"/api/v1/namespaces/{NAMESPACE}", f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
    found = [
        ("GET", f"{core}/secrets"),
        ("GET", f"{core}/secrets/{RELEASE}-auth"),
        ("GET", f"{core}/configmaps"),
        ("POST", f"{core}/pods"),
        ("DELETE", f"{core}/pods/some"),
        ("DELETE", f"{core}/pods"),
        ("PATCH", f"{core}/pods/some"),
        ("POST", f"{core}/pods/some/eviction"),
        ("POST", f"{core}/pods/some/exec"),
        ("GET", f"{core}/pods/some/log"),
        ("GET", f"{core}/pods?watch=true"),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/namespaces/elsewhere/pods/some"),
        ("GET", "/api/v1/namespaces/elsewhere/pods"),
        ("GET", "/api/v1/namespaces"),
        ("GET", "/api/v1/nodes"),
        ("PATCH", "/api/v1/nodes/some"),
        ("DELETE", "/api/v1/nodes/some"),
        ("GET", ray),
        ("POST", ray),
        ("GET", f"{ray}/other"),
        ("PATCH", f"{ray}/other"),
        ("PUT", f"{ray}/{RAY}"),
        ("DELETE", f"{ray}/{RAY}"),
        ("PATCH", f"{ray}/{RAY}/status"),
        ("GET", f"/apis/ray.io/v1/namespaces/elsewhere/rayclusters/{RAY}"),
        ("PATCH", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{RELEASE}"),
        ("POST", f"{core}/serviceaccounts/{account}/token"),
        ("POST", f"{RBAC}/namespaces/{NAMESPACE}/rolebindings"),
        ("PATCH", f"{RBAC}/namespaces/{NAMESPACE}/roles/{account}"),
    ]
    if account != HEAD:
        found += [("GET", f"{core}/pods"), ("GET", f"{ray}/{RAY}"), ("PATCH", f"{ray}/{RAY}")]
    if account != WORKER:
        found += [("GET", f"{core}/pods/some"), ("GET", "/api/v1/nodes/some")]
    return found


@pytest.mark.parametrize("account", [HEAD, WORKER, RELEASE, f"{RELEASE}-migrations", "default"])
def test_what_is_not_granted_is_refused(installed: Installed, account: str) -> None:
    place = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    there = {each["metadata"]["name"] for each in installed.server.ask("GET", place)["items"]}
    if account not in there:  # hooks make theirs, and a controller the default one
        made = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}
        installed.server.create(made, NAMESPACE)
    empty = {"kind": "application/json-patch+json", "content": "[]"}
    for method, path in forbidden(account):
        assert not installed.may(account, method, path, **(empty if method == "PATCH" else {})), (method, path)
    assert bool(installed.grants(account)) is (account in (HEAD, WORKER))
    # What the server itself says of it, which nobody can have forgotten to ask above.
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": NAMESPACE},
    }
    token = installed.server.token_of(NAMESPACE, account)
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    rules = installed.server.ask("POST", path, token, json=review)["status"]["resourceRules"]
    told = {
        (verb, resource, name)
        for rule in rules
        if rule["apiGroups"] != ["authorization.k8s.io"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or ("",)
    }
    assert told == {(grant.verb, grant.resource, grant.name) for grant in installed.grants(account)}


def test_writers_who_know_nothing_of_each_other_undo_nothing(
    installed: Installed, connector: Callable[[], Provisioner]
) -> None:
    """The operator and people write the same object. Who replaces it as it was read is refused once it has changed; a
    patch of the connector is made upon what stands there, whoever wrote that."""
    provisioner = connector()
    server, ends, refused = installed.server, threading.Event(), 0
    server.merge(installed.path, {"metadata": {"annotations": {"told": "0"}}})

    def write() -> None:
        nonlocal refused
        number = 0
        while not ends.is_set():
            there = server.ask("GET", installed.path)
            there["metadata"]["annotations"]["told"] = str(number + 1)
            try:
                server.ask("PUT", installed.path, json=there)
                number += 1
            except Refused as error:
                assert error.status == 409
                refused += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(20):
            provisioner.told(order(**{"l4": 2, "a100-spot": 1 + number % 3}))
            told_well(provisioner)
            assert installed.replicas()["a100-spot"] == 1 + number % 3
    finally:
        ends.set()
        thread.join()
    assert int(server.ask("GET", installed.path)["metadata"]["annotations"]["told"]) > 0
    stale = server.ask("GET", installed.path)
    provisioner.told(order(l4=2))
    server.merge(installed.path, {"metadata": {"annotations": {"told": "last"}}})
    with pytest.raises(Refused, match="status 409"):
        server.ask("PUT", installed.path, json=stale)


class Overtaken(KubernetesApi):
    """Somebody is quicker: between the look at the groups and the patch."""

    overtake: Callable[[], None] | None = None

    def patch(self, path: str, operations: Any) -> None:
        if self.overtake is not None:
            self.overtake()
            self.overtake = None
        super().patch(path, operations)


def test_groups_that_were_moved_meanwhile_are_not_taken_for_others(installed: Installed, tmp_path: Path) -> None:
    account = installed.server.account_folder(tmp_path / "account", NAMESPACE, HEAD)
    api = Overtaken(installed.server.url, account)
    pools = KubeRayPools(api, RAY)
    before = installed.replicas()
    groups = installed.server.ask("GET", installed.path)["spec"]["workerGroupSpecs"]
    api.overtake = lambda: [installed.server.merge(installed.path, {"spec": {"workerGroupSpecs": groups[::-1]}})]
    wanted = order(**{"a100-spot": before["a100-spot"] + 2})
    with pytest.raises(PoolsUnreachable, match="status 422"):
        pools.obey(wanted, ())
    assert installed.replicas() == before
    pools.obey(wanted, ())
    assert installed.replicas() == {**before, "a100-spot": before["a100-spot"] + 2}
    installed.server.merge(installed.path, {"spec": {"workerGroupSpecs": groups}})
    api.close()


def test_an_account_that_is_made_anew_is_refused_until_its_token_is(
    installed: Installed, connector: Callable[[], Provisioner], tmp_path: Path
) -> None:
    provisioner = connector()
    told_well(provisioner)
    place = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    installed.server.ask("DELETE", f"{place}/{HEAD}")
    made = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": HEAD}}
    installed.server.create(made, NAMESPACE)
    # The server believes a token for some seconds more.
    eventually(lambda: all("status 401" in (each["unreached"] or "") for each in told(provisioner).values()), 60)
    (tmp_path / "account" / "token").write_text(installed.server.token_of(NAMESPACE, HEAD))
    told_well(provisioner)
