"""Restores from copies on the disks of nodes, which are spoilt at random: of what was stored, and of snapshots for
which memory had no room. What is wrong is found, another copy is used, and no tensor ever gets a value that is not of
the step."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import start_agent
from restore_ground import (
    DONE,
    JOB,
    NODES,
    OLDER,
    Ground,
    break_store,
    check,
    choose,
    cut,
    flip,
    grounds,
    restore,
    spoil,
)
from waiting import eventually

from shoal_recovery.state import Snapshot
from shoal_workers import messages as m
from shoal_workers import shards
from shoal_workers.rooms import Rooms
from shoal_workers.shard_files import left_behind
from shoal_workers.shards import ShardStore
from shoal_workers.slot_files import SlotFiles, map_slots

STORED, SPILLED = "stored", "snapshots"  # folders on disk
DESCRIBING = (".task", ".layout", ".seal0")
both = pytest.mark.parametrize("tier", [STORED, SPILLED])
Make = Callable[[str], Ground]


@pytest.fixture
def make_ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Agents hold DONE in one folder on their disks, and nothing in memory: the epoch after it has come and is lost, or
    memory never had room."""
    with grounds(tmp_path) as make_in_memory:

        def make(tier: str) -> Ground:
            with monkeypatch.context() as patch:
                if tier == SPILLED:
                    patch.setattr(shards, "map_slots", _map_on_disk)
                ground = make_in_memory(due=tier == STORED)
            for node, agent in ground.agents.items():
                if tier == STORED:
                    agent.ask(m.Retire(job=JOB, before_epoch=2))
                eventually(lambda agent=agent: len(agent.held()) == 2)
                assert len(_files(ground, tier, node)) == 2 * {STORED: 2, SPILLED: 4}[tier]
                assert not list(agent.memory_dir.glob(f"{JOB}/0*"))
            return ground

        yield make


def _map_on_disk(stem: Path, num_bytes: int) -> SlotFiles:
    if stem.parent.parent.name == "memory":
        raise OSError(errno.ENOSPC, "no room")
    return map_slots(stem, num_bytes)


def _files(ground: Ground, tier: str, node: str) -> list[Path]:
    return sorted(path for path in (ground.agents[node].disk_dir / tier).rglob("*") if path.is_file())


def _describing(ground: Ground, tier: str, node: str) -> list[Path]:
    return [path for path in _files(ground, tier, node) if path.suffix in DESCRIBING]


def _content(ground: Ground, tier: str, node: str, name: str) -> Path:
    others = (*DESCRIBING, ".slot1")
    (path,) = (path for path in _files(ground, tier, node) if name in path.name and path.suffix not in others)
    return path


def _meanwhile(ground: Ground, rng: random.Random, node: str, breaks: Callable[[], None]) -> None:
    """While the agent serves, or before the next one of its node, which begins with what it finds."""
    is_up = rng.random() < 0.5
    if not is_up:
        ground.agents[node].close()
    breaks()
    if not is_up:
        ground.agents[node] = start_agent(ground.folder, node)


def _run(ground: Ground, tier: str, rng: random.Random) -> None:
    """Of all that is spoilt another node, or else the store, has a copy."""
    hit, before, verified = rng.sample(NODES, rng.choice((1, 1, 3))), rng.random() < 0.5, rng.random() < 0.5
    alone = len(hit) == 1

    def breaks() -> None:
        for node in hit:
            paths = rng.sample(_files(ground, tier, node), rng.randint(1, 3))
            _meanwhile(ground, rng, node, lambda paths=paths: [spoil(path, rng) for path in paths])
        if alone and rng.random() < 0.3:
            break_store(ground, rng, DONE)

    if before:
        breaks()
    step, lives, supply, taken = restore(ground, (lambda: None) if before else breaks, verified=verified)
    check(step, lives)
    assert step == DONE
    assert taken["store"] == 0 or not alone
    assert {failed.source for failed in supply.told()} <= {f"agent of {node}" for node in hit}


@both
def test_nothing_is_told_where_nothing_is_wrong(make_ground: Make, tier: str) -> None:
    step, lives, supply, taken = restore(make_ground(tier))
    check(step, lives)
    assert (step, supply.told(), taken["store"]) == (DONE, (), 0)


