"""Restores from agents and a store that are broken in every way: what is wrong is found, another copy is used, and no
tensor ever gets a value that is not of the step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from restore_ground import DONE, JOB, NODES, OLDER, Ground, break_store, check, cut, flip, grounds, restore

from shoal_recovery.checkpoints import load_manifest
from shoal_recovery.errors import StoreError
from shoal_recovery.store import open_store
from shoal_workers import messages as m
from shoal_workers.rooms import Rooms
from shoal_workers.shards import ShardStore
from shoal_workers.wire import ConnectionClosed


class Liar(ShardStore):
    """Gives other bytes than it holds, of one range in two; `num_left` ranges later it is gone."""

    num_left = 10**9
    lies = True

    def ranges(
        self, job: str, name: str, step: int, wanted: Iterable[tuple[int, int]]
    ) -> tuple[list[memoryview], list[tuple[int, int]]]:
        parts, around = super().ranges(job, name, step, wanted)
        if self.num_left < len(parts):
            raise ConnectionClosed("gone")
        self.num_left -= len(parts)
        spoilt = [bytearray(part) for part in parts]
        for index, part in enumerate(spoilt):
            if self.lies and index % 2 == 0:
                part[len(part) // 2] ^= 4
        return [memoryview(part) for part in spoilt], around


@pytest.fixture
def make_ground(tmp_path: Path) -> Iterator[Callable[[], Ground]]:
    with grounds(tmp_path) as make:
        yield make


# --- what breaks ---


def _break_slot(ground: Ground, rng: random.Random, node: str) -> None:
    ranks = [rank for rank in range(len(NODES)) if ground.slot(node, rank).exists()]
    rng.choice((flip, cut))(ground.slot(node, rng.choice(ranks)), rng)


def _lie(ground: Ground, rng: random.Random, node: str) -> None:
    liar = ground.agents[node].agent._shards = Liar(Rooms(ground.agents[node].memory_dir), node)
    liar.lies, liar.num_left = rng.choice(((True, 10**9), (False, rng.randrange(10)), (False, 0)))


def _write_late(ground: Ground, rng: random.Random, node: str) -> None:
    """A rank of the epoch that was left goes on as if nothing had happened: it takes the slot, or writes into it."""
    rank = NODES.index(node)
    if rng.random() < 0.5:
        ground.agents[node].ask(m.BeginSnapshot(job=JOB, name=f"000001-{rank}", step=DONE + 2))
    path = ground.slot(node, rank)
    with path.open("r+b") as file:
        file.write(rng.randbytes(rng.randint(1, path.stat().st_size)))


def _vanish(ground: Ground, rng: random.Random, node: str) -> None:
    ground.agents[node].close()


def test_nothing_is_told_where_nothing_is_wrong(make_ground: Callable[[], Ground]) -> None:
    step, lives, supply, taken = restore(make_ground())
    check(step, lives)
    assert (step, supply.told(), taken["store"]) == (DONE, (), 0)
    assert taken["node"] > 0 and taken["peer"] > 0


def _one_copy_broken(ground: Ground, rng: random.Random) -> None:
    """Of every shard a copy is left: one node's agent is hit, and perhaps the store, which nobody needs then."""
    node = rng.choice(NODES)
    rng.choice((_break_slot, _lie, _write_late, _vanish))(ground, rng, node)
    if rng.random() < 0.3:
        break_store(ground, rng, DONE)


def _no_agent_left(ground: Ground, rng: random.Random) -> None:
    """Both copies of some shards are hit, so the store is needed."""
    first = rng.randrange(len(NODES))
    for node in (NODES[first], NODES[(first + 1) % len(NODES)]):
        rng.choice((_lie, _write_late, _vanish))(ground, rng, node)


def _run(ground: Ground, rng: random.Random, hit: Callable[[Ground, random.Random], None], before: bool) -> None:
    if before:
        hit(ground, rng)
    step, lives, _, _ = restore(ground, (lambda: None) if before else (lambda: hit(ground, rng)))
    assert step == DONE
    check(step, lives)


@pytest.mark.parametrize("seed", range(20))
def test_another_copy_is_used_whatever_breaks(make_ground: Callable[[], Ground], seed: int) -> None:
    rng = random.Random(seed)
    _run(make_ground(), rng, rng.choice((_one_copy_broken, _no_agent_left)), rng.random() < 0.4)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("before", [True, False])
def test_what_breaks_in_the_store_is_found_where_nothing_else_is_left(
    make_ground: Callable[[], Ground], seed: int, before: bool
) -> None:
    """Before its step is chosen or while it is read: the checkpoint before takes its place, whole."""
    rng, ground = random.Random(seed), make_ground()
    for agent in ground.agents.values():
        agent.close()
    if before:
        break_store(ground, rng, DONE)
    step, lives, supply, taken = restore(ground, lambda: None if before else break_store(ground, rng, DONE))
    check(step, lives)
    assert step == OLDER or not supply.told(), "what nobody reads any more may break"
    assert step == OLDER or not before
    assert taken["store"] > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_so_it_is_a_thousand_times(make_ground: Callable[[], Ground]) -> None:
    for seed in range(1000, 2000):
        rng = random.Random(seed)
        _run(make_ground(), rng, rng.choice((_one_copy_broken, _no_agent_left)), rng.random() < 0.4)


@pytest.mark.parametrize("how", [flip, cut])
def test_what_breaks_in_a_slot_is_found_and_told(
    make_ground: Callable[[], Ground], how: Callable[[Path, random.Random], None]
) -> None:
    ground = make_ground()
    step, lives, supply, taken = restore(ground, lambda: how(ground.slot("n0", 0), random.Random(1)))
    check(step, lives)
    (failed,) = supply.told()
    assert (failed.source, failed.object, failed.step, step) == ("agent of n0", "000001-0", DONE, DONE)
    assert failed.instead == ("agent of n1",)
    assert taken["store"] == 0


def test_without_agents_the_store_is_read_and_then_the_checkpoint_before(make_ground: Callable[[], Ground]) -> None:
    ground = make_ground()
    for agent in ground.agents.values():
        agent.close()
    flip(ground.manifest(DONE), random.Random(0))
    step, lives, supply, taken = restore(ground)
    check(step, lives)
    assert step == OLDER
    (failed,) = supply.told()
    assert (failed.source, failed.step, failed.instead) == ("object store", DONE, (f"step {OLDER}",))
    assert taken["store"] > 0


def test_two_agents_that_state_other_checksums_are_settled_by_the_store(make_ground: Callable[[], Ground]) -> None:
    """One of them has sealed other bytes than the rank wrote: by itself its copy is in order."""
    ground = make_ground()
    flip(ground.slot("n1", 0), random.Random(3))
    ground.agents["n1"].agent._shards.seal(JOB, "000001-0", DONE)
    step, lives, supply, _ = restore(ground)
    check(step, lives)
    assert step == DONE
    assert {failed.source for failed in supply.told()} == {"agent of n1"}


def test_a_flipped_bit_anywhere_in_a_manifest_is_found(make_ground: Callable[[], Ground]) -> None:
    ground = make_ground()
    whole, rng = ground.manifest(DONE).read_bytes(), random.Random(5)
    store = open_store(str(ground.spec.checkpoint.uri))
    for _ in range(300):
        ground.manifest(DONE).write_bytes(whole)
        flip(ground.manifest(DONE), rng)
        if ground.manifest(DONE).read_bytes() != whole:
            with pytest.raises(StoreError):
                load_manifest(store, JOB, DONE)
