"""The shard store of a node: two slots, seals, and what is left when the writer is killed in the middle of a write."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import eventually

from shoal_recovery.crc import checksum
from shoal_recovery.state import OWNED_KINDS, ShardKey, Snapshot
from shoal_workers.rooms import Rooms
from shoal_workers.shards import ShardStore, snapshot_name

LAYOUT = tuple(ShardKey(fqn="w", kind=kind, first=0, last=64) for kind in OWNED_KINDS)
NAME = snapshot_name(1, 0)


def write(store: ShardStore, step: int, *, name: str = NAME, fill: int | None = None) -> bytes:
    """A whole snapshot of `step`; its bytes."""
    content = bytes([step % 251 if fill is None else fill]) * (64 * 4 * len(LAYOUT))
    store.open("job", name, LAYOUT)
    store.begin("job", name, step)
    store.slot("job", name, step)[:] = content
    store.seal("job", name, step)
    return content


def held(store: ShardStore, job: str = "job") -> list[tuple[str, int]]:
    return sorted((snapshot.name, snapshot.step) for snapshot in store.snapshots(job))


def test_even_and_odd_steps_stand_side_by_side(tmp_path: Path) -> None:
    store = ShardStore(Rooms(tmp_path), "n0")
    contents = {step: write(store, step) for step in range(5)}
    assert held(store) == [(NAME, 3), (NAME, 4)]
    assert bytes(store.slot("job", NAME, 3)) == contents[3]
    snapshot = store.sealed("job", NAME, 4)
    assert (snapshot.node, snapshot.name, snapshot.step) == ("n0", NAME, 4)
    assert [piece.offset for piece in snapshot.pieces] == [0, 256, 512]
    assert {piece.checksum for piece in snapshot.pieces} == {checksum(memoryview(contents[4][:256]))}
    with pytest.raises(KeyError, match="of step 2"):
        store.sealed("job", NAME, 2)


@pytest.mark.parametrize("steps", [(0, 14, 28, 42, 45), (3, 5, 7, 9), (2, 3, 13, 23)])
def test_the_two_newest_steps_stand_side_by_side_whatever_lies_between(tmp_path: Path, steps: tuple[int, ...]) -> None:
    store = ShardStore(Rooms(tmp_path), "n0")
    for number, step in enumerate(steps):
        write(store, step)
        assert held(store) == [(NAME, one) for one in steps[max(0, number - 1) : number + 1]]
        store = ShardStore(Rooms(tmp_path), "n0")  # who comes after it knows which is which
        store.open("job", NAME, LAYOUT)
        store.begin("job", NAME, step + 1)  # and never gets so far
        assert held(store) == [(NAME, step)]


def test_a_slot_holds_nothing_from_the_moment_that_its_writing_begins(tmp_path: Path) -> None:
    store = ShardStore(Rooms(tmp_path), "n0")
    write(store, 1)
    write(store, 2)
    store.begin("job", NAME, 3)
    assert held(store) == [(NAME, 2)]
    assert held(ShardStore(Rooms(tmp_path), "n0")) == [(NAME, 2)]
    store.seal("job", NAME, 3)
    assert held(store) == [(NAME, 2), (NAME, 3)]


def test_a_copy_with_other_checksums_is_not_sealed(tmp_path: Path) -> None:
    store = ShardStore(Rooms(tmp_path), "n0")
    write(store, 1)
    store.begin("job", NAME, 2)
    with pytest.raises(ValueError, match="does not match its checksums"):
        store.seal("job", NAME, 2, ["crc32:00000000"] * len(LAYOUT))
    assert held(store) == [(NAME, 1)]


def test_a_shard_with_a_flipped_byte_is_not_listed(tmp_path: Path) -> None:
    store = ShardStore(Rooms(tmp_path), "n0")
    write(store, 1)
    write(store, 2)
    slot = store.slot("job", NAME, 2)
    slot[300] ^= 1
    spoilt: list[tuple[Snapshot, str]] = []
    _, hit = sorted(store.snapshots("job", spoilt), key=lambda snapshot: snapshot.step)
    ((bad, problem),) = spoilt
    assert bad.pieces[0].offset <= 300 < bad.pieces[0].offset + bad.pieces[0].num_bytes
    assert bad.pieces[0] not in hit.pieces and len(hit.pieces) == len(LAYOUT) - 1
    assert problem.startswith(f"it was sealed with {bad.pieces[0].checksum}, and has crc32:")
    assert {len(snapshot.pieces) for snapshot in store.snapshots("job", verified=False)} == {len(LAYOUT)}
    slot[300] ^= 1
    assert [len(snapshot.pieces) for snapshot in store.snapshots("job")] == [len(LAYOUT)] * 2


@pytest.mark.parametrize("which", ["seal0", "layout"])
def test_a_flipped_bit_in_what_says_what_the_bytes_are_makes_them_nothing(tmp_path: Path, which: str) -> None:
    """It must not make them another step's, or another parameter's."""
    store = ShardStore(Rooms(tmp_path), "n0")
    write(store, 1)
    write(store, 2)
    path = tmp_path / "job" / f"{NAME}.{which}"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = held(ShardStore(Rooms(tmp_path), "n0"))
        assert found == ([(NAME, 1)] if which == "seal0" else []), whole[place:]


def test_a_file_that_was_cut_short_ends_nobody(tmp_path: Path) -> None:
    store = ShardStore(Rooms(tmp_path), "n0")
    write(store, 2)
    os.truncate(tmp_path / "job" / f"{NAME}.slot0", 100)
    spoilt: list[tuple[Snapshot, str]] = []
    assert list(store.snapshots("job", spoilt)) == []
    assert {problem for _, problem in spoilt} == {"the file has 100 of its 768 bytes"}
    assert list(store.snapshots("job", verified=False)) == []
    with pytest.raises(OSError, match="has 100 of its"):
        store.ranges("job", NAME, 2, [(0, 4)])


def test_another_layout_under_the_same_name_forgets_the_old_one(tmp_path: Path) -> None:
    store = ShardStore(Rooms(tmp_path), "n0")
    write(store, 1)
    write(store, 2)
    paths, num_bytes = store.open("job", NAME, LAYOUT)
    assert num_bytes == 768
    assert held(store) == [(NAME, 1), (NAME, 2)]
    assert all(Path(path).stat().st_size == 768 for path in paths)
    store.open("job", NAME, LAYOUT[:1])
    assert held(store) == []
    assert store.layout("job", NAME) == LAYOUT[:1]
    assert held(ShardStore(Rooms(tmp_path), "n0")) == []


def test_retiring_forgets_older_epochs_and_other_jobs_stay(tmp_path: Path) -> None:
    store = ShardStore(Rooms(tmp_path), "n0")
    names = [snapshot_name(epoch, rank) for epoch in (1, 2, 3) for rank in (1, 11)]
    for name in names:
        write(store, 4, name=name)
    store.open("other", NAME, LAYOUT)
    store.begin("other", NAME, 7)
    store.seal("other", NAME, 7)
    store.retire("job", 3)
    assert held(store) == [(name, 4) for name in names[4:]]
    assert held(ShardStore(Rooms(tmp_path), "n0")) == [(name, 4) for name in names[4:]]
    store.retire("job", None)
    assert held(store) == []
    assert not (tmp_path / "job").exists()
    assert held(store, "other") == [(NAME, 7)]
    with pytest.raises(KeyError):
        store.begin("job", names[0], 5)


def test_a_rank_that_owns_nothing_has_an_empty_snapshot(tmp_path: Path) -> None:
    store = ShardStore(Rooms(tmp_path), "n0")
    _, num_bytes = store.open("job", NAME, ())
    store.begin("job", NAME, 1)
    store.seal("job", NAME, 1)
    assert num_bytes == 0
    assert [snapshot.pieces for snapshot in ShardStore(Rooms(tmp_path), "n0").snapshots("job")] == [()]


WRITER = """
import sys
from pathlib import Path
from shoal_recovery.state import OWNED_KINDS, ShardKey
from shoal_workers.rooms import Rooms
from shoal_workers.shards import ShardStore
store = ShardStore(Rooms(Path(sys.argv[1])), "n0")
layout = tuple(ShardKey(fqn="w", kind=kind, first=0, last=500_000) for kind in OWNED_KINDS)
store.open("job", "000001-0", layout)
step = int(sys.argv[2])
while True:
    store.begin("job", "000001-0", step)
    slot = store.slot("job", "000001-0", step)
    for first in range(0, slot.nbytes, 100_000):
        slot[first:first + 100_000] = bytes([step % 251]) * min(100_000, slot.nbytes - first)
    store.seal("job", "000001-0", step)
    print(step, flush=True)
    step += 1
