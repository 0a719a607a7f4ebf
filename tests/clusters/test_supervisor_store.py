"""What a job says and does when its object store, a real S3 server, cannot be used: at the start, and while it runs."""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from breakable_wire import BreakableWire
from faults.disks import Disks, freeze
from process_cluster import LIFE, ProcessCluster
from safetensors.numpy import load_file
from servers import RunningServer, new_place
from supervised import Supervised, supervised, tiny_job
from waiting import eventually

from shoal import cli
from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.job import CheckpointSpec, JobSpec
from shoal_planner.memory import STATE_BYTES
from shoal_planner.plan import parse_plan
from shoal_recovery import tenure
from shoal_recovery.checkpoints import list_manifests
from shoal_recovery.claims import put_claimed
from shoal_recovery.errors import StoreConflict, StoreUnreachable
from shoal_recovery.journal import (
    CheckpointCommitted,
    CheckpointFailed,
    JobState,
    RecoveryDone,
    StepDone,
    StoreFailed,
    StoreRecovered,
)
from shoal_recovery.shard_map import shard_map
from shoal_recovery.store import Data, open_store
from shoal_recovery.store_directory import DirectoryStore
from shoal_recovery.tenure import Life, claim
from shoal_workers import checkpoint_commits
from shoal_workers import messages as m
from shoal_workers.change import copies_of
from shoal_workers.checkpoint_commits import CheckpointCommits, Result
from shoal_workers.store_check import Tried, patiently, try_store


def job(folder: Path, uri: str, steps: int) -> JobSpec:
    path = folder / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    return tiny_job(path.as_uri(), steps=steps, checkpoint=CheckpointSpec(uri=uri, every_steps=40, keep=2))


def of_the_first_rank(running: Supervised, spec: JobSpec) -> tuple[str, str]:
    """Its node, and the one that alone has the copies of its state."""
    plan, snapshot = parse_plan(running.epoch.plan), snapshot_from_mapping(running.epoch.snapshot)
    copies, ranks = copies_of(plan, snapshot, spec.model), shard_map(plan, spec.model).ranks
    return ranks[0].device.node, copies[0].sent[0][0]


@pytest.fixture
def wire(seaweedfs: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[BreakableWire]:
    made = BreakableWire(seaweedfs.endpoint)
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    uri_environment = seaweedfs.environment() | {"AWS_ENDPOINT_URL_S3": made.url, "AWS_MAX_ATTEMPTS": "1"}
    for name, value in uri_environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def test_training_goes_on_without_its_store_and_what_waits_is_brought_later(
    wire: BreakableWire, seaweedfs: RunningServer, tmp_path: Path
) -> None:
    uri = new_place()
    environment = seaweedfs.environment() | {"AWS_ENDPOINT_URL_S3": wire.url}
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1)}, environment=environment)
    try:
        with supervised(cluster, "cut-off", job(tmp_path, uri, steps=100_000)) as running:
            running.eventually(lambda: running.events(CheckpointCommitted))
            wire.cut()
            running.eventually(lambda: running.events(StoreFailed))
            (failed,) = running.events(StoreFailed)
            assert failed.uri == uri
            assert wire.url in failed.problem
            running.reaches(max(running.step, failed.step) + 20)
            stored = [event.step for event in running.events(CheckpointCommitted)]
            wire.mend()
            running.eventually(lambda: running.events(StoreRecovered), 60.0)
            (recovered,) = running.events(StoreRecovered)
            assert recovered.step >= failed.step > max(stored)
            after = [type(event) for event in running.events_before(recovered)]
            assert after.count(StoreFailed) == 1
            assert StepDone in after[after.index(StoreFailed) :]
            running.supervisor.cancel()
            assert running.ends() is JobState.CANCELLED
            store = open_store(uri)
            kept = list_manifests(store, "cut-off")
            assert max(kept) >= recovered.step
            assert cli.run(["export", f"{uri}/cut-off", str(tmp_path / "out")]) == 0
            assert "model.layers.3.mlp.down_proj.weight" in load_file(tmp_path / "out" / "model.safetensors")
            running.supervisor.ended.wait(30.0)
            steps = {int(name.split("/")[2]) for name in store.list("cut-off/shards/")}
            assert steps <= {*kept, max(steps)}  # an agent may have been at the very last one
    finally:
        cluster.close()


