"""Drills, drawn from their seeds: a job, the nodes it runs on, and what happens to it when. Pure: the same seed gives
the same drill on every machine. What a drill does to processes is a ground's business; what must come of it is judged
in `judging`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from shoal_planner.job import CheckpointSpec, DataSpec, JobSpec, LimitsSpec, ModelSpec, TrainSpec


class Kind(StrEnum):
    """What fails. What is stopped gets SIGSTOP and, later, SIGCONT; everything else that dies gets SIGKILL."""

    RANK = "rank"
    AGENT = "agent"
    NODE = "node"  # all its processes at once, and what it kept
    HALF = "half"  # of the nodes at once, with what they kept
    AWAY = "away"  # half of the nodes; they come back with what they kept
    SUPERVISOR = "supervisor"
    RANK_STOPPED = "rank_stopped"
    AGENT_STOPPED = "agent_stopped"
    NODE_STOPPED = "node_stopped"
    NOTICE = "notice"  # that a node is to go away; later it does
    DISK_FULL = "disk_full"
    DISK_HUNG = "disk_hung"  # whoever writes there waits, and cannot even be killed
    STORE_CUT = "store_cut"  # nobody answers there
    STORE_HUNG = "store_hung"  # it takes connections and says nothing
    STORE_SLOW = "store_slow"  # a shard takes seconds
    MEMORY_SPOILT = "memory_spoilt"  # bits of what a node keeps, as one of its ranks dies
    OBJECT_SPOILT = "object_spoilt"  # bits of the newest checkpoint, as half of the nodes die
    MANIFEST_SPOILT = "manifest_spoilt"  # the newest one cut short, as half of the nodes die
    PAUSED = "paused"  # and resumed once the job rests
    RAYLET = "raylet"  # alone
    DRAINED = "drained"  # a notice that Ray gives
    CONNECTOR = "connector"
    CONTROL_PLANE = "control_plane"
    VANISHED = "vanished"  # a host, without a packet: cut off, or all that runs there is stopped and never goes on
    PARTITION = "partition"  # half of the nodes hear each other, and nobody else
    PARTITION_STORE = "partition_store"  # the same, and both parts hear the object store
    GCS = "gcs"  # the head of the Ray cluster
    HEAD_LOST = "head_lost"  # with all that it knew, and so the cluster; a new one is made of the same machines
    STRAGGLER = "straggler"  # the ranks of a node become some times slower for a while, and no more


class Moment(StrEnum):
    """When it fails: at any point of a step, as a snapshot is written, while one is on its way to the store, while the
    job recovers from the loss of a rank, while it drains because a node is to go away, or as it steps on without a node
    that it lost and that is not back yet."""

    STEP = "step"
    SNAPSHOT = "snapshot"
    UPLOAD = "upload"
    RECOVERY = "recovery"
    DRAIN = "drain"
    REDUCED = "reduced"


Copies = int | Literal["auto"]
PLANS = "drawn-plans"  # a label of jobs whose plans are drawn, and from which seed
Level = Literal["processes", "ray"]
Store = Literal["none", "file", "s3"]

# Device type and number of devices of each node.
SHAPES: Mapping[str, Mapping[str, tuple[str, int]]] = {
    "unequal": {"a": ("cpu-2t", 1), "b": ("cpu-1t", 2), "c": ("cpu-1t", 1), "d": ("cpu-1t", 1)},
    "pairs": {"a": ("cpu-1t", 2), "b": ("cpu-1t", 2), "c": ("cpu-1t", 1)},
    "single": {name: ("cpu-1t", 1) for name in "abcde"},
}
_DRILLS_IN_A_ROW = 4  # on the same nodes, which they reuse
_PROCESSES_EVERY = 10  # all other drills are on Ray
# Of each job. The slower the machine, the more faults fall: 13 to 27 among processes and, where a node needs seconds to
# come back, some 8 on Ray.
STEPS: Mapping[Level, int] = {"processes": 200, "ray": 130}
_FALL: Mapping[Level, int] = {"processes": 16, "ray": 8}
_MOST: Mapping[Level, int] = {"processes": 36, "ray": 12}

# Without a second device that has it, all of a node's state is with that node and its backup: what takes both of them
# needs a store to go on from.
_NEEDS_SERVER = frozenset({Kind.STORE_CUT, Kind.STORE_HUNG, Kind.STORE_SLOW, Kind.PARTITION_STORE})
_NEEDS_STORE = _NEEDS_SERVER | {
    Kind.HALF,
    Kind.DISK_FULL,
    Kind.DISK_HUNG,
    Kind.OBJECT_SPOILT,
    Kind.MANIFEST_SPOILT,
    Kind.PAUSED,
}
KINDS: Mapping[Level, tuple[Kind, ...]] = {
    "processes": (
        Kind.RANK,
        Kind.AGENT,
        Kind.NODE,
        Kind.HALF,
        Kind.AWAY,
        Kind.SUPERVISOR,
        Kind.RANK_STOPPED,
        Kind.AGENT_STOPPED,
        Kind.NODE_STOPPED,
        Kind.NOTICE,
        Kind.DISK_FULL,
        Kind.DISK_HUNG,
        Kind.STORE_CUT,
        Kind.STORE_HUNG,
        Kind.STORE_SLOW,
        Kind.MEMORY_SPOILT,
        Kind.OBJECT_SPOILT,
        Kind.MANIFEST_SPOILT,
        Kind.PARTITION,
        Kind.PARTITION_STORE,
        Kind.VANISHED,
        Kind.STRAGGLER,
    ),
    "ray": tuple(Kind),
}
# The second blow of two, while the job deals with the first; and what may hit a job as it writes.
_SECOND = frozenset(
    {
        Kind.RANK,
        Kind.AGENT,
        Kind.NODE,
        Kind.HALF,
        Kind.SUPERVISOR,
        Kind.RANK_STOPPED,
        Kind.PARTITION,
        Kind.PARTITION_STORE,
        Kind.VANISHED,
        Kind.RAYLET,
        Kind.CONTROL_PLANE,
        Kind.GCS,
        Kind.HEAD_LOST,
    }
)
_WRITING = frozenset({Kind.RANK, Kind.AGENT, Kind.NODE, Kind.SUPERVISOR, Kind.RANK_STOPPED, Kind.AGENT_STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`pick` says which of those that it may hit, counted round; `delay_s` passes between the moment and the blow, and
    what comes back is away for `hold_s` at least."""

    kind: Kind
    moment: Moment
    pick: int
    delay_s: float
    hold_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """With `random_plans`, as on Ray, each plan is drawn instead of searched for. There are more `faults` than fall
    before the job has ended: how many do hangs on how fast steps are, beside all that goes wrong."""

    seed: int
    level: Level
    nodes: str
    random_plans: bool
    store: Store
    model: ModelSpec
    train: TrainSpec
    min_devices: int
    every_steps: int
    copies: Copies
    faults: tuple[Fault, ...]

    def job(self, data_uri: str, store_uri: str | None) -> JobSpec:
        checkpoint = CheckpointSpec(copies=self.copies)
        if store_uri is not None:
            checkpoint = CheckpointSpec(uri=store_uri, every_steps=self.every_steps, keep=3, copies=self.copies)
        return JobSpec(
            name=f"drill-{self.seed}",
            model=self.model,
            data=DataSpec(uri=data_uri),
            train=self.train,
            limits=LimitsSpec(min_devices=self.min_devices),
            checkpoint=checkpoint,
            labels={PLANS: str(self.seed)} if self.random_plans else {},
        )


