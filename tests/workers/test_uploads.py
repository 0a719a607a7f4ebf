"""Uploads to a store that is slow or dead: which copies wait, which are given up, and what is said of it."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.disks import Disks, freeze
from waiting import eventually

from shoal_planner.errors import InvalidField
from shoal_recovery.crc import checksum
from shoal_recovery.errors import StoreUnreachable
from shoal_recovery.patient_disk import PatientDisk
from shoal_recovery.state import Kind, Piece, ShardKey, Snapshot
from shoal_recovery.store import Data, Store
from shoal_recovery.store_directory import DirectoryStore
from shoal_workers.messages import UploadDelayed, Uploaded
from shoal_workers.shard_files import ShardFile
from shoal_workers.shards import snapshot_name
from shoal_workers.stored_copies import StoredCopies
from shoal_workers.uploads import Report, Uploads

CONTENT = bytes(range(40))
PIECE = Piece(
    key=ShardKey(fqn="w", kind=Kind.MASTER, first=0, last=10), offset=0, num_bytes=40, checksum=checksum(CONTENT)
)


class _Gated(DirectoryStore):
    """Objects go in one by one, as the test lets them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Semaphore(0)
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()

    def put(self, name: str, data: Data) -> None:
        self.begun.put(name)
        self.gate.acquire()
        super().put(name, data)


class Scene:
    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.folder = folder / "on-its-way"
        self.slow = _Gated(folder / "slow")
        self.quick = DirectoryStore(folder / "quick")
        disk = PatientDisk(0.5)
        self.stored = StoredCopies(folder / "stored", lambda: self.room_bytes, disk)
        self.stored.start()
        self.room_bytes = 1000
        self.uploads = Uploads(self.folder, self.stored, self._open, disk, clock=lambda: self.now_s)
        self.uploads.start()

    def _open(self, uri: str) -> Store:
        if uri == "nothing such:":
            raise InvalidField("uri", uri, "names no store")
        if uri == "dead:":
            raise StoreUnreachable(uri, "does not answer")
        return self.slow if uri == "slow:" else self.quick

    def add(self, step: int, uri: str = "slow:", job: str = "j", epoch: int = 1) -> None:
        snapshot = Snapshot(node="a", name=snapshot_name(epoch, 0), step=step, pieces=(PIECE,))
        self.uploads.add(job, snapshot, uri, memoryview(CONTENT))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.uploads.close()
    made.slow.gate.release(100)


def results(events: queue.SimpleQueue[Report], count: int) -> dict[int, str | None]:
    """The problems of so many steps; what is said of delays is left out."""
    found: dict[int, str | None] = {}
    while len(found) < count:
        word = events.get(timeout=10.0)
        if isinstance(word, Uploaded):
            found[word.step] = word.problem
    return found


def test_behind_a_slow_store_few_steps_wait_and_on_all_nodes_the_same(scene: Scene) -> None:
    """The first may be half there on another node, the newest is the best; between them those with factors of two."""
    events = scene.uploads.watch("j")
    scene.add(10)
    scene.slow.begun.get(timeout=10.0)
    for step in range(20, 130, 10):
        scene.add(step)
    given_up = results(events, 8)
    assert set(given_up) == {20, 30, 50, 60, 70, 90, 100, 110}
    assert all(problem and "given up for other steps" in problem for problem in given_up.values())
    scene.slow.gate.release(10)
    assert results(events, 4) == {10: None, 40: None, 80: None, 120: None}
    assert list(scene.folder.iterdir()) == []


@pytest.mark.parametrize(("place", "said"), [(-3, f"sealed with {PIECE.checksum}"), (12, "its header is another one")])
def test_what_was_spoilt_on_its_way_is_not_stored(scene: Scene, place: int, said: str) -> None:
    """The one before it holds it up; it is changed meanwhile."""
    events = scene.uploads.watch("j")
    scene.add(10)
    scene.slow.begun.get(timeout=10.0)
    scene.add(20)
    (path,) = (path for path in scene.folder.iterdir() if "-20." in path.name and path.suffix != ".task")
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)
    scene.slow.gate.release(10)
    found = results(events, 2)
    assert found[10] is None
    assert found[20] is not None and said in found[20]
    assert len(list(scene.slow.list(""))) == 1


