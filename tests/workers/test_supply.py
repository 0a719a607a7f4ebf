"""What the ranks of an epoch begin with: never with nothing where a step was safe."""

from __future__ import annotations

import dataclasses

import layouts
import pytest

from shoal_planner.job import CheckpointSpec, DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.errors import StateLost
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Inventory
from shoal_workers.change import Found, History
from shoal_workers.supply import Supply

MODEL = ModelSpec(layers=2, hidden=16, heads=4, ffn=12, vocab=256)
SPEC = JobSpec(
    name="j",
    model=MODEL,
    data=DataSpec(uri="stdlib:"),
    train=TrainSpec(global_batch=2, seq_len=8, steps=100),
    checkpoint=CheckpointSpec(),
)
STAGE = Stage(layers=((0, 2),), replicas=tuple(Replica(node=node, devices=(0,), samples=1) for node in ("n0", "n1")))
SHARDS = shard_map(Plan(pipelines=(Pipeline(micro_batch=2, micro_batches=1, stages=(STAGE,)),)), MODEL)


def supply(held_step: int, done_step: int, spec: JobSpec = SPEC) -> Supply:
    """Survivors hold that step, whole, and no other."""
    snapshots = tuple(
        layouts.snapshot(layouts.shard(state, layouts.arrays(MODEL, held_step)), layouts.NODES[state.rank], held_step)
        for state in SHARDS.ranks
    )
    found = Found(inventory=Inventory(live=(), snapshots=snapshots), newest_live_step=0)
    history = History(plans={}, starts={1: 0}, done_step=done_step)
    return Supply(2, "j", spec, SHARDS, {}, found, history, [], lambda _: None)


@pytest.mark.parametrize(("held_step", "done_step"), [(0, 0), (0, 1), (5, 5), (5, 9)])
def test_survivors_are_begun_with(held_step: int, done_step: int) -> None:
    plan, step = supply(held_step, done_step).choose()
    assert plan is not None
    assert step == held_step


def test_a_job_with_a_safe_step_does_not_begin_anew() -> None:
    """Who had nothing but the beginning comes back alone: whoever has the rest may come back, too."""
    with pytest.raises(StateLost, match="only step 0 is whole, and step 500 was done already"):
        supply(0, 500).choose()


def test_what_a_job_does_not_protect_is_done_again_from_the_beginning() -> None:
    """Before its first protected step; from then on that one is waited for."""
    seldom = dataclasses.replace(SPEC, checkpoint=CheckpointSpec(protect_every=7))
    plan, step = supply(0, 5, seldom).choose()
    assert plan is not None and step == 0
    with pytest.raises(StateLost, match="only step 0 is whole, and step 8 was done already"):
        supply(0, 8, seldom).choose()
