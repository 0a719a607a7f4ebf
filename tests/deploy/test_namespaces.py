"""The start scripts of deploy/ make a Ray cluster out of machines that have nothing in common but a network: a head and
four workers, each in a network namespace. A job there survives the loss of one and the partition of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from networks import missing
from running import check_history, job_mapping
from started_nodes import CLUSTER_ID, HEAD, StartedNodes
from waiting import eventually

WHY_NOT = missing()
WORKERS = {"a": "cpu-1t", "b": "cpu-1t", "c": "cpu-1t", "d": "cpu-2t"}
STEPS = 100
LIMIT_S = 600.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "networks can be made"),
]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[StartedNodes]:
    with StartedNodes(tmp_path, WORKERS) as nodes:
        yield nodes


@pytest.fixture
def started_three(tmp_path: Path) -> Iterator[StartedNodes]:
    with StartedNodes(tmp_path, {name: "cpu-1t" for name in "abc"}) as nodes:
        yield nodes


def nodes_seen(started: StartedNodes) -> dict[str, dict[str, Any]]:
    if CLUSTER_ID not in {each["id"] for each in started.client.clusters()}:
        return {}
    return {node["id"]: node for node in started.client.nodes(CLUSTER_ID)}


def test_a_job_survives_a_loss_and_a_partition(started: StartedNodes) -> None:
    client = started.client
    seen = eventually(lambda: len(found := nodes_seen(started)) == len(WORKERS) and found, LIMIT_S)
    assert {name: node["device"] for name, node in seen.items()} == WORKERS
    for name in (HEAD, *WORKERS):
        (raylet,) = [each for each in started.processes(name) if each.name() == "raylet"]
        assert f"--node_ip_address={started.network.host(name)}" in raylet.cmdline()
    assert len({started.network.host(name) for name in (HEAD, *WORKERS)}) == 5

    job = client.submit(job_mapping(STEPS))["id"]
    until(started, job, lambda events: steps(events) >= 10)
    lost = in_plan(client.events(job))[0]
    started.kill(lost)
    until(started, job, lambda events: recovered_from(events, lost))
    apart = in_plan(client.events(job))[0]
    assert apart != lost
    started.network.cut(apart)
    until(started, job, lambda events: recovered_from(events, apart))
    ended = client.wait(job, timeout_s=LIMIT_S)
    assert ended["status"]["state"] == "succeeded", ended["status"]
    check_history(list(client.events(job)), STEPS)


def test_a_job_leaves_a_node_that_is_stopped_and_outlives_the_head(started_three: StartedNodes) -> None:
    """As `systemctl stop shoal-worker` and a head that crashes and is started again do."""
    started, client = started_three, started_three.client
    eventually(lambda: len(nodes_seen(started)) == 3, LIMIT_S)
    job = client.submit(job_mapping(STEPS))["id"]
    until(started, job, lambda events: steps(events) >= 10)
    stopped = in_plan(client.events(job))[0]
    started.stop(stopped)
    until(started, job, lambda events: bool(recoveries(events)))
    (left,) = recoveries(client.events(job))
    assert (left["cause"], left["redone_steps"]) == ("preemption_notice", 0)
    assert stopped not in in_plan(client.events(job))

    assert steps(client.events(job)) < STEPS
    started.kill(HEAD)
    started.start_head()
    # Ranks step on meanwhile; who supervises them again brings what they did, to the end maybe.
    ended = client.wait(job, timeout_s=LIMIT_S)
    assert ended["status"]["state"] == "succeeded", ended["status"]
    check_history(list(client.events(job)), STEPS)


def recoveries(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == "recovery_done"]


def until(started: StartedNodes, job: str, check: Callable[[list[dict[str, Any]]], bool]) -> None:
    def holds() -> bool:
        status = started.client.get(job)["status"]  # first: what is looked for may come last of all
        if check(list(started.client.events(job))):
            return True
        if status["state"] in ("failed", "cancelled", "succeeded"):
            raise RuntimeError(f"{status}: {list(started.client.events(job))[-3:]}")
        return False

    eventually(holds, LIMIT_S)


def steps(events: list[dict[str, Any]]) -> int:
    return max((event["step"] for event in events if event["kind"] == "step_done"), default=0)


def recovered_from(events: list[dict[str, Any]], node: str) -> bool:
    return any(event["kind"] == "recovery_done" and node in event["nodes_lost"] for event in events)


def in_plan(events: Iterable[dict[str, Any]]) -> list[str]:
    """The nodes that compute by the newest plan."""
    plan = [event for event in events if event["kind"] == "plan_adopted"][-1]["plan"]
    stages = (stage for pipeline in plan["pipelines"] for stage in pipeline["stages"])
    return sorted({replica["node"] for stage in stages for replica in stage["replicas"]})