def test_a_store_is_slow_when_the_next_step_comes_long_after(scene: Scene) -> None:
    events = scene.uploads.watch("j")
    scene.add(10)
    scene.now_s = 5.0
    scene.add(20)  # soon after: no reason to speak
    scene.now_s = 31.0
    scene.add(30)
    assert events.get(timeout=10.0) == UploadDelayed(job="j", step=30, problem="step 10 is still on its way after 31 s")
    assert scene.uploads.watch("j").get(timeout=10.0) == UploadDelayed(
        job="j", step=30, problem="step 10 is still on its way after 31 s"
    )
    scene.slow.gate.release(10)
    assert results(events, 3) == {10: None, 20: None, 30: None}


def test_the_dead_store_of_one_job_holds_up_no_other(scene: Scene) -> None:
    dead, other = scene.uploads.watch("j"), scene.uploads.watch("other")
    scene.add(10, "dead:")
    word = dead.get(timeout=10.0)
    assert isinstance(word, UploadDelayed)
    scene.add(10, "quick:", job="other")
    assert results(other, 1) == {10: None}
    assert len(list(scene.folder.iterdir())) == 2  # of the job whose store is dead: content, and what it is
    scene.uploads.forget("j")
    assert list(scene.folder.iterdir()) == []


def test_whoever_comes_late_hears_of_the_newest_steps_and_a_long_job_keeps_no_more(scene: Scene) -> None:
    events = scene.uploads.watch("j")
    for step in range(10, 50):
        scene.add(step, "quick:")
        assert results(events, 1) == {step: None}
    assert set(results(scene.uploads.watch("j"), 32)) == set(range(18, 50))
    for step in (18, 19):
        scene.add(step, "quick:", epoch=2)  # done again: newer than what has a higher number
        assert results(events, 1) == {step: None}
    late = scene.uploads.watch("j")
    heard = [(word.epoch, word.step) for word in (late.get_nowait() for _ in range(late.qsize()))]  # type: ignore[union-attr]
    assert heard == [(1, step) for step in range(20, 50)] + [(2, 18), (2, 19)]
    for step in range(100, 140):
        scene.add(step, "nothing such:")
        assert results(events, 1)[step]
    assert set(results(scene.uploads.watch("j"), 64)) == {*range(18, 50), *range(108, 140)}


def kept(scene: Scene) -> list[tuple[str, int]]:
    found = scene.stored.snapshots("j", [], (), verified=True)
    return sorted((one.name, one.step) for one in found)


def test_of_what_was_brought_the_step_that_is_whole_stays_on_disk_and_later_ones(scene: Scene) -> None:
    events = scene.uploads.watch("j")
    for step in (10, 20, 30):
        scene.add(step, "quick:")
    assert results(events, 3) == {10: None, 20: None, 30: None}
    assert kept(scene) == [("000001-0", 10), ("000001-0", 20), ("000001-0", 30)], "any of them may be whole next"
    scene.stored.is_whole("j", 20)
    scene.stored.is_whole("j", 10)  # told again, late
    assert kept(scene) == [("000001-0", 20), ("000001-0", 30)]
    assert scene.stored.epoch("j") == 1
    again = StoredCopies(scene.folder.parent / "stored", lambda: 10**9, PatientDisk())
    again.start()
    (piece,) = next(again.snapshots("j", [], [("000001-0", 20)], verified=True)).pieces
    (content,), _ = again.ranges("j", "000001-0", 30, [(piece.offset, piece.num_bytes)])
    assert bytes(content) == CONTENT
    with pytest.raises(ValueError, match="not within one shard"):
        again.ranges("j", "000001-0", 30, [(piece.offset, piece.num_bytes + 1)])
    with pytest.raises(KeyError):
        again.ranges("j", "000001-0", 10, [(piece.offset, piece.num_bytes)])


