"""Restores from agents and a store that are broken in every way: what is wrong is found, another copy is used, and no
tensor ever gets a value that is not of the step."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest
from agents import RunningAgent, open_slots, start_agent

from shoal_planner.job import CheckpointSpec, DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.checkpoints import commit, load_manifest, put_shard
from shoal_recovery.errors import StoreError
from shoal_recovery.faults import Fault
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Kind, Manifest, Tier
from shoal_recovery.store import open_store
from shoal_workers import messages as m
from shoal_workers.change import History, Interrupted, take_stock
from shoal_workers.fetching import Failed, Fetcher, Sources
from shoal_workers.greeting import epoch_pass
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.rooms import Rooms
from shoal_workers.roster import Contact
from shoal_workers.rows import transfer_rows, transfers_from_rows
from shoal_workers.shards import ShardStore
from shoal_workers.supply import Supply
from shoal_workers.wire import Connection, ConnectionClosed

NODES = ("n0", "n1", "n2")
OLDER, DONE = 4, 6
MODEL = ModelSpec(layers=2, hidden=16, heads=4, ffn=12, vocab=256)
JOB = "job"


def _plan(*nodes: str) -> Plan:
    """One stage on all of them: state is cut among them, and cut anew for another number."""
    replicas = tuple(Replica(node=node, devices=(0,), samples=1) for node in nodes)
    stage = Stage(layers=((0, MODEL.layers),), replicas=replicas)
    return Plan(pipelines=(Pipeline(micro_batch=len(nodes), micro_batches=1, stages=(stage,)),))


BEFORE, AFTER = shard_map(_plan(*NODES), MODEL), shard_map(_plan("n0", "n1"), MODEL)


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


@dataclass(eq=False, kw_only=True, slots=True)
class Listener(Contact):
    """A rank as its supervisor sees it; keeps what it is sent."""

    sent: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.sent.append(m.decode(m.encode(message)))


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Agents that hold DONE, each rank's snapshot on its own node and the next; a store that holds DONE and OLDER."""

    folder: Path
    agents: dict[str, RunningAgent]
    spec: JobSpec
    link: Connection  # for contacts, which must have one

    def slot(self, node: str, rank: int) -> Path:
        return self.agents[node].memory_dir / JOB / f"000001-{rank}.slot{DONE % 2}"

    def objects(self, step: int) -> list[Path]:
        return sorted((self.folder / "store" / JOB / "shards" / f"{step:09d}").iterdir())

    def manifest(self, step: int) -> Path:
        return self.folder / "store" / JOB / "manifests" / f"{step:09d}.json"


@pytest.fixture
def make_ground(tmp_path: Path) -> Iterator[Callable[[], Ground]]:
    with contextlib.ExitStack() as stack:
        numbers = iter(range(10**6))

        def make() -> Ground:
            stack.close()
            folder = tmp_path / str(next(numbers))
            agents = {node: start_agent(folder, node) for node in NODES}
            for agent in agents.values():
                stack.callback(agent.close)
            uri = (folder / "store").as_uri()
            spec = JobSpec(
                name="j",
                model=MODEL,
                data=DataSpec(uri="stdlib:"),
                train=TrainSpec(global_batch=6, seq_len=8, steps=9),
                checkpoint=CheckpointSpec(uri=uri),
            )
            ground = Ground(folder=folder, agents=agents, spec=spec, link=agents["n0"].connect(epoch=1, job=JOB))
            _fill_agents(ground)
            for step in (OLDER, DONE):
                _fill_store(uri, step)
            return ground

        yield make


def _fill_agents(ground: Ground) -> None:
    for state in BEFORE.ranks:
        node = state.device.node
        backup = ground.agents[NODES[(NODES.index(node) + 1) % len(NODES)]]
        opened = open_slots(layouts.vouched_keys(state), rank=state.rank, backups=(backup,))
        slots = ground.agents[node].ask(opened)
        begun = ground.agents[node].ask(m.BeginSnapshot(job=JOB, name=slots.name, step=DONE))
        truth = layouts.arrays(MODEL, DONE)
        content = b"".join(
            truth[key.fqn, key.kind][key.first : key.last].tobytes() for key in layouts.vouched_keys(state)
        )
        with open(slots.paths[begun.slot], "r+b") as file:
            file.write(content)
        assert ground.agents[node].ask(m.SealSnapshot(job=JOB, name=slots.name, step=DONE)) == m.Done()