def draw(seed: int, steps: int | None = None) -> Drill:
    """Fewer steps are the beginning of the same drill."""
    rng = random.Random(f"fault drill {seed}")
    if seed % _PROCESSES_EVERY:
        return _on_ray(rng, seed, steps or STEPS["ray"])
    turn = seed // _PROCESSES_EVERY
    shapes = sorted(SHAPES)
    nodes = shapes[turn // _DRILLS_IN_A_ROW % len(shapes)]
    num_devices = sum(count for _, count in SHAPES[nodes].values())
    store: Store = rng.choice(("none", "file", "s3", "s3"))
    return Drill(
        seed=seed,
        level="processes",
        nodes=nodes,
        random_plans=rng.random() < 0.5,
        store=store,
        model=ModelSpec(
            layers=rng.choice((2, 4, 6)),
            hidden=64,
            heads=4,
            kv_heads=rng.choice((2, 4)),
            ffn=160,
            vocab=256,
            tie_embeddings=rng.random() < 0.5,
        ),
        train=_train(rng, batch=rng.choice((4, 6, 8)), seq_len=32, steps=steps or STEPS["processes"]),
        min_devices=rng.randint(2, num_devices - 1),
        every_steps=rng.choice((10, 20)),
        copies=_copies(rng),
        faults=_faults(rng, "processes", turn, store),
    )


def _on_ray(rng: random.Random, seed: int, steps: int) -> Drill:
    """A model whose state does not fit a small node of that cluster. Few jobs, as their undisturbed runs are long."""
    turn = seed - seed // _PROCESSES_EVERY - 1
    store: Store = rng.choice(("none", "file", "s3", "s3", "s3", "s3"))
    return Drill(
        seed=seed,
        level="ray",
        nodes="raylets",
        random_plans=True,
        store=store,
        model=ModelSpec(layers=6, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=256),
        train=_train(rng, batch=6, seq_len=32, steps=steps, seeds=1),
        min_devices=rng.randint(2, 4),
        every_steps=rng.choice((10, 20)),
        copies=_copies(rng),
        faults=_faults(rng, "ray", turn, store),
    )


def _copies(rng: random.Random) -> Copies:
    copies: Copies = rng.choice((1, 2, "auto"))
    return copies


def _train(rng: random.Random, *, batch: int, seq_len: int, steps: int, seeds: int = 4) -> TrainSpec:
    return TrainSpec(
        global_batch=batch,
        seq_len=seq_len,
        steps=steps,
        lr=1e-3,
        warmup_steps=10,
        lr_schedule=rng.choice(("constant", "cosine")),
        clip_norm=rng.choice((None, 1.0)),
        seed=rng.randrange(seeds),
    )


def _faults(rng: random.Random, level: Level, turn: int, store: Store) -> tuple[Fault, ...]:
    """As many as may fall at most. Each drill of a level goes on about where the one before it ended, or two kinds that
    begin a round would fall often, and those at its end never."""
    kinds = itertools.islice(_rounds(level), turn * _FALL[level], None)
    possible = (
        kind
        for kind in kinds
        if (store != "none" or kind not in _NEEDS_STORE) and (store == "s3" or kind not in _NEEDS_SERVER)
    )
    return tuple(_fault(rng, kind, store) for kind in itertools.islice(possible, _MOST[level]))


def _rounds(level: Level) -> Iterator[Kind]:
    """Every kind, in any order, again and again."""
    for number in itertools.count():
        rng = random.Random(f"round {number} of {level}")
        yield from rng.sample(KINDS[level], len(KINDS[level]))


def _fault(rng: random.Random, kind: Kind, store: Store) -> Fault:
    moments = [Moment.STEP] * 2
    if kind in _WRITING:
        moments.append(Moment.SNAPSHOT)
        if store != "none":
            moments.append(Moment.UPLOAD)
    if kind is Kind.PARTITION_STORE:  # most of all while both parts have something to write there
        moments += [Moment.UPLOAD] * 4
    if kind in _SECOND:
        moments += [Moment.RECOVERY, Moment.REDUCED] * 2 + [Moment.DRAIN]
    moment = rng.choice(moments)
    longest_s = {Moment.RECOVERY: 0.6, Moment.DRAIN: 0.1}.get(moment, 0.05)
    return Fault(
        kind=kind,
        moment=moment,
        pick=rng.randrange(1000),
        delay_s=0.0 if moment in (Moment.SNAPSHOT, Moment.UPLOAD) else rng.uniform(0.0, longest_s),
        hold_s=rng.choice((0.3, 1.0, 1.0, 6.0)),
    )
