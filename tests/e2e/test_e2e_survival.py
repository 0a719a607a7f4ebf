"""What a running job survives, on real raylets: death of the control plane, of its supervisor, of a raylet, of nodes
with the only holders of a state; a rank that stops and comes back. The loss curve is the judge."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from running import BATCH, Running, check_curve, check_history, job_mapping
from servers import new_place
from waiting import eventually

from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.job import parse_job
from shoal_planner.plan import parse_plan
from shoal_recovery.placement import backups
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import ShardMap, Span
from shoal_workers.allocator import ENVIRONMENT

STEPS = 60


@pytest.mark.long
def test_training_goes_on_without_the_control_plane_and_its_history_is_complete(running: Running) -> None:
    job_id = running.submit(job_mapping(STEPS))
    running.until_step(job_id, 10)
    psutil.Process(running.shoal.server_pid).kill()
    last = max(entry["seq"] for entry in running.journal_on_disk(job_id))

    def gone_on() -> bool:
        return running.journal_on_disk(job_id)[-1]["seq"] >= last + 10

    eventually(gone_on, 60)
    running.shoal.start_server()
    events = running.finish(job_id)
    check_history(events, STEPS)
    assert len({event["epoch"] for event in events if event["kind"] == "step_done"}) == 1


def test_a_killed_supervisor_is_replaced_while_ranks_step_on(running: Running) -> None:
    job_id = running.submit(job_mapping(STEPS))
    running.until_step(job_id, 10)
    ranks = set(running.processes("ray::RankActor"))
    assert ranks
    first = {psutil.Process(pid).parents()[1] for pid in ranks}  # all were forked off it, by way of their nurseries
    assert all(ENVIRONMENT.items() <= process.environ().items() for process in first)
    old = running.processes("ray::SupervisorActor")
    for process in old.values():
        process.kill()
    new = eventually(lambda: running.processes("ray::SupervisorActor").keys() - old.keys(), 60)
    for pid in new:  # Ray restarts it within a step, so it is held back: nobody supervises from here on
        running.stop(psutil.Process(pid))
    before, last_seq = running.sealed_step(job_id), running.journal_on_disk(job_id)[-1]["seq"]
    eventually(lambda: running.sealed_step(job_id) >= before + 2, 60)
    assert running.journal_on_disk(job_id)[-1]["seq"] == last_seq, "somebody supervised"
    for pid in new:
        psutil.Process(pid).resume()
    eventually(lambda: running.journal_on_disk(job_id)[-1]["seq"] > last_seq, 60)
    assert set(running.processes("ray::RankActor")) == ranks
    events = running.finish(job_id)
    check_history(events, STEPS)
    assert {event["epoch"] for event in events if event["kind"] == "step_done"} == {1}
    assert not [event for event in events if event["kind"] == "recovery_done"]


@pytest.mark.long
def test_a_supervisor_that_is_stopped_is_replaced_before_ranks_end_themselves(running: Running) -> None:
    job_id = running.submit(job_mapping(400))
    running.until_step(job_id, 10)
    ranks, old = set(running.processes("ray::RankActor")), running.processes("ray::SupervisorActor")
    for process in old.values():
        running.stop(process)
    eventually(lambda: running.processes("ray::SupervisorActor").keys() - old.keys(), 90)
    running.until_step(job_id, running.step(job_id) + 3)
    assert set(running.processes("ray::RankActor")) == ranks
    running.client.cancel(job_id)


@pytest.mark.long
def test_a_connector_that_is_stopped_is_replaced(running: Running) -> None:
    job_id = running.submit(job_mapping(400))
    running.until_step(job_id, 10)
    old = running.processes("ray::ConnectorActor")
    assert old
    for process in old.values():
        running.stop(process)
    step = running.step(job_id)  # the last one that came home
    eventually(lambda: running.processes("ray::ConnectorActor").keys() - old.keys(), 120)
    running.until_step(job_id, step + 10)
    running.client.cancel(job_id)


@pytest.mark.long
def test_training_goes_on_while_the_head_is_away_and_after_it_came_back(running: Running) -> None:
    """The head stands still, dies, and comes back with all that it knew: nobody is given up, and a loss after that is
    recovered from as ever."""
    job_id = running.submit(job_mapping(STEPS))
    running.until_step(job_id, 5)
    (cluster,) = running.client._call("GET", "/v1/clusters")["items"]
    assert cluster["fault_tolerant_head"]
    ranks = set(running.processes("ray::RankActor"))
    (head,) = [each for each in psutil.Process(running.shoal.cluster_pid).children() if "gcs_server" in each.name()]
    running.stop(head)
    last = running.journal_on_disk(job_id)[-1]["seq"]
    eventually(lambda: running.journal_on_disk(job_id)[-1]["seq"] >= last + 3, 60)
    head.kill()
    running.until_step(job_id, running.step(job_id) + 3)
    assert set(running.processes("ray::RankActor")) == ranks
    assert not running.events(job_id, "recovery_done")
    running.kill("small-2")
    recovery = running.until_event(job_id, "recovery_done")
    assert recovery["nodes_lost"] == ["small-2"]
    events = running.finish(job_id)
    check_history(events, STEPS)
    assert len([event for event in events if event["kind"] == "cluster_entered"]) == 1


@pytest.mark.long
def test_ranks_outlive_no_killed_raylet_and_the_job_goes_on(running: Running) -> None:
    job_id = running.submit(job_mapping(STEPS))
    running.until_step(job_id, 10)
    node = running.plan(job_id)["plan"]["pipelines"][-1]["stages"][0]["replicas"][0]["node"]
    ghost = running.rank_of(node)
    running.killed.add(node)
    psutil.Process(running.shoal.pids(node)["raylet"]).kill()
    eventually(lambda: not ghost.is_running() or ghost.status() == psutil.STATUS_ZOMBIE, 20)
    events = running.finish(job_id)
    check_history(events, STEPS)
    lost = [event for event in events if event["kind"] == "node_lost"]
    assert [event["node"] for event in lost] == [node]


@pytest.mark.long
def test_a_rank_that_stops_and_comes_back_does_no_harm(running: Running) -> None:
    steps = 2 * STEPS
    job_id = running.submit(job_mapping(steps))
    running.until_step(job_id, 10)
    node = running.plan(job_id)["plan"]["pipelines"][0]["stages"][0]["replicas"][0]["node"]
    rank = running.rank_of(node)
    running.stop(rank)
    recovery = running.until_event(job_id, "recovery_done")
    assert recovery["nodes_lost"] == [node]
    rank.resume()
    running.until_event(job_id, "node_joined", lambda event: event["seq"] > recovery["seq"])
    assert rank.is_running(), "it was not to be restarted"
    check_history(running.finish(job_id), steps)


@pytest.mark.long
def test_nodes_that_are_told_to_go_are_left_with_nothing_to_redo(running: Running) -> None:
    """One as a drill, then another one by Ray; both die some time after."""
    job_id = running.submit(job_mapping(STEPS))
    running.until_step(job_id, 10)
    told: dict[str, str] = {}
    for source in ("drill", "ray"):
        node = running.plan(job_id)["plan"]["pipelines"][-1]["stages"][0]["replicas"][0]["node"]
        told[node] = source
        if source == "drill":
            assert running.client.preempt(node, notice_s=60)["node"] == node
        else:
            running.drain(node, 60)
        recovery = running.until_event(job_id, "recovery_done", lambda event, node=node: node in event["nodes_drained"])
        assert recovery["cause"] == "preemption_notice"
        assert (recovery["redone_steps"], recovery["lost_steps"], recovery["num_bytes"]["store"]) == (0, 0, 0)
        running.kill(node)
        ended = running.until_event(job_id, "notice_ended", lambda event, node=node: event["node"] == node)
        assert (ended["source"], ended["outcome"]) == (source, "gone")
    events = running.finish(job_id)
    check_history(events, STEPS)
    assert {event["node"]: event["source"] for event in events if event["kind"] == "node_noticed"} == told
    assert not [event for event in events if event["kind"] == "node_lost"]
    assert len([event for event in events if event["kind"] == "recovery_done"]) == 2


@pytest.mark.long
def test_the_store_is_read_for_exactly_what_no_survivor_holds(running: Running) -> None:
    """The steps are slow enough for survivors to hold the checkpointed one still when its other holders die, as a rule:
    who has stored two steps more holds it no longer, and then the store is read for more. That kills more nodes than
    there are copies, so a safe step may have to be done again."""
    steps, batch = 12, 144
    job_id = running.submit(job_mapping(steps, batch, uri=new_place(), every_steps=1, keep=10))
    newest = running.until_event(job_id, "checkpoint_committed", lambda event: event["step"] >= 3)["step"]
    adopted = running.plan(job_id)
    gone = _owner_and_backup(adopted)
    whole = running.until_event(job_id, "checkpoint_committed", lambda event: event["step"] > newest)["step"]
    running.kill(*gone)
    recovery = running.until_event(job_id, "recovery_done")
    after = running.plan(job_id)
    events = running.finish(job_id)
    check_curve(events, steps, batch)
    assert sorted(recovery["nodes_lost"]) == sorted(gone)
    stored = [event["step"] for event in events if event["kind"] == "checkpoint_committed"]
    assert recovery["step"] in stored
    assert recovery["step"] >= whole, "the newest whole step was not taken"
    gone_back = recovery["redone_steps"] + recovery["lost_steps"]
    expected = _bytes_nobody_holds(adopted, after, frozenset(gone), gone_back > 0)
    assert expected > 0
    if gone_back < 2:
        assert recovery["num_bytes"]["store"] == expected
    else:
        assert recovery["num_bytes"]["store"] >= expected


@pytest.mark.long
def test_a_job_outlasts_the_loss_of_nearly_all_nodes(running: Running) -> None:
    """What is left is too little for it: it waits, and goes on from the store by itself when nodes come."""
    limits = {"limits": {"min_devices": 2}}
    job_id = running.submit(job_mapping(STEPS, uri=new_place(), every_steps=4, keep=2) | limits)
    running.until_event(job_id, "checkpoint_committed")
    gone = ("big-0", "small-0", "small-1")
    running.kill(*gone)
    waits = running.until_event(job_id, "state_changed", lambda event: event["state"] == "waiting")
    stored = running.events(job_id, "checkpoint_committed")[-1]["step"]
    for node in gone:
        running.shoal.add(node)
        running.killed.remove(node)
    events = running.finish(job_id)
    check_curve(events, STEPS, BATCH)
    (recovery,) = (event for event in events if event["kind"] == "recovery_done" and event["num_bytes"]["store"])
    assert recovery["seq"] > waits["seq"]
    assert recovery["step"] == stored
    assert set(recovery["nodes_lost"]) <= {*gone}


def _owner_and_backup(adopted: dict[str, Any]) -> tuple[str, str]:
    """Two small nodes of which one keeps the only copies of the other's snapshots."""
    copies = backups(snapshot_from_mapping(adopted["snapshot"]).nodes, adopted["plan"]["copies"])
    used = {device.node for device in parse_plan(adopted["plan"]).devices()}
    return next(
        (node, kept_on[0])
        for node, kept_on in copies.items()
        if node in used and node.startswith("small") and kept_on[0].startswith("small")
    )


