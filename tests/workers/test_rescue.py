"""State that would go with nodes: what counts as brought to the object store, and how often that is tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from shoal_planner.job import CheckpointSpec, DataSpec, JobSpec, ModelSpec, TrainSpec
from shoal_workers.epoch_view import EpochView
from shoal_workers.rescue import Rescue

SPEC = JobSpec(
    name="j",
    model=ModelSpec(layers=2, hidden=16, heads=4, ffn=12, vocab=256),
    data=DataSpec(uri="stdlib:"),
    train=TrainSpec(global_batch=2, seq_len=8, steps=100),
    checkpoint=CheckpointSpec(uri="s3://bucket/jobs"),
)
GOING = frozenset({"a", "b"})
EPOCH = cast(EpochView, SimpleNamespace(vital=frozenset({"a", "b", "c"}), plan=SimpleNamespace(copies=1)))


def test_what_was_not_brought_is_tried_again() -> None:
    rescue = Rescue(SPEC)
    assert rescue.wanted(EPOCH, GOING, False)
    rescue.saves(None)  # one of them died meanwhile
    assert rescue.wanted(EPOCH, GOING, False)
    rescue.saves(7)
    assert not rescue.wanted(EPOCH, GOING, False)


def test_training_goes_on_after_a_few_tries() -> None:
    rescue = Rescue(SPEC)
    for _ in range(3):
        assert rescue.wanted(EPOCH, GOING, False)
        rescue.saves(None)
    assert not rescue.wanted(EPOCH, GOING, False)


def test_a_notice_that_comes_later_is_another_matter() -> None:
    rescue = Rescue(SPEC)
    assert rescue.wanted(EPOCH, GOING, False)
    rescue.saves(7)
    assert not rescue.wanted(EPOCH, frozenset({"b"}), False)
    assert rescue.wanted(EPOCH, GOING, False)