@pytest.mark.long
def test_training_goes_on_while_a_folder_that_is_its_store_hangs(tmp_path: Path) -> None:
    """As where the server of a network file system is gone: whoever writes there waits, and hears of no error."""
    disks = Disks([tmp_path / "mounted"])
    if disks.missing:
        pytest.skip(disks.missing)
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1)})
    try:
        with supervised(cluster, "frozen", job(tmp_path, (tmp_path / "mounted").as_uri(), 100_000)) as running:
            running.eventually(lambda: running.events(CheckpointCommitted))
            thaw = freeze(tmp_path / "mounted")
            try:
                running.eventually(lambda: running.events(StoreFailed), 90.0)
                (failed,) = running.events(StoreFailed)
                running.reaches(max(running.step, failed.step) + 20)
            finally:
                thaw()
            running.eventually(lambda: running.events(StoreRecovered), 90.0)
            assert running.events(StoreRecovered)[0].step >= failed.step
    finally:
        cluster.close()
        disks.close()


@pytest.mark.parametrize("kind", ["folder", "rclone"])
def test_of_a_checkpoint_only_what_no_survivor_has_comes_from_the_store(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """A node dies with the one that has its copies: all go back to a checkpoint, and have kept their own of it. Also
    where the store is one that ignores conditions."""
    uri, environment = (tmp_path / "store").as_uri(), {}
    if kind == "rclone":
        environment = request.getfixturevalue("rclone_environment")
        uri = new_place()
    spec = job(tmp_path, uri, steps=100_000)
    cluster = ProcessCluster(tmp_path, {name: ("cpu-1t", 1) for name in "abcd"}, environment=environment)
    try:
        with supervised(cluster, "part", spec) as running:
            running.eventually(lambda: running.events(CheckpointCommitted))
            running.steps_on()
            plan, snapshot = parse_plan(running.epoch.plan), snapshot_from_mapping(running.epoch.snapshot)
            copies, ranks = copies_of(plan, snapshot, spec.model), shard_map(plan, spec.model).ranks
            owner, copied = ranks[0].device.node, copies[0].sent[0][0]
            cluster.kill_node(owner, copied)
            running.eventually(lambda: running.events(RecoveryDone))
            stored = [event.step for event in running.events(CheckpointCommitted)]
            (recovery,) = running.events(RecoveryDone)
            assert recovery.step in stored
            gone = sum(span.numel for rank in ranks if rank.device.node == owner for span in rank.vouches)
            assert recovery.num_bytes["store"] == STATE_BYTES * gone > 0
            running.steps_on()
            running.supervisor.cancel()
            assert running.ends() is JobState.CANCELLED
            assert not list(tmp_path.rglob("stored/*"))
    finally:
        cluster.close()


def test_a_recovery_that_needs_a_store_that_is_away_says_so_and_goes_on_later(
    wire: BreakableWire, seaweedfs: RunningServer, tmp_path: Path
) -> None:
    environment = seaweedfs.environment() | {"AWS_ENDPOINT_URL_S3": wire.url}
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1)}, environment=environment)
    try:
        with supervised(cluster, "needs", job(tmp_path, new_place(), steps=100_000)) as running:
            running.eventually(lambda: running.events(CheckpointCommitted))
            wire.cut()
            cluster.kill_node("a", "b")
            stored = max(event.step for event in running.events(CheckpointCommitted))
            cluster.heal()
            running.eventually(lambda: running.code == "store_needed")
            assert running.reason.startswith("The object store is needed to go on, and cannot be used: s3://")
            wire.mend()
            running.eventually(lambda: running.events(RecoveryDone), 60.0)
            assert running.events(RecoveryDone)[0].step >= stored, "one that was just written may have been whole"
            running.steps_on()
    finally:
        cluster.close()