"""


def test_whatever_moment_kills_the_writer_the_newest_whole_step_is_found(tmp_path: Path) -> None:
    """Real processes, killed while they write; what they had said to be sealed must be there, and nothing torn."""
    moments = random.Random(4)
    step, found_torn = 0, 0
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(step)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        sealed = step - 1
        for _ in range(moments.randint(2, 5)):
            sealed = int(process.stdout.readline())
        slot = tmp_path / "job" / f"000001-0.slot{(sealed + 1) % 2}"
        eventually(lambda slot=slot, sealed=sealed: _is_torn(slot, sealed), 10.0) if moments.random() < 0.7 else None
        process.send_signal(signal.SIGKILL)
        sealed = max([sealed, *map(int, process.stdout.read().split())])
        process.wait()
        process.stdout.close()
        found = list(ShardStore(Rooms(tmp_path), "n0").snapshots("job"))
        assert max(snapshot.step for snapshot in found) >= sealed
        for snapshot in found:
            _assert_whole(tmp_path, snapshot)
        found_torn += len(found) < 2
        step = max(snapshot.step for snapshot in found) + 1
    assert found_torn, "no writer was killed in the middle of a write"


def _is_torn(slot: Path, sealed: int) -> bool:
    """Whether the writer is beyond the first bytes of the step after `sealed`, or further."""
    with slot.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content[0] != (sealed - 1) % 251


def _assert_whole(folder: Path, snapshot: Snapshot) -> None:
    content = (folder / "job" / f"{snapshot.name}.slot{snapshot.step % 2}").read_bytes()
    assert set(content) == {snapshot.step % 251}, "a torn slot passed"
