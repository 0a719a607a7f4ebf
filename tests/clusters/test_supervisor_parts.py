"""What a supervisor keeps in its head: changes under way, checkpoints that are due, epochs, the safest state."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from layouts import arrays, shard
from process_cluster import LIFE
from waiting import eventually

from shoal_planner.cluster import ClusterSnapshot, DeviceRef
from shoal_planner.job import CheckpointSpec, DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery import checkpoints, tenure
from shoal_recovery.checkpoints import list_manifests, load_manifest, put_shard
from shoal_recovery.decide import ChangePlan
from shoal_recovery.errors import StoreUnreachable
from shoal_recovery.hf_beside import ends_of, kept_beside
from shoal_recovery.journal import CheckpointCommitted, CheckpointFailed, StoreFailed
from shoal_recovery.protection import Protection
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Kind, Manifest, Piece, ShardKey, Snapshot
from shoal_recovery.store import Data, Entry
from shoal_recovery.store_directory import DirectoryStore
from shoal_recovery.tenure import Life
from shoal_workers import checkpoint_commits
from shoal_workers import messages as m
from shoal_workers.checkpoint_commits import CheckpointCommits, Result
from shoal_workers.epoch_view import EpochView
from shoal_workers.pending import PendingChange
from shoal_workers.rows import stored_from_rows, stored_rows
from shoal_workers.safekeeping import newest_whole, owners
from shoal_workers.shards import snapshot_name

MODEL = ModelSpec(layers=2, hidden=8, heads=2, ffn=8, vocab=256)
PLAN = Plan(
    pipelines=tuple(
        Pipeline(
            micro_batch=1,
            micro_batches=1,
            stages=(Stage(layers=((0, 2),), replicas=(Replica(node=node, devices=(0,)),)),),
        )
        for node in ("a", "b")
    )
)
SHARDS = shard_map(PLAN, MODEL)


def job(uri: str) -> JobSpec:
    return JobSpec(
        name="j",
        model=MODEL,
        data=DataSpec(uri="stdlib:"),
        train=TrainSpec(global_batch=2, seq_len=4, steps=9),
        checkpoint=CheckpointSpec(uri=uri, every_steps=1, keep=2),
    )


# --- a change that is under way ---


def pending(every: int = 1, **fields: int) -> PendingChange:
    given = {"done_step": 7, "safe_step": 6, "since": 0, **fields}
    return PendingChange(
        protection=Protection(every=every, stored_every=None, last_step=100),
        cause="node_joined",
        reason="Taking in c.",
        blow_s=10.0,
        noticed_s=10.5,
        vital_before=frozenset({"a", "b"}),
        plan_before="old",
        **given,
    )


def ready(restore_s: float, rebuild_s: float, **num_bytes: int) -> m.Ready:
    source_s = {tier: restore_s / 2 for tier in num_bytes}
    shards = [[tier, "b", f"of-{tier}", count, 0.1] for tier, count in num_bytes.items() if tier != "own"]
    return m.Ready(
        epoch=3,
        step=6,
        restore_s=restore_s,
        rebuild_s=rebuild_s,
        num_bytes=num_bytes,
        source_s=source_s,
        shards=shards,
        num_shards=len(shards),
    )


def test_phases_and_bytes_of_a_change_add_up() -> None:
    change = pending()
    change.adopted(3, 6, frozenset({"a", "b", "c"}), "new", 11.0)
    one, other = DeviceRef(node="a", index=0), DeviceRef(node="a", index=1)
    change.all_ready({one: ready(0.5, 0.2, own=5, peer=1), other: ready(0.3, 0.4, own=1, store=3)}, ())
    done = change.done(13.0)
    assert (done.detect_s, done.decide_s, done.restore_s, done.rebuild_s, done.total_s) == (0.5, 0.5, 0.5, 0.4, 3.0)
    assert done.num_bytes == {"own": 6, "node": 0, "peer": 1, "store": 3}
    assert done.source_s == {"own": 0.25, "node": 0.0, "peer": 0.25, "store": 0.15}
    assert [(shard.shard, shard.to, shard.num_bytes) for shard in done.shards] == [
        ("of-store", "a:1", 3),
        ("of-peer", "a:0", 1),
    ]
    assert done.num_shards == 2
    assert (done.plan_before, done.plan_after) == ("old", "new")
    assert (done.epoch, done.step, done.redone_steps, done.lost_steps) == (3, 6, 1, 0)
    assert (done.nodes_joined, done.nodes_lost) == (("c",), ())


def test_an_interrupted_attempt_leaves_its_cause_but_none_of_its_figures() -> None:
    change = pending()
    change.adopted(3, 6, frozenset({"a", "b", "c"}), "new", 11.0)
    change.restore_s = 9.0
    again = ChangePlan(cause="interrupted", use=frozenset(), lost=(), reason="Again.")
    lost = ChangePlan(cause="node_lost", use=frozenset(), lost=(("c", "closed"),), reason="Lost c.")
    change.goes_on(again)
    change.goes_on(lost)
    change.nodes_lost |= {"c"}
    change.goes_on(again)
    change.halted(8)
    change.adopted(5, 7, frozenset({"a", "b"}), "new", 12.0)
    change.all_ready({DeviceRef(node="a", index=0): ready(0.1, 0.1)}, ())
    done = change.done(13.0)
    assert (done.cause, done.reason) == ("node_lost", "Taking in c. Lost c.")
    assert (done.epoch, done.step, done.redone_steps, done.lost_steps) == (5, 7, 1, 0)
    assert (done.nodes_joined, done.nodes_lost, done.restore_s) == ((), ("c",), 0.1)


def test_steps_that_were_not_brought_to_safety_are_not_lost() -> None:
    """Every fourth is, and the one with which an epoch begins."""
    change = pending(every=4, since=5, safe_step=5)
    change.halted(11)
    change.adopted(3, 8, frozenset({"a"}), "new", 11.0)
    done = change.done(13.0)
    assert (done.step, done.redone_steps, done.lost_steps) == (8, 3, 0)


def test_a_safe_step_that_is_done_again_is_lost() -> None:
    change = pending()
    change.adopted(3, 4, frozenset({"a"}), "new", 11.0)
    done = change.done(12.0)
    assert (done.redone_steps, done.lost_steps) == (1, 2)
    drained = pending(safe_step=7)
    drained.adopted(3, 7, frozenset({"a"}), "new", 11.0)
    assert (drained.done(12.0).redone_steps, drained.done(12.0).lost_steps) == (0, 0)


# --- an epoch ---


def test_an_epoch_has_ended_when_all_its_ranks_have_left() -> None:
    snapshot = ClusterSnapshot(nodes=())
    view = EpochView(number=2, plan=PLAN, snapshot=snapshot, vital=frozenset({"a", "b"}), step=4, last_step=4)
    a, b = DeviceRef(node="a", index=0), DeviceRef(node="b", index=0)
    left = m.Left(epoch=2, step=6, finished=False)
    view.hear(a, left, 0.0)
    view.hear(b, m.Left(epoch=1, step=6, finished=False), 0.0)
    assert view.ended is None
    view.hear(b, left, 0.0)
    assert view.ended == "stopped"
    view.hear(a, m.Left(epoch=2, step=9, finished=True), 0.0)
    view.hear(b, m.Left(epoch=2, step=9, finished=True), 0.0)
    assert view.ended == "finished"
    assert not view.all_ready
    for device in (a, b):
        view.hear(device, ready(0.0, 0.0), 0.0)
    assert not view.all_ready, "those were of another epoch"


def test_the_first_trouble_of_a_rank_is_the_one_that_counts() -> None:
    snapshot = ClusterSnapshot(nodes=())
    view = EpochView(number=2, plan=PLAN, snapshot=snapshot, vital=frozenset({"a", "b"}), step=4, last_step=4)
    device = DeviceRef(node="a", index=0)
    view.hear(device, m.Trouble(epoch=2, problem="first", fatal=False), 10.0)
    view.hear(device, m.Trouble(epoch=2, problem="second", fatal=True), 11.0)
    (seen,) = view.troubles_seen(12.0)
    assert (seen.name, seen.problem, seen.fatal, seen.age_s) == ("rank process a:0", "first", False, 2.0)


# --- the newest state that a waiting job has ---


def held(epoch: int, step: int, rank: int, node: str) -> Snapshot:
    key = ShardKey(fqn="w", kind=Kind.MASTER, first=0, last=1)
    piece = Piece(key=key, offset=0, num_bytes=4, checksum="x")
    return Snapshot(node=node, name=snapshot_name(epoch, rank), step=step, pieces=(piece,))


def test_the_newest_step_that_one_epoch_left_whole_is_brought_to_the_store() -> None:
    plans_by_epoch = {1: PLAN, 2: PLAN}
    both = [held(1, 4, 0, "a"), held(1, 4, 1, "a"), held(1, 4, 0, "b"), held(1, 4, 1, "b")]
    torn = [held(1, 5, 0, "a"), held(2, 5, 1, "b")]
    found = newest_whole([*both, *torn], plans_by_epoch, MODEL)
    assert found is not None
    assert (found.epoch, found.step) == (1, 4)
    assert found.names == owners(1, PLAN, MODEL) == {"000001-0", "000001-1"}
    assert sorted(snapshot.node for snapshot in found.snapshots) == ["a", "b"]
    assert newest_whole(torn, plans_by_epoch, MODEL) is None
    assert newest_whole([held(1, 0, 0, "a"), held(1, 0, 1, "a")], plans_by_epoch, MODEL) is None
    assert newest_whole([held(3, 4, 0, "a"), held(3, 4, 1, "a")], plans_by_epoch, MODEL) is None


# --- checkpoints ---


@pytest.fixture
def results() -> queue.SimpleQueue[Result]:
    return queue.SimpleQueue()


@pytest.fixture
def commits(tmp_path: Path, results: queue.SimpleQueue[Result]) -> Iterator[CheckpointCommits]:
    started = CheckpointCommits("j", job(tmp_path.as_uri()), LIFE, results.put)
    yield started
    started.close()


def upload(folder: Path, epoch: int, step: int, rank: int, problem: str | None = None) -> m.Uploaded:
    found = shard(SHARDS.ranks[rank], arrays(MODEL, step))
    name = snapshot_name(epoch, rank)
    pieces = put_shard(
        DirectoryStore(folder), job="j", step=step, epoch=epoch, shard=name, data=found.content, pieces=found.pieces
    )
    return m.Uploaded(job="j", step=step, epoch=epoch, name=name, rows=stored_rows(pieces), problem=problem)


def test_a_step_is_committed_when_it_is_whole_and_safe(
    commits: CheckpointCommits, results: queue.SimpleQueue[Result], tmp_path: Path
) -> None:
    commits.uploaded(upload(tmp_path, 1, 3, 0))
    commits.expect(1, 0, owners(1, PLAN, MODEL))
    commits.uploaded(upload(tmp_path, 1, 3, 1))
    assert not list_manifests(DirectoryStore(tmp_path), "j")
    assert not kept_beside(DirectoryStore(tmp_path), "j")
    commits.safe(3)
    done = results.get(timeout=10.0)
    assert isinstance(done, CheckpointCommitted)
    assert (done.step, done.epoch) == (3, 1)
    assert list_manifests(DirectoryStore(tmp_path), "j") == (3,)
    assert ends_of(kept_beside(DirectoryStore(tmp_path), "j")) == (0,), "as bytes end documents"
    eventually(lambda: commits.settled(3))
    commits.uploaded(upload(tmp_path, 1, 3, 1))
    for step in (4, 5):
        for rank in (0, 1):
            commits.uploaded(upload(tmp_path, 1, step, rank))
    commits.safe(5)
    assert [results.get(timeout=10.0).step for _ in range(2)] == [4, 5]
    eventually(lambda: list_manifests(DirectoryStore(tmp_path), "j") == (5, 4))  # two are kept


def test_a_step_that_was_done_again_is_committed_as_it_came_out_last(
    commits: CheckpointCommits, results: queue.SimpleQueue[Result], tmp_path: Path
) -> None:
    commits.expect(1, 0, owners(1, PLAN, MODEL))
    for rank in (0, 1):
        commits.uploaded(upload(tmp_path, 1, 3, rank))
    commits.expect(2, 2, owners(2, PLAN, MODEL))
    commits.safe(3)
    for rank in (0, 1):
        commits.uploaded(upload(tmp_path, 2, 3, rank))
    done = results.get(timeout=10.0)
    assert isinstance(done, CheckpointCommitted)
    assert (done.step, done.epoch) == (3, 2)
    assert results.empty()


def test_a_step_that_becomes_void_while_its_manifest_is_written_is_not_stored(
    commits: CheckpointCommits, results: queue.SimpleQueue[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()

    class InTheMiddle(DirectoryStore):
        def put_new(self, name: str, data: Data) -> None:
            super().put_new(name, data)
            commits.begins(2, 2)
            written.set()

    monkeypatch.setattr(checkpoint_commits, "open_store", lambda uri: InTheMiddle(tmp_path))
    commits.expect(1, 0, owners(1, PLAN, MODEL))
    commits.safe(3)
    for epoch in (1, 2):
        for rank in (0, 1):
            commits.uploaded(upload(tmp_path, epoch, 3, rank))
    assert written.wait(10.0)
    commits.expect(2, 2, owners(2, PLAN, MODEL))
    done = results.get(timeout=10.0)
    assert isinstance(done, CheckpointCommitted)
    assert (done.step, done.epoch) == (3, 2)
    assert load_manifest(DirectoryStore(tmp_path), "j", 3).epoch == 2
    assert results.empty()


@pytest.mark.parametrize("stored", [1000, 1])
def test_what_a_void_step_has_become_for_another_cluster_is_left_alone(
    commits: CheckpointCommits,
    results: queue.SimpleQueue[Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: int,
) -> None:
    """The store is away while the other takes the job over, and stores this step itself or goes on from the manifest
    that it found: here neither is known when this side goes back behind it, and gives up to write it."""
    store, other = DirectoryStore(tmp_path), Life(cluster="elsewhere", incarnation="2")
    scenes = iter([True])

    def open_store(uri: str) -> DirectoryStore:
        if next(scenes, False):
            tenure.claim(store, "j", other)
            uploads = [upload(tmp_path, stored, 3, rank) for rank in (0, 1)]
            pieces = tuple(piece for each in uploads for piece in stored_from_rows(each.rows))
            manifest = Manifest(version=1, job="j", step=3, epoch=stored, next_sample=6, pieces=pieces)
            checkpoints.commit(store, manifest, MODEL)
            commits.begins(2, 2)
            commits.expect(2, 2, owners(2, PLAN, MODEL))
            for rank in (0, 1):
                commits.uploaded(upload(tmp_path, 2, 3, rank))  # waits, so the one before gives up
            raise StoreUnreachable(uri, "does not answer")
        return store

    monkeypatch.setattr(checkpoint_commits, "open_store", open_store)
    tenure.claim(store, "j", LIFE)
    commits.expect(1, 0, owners(1, PLAN, MODEL))
    commits.safe(3)
    for rank in (0, 1):
        commits.uploaded(upload(tmp_path, 1, 3, rank))
    assert isinstance(results.get(timeout=10.0), StoreFailed)
    failed = results.get(timeout=10.0)
    assert isinstance(failed, CheckpointFailed) and "another cluster has taken the job over" in failed.problem
    assert load_manifest(store, "j", 3).epoch == stored


def test_a_manifest_is_taken_back_by_its_own_epoch_alone(tmp_path: Path) -> None:
    """Not one that took its place after it was looked at, either."""

    class Replaced(DirectoryStore):
        def delete_listed(self, entry: Entry) -> None:
            store.put(entry.name, b"of another epoch")
            super().delete_listed(entry)

    store = DirectoryStore(tmp_path)
    pieces = tuple(piece for rank in (0, 1) for piece in stored_from_rows(upload(tmp_path, 7, 3, rank).rows))
    checkpoints.commit(store, Manifest(version=1, job="j", step=3, epoch=7, next_sample=6, pieces=pieces), MODEL)
    checkpoints.take_back(store, "j", 3, 8)
    assert list_manifests(store, "j") == (3,)
    checkpoints.take_back(Replaced(tmp_path), "j", 3, 7)
    assert store.read(checkpoints.manifest_name("j", 3)) == b"of another epoch"
    store.delete(checkpoints.manifest_name("j", 3))
    checkpoints.take_back(store, "j", 3, 7)
    checkpoints.commit(store, Manifest(version=1, job="j", step=3, epoch=7, next_sample=6, pieces=pieces), MODEL)
    checkpoints.take_back(store, "j", 3, 7)
    assert list_manifests(store, "j") == ()


def test_a_step_that_failed_is_committed_when_it_is_brought_again(
    commits: CheckpointCommits, results: queue.SimpleQueue[Result], tmp_path: Path
) -> None:
    commits.expect(1, 0, owners(1, PLAN, MODEL))
    commits.safe(3)
    for problem in ("no space", None):
        commits.try_again(1, 3)
        for rank in (0, 1):
            commits.uploaded(upload(tmp_path, 1, 3, rank, problem=problem))
        done = results.get(timeout=10.0)
        assert isinstance(done, CheckpointFailed if problem else CheckpointCommitted), done
        eventually(lambda: commits.settled(3))


def test_a_manifest_of_another_history_makes_way_for_that_of_this_one(
    commits: CheckpointCommits, results: queue.SimpleQueue[Result], tmp_path: Path
) -> None:
    """Epoch 1 has stored steps 4 and 5, but epoch 2 began at step 3."""
    store = DirectoryStore(tmp_path)
    commits.expect(1, 0, owners(1, PLAN, MODEL))
    commits.safe(5)
    for step in (4, 5):
        for rank in (0, 1):
            commits.uploaded(upload(tmp_path, 1, step, rank))
        assert isinstance(results.get(timeout=10.0), CheckpointCommitted)
    eventually(lambda: 1 in commits._swept)  # or it would take away what follows
    late = CheckpointCommits("j", job(tmp_path.as_uri()), LIFE, results.put)
    try:
        late.expect(2, 3, owners(2, PLAN, MODEL))
        late.safe(4)
        for rank in (0, 1):
            late.uploaded(upload(tmp_path, 2, 4, rank))
        assert isinstance(results.get(timeout=10.0), CheckpointCommitted)
        eventually(lambda: list_manifests(store, "j") == (4,))  # not step 5, which is still to be done again
        assert load_manifest(store, "j", 4).epoch == 2
    finally:
        late.close()


def test_a_manifest_that_cannot_be_read_makes_way_for_the_one_of_its_step_and_for_older_ones_that_can(
    commits: CheckpointCommits, results: queue.SimpleQueue[Result], tmp_path: Path
) -> None:
    """Else those behind would be the newest, and all that is kept."""
    store = DirectoryStore(tmp_path)
    for step in (3, 5, 6, 7):
        store.put(checkpoints.manifest_name("j", step), b"{")
    commits.expect(1, 0, owners(1, PLAN, MODEL))
    commits.safe(3)
    for rank in (0, 1):
        commits.uploaded(upload(tmp_path, 1, 3, rank))
    assert isinstance(results.get(timeout=10.0), CheckpointCommitted)
    eventually(lambda: 1 in commits._swept)
    assert list_manifests(store, "j") == (3,)
    assert load_manifest(store, "j", 3).epoch == 1


def test_one_upload_that_failed_is_a_failed_checkpoint(
    commits: CheckpointCommits, results: queue.SimpleQueue[Result], tmp_path: Path
) -> None:
    commits.expect(1, 0, owners(1, PLAN, MODEL))
    commits.safe(3)
    commits.uploaded(upload(tmp_path, 1, 3, 0, problem="no space"))
    commits.uploaded(upload(tmp_path, 1, 3, 1))
    done = results.get(timeout=10.0)
    assert done == CheckpointFailed(step=3, uri=tmp_path.as_uri(), problem="no space")
    eventually(lambda: commits.settled(3))


def test_steps_of_an_earlier_supervisor_are_settled(
    commits: CheckpointCommits, results: queue.SimpleQueue[Result], tmp_path: Path
) -> None:
    commits.adopt({3}, None)
    commits.expect(1, 0, owners(1, PLAN, MODEL))
    commits.safe(4)
    for step in (3, 4):
        for rank in (0, 1):
            commits.uploaded(upload(tmp_path, 1, step, rank))
    assert results.get(timeout=10.0).step == 4
