"""A node whose memory has no room for snapshots: they come to lie on its disk, and where that is full, plans keep less
there. Memory that is full is a real tmpfs."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_cluster import ProcessCluster
from supervised import supervised, tiny_job

from shoal_planner.cluster import Node
from shoal_recovery.journal import JobState, PlanAdopted, RecoveryDone, RoomShort
from shoal_recovery.state import OWNED_KINDS, ShardKey
from shoal_workers import messages as m
from shoal_workers.keeper import Keeper
from shoal_workers.record import JobRecord
from shoal_workers.rooms import NoRoom, Rooms
from shoal_workers.shards import ShardStore, snapshot_name

LAYOUT = tuple(ShardKey(fqn="w", kind=kind, first=0, last=8192) for kind in OWNED_KINDS)  # 96 KiB a slot
TWO_SLOTS = 2 * 3 * 8192 * 4


@contextlib.contextmanager
def small_memory(folder: Path, num_bytes: int) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def write(store: ShardStore, rank: int, step: int) -> bytes:
    name, content = snapshot_name(1, rank), bytes([16 * rank + step]) * (TWO_SLOTS // 2)
    store.open("job", name, LAYOUT)
    store.begin("job", name, step)
    store.slot("job", name, step)[:] = content
    store.seal("job", name, step)
    return content


def test_what_has_no_room_in_memory_lies_on_disk_and_is_found_again(tmp_path: Path) -> None:
    with small_memory(tmp_path / "memory", TWO_SLOTS + 64 * 1024) as memory:
        rooms = Rooms(memory, tmp_path / "disk", 2 * TWO_SLOTS)
        store = ShardStore(rooms, "n0")
        contents = [write(store, rank, 1) for rank in range(3)]
        assert [path.stem for path in sorted(memory.glob("job/*.layout"))] == [snapshot_name(1, 0)]
        assert len(list((tmp_path / "disk").glob("job/*.layout"))) == 2
        del store  # what is mapped keeps its room
        again = ShardStore(Rooms(memory, tmp_path / "disk", 2 * TWO_SLOTS), "n0")
        assert len(list(again.snapshots("job"))) == 3
        for rank, content in enumerate(contents):
            assert bytes(again.slot("job", snapshot_name(1, rank), 1)) == content
        with pytest.raises(NoRoom, match=rf"no room for {TWO_SLOTS} bytes .* 0 of {2 * TWO_SLOTS} on disk"):
            write(again, 3, 1)
        assert not [path for path in tmp_path.glob("*/job/*") if path.name.startswith(snapshot_name(1, 3))]
        again.retire("job", before_epoch=2)
        assert {path.name for path in tmp_path.glob("*/job/*")} == {"spare-1.slot0", "spare-1.slot1"}
        write(again, 3, 1)  # a rank may write into what lies ready, so it goes
        assert list(memory.glob("job/*.layout"))
        assert not list(tmp_path.glob("*/job/spare-*"))


def test_without_a_budget_nothing_lies_on_disk(tmp_path: Path) -> None:
    with small_memory(tmp_path / "memory", TWO_SLOTS // 2) as memory:
        store = ShardStore(Rooms(memory, tmp_path / "disk", 0), "n0")
        with pytest.raises(NoRoom, match=f"no room for {TWO_SLOTS} bytes of snapshots: [0-9]+ are free in memory"):
            write(store, 0, 1)
        assert not list(tmp_path.glob("*/job/*"))


def test_files_that_go_meanwhile_take_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread removes them, or all of a job, between the look at a folder and the look at what is in it."""
    rooms = Rooms(tmp_path / "memory", tmp_path / "disk", 1000)
    for name in ("left", "over"):
        (tmp_path / "disk" / name).mkdir()
        for slot in range(2):
            (tmp_path / "disk" / name / f"x.slot{slot}").write_bytes(bytes(100))
    (tmp_path / "disk" / "a file").write_bytes(bytes(100))
    stat, iterdir = Path.stat, Path.iterdir

    def late_stat(path: Path, **options: Any) -> os.stat_result:
        if path.name == "x.slot1":
            path.unlink(missing_ok=True)
        return stat(path, **options)

    def late_iterdir(path: Path) -> Iterator[Path]:
        if path.name == "over":
            shutil.rmtree(path, ignore_errors=True)
        return iterdir(path)

    assert rooms.left_of_budget() == 600
    monkeypatch.setattr(Path, "stat", late_stat)
    assert rooms.left_of_budget() == 800
    monkeypatch.setattr(Path, "iterdir", late_iterdir)
    assert rooms.left_of_budget() == 900


