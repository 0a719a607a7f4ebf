"""State that several nodes have live: nothing of it is sent, and whoever dies when, the newest step is still there."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import RunningAgent, running_agents
from copies_runs import Moment, run_protected
from engine_runs import job, on_nodes, part, plan
from process_cluster import ProcessCluster
from supervised import supervised, tiny_job
from waiting import eventually, stopped

from shoal_planner import search
from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.job import JobSpec
from shoal_planner.levels import Sharding
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_planner.search import PlanResult
from shoal_recovery.journal import PlanAdopted
from shoal_recovery.placement import network_bytes_per_parameter, place_copies
from shoal_recovery.restore import plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Inventory, Kind, Snapshot
from shoal_recovery.store import open_store
from shoal_workers import changer, foresight
from shoal_workers.change import assignments
from shoal_workers.fetching import Fetcher, Sources
from shoal_workers.greeting import epoch_pass
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.processes import Processes
from shoal_workers.safekeeping import newest_whole
from shoal_workers.shards import NUM_SLOTS
from shoal_workers.solo import RunRequest, WholeState, run_solo, solo_plan
from shoal_workers.tags import Purpose

NODES = ("a-0", "b-0", "c-0")
UNSPLIT = Sharding(optimizer="none")
DONE = 3  # the victim stops in the step after it
# All three have everything; or c has what a and b have together.
LAYOUTS = {
    "alike": plan((2, (part(6, (1, 1), (1, 1), (1, 2)),))),
    "one beside two stages": plan((2, (part(2, (1, 2)), part(4, (1, 2)))), (2, (part(6, (1, 2)),))),
}


def cluster() -> ClusterSnapshot:
    return parse_cluster({"nodes": [{"name": name[0], "device": "cpu-1t", "host_memory_gib": 4} for name in NODES]})


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[dict[str, RunningAgent]]:
    with running_agents(tmp_path, *NODES) as started:
        yield {agent.node: agent for agent in started}


@pytest.mark.parametrize(
    ("layout", "victim", "moment", "unsure", "expected"),
    [
        ("alike", 2, Purpose.REDUCE, None, DONE),
        ("alike", 0, Purpose.SPREAD, None, DONE),
        ("alike", 1, "vote", None, DONE),
        ("alike", 2, "voted", None, DONE + 1),
        ("alike", 2, "voted", 0, DONE),  # who knows has the next step, who does not has this one
        ("one beside two stages", 0, Purpose.ACTIVATION, None, DONE),
        ("one beside two stages", 2, Purpose.REDUCE, None, DONE),
        ("one beside two stages", 1, "voted", 2, DONE),
    ],
)
def test_a_holder_that_dies_at_any_moment_costs_no_step(
    processes: Processes,
    agents: dict[str, RunningAgent],
    layout: str,
    victim: int,
    moment: Moment,
    unsure: int | None,
    expected: int,
) -> None:
    """Its node is gone with all that its agent keeps, and nothing was ever sent. What the agents of the others keep,
    and get from their ranks at the end of the epoch, is a whole step: bit by bit what it was."""
    spec, made = job(), dataclasses.replace(on_nodes(LAYOUTS[layout], *NODES), sharding=UNSPLIT, copies=1)
    shards, snapshot = shard_map(made, spec.model), cluster()
    copies = place_copies(shards, snapshot, 1)
    assert network_bytes_per_parameter(shards, copies) == 0
    orders = assignments(
        epoch=1,
        job="job",
        spec=spec,
        plan=made,
        snapshot=snapshot,
        shards=shards,
        copies=copies,
        restore=None,
        step=0,
        evaluated=False,
        agents={node: agent.address for node, agent in agents.items()},
        marks=[],
        files=[],
    )
    request = RunRequest(job=spec, plan=made, until_step=20)
    undisturbed = processes.run(dataclasses.replace(request, until_step=expected)).state
    upsets = {victim: moment} | ({} if unsure is None else {unsure: "unsure"})
    call = processes.start(3, run_protected, request, orders, upsets, DONE)
    with stopped(processes.pid(victim)):
        survivors = [rank for rank in range(3) if rank != victim]
        if moment == "voted":
            for rank in survivors:
                if rank != unsure:
                    eventually(lambda agent=agents[NODES[rank]]: _has_begun(agent, DONE + 1))
        left = {}
        for rank in survivors:
            call.abandon(rank)
            left[rank] = call.answer(rank)
        held = [one for rank in survivors for one in agents[NODES[rank]].inventory()]
        whole = newest_whole(held, {1: made}, spec.model)
    call.abandon(victim)
    call.answer(victim)

    assert all(answer.problem is None for answer in left.values())
    assert [left[rank].tag for rank in survivors] == [_tag(rank, unsure, expected, moment) for rank in survivors]
    _assert_restores(spec, held, agents, undisturbed)
    assert whole is not None and whole.step == expected


def _has_begun(agent: RunningAgent, step: int) -> bool:
    """To keep it, which a rank does once it is done."""
    return step - NUM_SLOTS not in {snapshot.step for snapshot in agent.inventory()}


def _tag(rank: int, unsure: int | None, expected: int, moment: Moment) -> int:
    return DONE + 1 if moment == "voted" and rank != unsure else expected


def _assert_restores(
    spec: JobSpec, held: list[Snapshot], agents: dict[str, RunningAgent], expected: WholeState
) -> None:
    """Into one process that has nothing."""
    shards = shard_map(solo_plan(spec), spec.model)
    restore = plan_restore(shards, Inventory(snapshots=tuple(held)), (), spec.model, "fp32")
    assert restore.step == expected.step
    live = LiveState.build(spec.model, shards.ranks[0], "fp32", DeviceMemory("here", None))
    addresses = {node: agent.address for node, agent in agents.items()}
    sources = Sources(
        job="job",
        step=restore.step,
        old=None,
        agents=addresses,
        open_store=lambda: open_store("file:///nowhere"),
        shown=epoch_pass("job", 2),
    )
    fetcher = Fetcher(sources)
    assert not fetcher.bring(live, restore.transfers).failed
    fetcher.abandon()
    for key in (*live.owned_keys(), *live.kept_keys()):
        kind = Kind.MASTER if key.kind is Kind.WEIGHT else key.kind
        found = live.view(key).numpy().tobytes()
        assert found == expected.values[kind][key.fqn].reshape(-1)[key.first : key.last].tobytes(), key


# --- a whole job ---


@pytest.fixture
def running_cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1), "c": ("cpu-1t", 1)})
    yield started
    started.close()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes compute all layers, and have all optimizer state."""

    def plan(spec: JobSpec, snapshot: ClusterSnapshot, *args: Any, **options: Any) -> PlanResult:
        found = search.plan(spec, snapshot, *args, **{**options, "previous": None})
        samples = {1: (4,), 2: (2, 2), 3: (2, 1, 1)}[len(snapshot.nodes)]
        replicas = tuple(
            Replica(node=node.id, devices=(0,), samples=count)
            for node, count in zip(snapshot.nodes, samples, strict=True)
        )
        stage = Stage(layers=((0, spec.model.layers),), replicas=replicas)
        made = Plan(pipelines=(Pipeline(micro_batch=4, micro_batches=1, stages=(stage,)),), sharding=UNSPLIT, copies=1)
        return dataclasses.replace(found, plan=made, change=None)

    for module in (changer, foresight):
        monkeypatch.setattr(module, "search_plan", plan)


def test_a_job_whose_nodes_all_have_its_state_sends_no_copies_and_loses_nothing(
    running_cluster: ProcessCluster, planned: None
) -> None:
    spec = tiny_job(Path(argparse.__file__).as_uri(), steps=30, min_devices=2)
    with supervised(running_cluster, "live", spec) as running:
        running.reaches(5)
        assert "no copies of its state are sent" in running.reason.lower()
        victim = sorted(running.devices())[0]
        running_cluster.kill_node(victim)
        done = running.recovers()
        assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
        assert done.redone_steps <= 1
        running.succeeds()
        losses = running.losses()
        assert {adopted.network_bytes_per_parameter for adopted in running.events(PlanAdopted)} == {0.0}
    reference = run_solo(spec, 30).losses
    assert max(abs(losses[step] - loss) / loss for step, loss in enumerate(reference, start=1)) < 1e-4
