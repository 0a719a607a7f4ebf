"""Several jobs on one cluster of real raylets: each on nodes of its own, one shrinks for another and grows back, and
neither's loss curve shows it."""

from __future__ import annotations

from typing import Any

import pytest
from running import LIMIT_S, Running, check_history, job_mapping, reference_losses
from servers import new_place
from waiting import eventually

from shoal_planner.plan import parse_plan

SHORT, STEPS = 20, 120
ENDLESS, LARGE = 100_000, 32


def used(adopted: dict[str, Any]) -> set[str]:
    """Nodes that a plan computes on, or may keep copies on."""
    computing = {device.node for device in parse_plan(adopted["plan"]).devices()}
    assert computing <= {node["id"] for node in adopted["snapshot"]["nodes"]}
    return {node["id"] for node in adopted["snapshot"]["nodes"]}


def share(running: Running, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = running.client.get(job_id)["share"]
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_shrinks_for_another_and_grows_back(running: Running) -> None:
    """The longer one computes so much in a step that growing back from two nodes to four is worth it. It is
    cancelled at the end: how long the other one takes must not decide anything."""
    low = running.submit(job_mapping(ENDLESS, LARGE) | {"priority": "low", "limits": {"min_devices": 2}})
    running.until_step(low, 5)
    assert share(running, low)["nodes"] is None
    before = used(running.plan(low))
    high = running.submit(job_mapping(SHORT) | {"priority": "high", "limits": {"min_devices": 2, "max_devices": 2}})
    running.until_event(high, "step_done")
    mine, theirs = used(running.plan(high)), used(running.plan(low))
    assert not mine & theirs, "two jobs are on one node"
    assert theirs < before and mine <= before - theirs
    left = running.until_event(low, "recovery_done", lambda event: event["cause"] == "share_changed")
    assert (left["redone_steps"], left["lost_steps"], left["nodes_lost"]) == (0, 0, [])
    step = running.step(low)
    check_history(running.finish(high), SHORT)
    assert running.step(low) > step, "it stood still while the other one ran"
    eventually(lambda: share(running, low)["nodes"] is None, LIMIT_S)
    grown = running.until_event(low, "recovery_done", lambda event: event["cause"] == "node_joined")
    assert {*grown["nodes_joined"]} & mine
    running.until_event(low, "step_done", lambda event: event["epoch"] == grown["epoch"])
    running.client.cancel(low)
    running.client.wait(low, timeout_s=LIMIT_S)
    events = running.events(low)
    done = [event for event in events if event["kind"] == "step_done"]
    assert [event["step"] for event in done] == list(range(1, len(done) + 1)), "a step was lost, or done twice"
    expected = reference_losses(len(done), LARGE)
    assert [event["loss"] for event in done] == pytest.approx(expected, rel=1e-4)
    assert not [event for event in events if event["kind"] == "node_lost"]


@pytest.mark.long
def test_a_job_goes_entirely_and_comes_back_by_itself(running: Running) -> None:
    limits = {"limits": {"min_devices": 4}}
    low = running.submit(job_mapping(STEPS, uri=new_place(), every_steps=1000) | {"priority": "low"} | limits)
    running.until_step(low, 5)
    high = running.submit(job_mapping(SHORT) | {"priority": "high"} | limits)
    running.until_step(high, 3)
    shown = running.client.get(low)
    assert (shown["wish"], shown["status"]["state"]) == ("run", "queued")
    assert shown["status"]["code"] == "preempted_by_priority"
    check_history(running.finish(high), SHORT)
    events = running.finish(low)
    check_history(events, STEPS)
    assert [event["step"] for event in events if event["kind"] == "step_done"] == list(range(1, STEPS + 1))
