"""Nodes that are rented for jobs, from the wish to the RayCluster and back: a real control plane, the part of a
connector that obeys it, and an API server of Kubernetes whose pools have little capacity."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import ControlPlane, Story, control_plane, ok
from fake_kubernetes import CLUSTER, FakeKubernetes, account, serving
from waiting import eventually

from shoal.cli import run
from shoal_planner.cluster import ClusterSnapshot, Node, snapshot_to_mapping
from shoal_planner.job import parse_job
from shoal_planner.rented_pools import parse_pools
from shoal_planner.search import plan
from shoal_recovery.journal import Entry, entry_to_mapping
from shoal_workers.control_plane import ControlPlane as Client
from shoal_workers.control_plane import Wish
from shoal_workers.pools_kuberay import KubeRayPools, KubernetesApi
from shoal_workers.provisioner import Member, Provisioner

SPOT = {"device": "cpu-1t", "spot": True, "host_memory_gib": 4}
POOLS = [
    {"name": "spot-a", "max": 3, "zones": ["z1"], "node": {**SPOT, "devices": 2, "price_per_hour": 0.5}},
    {"name": "spot-b", "max": 3, "zones": ["z2"], "node": {**SPOT, "price_per_hour": 0.3}},
]
PLANNED: dict[str, Any] = {
    "name": "rents",
    "model": {"layers": 4, "hidden": 128, "heads": 4, "ffn": 344, "vocab": 256},
    "data": {"uri": "stdlib:"},
    "train": {"global_batch": 8, "seq_len": 64, "steps": 200_000},
}
JOB = {**PLANNED, "limits": {"rent": True, "max_price_per_hour": 0.7, "min_devices": 2}}
QUICK = {"pool_wait_s": "1", "pool_back_off_s": "30", "pool_idle_s": "1.5", "plan_time_limit_s": "60"}


class Cluster:
    """The connector of a RayCluster, as far as nodes and jobs are concerned: it turns until it is closed."""

    def __init__(self, plane: ControlPlane, kubernetes: FakeKubernetes, url: str, folder: Path) -> None:
        self._kubernetes = kubernetes
        self.client = Client(plane.url, plane.token, "kube", holder="connector-1")
        self._api = KubernetesApi(url, account(folder))
        self._provisioner = Provisioner(lambda: POOLS, KubeRayPools(self._api, CLUSTER), self.members)
        self._shapes = {pool.name: pool.node for pool in parse_pools(POOLS)}
        self._over = threading.Event()
        self.wishes: tuple[Wish, ...] = ()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._turns)
        self._thread.start()

    def members(self, pools: Collection[str] = ()) -> tuple[Member, ...]:
        running = self._kubernetes.running()
        return tuple(Member(node=pod[6:], incarnation=pod, pool=group, host=pod) for pod, group in running.items())

    def snapshot(self) -> ClusterSnapshot:
        nodes = [dataclasses.replace(self._shapes[each.pool], id=each.node) for each in self.members()]
        return ClusterSnapshot(nodes=tuple(nodes))

    def _turns(self) -> None:
        try:
            while not self._over.wait(0.1):
                self._provisioner.turn()
                snapshot = snapshot_to_mapping(self.snapshot())
                report = self._provisioner.report()
                self.client.offer(snapshot, {}, 30, fault_tolerant_head=True, pools=report)
                wishes = self.client.wishes(-1, 0)
                self.wishes = wishes.jobs
                if wishes.pools is not None:
                    self._provisioner.told(wishes.pools)
        except BaseException as error:
            self._failed.append(error)

    def run(self, job_id: str) -> Story:
        """As its supervisor would, on all nodes of its share: the job trains from now on."""
        nodes = self.share(job_id)
        told = Story(job=parse_job(PLANNED), cluster=self.snapshot().without({"none"}), now_s=1.8e9)
        told.state("starting", "planned", "starting ranks")
        chosen = dataclasses.replace(told.cluster, nodes=tuple(n for n in told.cluster.nodes if n.id in nodes))
        told.adopt(plan(told.job, chosen).plan, chosen, "first plan")
        told.state("running", "stepping", "training")
        self.send(job_id, told.entries)
        return told

    def send(self, job_id: str, entries: list[Entry]) -> None:
        self.client.append(job_id, [entry_to_mapping(entry) for entry in entries])

    def share(self, job_id: str) -> set[str]:
        (wish,) = (wish for wish in self.wishes if wish.id == job_id)
        everything = {node.id for node in self.snapshot().nodes}
        if wish.share is None or wish.share.nodes is None:
            return everything
        return set(wish.share.nodes) & everything

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._api.close()
        self.client.close()
        assert not self._failed, self._failed


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with control_plane(tmp_path / "plane", **QUICK) as running:
        yield running


@pytest.fixture
def kubernetes() -> FakeKubernetes:
    return FakeKubernetes({"spot-a": 3, "spot-b": 3})


@pytest.fixture
def cluster(plane: ControlPlane, kubernetes: FakeKubernetes, tmp_path: Path) -> Iterator[Cluster]:
    with serving(kubernetes) as url, contextlib.closing(Cluster(plane, kubernetes, url, tmp_path / "pod")) as made:
        yield made


@pytest.fixture
def http(plane: ControlPlane) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plane.url, headers=plane.headers, timeout=30) as client:
        yield client


def events(http: httpx.Client, **params: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ok(http.get("/v1/pool-events", params=params))["items"]
    return found


def kinds(http: httpx.Client, **params: Any) -> list[tuple[str, str, int]]:
    return [(each["kind"], each["pool"], each["count"]) for each in events(http, **params)]


def pools(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {pool["name"]: pool for pool in ok(http.get("/v1/pools"))["items"]}


def test_a_short_pool_is_left_for_another_kind_and_what_no_plan_uses_is_given_back(
    plane: ControlPlane,
    http: httpx.Client,
    cluster: Cluster,
    kubernetes: FakeKubernetes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kubernetes.capacity["spot-b"] = 1
    eventually(lambda: pools(http))
    job = ok(http.post("/v1/jobs", json=JOB))["id"]
    first = eventually(lambda: events(http, job_id=job), 60)[0]
    assert (first["kind"], first["pool"], first["job_id"]) == ("pool_asked", "spot-b", job)
    assert first["reason"] == "asked for 2 x spot-b in z2, at 0.3 USD an hour each"
    eventually(lambda: ("pool_short", "spot-b", 1) in kinds(http), 60)
    short = next(each for each in events(http) if each["kind"] == "pool_short")
    assert "Insufficient nvidia.com/gpu" in short["reason"] and "asked again in 30 s" in short["reason"]
    # One of each would cost more than the job may: the one that came goes for the other kind.
    eventually(lambda: {node.zone for node in cluster.snapshot().nodes} == {"z1"}, 60)
    assert kubernetes.replicas() == {"spot-a": 1, "spot-b": 0}, "what did not come is not asked for any more"
    told = [(each["kind"], each["pool"]) for each in events(http)]
    assert told.index(("node_released", "spot-b")) < told.index(("pool_asked", "spot-a"))
    eventually(lambda: pools(http)["spot-a"]["counts"]["num_came"] == 1, 30)
    seen = pools(http)
    assert seen["spot-b"]["asked_again_at"] is not None and seen["spot-a"]["asked_again_at"] is None
    assert seen["spot-b"]["counts"] == {"num_asked": 2, "num_came": 1, "num_short": 1, "num_released": 1}
    eventually(lambda: cluster.share(job), 30)
    drawn = http.get(f"/jobs/{job}/panels/timeline", headers={"Accept": "text/html"}).text
    assert first["reason"] in drawn and short["reason"] in drawn, "it has a timeline before it has begun"
    story = cluster.run(job)
    (node,) = cluster.share(job)
    before = len(story.entries)
    story.state("succeeded", "all_steps_done", "done")
    assert {each.id for each in cluster.snapshot().nodes} == {node}, "its plan stands on it"
    cluster.send(job, story.entries[before:])
    eventually(lambda: not cluster.snapshot().nodes, 60)
    eventually(lambda: not pools(http)["spot-a"]["nodes"], 30)
    assert kubernetes.replicas() == {"spot-a": 0, "spot-b": 0}
    released = [each for each in events(http) if each["kind"] == "node_released"][-1]
    assert released["nodes"] == [node] and "no plan has used it" in released["reason"]
    for name, value in plane.environment().items():
        monkeypatch.setenv(name, value)
    assert run(["events", job, "-f"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "asked for 2 x spot-b in z2" in lines[0] and "succeeded: done" in lines[-1]
    for patch in kubernetes.patches:
        assert patch[0]["op"] == "test", "a group that has moved within the RayCluster is not mistaken for another"


def test_machines_that_boot_are_kept_while_kubernetes_does_not_answer(
    http: httpx.Client, cluster: Cluster, kubernetes: FakeKubernetes
) -> None:
    kubernetes.joins = False
    eventually(lambda: pools(http))
    job = ok(http.post("/v1/jobs", json=JOB))["id"]
    eventually(lambda: pools(http)["spot-b"]["starting"] == 2, 60)
    kubernetes.away = True
    eventually(lambda: "cannot be reached now" in (pools(http)["spot-b"]["problem"] or ""), 60)
    other = ok(http.post("/v1/jobs", json=JOB))["id"]
    (told,) = eventually(lambda: events(http, job_id=other), 60)
    assert told["kind"] == "nothing_rented", "somebody has looked meanwhile"
    assert "cannot be reached now: Kubernetes: GET" in told["reason"] and "request timed out" in told["reason"]
    seen = pools(http)["spot-b"]
    assert (seen["target"], seen["starting"], seen["asked_again_at"], seen["counts"]["num_short"]) == (2, 2, None, 0)
    assert "cannot be reached now" in seen["problem"] and "request timed out" in seen["problem"]
    assert kubernetes.replicas() == {"spot-a": 0, "spot-b": 2}
    kubernetes.joins, kubernetes.away = True, False
    booted = {each.node for each in cluster.members()}
    eventually(lambda: cluster.share(job) == booted, 60)
    assert len(booted) == 2 and not [kind for kind, _, _ in kinds(http) if kind in ("pool_short", "nodes_went")]


def test_what_is_rented_is_within_the_budget_of_a_job_that_never_gets_its_fleet(
    http: httpx.Client, cluster: Cluster, kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    kubernetes.capacity, kubernetes.joins = {"spot-a": 0, "spot-b": 1}, False
    eventually(lambda: pools(http))
    store = {"checkpoint": {"uri": (tmp_path / "store").as_uri()}}
    job = ok(http.post("/v1/jobs", json={**JOB, **store, "limits": {**JOB["limits"], "budget_usd": 100}}))["id"]

    def cost() -> dict[str, Any]:
        return dict(ok(http.get(f"/v1/jobs/{job}/cost")))

    def has_nodes(count: int) -> bool:
        return sum(charge["num_nodes_now"] for charge in cost()["charges"]) == count

    eventually(lambda: has_nodes(1), 60)
    found = cost()
    assert not cluster.snapshot().nodes, "it starts"
    (charge,) = found["charges"]
    assert (charge["price_per_hour"], charge["device"], found["usd_per_hour"]) == (0.3, "cpu-1t", 0.3)
    assert found["beside_plans_usd"] == pytest.approx(found["usd"]) == pytest.approx(charge["usd"])
    assert 0 < found["usd"] < 0.3 * 120 / 3600
    kubernetes.joins = True
    eventually(lambda: pools(http)["spot-b"]["nodes"], 60)
    (project,) = ok(http.get("/v1/spending"))["by_project"]
    assert found["usd"] < project["usd"] <= cost()["usd"] and project["usd_per_hour"] == 0.3
    (charge,) = cost()["charges"]
    assert (charge["num_nodes"], charge["num_nodes_now"]) == (1, 1), "the one that has started"
    assert "machines that started, waited or were idle" in http.get(f"/jobs/{job}/panels/cost").text
    ok(http.post(f"/v1/jobs/{job}/limits", json={"budget_usd": found["usd"]}))
    eventually(lambda: ok(http.get(f"/v1/jobs/{job}"))["status"]["code"] == "budget_spent", 60)
    eventually(lambda: not cluster.snapshot().nodes, 60)
    eventually(lambda: has_nodes(0), 30)
    spent = cost()
    assert spent["usd"] > project["usd"] and spent["usd_per_hour"] == 0
    assert cost()["usd"] == spent["usd"], "what was given back costs nothing any more"
    (project,) = ok(http.get("/v1/spending"))["by_project"]
    assert (project["usd"], project["usd_per_hour"]) == (spent["usd"], 0)


def test_who_may_not_rent_waits_and_nobody_rents_where_no_cluster_can(
    plane: ControlPlane, http: httpx.Client, kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    with contextlib.closing(Client(plane.url, plane.token, "bare", holder="connector-2")) as other:
        check_refusals(plane, http, kubernetes, other, tmp_path)


def check_refusals(
    plane: ControlPlane, http: httpx.Client, kubernetes: FakeKubernetes, other: Client, tmp_path: Path
) -> None:
    known = Node(
        id="n", device="cpu-1t", devices=1, host_memory_bytes=2**32, intra_bytes_per_s=1e9, inter_bytes_per_s=1e9
    )
    other.offer(snapshot_to_mapping(ClusterSnapshot(nodes=(known,))), {}, 60, fault_tolerant_head=True)
    refused = http.post("/v1/jobs", json=JOB)
    assert (refused.status_code, refused.json()["code"]) == (422, "nobody_rents")
    assert "limits.rent = true" in refused.json()["detail"] and "SHOAL_PROVISIONER" in refused.json()["detail"]
    bad = [{"pool": {**POOLS[0], "max": 0}, "nodes": [], "starting": 0, "problem": None, "said": None}]
    body = {"holder": "connector-2", "snapshot": {"nodes": []}, "lease_s": 60, "pools": bad}
    wrong = http.put("/v1/clusters/bare", json=body)
    assert (wrong.status_code, wrong.json()["param"]) == (422, "pools[0].max")
    poor = {**JOB, "limits": {"rent": True, "max_price_per_hour": 0.01}}
    with serving(kubernetes) as url, contextlib.closing(Cluster(plane, kubernetes, url, tmp_path / "pod")):
        eventually(lambda: pools(http))
        other.offer(snapshot_to_mapping(ClusterSnapshot(nodes=())), {}, 1e-3, fault_tolerant_head=True)
        eventually(lambda: not ok(http.get("/v1/clusters/bare"))["connected"])
        refused = http.post("/v1/jobs", json=poor)
        assert (refused.status_code, refused.json()["code"]) == (422, "no_plan_fits")
        assert "buys nothing: the cheapest offer, spot-b, costs 0.3 an hour" in refused.json()["detail"]
        rehearsed = ok(http.post("/v1/jobs", params={"dry_run": True}, json=JOB))
        assert rehearsed["cluster_id"] == "kube" and "2 x spot-b" in rehearsed["reason"]
        assert not kubernetes.patches, "a rehearsal asks for nothing"
        kubernetes.capacity = {"spot-a": 0, "spot-b": 0}
        job = ok(http.post("/v1/jobs", json=JOB))["id"]

        def reason() -> str:
            return str(ok(http.get(f"/v1/jobs/{job}"))["status"]["reason"])

        eventually(lambda: "nothing is rented: offers = ['spot-a', 'spot-b']: none is available" in reason(), 60)
        assert {("pool_short", "spot-a", 1), ("pool_short", "spot-b", 2)} <= set(kinds(http, job_id=job))
        eventually(lambda: kubernetes.replicas() == {"spot-a": 0, "spot-b": 0})
