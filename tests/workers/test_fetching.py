"""Fetching a state from sources that are slow or fail for a moment: it shows that it gets on, and goes on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import layouts
import numpy as np
import pytest
from agents import open_slots, running_agents

from shoal_planner.job import ModelSpec
from shoal_planner.plan import Plan
from shoal_recovery.checkpoints import commit, load_manifest, put_shard
from shoal_recovery.errors import StoreError, StoreRefused, StoreUnreachable
from shoal_recovery.restore import plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Inventory, Manifest, RankState, RecoveryPlan
from shoal_recovery.store import Store
from shoal_recovery.store_directory import DirectoryStore
from shoal_workers import arrivals, fetching, store_reads
from shoal_workers import messages as m
from shoal_workers.arrivals import Arrivals
from shoal_workers.fetching import Brought, Fetcher, FetchFailed, Sources
from shoal_workers.greeting import epoch_pass
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.store_reads import PatientReader, next_piece_bytes

MIB = 1 << 20
STEP = 4
MODEL = ModelSpec(layers=2, hidden=16, heads=4, ffn=12, vocab=256)


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Abandoned(threading.Event):
    """Nobody sleeps in a test: time passes at once."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time

    def wait(self, timeout: float | None = None) -> bool:
        self._time.now_s += timeout or 0.0
        return self.is_set()


class Slow:
    """Gives so many bytes a second, but for the first so many times when it does not answer."""

    uri = "slow:"

    def __init__(self, time: Time, bytes_per_s: float, fails: list[Exception | None]) -> None:
        self._time = time
        self._bytes_per_s = bytes_per_s
        self._fails = fails
        self.asked: list[tuple[int, int]] = []

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        self.asked.append((offset, sum(place.nbytes for place in places)))
        if self._fails and (problem := self._fails.pop(0)) is not None:
            raise problem
        self._time.now_s += self.asked[-1][1] / self._bytes_per_s
        for place in places:
            place[:] = bytes([offset % 251]) * place.nbytes


class Scene:
    def __init__(self, bytes_per_s: float, *fails: Exception | None) -> None:
        self.time, self.told_s = Time(), list[float]()
        self.store = Slow(self.time, bytes_per_s, list(fails))
        self.arrivals = Arrivals(lambda: self.told_s.append(self.time.now_s), self.time)
        self.abandoned = Abandoned(self.time)
        self.reader = PatientReader(self.store, self.arrivals, self.abandoned, self.time)

    def read(self, offset: int, *sizes: int) -> bytes:
        """Into places of these sizes."""
        places = [memoryview(bytearray(size)) for size in sizes]
        self.reader.read_into("x", offset, places)
        return b"".join(places)


def test_it_is_told_once_a_second_that_bytes_come_and_not_when_none_do() -> None:
    time, told_s = Time(), list[float]()
    coming = Arrivals(lambda: told_s.append(time.now_s), time)
    for _ in range(31):
        coming.came()
        time.now_s += 0.25
    assert told_s == [101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0]
    time.now_s += 60.0
    assert (len(told_s), coming.silent_s) == (7, 60.25)
    coming.begin()
    assert coming.silent_s == 0.0
    coming.came()
    assert told_s[7:] == [time.now_s]


def test_a_large_read_of_a_slow_store_shows_that_it_gets_on() -> None:
    scene = Scene(0.2 * MIB)
    whole = scene.read(7, 40 * MIB)
    sizes = [num_bytes for _, num_bytes in scene.store.asked]
    assert len(whole) == 40 * MIB == sum(sizes)
    assert whole[:1] + whole[-1:] == bytes([7, scene.store.asked[-1][0] % 251])
    assert [offset for offset, _ in scene.store.asked] == [7 + sum(sizes[:index]) for index in range(len(sizes))]
    assert max(after - before for before, after in zip(scene.told_s[:-1], scene.told_s[1:], strict=True)) < 6.0
    assert scene.told_s[0] - 100.0 < 6.0