def _fill_store(uri: str, step: int) -> None:
    store, pieces = open_store(uri), []
    for state in BEFORE.ranks:
        held = layouts.shard(state, layouts.arrays(MODEL, step))
        pieces += put_shard(
            store, job=JOB, step=step, epoch=1, shard=f"r{state.rank}", data=held.content, pieces=held.pieces
        )
    manifest = Manifest(version=1, job=JOB, step=step, epoch=1, next_sample=step * 6, pieces=tuple(pieces))
    commit(store, manifest, MODEL)


# --- what breaks ---


def _flip(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for _ in range(rng.choice((1, 1, 5, 50))):
            place = rng.randrange(size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _break_slot(ground: Ground, rng: random.Random, node: str) -> None:
    ranks = [rank for rank in range(len(NODES)) if ground.slot(node, rank).exists()]
    rng.choice((_flip, _cut))(ground.slot(node, rng.choice(ranks)), rng)


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


def _break_store(ground: Ground, rng: random.Random, step: int) -> None:
    path = rng.choice([*ground.objects(step), ground.manifest(step)])
    rng.choice((_flip, _cut, lambda path, _: path.unlink()))(path, rng)


def _vanish(ground: Ground, rng: random.Random, node: str) -> None:
    ground.agents[node].close()


# --- a restore, as supervisor and ranks do it ---


def _nothing() -> None:
    pass


def _restore(
    ground: Ground, breaks: Callable[[], None] = _nothing
) -> tuple[int, list[LiveState], Supply, dict[str, int]]:
    """Stock is taken, then `breaks` happens, then everything is brought: the step, and what ranks then have. Where
    nobody has what failed another attempt is made, which knows of that."""
    faults: list[Fault] = []
    while True:
        known = len(faults)
        try:
            return _attempt(ground, breaks, faults)
        except Interrupted:
            assert len(faults) > known, "each attempt learns something"
            breaks = _nothing


def _attempt(
    ground: Ground, breaks: Callable[[], None], faults: list[Fault]
) -> tuple[int, list[LiveState], Supply, dict[str, int]]:
    contacts = tuple(
        Contact(node=node, index=None, address=agent.address, connection=ground.link, last_heard_s=0, last_word_s=0)
        for node, agent in ground.agents.items()
    )
    history = History(plans={1: _plan(*NODES)}, starts={1: 0, 2: DONE}, done_step=DONE)
    found = take_stock(JOB, ground.spec, {}, contacts, frozenset(), history, 10.0)
    supply = Supply(2, JOB, ground.spec, AFTER, {}, found, history, faults, lambda _: None)
    plan, step = supply.choose()
    assert plan is not None
    breaks()
    lives, taken = [], dict.fromkeys(Tier, 0)
    for state in AFTER.ranks:
        live = LiveState.build(MODEL, state, "fp32", DeviceMemory("here:0", None))
        rank = Listener(
            node=state.device.node,
            index=0,
            address=("", 0),
            connection=ground.link,
            last_heard_s=0,
            last_word_s=0,
        )
        fetcher = Fetcher(
            Sources(
                job=JOB,
                step=step,
                old=None,
                agents={node: agent.address for node, agent in ground.agents.items()},
                open_store=lambda: open_store(str(ground.spec.checkpoint.uri)),
                shown=epoch_pass(JOB, 2),
            )
        )
        mine = [transfer for transfer in plan.transfers if transfer.rank == state.rank]
        wanted = tuple(one for one in mine if not one.is_derived)
        while wanted:
            brought = fetcher.bring(live, wanted)
            for tier, num_bytes in brought.num_bytes.items():
                taken[Tier(tier)] += num_bytes
            wanted = _instead(supply, rank, brought.failed)
        fetcher.bring(live, (one for one in mine if one.is_derived))
        fetcher.abandon()
        lives.append(live)
    return step, lives, supply, {tier.value: num_bytes for tier, num_bytes in taken.items()}


def _instead(supply: Supply, rank: Listener, failed: list[Failed]) -> tuple[Any, ...]:
    if not failed:
        return ()
    rows = [[*transfer_rows((one.transfer,)), one.problem, one.silent] for one in failed]
    supply.hear(rank, m.Lacking(epoch=2, rows=rows))
    supply.serve()
    index = next(state.rank for state in AFTER.ranks if state.device == rank.device)
    return transfers_from_rows(index, rank.sent.pop().transfers)


def _check(step: int, lives: list[LiveState]) -> None:
    truth = layouts.arrays(MODEL, step)
    for state, live in zip(AFTER.ranks, lives, strict=True):
        for key in (*layouts.owned_keys(state), *(span.key(Kind.WEIGHT) for span in state.keeps)):
            np.testing.assert_array_equal(live.view(key).numpy(), truth[key.fqn, key.kind][key.first : key.last])


def test_nothing_is_told_where_nothing_is_wrong(make_ground: Callable[[], Ground]) -> None:
    step, lives, supply, taken = _restore(make_ground())
    _check(step, lives)
    assert (step, supply.told(), taken["store"]) == (DONE, (), 0)
    assert taken["node"] > 0 and taken["peer"] > 0


def _one_copy_broken(ground: Ground, rng: random.Random) -> None:
    """Of every shard a copy is left: one node's agent is hit, and perhaps the store, which nobody needs then."""
    node = rng.choice(NODES)
    rng.choice((_break_slot, _lie, _write_late, _vanish))(ground, rng, node)
    if rng.random() < 0.3:
        _break_store(ground, rng, DONE)


def _no_agent_left(ground: Ground, rng: random.Random) -> None:
    """Both copies of some shards are hit, so the store is needed."""
    first = rng.randrange(len(NODES))
    for node in (NODES[first], NODES[(first + 1) % len(NODES)]):
        rng.choice((_lie, _write_late, _vanish))(ground, rng, node)


def _run(ground: Ground, rng: random.Random, hit: Callable[[Ground, random.Random], None], before: bool) -> None:
    if before:
        hit(ground, rng)
    step, lives, _, _ = _restore(ground, (lambda: None) if before else (lambda: hit(ground, rng)))
    assert step == DONE
    _check(step, lives)


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
        _break_store(ground, rng, DONE)
    step, lives, supply, taken = _restore(ground, lambda: None if before else _break_store(ground, rng, DONE))
    _check(step, lives)
    assert step == OLDER or not supply.told(), "what nobody reads any more may break"
    assert step == OLDER or not before
    assert taken["store"] > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_so_it_is_a_thousand_times(make_ground: Callable[[], Ground]) -> None:
    for seed in range(1000, 2000):
        rng = random.Random(seed)
        _run(make_ground(), rng, rng.choice((_one_copy_broken, _no_agent_left)), rng.random() < 0.4)


@pytest.mark.parametrize("how", [_flip, _cut])
def test_what_breaks_in_a_slot_is_found_and_told(
    make_ground: Callable[[], Ground], how: Callable[[Path, random.Random], None]
) -> None:
    ground = make_ground()
    step, lives, supply, taken = _restore(ground, lambda: how(ground.slot("n0", 0), random.Random(1)))
    _check(step, lives)
    (failed,) = supply.told()
    assert (failed.source, failed.object, failed.step, step) == ("agent of n0", "000001-0", DONE, DONE)
    assert failed.instead == ("agent of n1",)
    assert taken["store"] == 0


def test_without_agents_the_store_is_read_and_then_the_checkpoint_before(make_ground: Callable[[], Ground]) -> None:
    ground = make_ground()
    for agent in ground.agents.values():
        agent.close()
    _flip(ground.manifest(DONE), random.Random(0))
    step, lives, supply, taken = _restore(ground)
    _check(step, lives)
    assert step == OLDER
    (failed,) = supply.told()
    assert (failed.source, failed.step, failed.instead) == ("object store", DONE, (f"step {OLDER}",))
    assert taken["store"] > 0


def test_two_agents_that_state_other_checksums_are_settled_by_the_store(make_ground: Callable[[], Ground]) -> None:
    """One of them has sealed other bytes than the rank wrote: by itself its copy is in order."""
    ground = make_ground()
    _flip(ground.slot("n1", 0), random.Random(3))
    ground.agents["n1"].agent._shards.seal(JOB, "000001-0", DONE)
    step, lives, supply, _ = _restore(ground)
    _check(step, lives)
    assert step == DONE
    assert {failed.source for failed in supply.told()} == {"agent of n1"}


def test_a_flipped_bit_anywhere_in_a_manifest_is_found(make_ground: Callable[[], Ground]) -> None:
    ground = make_ground()
    whole, rng = ground.manifest(DONE).read_bytes(), random.Random(5)
    store = open_store(str(ground.spec.checkpoint.uri))
    for _ in range(300):
        ground.manifest(DONE).write_bytes(whole)
        _flip(ground.manifest(DONE), rng)
        if ground.manifest(DONE).read_bytes() != whole:
            with pytest.raises(StoreError):
                load_manifest(store, JOB, DONE)