def test_while_a_store_hangs_that_a_recovery_needs_a_node_that_comes_back_ends_the_wait(
    wire: BreakableWire, seaweedfs: RunningServer, tmp_path: Path
) -> None:
    """With all that it kept. A wait for the store alone would take two minutes, and say nothing before."""
    environment = seaweedfs.environment() | {"AWS_ENDPOINT_URL_S3": wire.url}
    cluster = ProcessCluster(tmp_path, {name: ("cpu-1t", 1) for name in "abcd"}, environment=environment)
    spec = job(tmp_path, new_place(), steps=100_000)
    try:
        with supervised(cluster, "hung", spec) as running:
            running.eventually(lambda: running.events(CheckpointCommitted))
            owner, copied = of_the_first_rank(running, spec)
            wire.slow(1.0)
            cluster.kill_node(owner, copied, wipe=False)
            running.eventually(lambda: running.code == "store_needed", 20.0)
            assert "has not answered for 5 s" in running.reason
            cluster.bring_back(owner)
            running.eventually(lambda: running.events(RecoveryDone), 40.0)
            (recovery,) = running.events(RecoveryDone)
            assert recovery.num_bytes["store"] == 0
            assert (recovery.lost_steps, recovery.redone_steps <= 1) == (0, True)
            running.steps_on()
    finally:
        cluster.close()


def test_an_agent_that_stood_still_when_it_was_asked_ends_the_wait_for_a_store_once_it_is_heard(
    wire: BreakableWire, seaweedfs: RunningServer, tmp_path: Path
) -> None:
    """Its node was there, so it was asked; its answer never came, and it alone has what is needed."""
    environment = seaweedfs.environment() | {"AWS_ENDPOINT_URL_S3": wire.url}
    cluster = ProcessCluster(tmp_path, {name: ("cpu-1t", 1) for name in "abcd"}, environment=environment)
    spec = job(tmp_path, new_place(), steps=100_000)
    try:
        with supervised(cluster, "still", spec) as running:
            running.eventually(lambda: running.events(CheckpointCommitted))
            owner, copied = of_the_first_rank(running, spec)
            wire.slow(1.0)
            agent = cluster.agent_pid(owner)
            os.kill(agent, signal.SIGSTOP)
            try:
                cluster.kill_rank("still", owner)
                cluster.kill_node(copied)
                running.eventually(lambda: running.code == "store_needed", 40.0)
            finally:
                os.kill(agent, signal.SIGCONT)
            running.eventually(lambda: running.events(RecoveryDone), 40.0)
            (recovery,) = running.events(RecoveryDone)
            assert recovery.num_bytes["store"] == 0
            assert (recovery.lost_steps, recovery.redone_steps <= 1) == (0, True)
            running.steps_on()
    finally:
        cluster.close()


def test_a_cancelled_job_does_not_wait_for_a_store_that_hangs(
    wire: BreakableWire, seaweedfs: RunningServer, tmp_path: Path
) -> None:
    environment = seaweedfs.environment() | {"AWS_ENDPOINT_URL_S3": wire.url}
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1)}, environment=environment)
    try:
        with supervised(cluster, "hung", job(tmp_path, new_place(), steps=100_000)) as running:
            running.eventually(lambda: running.events(CheckpointCommitted))
            wire.slow(1.0)
            cluster.kill_node("a", "b")
            cluster.heal()
            running.eventually(lambda: running.code == "store_needed", 20.0)
            running.supervisor.cancel()
            assert running.ends() is JobState.CANCELLED
    finally:
        cluster.close()


def test_a_store_that_hangs_is_waited_for_within_reason() -> None:
    never = threading.Event()
    try:
        with pytest.raises(StoreUnreachable, match="s3://x: did not answer within 0 s"):
            patiently("s3://x", never.wait, 0.1)
        assert patiently("s3://x", lambda: 7, 10.0) == 7
        with pytest.raises(StoreConflict):
            patiently("s3://x", _conflict, 10.0)
    finally:
        never.set()


def _conflict() -> None:
    raise StoreConflict("s3://x", "somebody was quicker")


def test_what_came_of_steps_that_are_settled_is_forgotten(tmp_path: Path) -> None:
    said: queue.SimpleQueue[Result] = queue.SimpleQueue()
    commits = CheckpointCommits("j", job(tmp_path, tmp_path.as_uri(), steps=5), LIFE, said.put)
    commits.expect(1, 0, frozenset({"x"}))
    for step in range(1, 6):
        commits.uploaded(m.Uploaded(job="j", step=step, epoch=1, name="x", rows=[], problem="no"))
        commits.safe(step)
        assert said.get(timeout=10.0).step == step
        eventually(lambda step=step: commits.settled(step))
    commits.uploaded(m.Uploaded(job="j", step=6, epoch=1, name="x", rows=[], problem=None))
    assert set(commits._came) == {(1, 5), (1, 6)}
    commits.close()