def test_a_quick_store_is_soon_asked_for_much_at_once() -> None:
    scene = Scene(1000 * MIB)
    for first in range(4):
        scene.read(first * 32 * MIB, 32 * MIB)
    assert len(scene.store.asked) <= 6
    assert scene.store.asked[-1] == (96 * MIB, 32 * MIB)


def test_what_lies_side_by_side_is_read_at_once_into_several_places(tmp_path: Path) -> None:
    """However the pieces that are asked for lie to the places."""
    content = bytes(index % 251 for index in range(10_000))
    store = DirectoryStore(tmp_path)
    store.put("x", content)
    for piece_bytes in (1, 7, 1000, 3001, 20_000):
        scene = Scene(MIB)
        seconds = itertools.count()  # each takes as long as one should
        scene.reader = PatientReader(store, scene.arrivals, scene.abandoned, partial(next, seconds))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scene.reader, "_piece_bytes", piece_bytes)
            assert scene.read(3, 1, 0, 3000, 1, 6990) == content[3:9995]
        with pytest.raises(StoreError, match=r"has 997 of the 1000 bytes asked for at 9003: it was cut short"):
            scene.read(9003, 1000)


def test_pieces_are_what_comes_in_about_a_second() -> None:
    assert next_piece_bytes(4 * MIB, 4 * MIB, 0.1) == 8 * MIB
    assert next_piece_bytes(2 * MIB, 2 * MIB, 0.05) == 16 * MIB
    assert next_piece_bytes(4 * MIB, 1 * MIB, 0.1) == 4 * MIB, "the end of an object says little"
    assert next_piece_bytes(4 * MIB, 4 * MIB, 1.5) == 4 * MIB
    assert next_piece_bytes(4 * MIB, 4 * MIB, 9.0) == 2 * MIB
    assert next_piece_bytes(4 * MIB, 1 * MIB, 9.0) == MIB // 2
    assert next_piece_bytes(MIB // 4, MIB // 4, 9.0) == MIB // 4
    assert next_piece_bytes(32 * MIB, 32 * MIB, 0.1) == 32 * MIB


def test_a_store_that_does_not_answer_for_a_moment_is_asked_for_that_piece_again() -> None:
    away = StoreUnreachable("slow:", "away")
    scene = Scene(MIB, None, away, away, None)
    assert len(scene.read(0, 3 * MIB)) == 3 * MIB
    assert scene.store.asked == [(0, MIB), *[(MIB, MIB)] * 3, (2 * MIB, MIB)]


def test_patience_ends() -> None:
    scene = Scene(MIB, *[StoreUnreachable("slow:", "away")] * 100)
    with pytest.raises(StoreUnreachable):
        scene.read(0, MIB)
    assert (len(scene.store.asked), scene.time.now_s - 100.0) == (6, 7.75)
    scene.time.now_s += 1.0
    with pytest.raises(StoreUnreachable):
        scene.read(0, MIB)
    assert len(scene.store.asked) == 7, "nothing has come for long"


def test_a_store_that_lets_nobody_in_is_asked_once() -> None:
    scene = Scene(MIB, StoreRefused("slow:", "no credentials"))
    with pytest.raises(StoreRefused):
        scene.read(0, MIB)
    assert len(scene.store.asked) == 1


def test_nothing_is_asked_for_once_it_is_abandoned() -> None:
    scene = Scene(MIB)
    scene.abandoned.set()
    with pytest.raises(StoreUnreachable, match="not waited for"):
        scene.read(0, MIB)
    assert scene.store.asked == []


# --- a whole state ---


class Flaky(DirectoryStore):
    """Does not answer `every` so-manieth read."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder)
        self._every = every
        self.num_reads = 0

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        self.num_reads += 1
        if self.num_reads % self._every == 0:
            raise StoreUnreachable(self.uri, "does not answer")
        super().read_into(name, offset, places)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Whatever comes is told, and nothing is waited for; many small reads stand for a few large ones."""
    monkeypatch.setattr(arrivals, "_TELL_S", 0.0)
    monkeypatch.setattr(store_reads, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(store_reads, "_FIRST_PIECE_BYTES", 256)
    monkeypatch.setattr(store_reads, "_MOST_PIECE_BYTES", 256)
    monkeypatch.setattr(fetching, "_CHUNK_BYTES", 256)
    return []


def _bring(
    restore: RecoveryPlan,
    shards_of: RankState,
    open_store: Callable[[], Store],
    agents: dict[str, tuple[str, int]],
    told: list[None],
) -> Brought:
    """All of it, and to the bit."""
    live = LiveState.build(MODEL, shards_of, "fp32", DeviceMemory("here:0", None))
    sources = Sources(job="job", step=STEP, old=None, agents=agents, open_store=open_store, shown=epoch_pass("job", 2))
    fetcher = Fetcher(sources, lambda: told.append(None))
    try:
        brought = fetcher.bring(live, restore.transfers)
        assert not brought.failed
    finally:
        fetcher.abandon()
    truth = layouts.arrays(MODEL, STEP)
    for key in layouts.owned_keys(shards_of):
        np.testing.assert_array_equal(live.view(key).numpy(), truth[key.fqn, key.kind][key.first : key.last])
    return brought


def _alone() -> tuple[Plan, RankState]:
    plan = layouts.side_by_side("n0")
    return plan, shard_map(plan, MODEL).ranks[0]


def _from_store(folder: Path) -> RecoveryPlan:
    plan, state = _alone()
    store, held = DirectoryStore(folder), layouts.shard(state, layouts.arrays(MODEL, STEP))
    pieces = put_shard(store, job="job", step=STEP, epoch=1, shard="r0", data=held.content, pieces=held.pieces)
    commit(store, Manifest(version=1, job="job", step=STEP, epoch=1, next_sample=0, pieces=pieces), MODEL)
    manifest = load_manifest(store, "job", STEP)
    return plan_restore(shard_map(plan, MODEL), Inventory(), (manifest,), MODEL, "fp32")


def test_a_store_that_fails_now_and_then_gives_all_of_a_state(tmp_path: Path, told: list[None]) -> None:
    restore, store = _from_store(tmp_path), Flaky(tmp_path, every=3)
    brought = _bring(restore, _alone()[1], lambda: store, {}, told)
    ((tier, node, name, came, took_s),) = brought.largest_shards()
    assert (tier, node, came, took_s > 0) == ("store", "", brought.num_bytes["store"], True)
    assert name in DirectoryStore(tmp_path).list(""), "what is told is the name of the object"
    num_bytes = sum(transfer.shard_bytes for transfer in restore.transfers if not transfer.is_derived)
    assert len(told) > num_bytes / 256 / 2


def test_a_store_that_is_gone_is_told_and_the_rest_is_not_read(tmp_path: Path, told: list[None]) -> None:
    restore, store = _from_store(tmp_path), Flaky(tmp_path, every=1)
    with pytest.raises(FetchFailed, match=r"object store: .* does not answer"):
        _bring(restore, _alone()[1], lambda: store, {}, told)
    assert (store.num_reads, told) == (3, [])


def test_what_agents_send_shows_that_it_gets_on(tmp_path: Path, told: list[None]) -> None:
    plan, state = _alone()
    truth = layouts.arrays(MODEL, STEP)
    with running_agents(tmp_path, "n1") as (agent,):
        keys = layouts.vouched_keys(state)
        slots = agent.ask(open_slots(keys))
        agent.ask(m.BeginSnapshot(job="job", name=slots.name, step=STEP))
        content = b"".join(truth[key.fqn, key.kind][key.first : key.last].tobytes() for key in keys)
        Path(slots.paths[STEP % 2]).write_bytes(content)
        assert agent.ask(m.SealSnapshot(job="job", name=slots.name, step=STEP)) == m.Done()
        restore = plan_restore(shard_map(plan, MODEL), Inventory(snapshots=agent.inventory()), (), MODEL, "fp32")
        brought = _bring(restore, state, lambda: DirectoryStore(tmp_path), {"n1": agent.address}, told)
    assert [row[:4] for row in brought.largest_shards()] == [["peer", "n1", slots.name, brought.num_bytes["peer"]]]
    assert len(told) > len(content) / 256 / 2
