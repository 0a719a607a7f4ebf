"""Marks, which say where a sample begins in the data: the newest one that is not too late is always at hand."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from data_ground import BATCH, WRITERS, documents, job, undone
from hypothesis import given
from hypothesis import strategies as st

from shoal_planner.data_spec import DataSpec, SourceSpec
from shoal_workers.data import training_samples
from shoal_workers.data_marks import DataMarks


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60), st.integers(0, 30))
def test_marks_are_the_newest_that_are_not_too_late(told: list[tuple[int, int]], step: int) -> None:
    marks = DataMarks()
    shuffled = random.Random(1).sample(told, len(told))
    for stream, done in shuffled:
        marks.hear(done, [[stream, 10 * done, 0, 0, 1]])
    expected = {}
    for stream, done in told:
        if done <= step:
            expected[stream] = max(expected.get(stream, 0), 10 * done)
    assert {row[0]: row[1] for row in marks.at(step)} == expected


def mark(index: int) -> list[int]:
    return [0, index, 0, 10 * index, 1]


def test_marks_of_an_older_manifest_are_used_after_many_newer_ones() -> None:
    marks = DataMarks()
    for step in range(101, 1000):
        marks.hear(step, [mark(step)])
    assert marks.at(100, [mark(99)]) == [mark(99)]
    assert marks.at(100) == [mark(99)], "an attempt that begins anew finds it still"


def test_what_many_ranks_tell_alike_counts_once() -> None:
    marks = DataMarks()
    for step in range(0, 200, 4):
        for _ in range(16):
            marks.hear(step, [mark(step)])
    assert marks.at(180) == [mark(180)]


@given(steps=st.lists(st.integers(1, 40), min_size=150, max_size=250), asked=st.floats(0, 1))
def test_there_is_one_mark_not_far_before_any_step(steps: list[int], asked: float) -> None:
    marks, step = DataMarks(), 0
    marks.hear(0, [mark(0)])
    for gap in steps:
        step += gap
        marks.hear(step, [mark(step)])
    wanted = int(asked * step)
    ((_, found, *_),) = marks.at(wanted)
    assert wanted - found <= max(40, (step - found) / 2)


def test_no_mark_is_told_too_early_where_steps_are_redone(tmp_path: Path) -> None:
    """A step is abandoned when its samples were read, and the step before is done once more from what is kept."""
    small = WRITERS["jsonl"](tmp_path / "a", documents())
    more = SourceSpec(uri=WRITERS["jsonl"](tmp_path / "b", documents(300, 3)).uri, format="jsonl", weight=2.0)
    mix = DataSpec(mix=(SourceSpec(uri=str(small.uri), format="jsonl"), more))
    for data in (small, mix):
        spec = job(data, batch=BATCH)
        samples, marks = training_samples(spec), DataMarks()
        for step in range(1, 300):
            numbers = range((step - 1) * BATCH, step * BATCH)
            samples.read(numbers)
            if step % 3 == 0:
                samples.read(range(step * BATCH, (step + 1) * BATCH))
                samples.read(numbers)
            told = samples.marks(undone(step))
            marks.hear(step, told)
            for *source, stream, index, _, _, _ in told:
                number = undone(step)(stream)
                if source:
                    number = samples._own(source[0], number)  # type: ignore[attr-defined]
                assert index <= number // BATCH, "the step that comes next needs it"
        assert len(marks.at(299)) >= BATCH
        fresh = training_samples(spec)
        fresh.learn(marks.at(299))
        assert torch.equal(fresh.read(range(2990, 3000)), training_samples(spec).read(range(2990, 3000)))