def test_where_other_nodes_lag_behind_all_keep_the_same_steps(scene: Scene) -> None:
    """Of one that is whole no file goes, whatever is brought after it; of the others those with many factors of two."""
    events = scene.uploads.watch("j")
    scene.add(10, "quick:")
    assert results(events, 1) == {10: None}
    scene.stored.is_whole("j", 10)
    for step in range(20, 100, 10):
        scene.add(step, "quick:")
        assert results(events, 1) == {step: None}
    assert [step for _, step in kept(scene)] == [10, 20, 40, 80, 90]
    scene.stored.is_whole("j", 40)
    assert [step for _, step in kept(scene)] == [40, 80, 90]
    scene.uploads.forget("j")
    scene.add(10, "quick:")
    results(events, 1)
    assert [step for _, step in kept(scene)] == [10], "a job of this name begins anew"


def test_where_the_disk_is_small_there_are_as_many_as_fit(scene: Scene) -> None:
    """Each step is whole when the next one has come."""
    events = scene.uploads.watch("j")
    scene.room_bytes = 2 * len(CONTENT) + 10
    for step in (10, 20, 30, 40, 50):
        scene.add(step, "quick:")
        assert results(events, 1) == {step: None}
        assert [each for _, each in kept(scene)] == [step - 10, step][step == 10 :]
        scene.stored.is_whole("j", step - 10)
    scene.room_bytes = 3 * len(CONTENT) + 10
    for step in (60, 70):  # others lag behind
        scene.add(step, "quick:")
        assert results(events, 1) == {step: None}
    assert [each for _, each in kept(scene)] == [40, 50, 70]


def test_steps_that_are_done_again_take_the_place_of_what_was_kept_of_them(scene: Scene) -> None:
    events = scene.uploads.watch("j")
    for step, epoch in ((10, 1), (20, 1), (30, 1), (20, 2)):
        scene.add(step, "quick:", epoch=epoch)
    results(events, 3)  # the second of step 20 is the fourth
    events.get(timeout=10.0)
    assert kept(scene) == [("000001-0", 10), ("000002-0", 20)]


def test_what_is_kept_makes_way(scene: Scene) -> None:
    events = scene.uploads.watch("j")
    scene.room_bytes = 50
    scene.add(10, "quick:")
    scene.add(20, "quick:")
    results(events, 2)
    assert kept(scene) == [("000001-0", 10)], "there is room for one"
    assert scene.stored.make_way()
    assert not scene.stored.make_way()
    assert list((scene.folder.parent / "stored").iterdir()) == list(scene.folder.iterdir()) == []
    scene.add(30, "quick:")
    results(events, 1)
    assert kept(scene) == [("000001-0", 30)]
    scene.uploads.forget("j")
    assert list((scene.folder.parent / "stored").iterdir()) == []


def test_what_is_kept_and_not_as_it_was_is_told_and_may_be_brought_again(scene: Scene) -> None:
    events = scene.uploads.watch("j")
    scene.add(10, "quick:")
    assert results(events, 1) == {10: None}
    (scene.folder.parent / "quick" / "j" / "shards" / "000000010" / "000001-000001-0").unlink()
    assert scene.uploads.again("j", "000001-0", 10)
    assert not scene.uploads.again("j", "000001-0", 20)
    assert results(events, 1) == {10: None}
    assert list((scene.folder.parent / "quick").rglob("000001-000001-0"))
    (path,) = (scene.folder.parent / "stored").glob("*[0-9]")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    spoilt: list[tuple[Snapshot, str]] = []
    assert list(scene.stored.snapshots("j", spoilt, (), verified=True)) == []
    ((snapshot, problem),) = spoilt
    assert (snapshot.step, problem.startswith("it was sealed with")) == (10, True)
    assert len(list(scene.stored.snapshots("j", [], (), verified=False))) == 1
    path.write_bytes(content[:-1])
    spoilt.clear()
    assert list(scene.stored.snapshots("j", spoilt, (), verified=False)) == []
    assert "bytes" in spoilt[0][1]


