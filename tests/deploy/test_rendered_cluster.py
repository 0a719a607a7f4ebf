"""What the chart renders for KubeRay makes a Ray cluster, in which each pod has a network of its own: its options of
`ray start`, variables, volumes and hooks, and `shoal connect --stay` in the second container of the head. A job trains
there, leaves a pod that is deleted before its hook gives up, and survives the loss of a machine; with the Redis of the
chart it does not notice the loss of the head."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from networks import missing
from programs import program
from rendered_pods import CLUSTER_ID, HEAD, REDIS, RenderedPods
from running import check_history, job_mapping
from waiting import eventually

WHY_NOT = missing() or ("" if shutil.which("unshare") and shutil.which("nsenter") else "no unshare or nsenter here")
WORKERS = {"small-a": "small", "small-b": "small", "small-c": "small", "big-a": "big"}
OF_REDIS = {"small-a": "small", "small-b": "small"}
STEPS = 500
MANY_STEPS = 100_000  # more than are ever done
NEW_BEGINNINGS = ("cluster_entered", "plan_adopted", "recovery_done")
LIMIT_S = 600.0
SMALL = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}}
NODE = {"price_per_hour": 0.1, "host_memory_gib": 2, "intra_gb_per_s": 10, "inter_gbit_per_s": 80}
VALUES: dict[str, Any] = {
    "pools": [
        {"name": "small", "spot": True, "min": 0, "max": 3, "node": {"device": "cpu-1t", **NODE}},
        {"name": "big", "min": 0, "max": 1, "node": {"device": "cpu-2t", **NODE}},
    ],
    "provisioning": {"enabled": False},
    "rayCluster": {"head": {"objectStoreBytes": 80000000, "resources": SMALL, "sharedMemory": "1Gi"}},
    "workers": {
        "objectStoreBytes": 80000000,
        "resources": SMALL,
        "sharedMemory": "1Gi",
        "scratch": {"size": "1Gi"},
        # Links as labels say, or a tiny model would be trained by one node alone; many processes share few cores: what
        # is only slow must not pass for dead.
        "settings": {
            "link_limit_s": 0,
            "silence_s": 5,
            "silence_confirmed_s": 3,
            "metadata_url": "http://127.0.0.1:9",
            "disk_limit_bytes": 536870912,
        },
    },
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "networks can be made"),
]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[RenderedPods]:
    without_redis = {**VALUES["rayCluster"], "gcsFaultTolerance": {"enabled": False}}
    with RenderedPods(tmp_path, WORKERS, {**VALUES, "rayCluster": without_redis}) as started:
        yield started


@pytest.fixture
def pods_and_redis(tmp_path: Path) -> Iterator[RenderedPods]:
    program("redis-server")
    with RenderedPods(tmp_path, OF_REDIS, VALUES) as started:
        yield started


def test_a_job_leaves_a_deleted_pod_and_survives_the_loss_of_a_machine(pods: RenderedPods) -> None:
    client = pods.client
    seen = eventually(lambda: len(found := nodes_seen(pods)) == len(WORKERS) and found, LIMIT_S)
    types = {"small": "cpu-1t", "big": "cpu-2t"}
    assert {name: node["device"] for name, node in seen.items()} == {n: types[pool] for n, pool in WORKERS.items()}
    assert {name: node["spot"] for name, node in seen.items()} == {n: pool == "small" for n, pool in WORKERS.items()}
    assert len({pods.network.host(name) for name in (HEAD, *WORKERS)}) == 5
    for name in (HEAD, *WORKERS):
        check_probe(pods.network.host(name))

    job = client.submit(job_mapping(STEPS))["id"]
    until(pods, job, lambda events: steps(events) >= 10)
    deleted = in_plan(client.events(job))[0]
    took_s = pods.delete(deleted)
    (grace_s,) = {each["template"]["spec"]["terminationGracePeriodSeconds"] for each in groups(pods)}
    assert took_s < grace_s - 15, "the hook ends when the node was left, not when it may wait no longer"
    until(pods, job, lambda events: bool(recoveries(events)))
    done = recoveries(client.events(job))
    left, *later = done
    # Pods that share two cores may well look slow to each other.
    assert all(each["cause"] == "straggler" for each in later), [(each["cause"], each["reason"]) for each in done]
    assert (left["cause"], left["redone_steps"], left["nodes_drained"]) == ("preemption_notice", 0, [deleted])

    lost = in_plan(client.events(job))[0]
    assert lost != deleted and steps(client.events(job)) < STEPS
    pods.kill(lost)
    until(pods, job, lambda events: any(lost in each["nodes_lost"] for each in recoveries(events)))
    ended = client.wait(job, timeout_s=LIMIT_S)
    assert ended["status"]["state"] == "succeeded", ended["status"]
    check_history(list(client.events(job)), STEPS)


def test_training_goes_on_while_the_head_is_away(pods_and_redis: RenderedPods) -> None:
    """Its container is started again in the same pod; then the pod is deleted, and another one takes its place, which
    has another address. Nobody plans anew for either."""
    pods, client = pods_and_redis, pods_and_redis.client
    assert unasked(pods.network.host(REDIS)).startswith(b"-NOAUTH")
    eventually(lambda: len(nodes_seen(pods)) == len(OF_REDIS), LIMIT_S)
    job = client.submit(job_mapping(MANY_STEPS))["id"]
    until(pods, job, lambda events: steps(events) >= 10)
    assert client.get(job)["cluster"]["if_head_dies"].startswith("training goes on")

    for end, bring in ((pods.crash_head, pods.restart_head), (pods.lose_head, pods.replace_head)):
        end()
        missed = eventually(lambda: client.get(job)["cluster"]["problem"], LIMIT_S)
        assert "training may well go on there" in missed
        heard, safe = steps(client.events(job)), sealed_step(pods, job)
        eventually(lambda at=safe: sealed_step(pods, job) > at + 10, LIMIT_S)
        assert steps(client.events(job)) == heard
        bring()
        safe = sealed_step(pods, job)
        until(pods, job, lambda events, at=safe: steps(events) > at + 10)
        assert client.get(job)["cluster"]["problem"] is None

    client.cancel(job)
    ended = client.wait(job, timeout_s=LIMIT_S)
    assert ended["status"]["state"] == "cancelled", ended["status"]
    events = list(client.events(job))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    done = [event for event in events if event["kind"] == "step_done"]
    assert [event["step"] for event in done] == list(range(1, len(done) + 1)), "each step once"
    assert [event["kind"] for event in events if event["kind"] in NEW_BEGINNINGS] == ["cluster_entered", "plan_adopted"]


def unasked(redis: str) -> bytes:
    """What it answers to somebody without its password."""
    with socket.create_connection((redis, 6379), timeout=30) as connection:
        connection.sendall(b"KEYS *\r\n")
        return connection.recv(1024)


def sealed_step(pods: RenderedPods, job: str) -> int:
    """The newest step of which a node has the state, by what lies in its memory."""
    found = [0]
    for name in OF_REDIS:
        for text in pods.read(name, f"/dev/shm/shoal/**/{job}/*.seal?"):
            with contextlib.suppress(ValueError):  # it is being written
                found.append(json.loads(text)["step"])
    return max(found)


def check_probe(host: str) -> None:
    """What KubeRay has the kubelet ask from outside the pod, without the token: unanswered, the pod is ended."""
    agent = f"http://{host}:52365"
    assert httpx.get(f"{agent}/api/healthz", timeout=10).is_success
    assert httpx.get(f"{agent}/api/job_agent/jobs/none/logs", timeout=10).status_code == 401, "all else needs the token"


def nodes_seen(pods: RenderedPods) -> dict[str, dict[str, Any]]:
    if CLUSTER_ID not in {each["id"] for each in pods.client.clusters()}:
        return {}
    return {node["id"]: node for node in pods.client.nodes(CLUSTER_ID)}


def groups(pods: RenderedPods) -> list[dict[str, Any]]:
    return list(pods.cluster["spec"]["workerGroupSpecs"])


def recoveries(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == "recovery_done"]


def until(pods: RenderedPods, job: str, check: Any) -> None:
    def holds() -> bool:
        status = pods.client.get(job)["status"]  # first: what is looked for may come last of all
        if check(list(pods.client.events(job))):
            return True
        if status["state"] in ("failed", "cancelled", "succeeded"):
            raise RuntimeError(f"{status}: {list(pods.client.events(job))[-3:]}")
        return False

    eventually(holds, LIMIT_S)


def steps(events: Iterable[dict[str, Any]]) -> int:
    return max((event["step"] for event in events if event["kind"] == "step_done"), default=0)


def in_plan(events: Iterable[dict[str, Any]]) -> list[str]:
    """The nodes that compute by the newest plan."""
    plan = [event for event in events if event["kind"] == "plan_adopted"][-1]["plan"]
    stages = (stage for pipeline in plan["pipelines"] for stage in pipeline["stages"])
    return sorted({replica["node"] for stage in stages for replica in stage["replicas"]})
