"""Agents and a store that hold a job's state, what breaks of them, and a restore as supervisor and ranks do it."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import layouts
import numpy as np
from agents import RunningAgent, open_slots, start_agent

from shoal_planner.job import CheckpointSpec, DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.checkpoints import commit, put_shard
from shoal_recovery.faults import Fault
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Kind, Manifest, RecoveryPlan, Tier
from shoal_recovery.store import open_store
from shoal_workers import messages as m
from shoal_workers.change import History, Interrupted, take_stock
from shoal_workers.fetching import Failed, Fetcher, Sources
from shoal_workers.greeting import epoch_pass
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.roster import Contact
from shoal_workers.rows import transfer_rows, transfers_from_rows
from shoal_workers.supply import Supply
from shoal_workers.wire import Connection

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


@contextlib.contextmanager
def grounds(folder: Path) -> Iterator[Callable[..., Ground]]:
    """Each call makes another one in `folder`, and ends the one before. What is `due` goes to the store by the agents,
    too, which keep copies of it then."""
    with contextlib.ExitStack() as stack:
        numbers = iter(range(10**6))

        def make(*, due: bool = False) -> Ground:
            stack.close()
            place = folder / str(next(numbers))
            agents = {node: start_agent(place, node) for node in NODES}
            stack.callback(lambda: [agent.close() for agent in agents.values()])
            uri = (place / "store").as_uri()
            spec = JobSpec(
                name="j",
                model=MODEL,
                data=DataSpec(uri="stdlib:"),
                train=TrainSpec(global_batch=6, seq_len=8, steps=9),
                checkpoint=CheckpointSpec(uri=uri),
            )
            ground = Ground(folder=place, agents=agents, spec=spec, link=agents["n0"].connect(epoch=1, job=JOB))
            _fill_agents(ground, uri if due else None)
            for step in (OLDER, DONE):
                _fill_store(uri, step)
            return ground

        yield make


def _fill_agents(ground: Ground, uri: str | None) -> None:
    for state in BEFORE.ranks:
        node = state.device.node
        backup = ground.agents[NODES[(NODES.index(node) + 1) % len(NODES)]]
        opened = open_slots(layouts.vouched_keys(state), rank=state.rank, backups=(backup,), uri=uri)
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


def flip(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for _ in range(rng.choice((1, 1, 5, 50))):
            place = rng.randrange(size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def spoil(path: Path, rng: random.Random) -> None:
    rng.choice((flip, cut, lambda path, _: path.unlink()))(path, rng)


def break_store(ground: Ground, rng: random.Random, step: int) -> None:
    spoil(rng.choice([*ground.objects(step), ground.manifest(step)]), rng)


# --- a restore, as supervisor and ranks do it ---


def _nothing() -> None:
    pass


def restore(
    ground: Ground, breaks: Callable[[], None] = _nothing, *, verified: bool = True
) -> tuple[int, list[LiveState], Supply, dict[str, int]]:
    """Stock is taken, then `breaks` happens, then everything is brought: the step, and what ranks then have. Where
    nobody has what failed another attempt is made, which knows of that. If not `verified`, agents look through what
    they hold only then."""
    faults: list[Fault] = []
    while True:
        known = len(faults)
        try:
            return _attempt(ground, breaks, faults, verified or known > 0)
        except Interrupted:
            assert len(faults) > known, "each attempt learns something"
            breaks = _nothing


def choose(ground: Ground, faults: list[Fault], verified: bool = True) -> tuple[Supply, RecoveryPlan]:
    """Stock is taken, and the step and all sources are chosen."""
    contacts = tuple(
        Contact(node=node, index=None, address=agent.address, connection=ground.link, last_heard_s=0, last_word_s=0)
        for node, agent in ground.agents.items()
    )
    history = History(plans={1: _plan(*NODES)}, starts={1: 0, 2: DONE}, done_step=DONE)
    found = take_stock(JOB, ground.spec, {}, contacts, frozenset(), history, 10.0, verified=verified)
    supply = Supply(2, JOB, ground.spec, AFTER, {}, found, history, faults, lambda _: None)
    plan, _ = supply.choose()
    assert plan is not None
    return supply, plan


def _attempt(
    ground: Ground, breaks: Callable[[], None], faults: list[Fault], verified: bool
) -> tuple[int, list[LiveState], Supply, dict[str, int]]:
    supply, plan = choose(ground, faults, verified)
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
                step=plan.step,
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
    return plan.step, lives, supply, {tier.value: num_bytes for tier, num_bytes in taken.items()}


def _instead(supply: Supply, rank: Listener, failed: list[Failed]) -> tuple[Any, ...]:
    if not failed:
        return ()
    rows = [[*transfer_rows((one.transfer,)), one.problem, one.silent] for one in failed]
    supply.hear(rank, m.Lacking(epoch=2, rows=rows))
    supply.serve()
    index = next(state.rank for state in AFTER.ranks if state.device == rank.device)
    return transfers_from_rows(index, rank.sent.pop().transfers)


def check(step: int, lives: list[LiveState]) -> None:
    truth = layouts.arrays(MODEL, step)
    for state, live in zip(AFTER.ranks, lives, strict=True):
        for key in (*layouts.owned_keys(state), *(span.key(Kind.WEIGHT) for span in state.keeps)):
            np.testing.assert_array_equal(live.view(key).numpy(), truth[key.fqn, key.kind][key.first : key.last])