def test_a_step_that_could_not_be_stored_is_stored_when_it_is_done_again(tmp_path: Path) -> None:
    """By the epoch that a loss in the middle of its upload led to."""
    said: queue.SimpleQueue[Result] = queue.SimpleQueue()
    commits = CheckpointCommits("j", job(tmp_path, tmp_path.as_uri(), steps=5), LIFE, said.put)
    for epoch, start in ((1, 0), (2, 2)):
        commits.begins(epoch, start)
        commits.expect(epoch, start, frozenset({"x"}))
        commits.uploaded(m.Uploaded(job="j", step=3, epoch=epoch, name="x", rows=[], problem=f"lost in {epoch}"))
        commits.safe(3)
        failed = said.get(timeout=10.0)
        assert isinstance(failed, CheckpointFailed)
        assert (failed.step, failed.problem) == (3, f"lost in {epoch}")
        eventually(lambda: commits.settled(3))
    commits.close()


@pytest.mark.parametrize("holder", [LIFE, Life(cluster="elsewhere", incarnation="2")])
def test_what_another_cluster_stores_is_not_swept_away(tmp_path: Path, holder: Life) -> None:
    """A job that was given away ends where it was: what no manifest names is on its way to one."""
    store = open_store(tmp_path.as_uri())
    claim(store, "j", holder)
    store.put("j/shards/000000040/000007-x", b"on its way")
    commits = CheckpointCommits("j", job(tmp_path, tmp_path.as_uri(), steps=5), LIFE, lambda result: None)
    commits.close(over=True)
    assert bool(store.list("j/shards/")) == (holder != LIFE)


def test_who_claims_too_slowly_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store ignores conditions, and whoever began to claim the job stands still for so long that the next one
    passes its number over."""
    elsewhere, times = Life(cluster="elsewhere", incarnation="2"), itertools.count()

    class Overwriting(DirectoryStore):
        def put_new(self, name: str, data: Data) -> None:
            put_claimed(self, name, bytes(data), clock=lambda: float(next(times)), pause=lambda _: None)

    class Slow(Overwriting):
        def put(self, name: str, data: Data) -> None:
            if name == "j/tenures/000001.json":
                claim(Overwriting(tmp_path), "j", elsewhere)
            super().put(name, data)

    monkeypatch.setattr(checkpoint_commits, "open_store", lambda uri: Slow(tmp_path))
    commits = CheckpointCommits("j", job(tmp_path, tmp_path.as_uri(), steps=5), LIFE, lambda result: None)
    commits.take_over()
    commits.close()
    assert tenure.holder(DirectoryStore(tmp_path), "j") == (2, elsewhere)
    assert commits.lost_to == elsewhere


def test_a_store_that_refuses_ends_a_job_before_its_first_step(
    wire: BreakableWire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = new_place()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1)})
    try:
        with supervised(cluster, "refused", job(tmp_path, uri, steps=5)) as running:
            assert running.ends() is JobState.FAILED
            assert running.code == "store_refused"
            assert running.reason.startswith(f"checkpoint.uri = '{uri}': cannot be written from the cluster: ")
            assert "refuses the credentials" in running.reason
            assert not running.events(StepDone)
    finally:
        cluster.close()


def test_a_store_is_refused_or_has_a_problem_at_present(wire: BreakableWire, tmp_path: Path) -> None:
    assert try_store(None) == try_store(tmp_path.as_uri()) == try_store(new_place()) == Tried()
    assert "must begin with" in str(try_store("gs://bucket/x").refused)
    wire.cut()
    assert "does not answer" in str(try_store("s3://shoal-tests/x").problem)


def test_a_store_is_said_to_fail_once_and_to_work_once_it_has_what_waited(tmp_path: Path) -> None:
    said: queue.SimpleQueue[Result] = queue.SimpleQueue()
    commits = CheckpointCommits("j", job(tmp_path, tmp_path.as_uri(), steps=5), LIFE, said.put)
    for step in (10, 20, 30):
        commits.fails(step, "does not answer")
    assert said.get(timeout=10.0) == StoreFailed(uri=tmp_path.as_uri(), step=10, problem="does not answer")
    commits._works(20)
    commits._works(30)
    recovered = said.get(timeout=10.0)
    assert isinstance(recovered, StoreRecovered)
    assert recovered.step == 30
    assert said.empty()
    commits.close()