def test_what_is_kept_outlives_a_store_that_does_not_take_it(scene: Scene) -> None:
    """It lies there for others' sake, and an order to bring it may come while the store is broken."""
    events = scene.uploads.watch("j")
    quick, snapshot = scene.folder.parent / "quick", Snapshot(node="b", name="000001-0", step=10, pieces=(PIECE,))
    scene.stored.add("j", snapshot, "quick:", memoryview(CONTENT))
    quick.write_text("in the way")
    assert scene.uploads.again("j", "000001-0", 10)
    assert "not a directory" in str(results(events, 1)[10])
    assert kept(scene) == [("000001-0", 10)]
    quick.unlink()
    assert scene.uploads.again("j", "000001-0", 10)
    assert results(events, 1) == {10: None}
    (path,) = (scene.folder.parent / "stored").glob("*[0-9]")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert scene.uploads.again("j", "000001-0", 10)
    assert "sealed with" in str(results(events, 1)[10])
    assert not scene.uploads.again("j", "000001-0", 10), "what a spoilt file holds is looked for elsewhere"


def test_a_disk_that_hangs_costs_checkpoints_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """A real one: whoever writes there cannot even be killed."""
    place = tmp_path / "node"
    disks = Disks([place])
    if disks.missing:
        pytest.skip(disks.missing)
    try:
        scene = Scene(place)
        snapshot = Snapshot(node="b", name=snapshot_name(1, 1, mirror=True), step=10, pieces=(PIECE,))
        for step in (9, 10):
            scene.stored.add("j", dataclasses.replace(snapshot, step=step), "quick:", memoryview(CONTENT))
        events = scene.uploads.watch("j")
        thaw = freeze(place)
        try:
            scene.add(10, "quick:")
            scene.add(20, "quick:")
            found = results(events, 2)
            assert all(problem and "the disk hangs" in problem for problem in found.values())
            scene.stored.add("j", dataclasses.replace(snapshot, step=20), "quick:", memoryview(CONTENT))
            assert [one.step for one in scene.stored.snapshots("j", [], (), verified=True)] == [9, 10]
            scene.stored.is_whole("j", 20)
            scene.uploads.forget("j")
        finally:
            thaw()
        eventually(lambda: not [*scene.folder.iterdir(), *(place / "stored").iterdir()])
        events = scene.uploads.watch("j")
        scene.add(30, "quick:")
        assert results(events, 1) == {30: None}
        scene.uploads.close()
    finally:
        disks.close()


def test_a_copy_whose_job_ends_while_it_is_written_does_not_stay(tmp_path: Path) -> None:
    gate, looked = threading.Event(), threading.Event()

    class Slow(PatientDisk):
        def run(self, write: Any, undo: Any = lambda _: None) -> Any:
            written = super().run(write, undo)
            if isinstance(written, ShardFile):
                looked.set()
                gate.wait()
            return written

    stored = StoredCopies(tmp_path, lambda: 1000, Slow())
    stored.start()
    snapshot = Snapshot(node="b", name=snapshot_name(1, 1, mirror=True), step=10, pieces=(PIECE,))
    adding = threading.Thread(target=stored.add, args=("j", snapshot, "quick:", memoryview(CONTENT)))
    adding.start()
    assert looked.wait(10.0)
    stored.forget("j")
    gate.set()
    adding.join()
    assert list(tmp_path.iterdir()) == []
    assert list(stored.snapshots("j", [], (), verified=True)) == []
