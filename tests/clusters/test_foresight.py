"""What a loss would lead to is known before it happens: the very plan that the search finds, and the memory for it."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from process_cluster import SETTINGS, ProcessCluster
from supervised import supervised, tiny_job
from waiting import eventually

from shoal_planner.moving import UNKNOWN
from shoal_planner.profile import Profile
from shoal_planner.search import plan as search_plan
from shoal_recovery.journal import JobState
from shoal_recovery.shard_map import shard_map
from shoal_workers.change import copies_of, rooms, vital_nodes
from shoal_workers.epoch_view import EpochView
from shoal_workers.foresight import Foresight
from shoal_workers.gains import Gains
from shoal_workers.keeper import Keeper
from shoal_workers.measuring import Measuring
from shoal_workers.prospects import Prospects
from shoal_workers.record import JobRecord
from shoal_workers.roster import Roster
from shoal_workers.slot_files import Sizes
from shoal_workers.slot_sizes import slot_sizes

NODES = {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1), "c": ("cpu-1t", 1)}


def test_the_plan_after_each_loss_is_what_the_search_finds(tmp_path: Path) -> None:
    spec, snapshot = tiny_job("stdlib:", steps=9), ProcessCluster(tmp_path, NODES).snapshot()
    plan = search_plan(spec, snapshot).plan
    vital = vital_nodes(plan, copies_of(plan, snapshot, spec.model))
    assert len(vital) > 1
    told: queue.SimpleQueue[Mapping[str, Sizes]] = queue.SimpleQueue()
    foresight, epoch = Foresight(spec, told.put), EpochView.begun(7, plan, snapshot, 3, vital)
    foresight.look(epoch, snapshot, Profile(), UNKNOWN)
    sizes = told.get(timeout=30)
    for lost in vital:
        rest = dataclasses.replace(snapshot, nodes=tuple(node for node in snapshot.nodes if node.id != lost))
        expected = search_plan(spec, rest, previous=plan).plan
        assert foresight.plan(7, rest, Profile()) == expected
        assert foresight.plan(8, rest, Profile()) is None
        assert foresight.plan(7, rest, dataclasses.replace(Profile(), kinds={"a": "another"})) is None
        for node, needed in slot_sizes(expected, rest, spec.model).items():
            ready = sizes[node]
            assert len(ready.local) >= len(needed.local) and len(ready.copies) >= len(needed.copies)
            assert all(map(int.__ge__, ready.local, needed.local))
            assert all(map(int.__ge__, ready.copies, needed.copies))
    assert foresight.plan(7, snapshot, Profile()) is None


def test_a_node_that_joins_and_is_not_used_is_looked_at_too(tmp_path: Path) -> None:
    spec, whole = tiny_job("stdlib:", steps=9), ProcessCluster(tmp_path, NODES).snapshot()
    two = dataclasses.replace(whole, nodes=whole.nodes[:2])
    plan = search_plan(spec, two).plan
    epoch = EpochView.begun(7, plan, two, 3, vital_nodes(plan, copies_of(plan, two, spec.model)))
    told, seconds = queue.SimpleQueue[Mapping[str, Sizes]](), [0.0]
    foresight = Foresight(spec, told.put, lambda: seconds[-1])
    foresight.look(epoch, two, Profile(), UNKNOWN)
    told.get(timeout=30)
    assert not foresight.due(7) and foresight.due(8)
    seconds.append(60.0)
    eventually(lambda: foresight.due(7), 30)
    foresight.look(epoch, whole, Profile(), UNKNOWN)
    assert not foresight.due(7)
    told.get(timeout=30)
    for nodes in (whole.nodes[1:], two.nodes[1:]):
        assert foresight.plan(7, dataclasses.replace(whole, nodes=nodes), Profile()) is not None
    eventually(lambda: not _looking(), 30)
    foresight.look(epoch, whole, Profile(), UNKNOWN)
    assert not _looking(), "nothing is new"


def test_the_plan_with_a_node_that_joins_is_what_was_weighed(tmp_path: Path) -> None:
    """So it is not looked for once more while those that compute stand still."""
    tiny, whole = tiny_job("stdlib:", steps=1000), ProcessCluster(tmp_path, NODES).snapshot()
    model = dataclasses.replace(tiny.model, hidden=128, ffn=256)
    spec = dataclasses.replace(tiny, model=model, train=dataclasses.replace(tiny.train, global_batch=12, seq_len=128))
    two = dataclasses.replace(whole, nodes=whole.nodes[:2])
    plan = search_plan(spec, two).plan
    epoch = EpochView.begun(7, plan, two, 3, vital_nodes(plan, copies_of(plan, two, spec.model)))
    told: queue.SimpleQueue[Mapping[str, Sizes]] = queue.SimpleQueue()
    gains, record = Gains(spec, told.put), JobRecord(Keeper("job", lambda: 0.0), lambda: 0.0)
    ready = frozenset(NODES)
    assert gains.plan(7, whole, record.profile) is None
    eventually(lambda: gains.of(epoch, ready, record, lambda: whole) is not None, 30)
    expected = search_plan(spec, whole, previous=plan, outlook=record.outlook).plan
    assert gains.plan(7, whole, record.profile) == expected
    ready_first = told.get(timeout=30)
    assert ready_first == slot_sizes(expected, whole, spec.model), "whoever is in that plan makes memory ready"
    assert list(ready_first) == ["c", "a", "b"], "whoever comes before the others"
    assert gains.plan(8, whole, record.profile) is None and gains.plan(7, two, record.profile) is None
    assert gains.plan(7, whole, dataclasses.replace(record.profile, kinds={"a": "another"})) is None


def test_nothing_is_looked_for_when_the_epoch_is_about_to_end(tmp_path: Path) -> None:
    """The memory that it would be for is made when the next epoch waits for its own."""
    cluster, spec = ProcessCluster(tmp_path, NODES), tiny_job("stdlib:", steps=9)
    snapshot, clock = cluster.snapshot(), time.monotonic
    plan = search_plan(spec, snapshot).plan
    epoch = EpochView.begun(7, plan, snapshot, 3, vital_nodes(plan, copies_of(plan, snapshot, spec.model)))
    record, told = JobRecord(Keeper("job", clock), clock), queue.SimpleQueue[Mapping[str, Sizes]]()
    roster = Roster(cluster, "job", queue.SimpleQueue(), clock)
    measuring = Measuring(spec, roster, record, SETTINGS, overrides=lambda: (), clock=clock, wall_clock=time.time)

    def make_ready(sizes: Mapping[str, Sizes], /, *, joining: bool = False) -> None:
        assert not joining
        told.put(sizes)

    prospects = Prospects(spec, record, measuring, lambda nodes: snapshot, make_ready)
    for state in (JobState.STARTING, JobState.RUNNING, JobState.DRAINING):
        record.enter(state, "", "")
    prospects.look_ahead(epoch, frozenset(NODES))
    assert not _looking()
    record.enter(JobState.RECOVERING, "", "")
    record.enter(JobState.RUNNING, "", "")
    prospects.look_ahead(epoch, frozenset(NODES))
    assert told.get(timeout=30)


def test_room_is_for_what_a_plan_takes_of_cpus(tmp_path: Path) -> None:
    spec, snapshot = tiny_job("stdlib:", steps=9), ProcessCluster(tmp_path, NODES).snapshot()
    plan = search_plan(spec, snapshot).plan
    assert plan.prediction is not None
    found = rooms(plan, snapshot)
    assert {str(ref): num_bytes for ref, num_bytes in found.items()} == {
        name: int(num_bytes) for name, num_bytes in plan.prediction.memory_bytes
    }
    first, *others = snapshot.nodes
    with_gpu = dataclasses.replace(snapshot, nodes=(dataclasses.replace(first, device="A100-80G"), *others))
    assert rooms(plan, with_gpu) == {ref: num_bytes for ref, num_bytes in found.items() if ref.node != first.id}
    assert rooms(None, snapshot) == {}


def _looking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "foresight"]


def test_sizes_are_those_of_all_snapshots_of_a_plan(tmp_path: Path) -> None:
    spec, snapshot = tiny_job("stdlib:", steps=9), ProcessCluster(tmp_path, NODES).snapshot()
    plan = search_plan(spec, snapshot).plan
    elements = sum(span.numel for state in shard_map(plan, spec.model).ranks for span in state.vouches)
    found = slot_sizes(plan, snapshot, spec.model)
    assert sum(sum(sizes.local) for sizes in found.values()) == 12 * elements
    assert sum(sum(sizes.copies) for sizes in found.values()) == 12 * elements * plan.copies
    assert Sizes(local=(5, 2)).or_more(Sizes(local=(3, 3, 1), copies=(4,))) == Sizes(local=(5, 3, 1), copies=(4,))


def test_agents_make_ready_what_the_next_epoch_then_uses(tmp_path: Path) -> None:
    """Files are told apart by their inodes, which are not given anew as long as somebody maps them."""
    cluster, spec = ProcessCluster(tmp_path, NODES), tiny_job("stdlib:", steps=100_000)

    def memory(node: str, pattern: str) -> set[int]:
        return {path.stat().st_ino for path in cluster.memory_of(node).glob(f"job/{pattern}")}

    try:
        with supervised(cluster, "job", spec) as job:
            job.steps_on()
            lost = max(job.devices())
            eventually(lambda: all(memory(node, "spare-*") for node in NODES), 30)
            ready = {node: memory(node, "spare-*") for node in NODES}
            cluster.kill_node(lost)
            done = job.recovers()
            assert job.devices() and lost not in job.devices()
            for node in job.devices():
                assert memory(node, f"{done.epoch:06d}-*.slot*") <= ready[node]
    finally:
        cluster.close()