def test_who_watches_is_told_once_of_the_disk_and_each_time_of_no_room(tmp_path: Path) -> None:
    with small_memory(tmp_path / "memory", TWO_SLOTS // 2) as memory:
        rooms = Rooms(memory, tmp_path / "disk", 2 * TWO_SLOTS)
        store, events = ShardStore(rooms, "n0"), queue.SimpleQueue[Any]()
        rooms.watch("job", events)
        write(store, 0, 1)
        write(store, 1, 1)
        for _ in range(2):
            with pytest.raises(NoRoom):
                write(store, 2, 1)
        told = [events.get_nowait() for _ in range(events.qsize())]
        assert [one.on_disk for one in told] == [True, False, False]
        assert all(isinstance(one, m.RoomShort) and one.num_bytes == TWO_SLOTS for one in told)
        late = queue.SimpleQueue[Any]()
        rooms.watch("job", late)
        assert late.get_nowait() == told[-1]


def test_plans_count_on_the_room_that_was_found(tmp_path: Path) -> None:
    node = Node(
        id="a", device="cpu-1t", devices=1, host_memory_bytes=1000, intra_bytes_per_s=1.0, inter_bytes_per_s=1.0
    )
    record = JobRecord(Keeper("job", lambda: 0.0), lambda: 0.0)
    record.room_short("a", 10, 700, on_disk=True)
    assert record.with_its_room(node) == node
    record.room_short("a", 10, 600, on_disk=False)
    assert record.with_its_room(node).host_memory_bytes == 600
    record.room_short("a", 10, 600, on_disk=False)
    record.room_short("a", 10, 650, on_disk=True)
    assert record.with_its_room(node).host_memory_bytes == 600, "what fits on disk now does not undo that"
    assert [entry.event for entry in record.keeper.entries()] == [
        RoomShort(node="a", num_bytes=10, on_disk=True, room_bytes=700),
        RoomShort(node="a", num_bytes=10, on_disk=False, room_bytes=600),
    ]


def test_a_job_goes_on_from_snapshots_that_lie_on_disk(tmp_path: Path) -> None:
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1), "c": ("cpu-1t", 1)})
    text = Path(argparse.__file__).as_uri()
    try:
        with (
            small_memory(cluster.memory_of("b"), 64 * 1024),
            supervised(cluster, "on-disk", tiny_job(text, steps=100_000)) as running,
        ):
            running.reaches(10)
            (short,) = running.events(RoomShort)
            assert (short.node, short.on_disk) == ("b", True)
            cluster.kill_node("a")
            running.eventually(lambda: running.events(RecoveryDone))
            (recovery,) = running.events(RecoveryDone)
            assert (recovery.lost_steps, recovery.num_bytes["store"]) == (0, 0)
            assert recovery.redone_steps <= 1
            running.reaches(running.step + 5)
            running.supervisor.cancel()
            assert running.ends() is JobState.CANCELLED
    finally:
        cluster.close()


def test_where_the_disk_is_full_too_plans_keep_less_there(tmp_path: Path) -> None:
    environment = {"SHOAL_WORKER_DISK_LIMIT_BYTES": "0"}
    cluster = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "b": ("cpu-1t", 1)}, environment=environment)
    text = Path(argparse.__file__).as_uri()
    try:
        with (
            small_memory(cluster.memory_of("b"), 1_000_000),
            supervised(cluster, "no-room", tiny_job(text, steps=100)) as running,
        ):
            assert running.ends() is JobState.SUCCEEDED
            shorts = running.events(RoomShort)
            assert {(short.node, short.on_disk) for short in shorts} == {("b", False)}
            assert min(short.room_bytes for short in shorts) < 1_100_000  # whole pages
            before, after = running.events(PlanAdopted)[0], running.events(PlanAdopted)[-1]
            assert before.plan["copies"] == 1
            assert after.plan["copies"] == 0 or "b" not in str(after.plan["pipelines"])
    finally:
        cluster.close()