@both
@pytest.mark.parametrize("seed", range(10))
def test_another_copy_is_used_whatever_is_spoilt(make_ground: Make, tier: str, seed: int) -> None:
    _run(make_ground(tier), tier, random.Random(seed))


@pytest.mark.long
@pytest.mark.timeout(1800)
@both
def test_so_it_is_a_thousand_times(make_ground: Make, tier: str) -> None:
    for seed in range(1000, 2000):
        _run(make_ground(tier), tier, random.Random(seed))


@both
@pytest.mark.parametrize("seed", range(6))
def test_content_that_is_spoilt_is_told_where_anybody_wants_it(make_ground: Make, tier: str, seed: int) -> None:
    """All of it where agents look through what they hold, else what ranks fetch; and nothing else."""
    rng, ground = random.Random(seed), make_ground(tier)
    before, verified = rng.choice(((True, True), (True, False), (False, False)))
    wanted = [one for one in choose(ground, [])[1].transfers if one.node is not None]
    node, name = rng.choice(sorted({(str(one.node), str(one.name)) for one in wanted}))
    (held,) = (one for one in ground.agents[node].inventory() if one.name == name)
    path = _content(ground, tier, node, name)
    whole, how = path.read_bytes(), rng.choice((flip, flip, cut))

    def breaks() -> None:
        _meanwhile(ground, rng, node, lambda: how(path, rng))

    if before:
        breaks()
    step, lives, supply, taken = restore(ground, (lambda: None) if before else breaks, verified=verified)
    check(step, lives)
    assert (step, taken["store"]) == (DONE, 0)

    now = path.read_bytes()

    def is_bad(first: int, num_bytes: int) -> bool:
        return len(now) < len(whole) or now[first : first + num_bytes] != whole[first : first + num_bytes]

    mine = [one for one in wanted if (one.node, one.name) == (node, name)]
    bad = {one.source_key for one in mine if is_bad(one.offset - one.before_bytes, one.shard_bytes)}
    if verified:
        bad = {piece.key for piece in held.pieces if is_bad(piece.offset, piece.num_bytes)}
    told = [(failed.source, failed.object, failed.step, failed.num_bytes) for failed in supply.told()]
    assert told == ([(f"agent of {node}", name, DONE, sum(4 * key.numel for key in bad))] if bad else [])


def test_a_copy_that_names_another_step_is_none(make_ground: Make) -> None:
    """All of them do, and the step that they name is the only one that the store has."""
    ground = make_ground(STORED)
    for node, agent in ground.agents.items():
        agent.close()
        for path in _describing(ground, STORED, node):
            path.write_text(path.read_text().replace(f", {DONE}, [[", f", {OLDER}, [["))
        ground.agents[node] = start_agent(ground.folder, node)
    ground.manifest(DONE).unlink()
    step, lives, _, taken = restore(ground)
    check(step, lives)
    assert (step, taken["peer"], taken["node"]) == (OLDER, 0, 0)


@both
def test_a_flipped_bit_in_what_says_what_a_copy_is_makes_it_none(make_ground: Make, tier: str) -> None:
    """Whoever comes after the agent that wrote it takes it for nothing else."""
    rng, ground = random.Random(7), make_ground(tier)
    agent = ground.agents["n0"]
    agent.close()

    def held() -> list[Snapshot]:
        if tier == STORED:
            return [one.snapshot for one in left_behind(agent.disk_dir / STORED)]
        return list(
            ShardStore(Rooms(agent.memory_dir, agent.disk_dir / SPILLED, 10**9), "n0").snapshots(JOB, verified=False)
        )

    truth = held()
    assert len(truth) == 2
    whole = {path: path.read_bytes() for path in _files(ground, tier, "n0")}
    for _ in range(100):
        path = rng.choice(_describing(ground, tier, "n0"))
        flip(path, rng)
        changed = path.read_bytes() != whole[path]
        assert held() == [one for one in truth if not (changed and one.name in path.name)]
        for path, content in whole.items():
            path.write_bytes(content)
