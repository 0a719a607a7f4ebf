"""Uploads to a store that is slow or dead: which copies wait, which are given up, and what is said of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_recovery.errors import StoreUnreachable
from shoal_recovery.state import Kind, Piece, ShardKey, Snapshot
from shoal_recovery.store import Data, DirectoryStore, Store
from shoal_workers.messages import UploadDelayed, Uploaded
from shoal_workers.uploads import Report, Uploads

CONTENT = bytes(range(40))
PIECE = Piece(key=ShardKey(fqn="w", kind=Kind.MASTER, first=0, last=10), offset=0, num_bytes=40, checksum="crc32:0")


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
        self.uploads = Uploads(self.folder, self._open, clock=lambda: self.now_s)
        self.uploads.start()

    def _open(self, uri: str) -> Store:
        if uri == "dead:":
            raise StoreUnreachable(uri, "does not answer")
        return self.slow if uri == "slow:" else self.quick

    def add(self, step: int, uri: str = "slow:", job: str = "j") -> None:
        snapshot = Snapshot(node="a", name="000001-0", step=step, pieces=(PIECE,))
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
