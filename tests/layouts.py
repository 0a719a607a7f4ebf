"""Random models and plans for property tests, and what a surviving cluster would hold under them, as real bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from shoal_planner.job import ModelSpec
from shoal_planner.levels import LEVELS, DeviceGroups, Level, Sharding
from shoal_planner.parameters import parameters
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.crc import checksum
from shoal_recovery.state import OWNED_KINDS, Kind, Live, Piece, RankState, ShardKey, Snapshot, Span, StoredPiece

Arrays = dict[tuple[str, Kind], np.ndarray]
NODES = tuple(f"n{index}" for index in range(5))


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    return ModelSpec(
        layers=draw(st.integers(1, 3)),
        hidden=8,
        heads=4,
        kv_heads=draw(st.sampled_from((2, 4))),
        ffn=draw(st.integers(3, 9)),
        vocab=draw(st.integers(3, 11)),
        tie_embeddings=draw(st.booleans()),
    )


@st.composite
def plans(draw: st.DrawFn, model: ModelSpec) -> Plan:
    """Different pipelines, stages, replicas, tp degrees, shares and levels of sharding; devices of NODES, so that two
    plans overlap."""
    used: defaultdict[str, int] = defaultdict(int)
    pipelines = tuple(draw(_pipelines(model, used)) for _ in range(draw(st.integers(1, 3))))
    groups = tuple(DeviceGroups(node=node, size=2) for node in NODES)
    sharding = draw(_shardings())
    if sharding.weights != "none" or sharding.gradients != "none":
        pipelines = tuple(_in_slices(pipeline, model, draw(st.integers(1, 3))) for pipeline in pipelines)
    return Plan(pipelines=pipelines, sharding=sharding, device_groups=groups)


def _in_slices(pipeline: Pipeline, model: ModelSpec, slices: int) -> Pipeline:
    """Its stages, as far as they may be."""

    def cut(stage: Stage) -> Stage:
        degrees = {replica.tp for replica in stage.replicas}
        most = min(model.ffn, model.vocab) // max(degrees) if len(degrees) == 1 else 1
        return dataclasses.replace(stage, slices=min(slices, max(1, most)))

    return dataclasses.replace(pipeline, stages=tuple(map(cut, pipeline.stages)))


@st.composite
def _shardings(draw: st.DrawFn) -> Sharding:
    level: st.SearchStrategy[Level] = st.sampled_from(LEVELS)
    weights, gradients = draw(level), draw(level)
    optimizer = draw(st.sampled_from(LEVELS[LEVELS.index(gradients) :]))
    return Sharding(weights=weights, gradients=gradients, optimizer=optimizer)


@st.composite
def _pipelines(draw: st.DrawFn, model: ModelSpec, used: defaultdict[str, int]) -> Pipeline:
    micro_batch = draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, model.layers), max_size=2, unique=True)))
    borders = [0, *cuts, model.layers]
    stages = tuple(
        Stage(layers=((first, last),), replicas=draw(_replicas(model, micro_batch, used)))
        for first, last in itertools.pairwise(borders)
    )
    return Pipeline(micro_batch=micro_batch, micro_batches=1, stages=stages)


@st.composite
def _replicas(draw: st.DrawFn, model: ModelSpec, micro_batch: int, used: defaultdict[str, int]) -> tuple[Replica, ...]:
    count = draw(st.integers(1, min(3, micro_batch)))
    samples = [1] * (count - 1) + [micro_batch - count + 1] + [0] * draw(st.integers(0, 1))
    near = draw(st.lists(st.sampled_from(NODES), min_size=1, max_size=2))  # so that some are on one node
    found = []
    for share in samples:
        node, tp = draw(st.sampled_from(near)), draw(st.sampled_from((1, 2, model.num_kv_heads)))
        devices = tuple(range(used[node], used[node] + tp))
        used[node] += tp
        state_share = draw(st.sampled_from((0.3, 1.0, 2.5)))
        found.append(Replica(node=node, devices=devices, tp=tp, samples=share, state_share=state_share))
    return tuple(found)


def side_by_side(*nodes: str) -> Plan:
    """One pipeline of one stage on each of these nodes; the state that updates need is cut among them."""
    pipelines = tuple(
        Pipeline(
            micro_batch=1,
            micro_batches=1,
            stages=(Stage(layers=((0, 2),), replicas=(Replica(node=node, devices=(0,), samples=1),)),),
        )
        for node in nodes
    )
    return Plan(pipelines=pipelines, sharding=Sharding(optimizer="cluster"))


@functools.lru_cache(maxsize=8)
def arrays(model: ModelSpec, step: int) -> Arrays:
    """The whole state after `step`; different in every element from that of any other step. Not to be changed."""
    generator = np.random.default_rng(step)
    found = {
        (parameter.fqn, kind): generator.standard_normal(parameter.numel).astype("<f4")
        for parameter in parameters(model)
        for kind in OWNED_KINDS
    }
    found |= {(fqn, Kind.WEIGHT): array for (fqn, kind), array in found.items() if kind is Kind.MASTER}
    return found


def owned_keys(state: RankState) -> tuple[ShardKey, ...]:
    return tuple(span.key(kind) for span in state.owns for kind in OWNED_KINDS)


def vouched_keys(state: RankState) -> tuple[ShardKey, ...]:
    return tuple(span.key(kind) for span in state.vouches for kind in OWNED_KINDS)


def live(state: RankState, step: int) -> Live:
    keys = (*owned_keys(state), *(span.key(Kind.WEIGHT) for span in state.keeps))
    return Live(device=state.device, step=step, keys=keys)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one rank's snapshot looks like on disk."""

    name: str
    content: bytes
    pieces: tuple[Piece, ...]


def shard(state: RankState, truth: Arrays, epoch: int = 1) -> Shard:
    """With a gap before the first piece: offsets must be taken from the pieces."""
    content, pieces = bytearray(b"head"), []
    for key in vouched_keys(state):
        data = truth[key.fqn, key.kind][key.first : key.last].tobytes()
        pieces.append(Piece(key=key, offset=len(content), num_bytes=len(data), checksum=checksum(data)))
        content += data
    return Shard(name=f"{epoch:06d}-{state.rank}", content=bytes(content), pieces=tuple(pieces))


def snapshot(held: Shard, node: str, step: int) -> Snapshot:
    return Snapshot(node=node, name=held.name, step=step, pieces=held.pieces)


def stored_pieces(held: Shard, name: str) -> tuple[StoredPiece, ...]:
    return tuple(
        StoredPiece(key=piece.key, object=name, offset=piece.offset, num_bytes=piece.num_bytes, checksum=piece.checksum)
        for piece in held.pieces
    )


def count(spans: Iterable[Span], fqn: str, numel: int) -> np.ndarray:
    """How often each element is in them."""
    found = np.zeros(numel, dtype=int)
    for span in spans:
        if span.fqn == fqn:
            found[span.first : span.last] += 1
    return found