def _bytes_nobody_holds(before: dict[str, Any], after: dict[str, Any], gone: frozenset[str], gone_back: bool) -> int:
    """Counted element by element, 4 bytes each: master and moments for their new owners, master for ranks that only
    compute with them, unless they have the weights in place (not of an earlier step than theirs: `gone_back`). Of a
    stored piece all is read, for it is verified as a whole."""
    job = parse_job(job_mapping(STEPS))
    old, new = (shard_map(parse_plan(adopted["plan"]), job.model) for adopted in (before, after))
    copies = backups(snapshot_from_mapping(before["snapshot"]).nodes, before["plan"]["copies"])
    pieces = [
        span
        for state in old.ranks
        if state.device.node in gone and set(copies[state.device.node]) <= gone
        for span in state.vouches
    ]
    survivors = [state for state in old.ranks if state.device.node not in gone]
    live = {state.device: set(_elements(old, "keeps", {state.rank})) for state in survivors}
    total = 0
    for state in new.ranks:
        owned, computed = (set(_elements(new, what, {state.rank})) for what in ("owns", "keeps"))
        kept = set() if gone_back else live.get(state.device, set())
        for piece in pieces:
            for wanted, num_kinds in ((owned, 3), (computed - owned - kept, 1)):
                total += 4 * num_kinds * _num_runs(piece, wanted) * piece.numel
    return total


def _num_runs(piece: Span, wanted: set[tuple[str, int]]) -> int:
    """How many unbroken runs of what is wanted lie in the piece."""
    inside = [(piece.fqn, element) in wanted for element in range(piece.first, piece.last)]
    return sum(here and not before for before, here in zip([False, *inside], inside, strict=False))


def _elements(shards: ShardMap, what: str, ranks: set[int]) -> list[tuple[str, int]]:
    return [
        (span.fqn, element)
        for state in shards.ranks
        if state.rank in ranks
        for span in getattr(state, what)
        for element in range(span.first, span.last)
    ]
