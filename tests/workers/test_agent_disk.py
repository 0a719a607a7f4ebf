"""Steps that go to the object store are safe as soon as memory has them: the copies on disks come after that."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agents import RunningAgent, next_report, open_slots, running_agents, watch, write_snapshot
from waiting import eventually

from shoal_recovery.state import OWNED_KINDS, ShardKey
from shoal_recovery.store import open_store
from shoal_workers import messages as m
from shoal_workers.rows import stored_from_rows
from shoal_workers.shard_files import ShardFile

LAYOUT = tuple(ShardKey(fqn="w", kind=kind, first=0, last=50) for kind in OWNED_KINDS)
NAME = "000001-0"


class SlowDisk:
    """Of all agents of this process: a file is written when it is let through, and meanwhile there is progress."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()  # steps
        self.gate = threading.Semaphore(0)
        self._write = ShardFile.write

    def write(self, path: Path, job: str, snapshot: Any, uri: str, content: memoryview, progress: Any) -> ShardFile:
        self.begun.put(snapshot.step)
        while not self.gate.acquire(timeout=0.05):
            progress()
        return self._write(path, job, snapshot, uri, content, progress)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk()
    monkeypatch.setattr(ShardFile, "write", slow.write)
    yield slow
    slow.gate.release(100)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RunningAgent, RunningAgent]]:
    with running_agents(tmp_path, "n0", "n1") as (first, second):
        yield first, second


def seal(step: int) -> m.SealSnapshot:
    return m.SealSnapshot(job="job", name=NAME, step=step)


def test_a_step_is_safe_before_disks_have_it_and_they_get_what_it_was(
    pair: tuple[RunningAgent, RunningAgent], disk: SlowDisk, tmp_path: Path
) -> None:
    first, second = pair
    uri = (tmp_path / "store").as_uri()
    opened = open_slots(LAYOUT, backups=(second,), uri=uri, every=10)
    contents = {}
    for step in (10, 11):  # the second lies in the other slot
        contents[step] = write_snapshot(first, opened, step)
        assert first.ask(seal(step)) == m.Done()
        assert first.held() == second.held() == [(NAME, one) for one in range(10, step + 1)]
    assert [disk.begun.get(timeout=10), disk.begun.get(timeout=10)] == [10, 10], "its own disk, and the backup's"
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_snapshot, first, opened, 12)
        with pytest.raises(TimeoutError):
            writing.result(0.3)  # its slot is what the disk still gets
        assert first.held() == [(NAME, 10), (NAME, 11)]
        disk.gate.release(2)
        contents[12] = writing.result(10)
    assert first.ask(seal(12)) == m.Done()
    assert brought(first) == {10: contents[10]}
    eventually(lambda: first.held() == second.held() == [(NAME, 10), (NAME, 11), (NAME, 12)])


def brought(agent: RunningAgent) -> dict[int, bytes]:
    """The content of the first step that the agent brought to the store, as it lies there."""
    report = next_report(watch(agent))
    assert report.problem is None
    pieces = stored_from_rows(report.rows)
    store = open_store(f"{agent.disk_dir.parent.parent.as_uri()}/store")
    return {report.step: b"".join(store.read(one.object, one.offset, one.num_bytes) for one in pieces)}


def test_what_is_over_goes_while_a_disk_still_gets_it(
    pair: tuple[RunningAgent, RunningAgent], disk: SlowDisk, tmp_path: Path
) -> None:
    first, second = pair
    opened = open_slots(LAYOUT, backups=(second,), uri=(tmp_path / "store").as_uri(), every=10)
    write_snapshot(first, opened, 10)
    assert first.ask(seal(10)) == m.Done()
    assert [disk.begun.get(timeout=10), disk.begun.get(timeout=10)] == [10, 10]
    second.ask(m.Retire(job="job", before_epoch=2))
    assert second.held() == []
    assert not list(second.memory_dir.glob(f"*/{NAME}*"))
    disk.gate.release(2)
    eventually(lambda: second.held() == [(NAME, 10)])  # of use to whoever goes back to this step


def test_a_job_that_ends_while_its_last_step_is_written_leaves_nothing_on_its_way(
    pair: tuple[RunningAgent, RunningAgent], disk: SlowDisk, tmp_path: Path
) -> None:
    first, _ = pair
    write_snapshot(first, open_slots(LAYOUT, uri=(tmp_path / "store").as_uri(), every=10), 10)
    assert first.ask(seal(10)) == m.Done()
    assert disk.begun.get(timeout=10) == 10
    first.ask(m.Retire(job="job", before_epoch=None))
    disk.gate.release()
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "to-disk"])
    eventually(lambda: not list((first.disk_dir / "uploads").iterdir()))
    assert not [path for path in tmp_path.glob("store/**/*") if path.is_file()]
