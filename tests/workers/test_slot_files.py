"""The memory of snapshots whose epoch is over is used again, but never as long as somebody may write into it."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from pathlib import Path

import pytest

from shoal_recovery.state import OWNED_KINDS, ShardKey
from shoal_workers import shards
from shoal_workers.rooms import Rooms
from shoal_workers.shards import ShardStore, snapshot_name
from shoal_workers.slot_files import Sizes, SlotFiles, map_slots
from shoal_workers.slot_maps import SlotMaps

LAYOUT = tuple(ShardKey(fqn="w", kind=kind, first=0, last=2000) for kind in OWNED_KINDS)
SIZE = 2000 * 4 * len(LAYOUT)
SMALLER = LAYOUT[:2]
FIRST, SECOND, THIRD = (snapshot_name(epoch, 0) for epoch in (1, 2, 3))


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(Rooms(tmp_path), "n0")


def inodes(paths: tuple[str, ...]) -> list[int]:
    return [os.stat(path).st_ino for path in paths]


def fill(store: ShardStore, name: str, step: int, layout: tuple[ShardKey, ...] = LAYOUT) -> None:
    store.begin("job", name, step)
    view = store.slot("job", name, step)
    view[:] = bytes([step]) * len(view)
    store.seal("job", name, step)


def test_a_rank_gets_again_what_it_has_left(store: ShardStore) -> None:
    paths, _ = store.open("job", FIRST, LAYOUT, by_rank=True)
    before = inodes(paths)
    fill(store, FIRST, 7)
    store.retire("job", 2)
    paths, num_bytes = store.open("job", SECOND, SMALLER, by_rank=True, left=(FIRST,))
    assert inodes(paths) == before and num_bytes == SIZE * 2 // 3
    assert not list(store.snapshots("job")), "what was in it is nothing"
    fill(store, SECOND, 8, SMALLER)
    (snapshot,) = store.snapshots("job")
    assert (snapshot.name, snapshot.step, len(snapshot.pieces)) == (SECOND, 8, 2)
    assert len(store.slot("job", SECOND, 8)) == num_bytes


def test_nobody_else_gets_what_a_rank_may_still_write_into(store: ShardStore) -> None:
    before = inodes(store.open("job", FIRST, LAYOUT, by_rank=True)[0])
    store.retire("job", 2)
    assert inodes(store.open("job", SECOND, LAYOUT, by_rank=True)[0]) != before, "its process has not left it"
    assert inodes(store.open("job", snapshot_name(2, 1), LAYOUT)[0]) != before, "a copy"


def test_copies_lie_where_others_lay_once_nobody_writes_them(store: ShardStore) -> None:
    before = inodes(store.open("job", FIRST, LAYOUT)[0])
    store.retire("job", 2)
    assert inodes(store.open("job", SECOND, LAYOUT)[0]) == before
    store.begin("job", SECOND, 0)
    with store.used("job", SECOND), store.slot("job", SECOND, 0):
        store.retire("job", 3)
        assert inodes(store.open("job", THIRD, LAYOUT)[0]) != before


def test_what_is_made_ready_is_there_and_the_rest_goes(store: ShardStore, tmp_path: Path) -> None:
    store.open("job", FIRST, SMALLER, by_rank=True)
    store.retire("job", 2)
    store.open("job", SECOND, SMALLER)
    store.make_ready("job", Sizes(local=(SIZE,), copies=(SIZE, SIZE * 2 // 3)))
    store.make_ready("job", Sizes(local=(SIZE,), copies=(SIZE,)))
    spare = sorted(path.stat().st_ino for path in tmp_path.glob("job/spare-*"))
    assert [path.stat().st_size for path in tmp_path.glob("job/spare-*")] == [SIZE] * 4
    taken = [*inodes(store.open("job", THIRD, LAYOUT)[0])]
    taken += inodes(store.open("job", snapshot_name(3, 1), LAYOUT, by_rank=True)[0])
    assert sorted(taken) == spare
    store.make_ready("job", Sizes(copies=(SIZE,)))
    assert len(list(tmp_path.glob("job/spare-*"))) == 2
    ShardStore(Rooms(tmp_path), "n0")
    assert not list(tmp_path.glob("job/spare-*")), "an agent that comes later does not know who has them mapped"


def test_memory_for_who_joins_lies_beside_that_for_a_loss(store: ShardStore, tmp_path: Path) -> None:
    """As much as either needs, however often it is asked for: whichever comes, its epoch waits for nothing."""

    def sizes() -> list[int]:
        return sorted(path.stat().st_size for path in tmp_path.glob("job/spare-*.slot0"))

    loss, join = Sizes(local=(3 * SIZE,)), Sizes(local=(SIZE, SIZE), copies=(SIZE,))
    store.make_ready("job", loss)
    for _ in range(3):
        store.make_ready("job", join, joining=True)
        store.make_ready("job", loss)
    assert sizes() == [SIZE, SIZE, 3 * SIZE]
    store.make_ready("job", Sizes(local=(2 * SIZE, SIZE // 2)), joining=True)
    assert sizes() == [SIZE, 3 * SIZE], "another one joins"
    store.open("job", FIRST, SMALLER)
    store.retire("job", 2)
    store.make_ready("job", Sizes(local=(SIZE,)))
    assert sizes() == [SIZE], "they were for the epoch that has come"


def test_an_epoch_takes_what_fits_and_keeps_no_more(store: ShardStore, tmp_path: Path) -> None:
    store.open("job", FIRST, SMALLER)
    store.retire("job", 2)
    store.open("job", SECOND, LAYOUT)
    assert len(list(tmp_path.glob("job/spare-*"))) == 2, "too small, but the next one may be smaller"
    store.retire("job", 3)
    assert len(list(tmp_path.glob("job/spare-*"))) == 2
    store.retire("job", None)
    assert not (tmp_path / "job").exists()


def test_nothing_is_made_ready_for_a_job_that_is_over(store: ShardStore, tmp_path: Path) -> None:
    """Who looks ahead asks for it beside everything else, and may come after whoever ended the job."""
    store.open("job", FIRST, LAYOUT)
    store.retire("job", None)
    store.make_ready("job", Sizes(local=(SIZE,), copies=(SIZE,)))
    assert not (tmp_path / "job").exists()
    store.open("job", SECOND, LAYOUT)  # it goes on
    store.make_ready("job", Sizes(local=(SIZE,)))
    assert len(list(tmp_path.glob("job/spare-*"))) == 2


def test_what_was_being_made_ready_when_its_job_ended_goes(
    store: ShardStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.open("job", FIRST, LAYOUT)

    def mapped(stem: Path, num_bytes: int) -> SlotFiles:
        store.retire("job", None)
        stem.parent.mkdir()
        return map_slots(stem, num_bytes)

    monkeypatch.setattr(shards, "map_slots", mapped)
    store.make_ready("job", Sizes(local=(SIZE,)))
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_being_made_ready_is_waited_for(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    begun, goes_on, made = threading.Event(), threading.Event(), []

    def mapped(stem: Path, num_bytes: int) -> SlotFiles:
        if stem.name.startswith("spare"):
            begun.set()
            assert goes_on.wait(20)
            if fails:
                raise OSError(errno.ENOSPC, "no room")
        made.append(stem.name)
        return map_slots(stem, num_bytes)

    store.open("job", SECOND, LAYOUT)
    monkeypatch.setattr(shards, "map_slots", mapped)
    making = threading.Thread(target=store.make_ready, args=("job", Sizes(local=(SIZE,))))
    making.start()
    assert begun.wait(20)
    opening = threading.Thread(target=store.open, args=("job", FIRST, LAYOUT))
    opening.start()
    store.open("another", FIRST, LAYOUT)  # nobody else waits
    store.open("job", SECOND, LAYOUT)  # nor whose file is there: copies of every step come so
    opening.join(0.2)
    assert opening.is_alive() and made == [FIRST]
    goes_on.set()
    for thread in (making, opening):
        thread.join(20)
    assert made == ([FIRST, FIRST] if fails else [FIRST, "spare-1"])


def test_who_makes_memory_and_hangs_is_not_waited_for_for_ever(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()

    def hangs(stem: Path, num_bytes: int) -> SlotFiles:
        if "spare" in stem.name:
            begun.set()
            assert over.wait(10.0)
        return map_slots(stem, num_bytes)

    monkeypatch.setattr(shards, "map_slots", hangs)
    monkeypatch.setattr(shards, "_SPARE_WAIT_S", 0.05)
    maker = threading.Thread(target=store.make_ready, args=("job", Sizes(local=(SIZE,))))
    maker.start()
    try:
        assert begun.wait(10.0)
        _, num_bytes = store.open("job", FIRST, LAYOUT)
        assert num_bytes == SIZE and not over.is_set()
    finally:
        over.set()
        maker.join(10.0)


def test_a_process_maps_the_same_memory_once(store: ShardStore) -> None:
    maps = SlotMaps()
    first = [maps.map(path) for path in store.open("job", FIRST, LAYOUT, by_rank=True)[0]]
    maps.leave(FIRST)
    store.retire("job", 2)
    again = [maps.map(path) for path in store.open("job", SECOND, LAYOUT, by_rank=True, left=maps.left)[0]]
    assert [id(one) for one in again] == [id(one) for one in first]
    fill(store, SECOND, 4)
    assert again[0][:SIZE] == bytes([4]) * SIZE
    store.retire("job", None)
    mapped = weakref.ref(again[0])
    del first, again
    maps.map(store.open("job", THIRD, LAYOUT, by_rank=True)[0][0])
    assert mapped() is None, "a file that is gone is let go of"
