"""The pure parts of the page and of the status: geometry, words, and how journals advance a job."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from control_plane import ALL_NODES, job_mapping, snapshot, story

from shoal_planner.cluster import Node, snapshot_to_mapping
from shoal_planner.job import parse_job
from shoal_planner.plan import Pipeline, Plan, Replica, Stage, plan_to_mapping
from shoal_recovery.journal import (
    TERMINAL,
    TRANSITIONS,
    Entry,
    EvaluationDone,
    JobState,
    StepDone,
    StepSkipped,
    entry_to_mapping,
)
from shoal_service.jobs import perplexity, rfc3339
from shoal_service.plan_map import LABEL_WIDTH, MAX_ROWS, plan_map
from shoal_service.status import Status, advance, moved
from shoal_service.timeline import Event, duration, num_bytes, recoveries, timeline


def events() -> list[Event]:
    told = []
    for entry in story(job_mapping(), started_at_s=1000.0).entries:
        payload = entry_to_mapping(entry)
        told.append(Event(seq=entry.seq, at_s=entry.at_s, kind=entry.event.kind, payload=payload))
    return [event for event in told if event.kind != "step_done"]


def test_cells_of_the_plan_map_are_as_wide_as_their_layers() -> None:
    drawn = plan_map(plan_to_mapping(ALL_NODES), snapshot_to_mapping(snapshot()))
    assert [row.name for row in drawn.rows] == ["pipeline 0", "pipeline 1"]
    for row in drawn.rows:
        for left, right in itertools.pairwise(row.cells):
            assert left.x + left.width < right.x
        assert row.cells[0].x == LABEL_WIDTH
        assert row.cells[-1].x + row.cells[-1].width == pytest.approx(drawn.width, abs=1)
    first, last = drawn.rows[1].cells
    assert first.width > last.width
    assert first.head == "embedding + layers 0-8" and last.head == "layers 9-11 + head"
    shared = drawn.rows[0].cells[1].boxes
    assert [box.lines for box in shared] == [("big-1:1", "tp 1, 2 samples"), ("spot-0:0", "tp 1, 1 sample")]
    assert [box.spot for box in shared] == [False, True]
    assert shared[0].colour != shared[1].colour
    assert drawn.types == (("A100-80G", 0, 4), ("T4", 1, 2))
    assert len(drawn.places) == 5


def test_pipelines_that_are_alike_share_a_row_of_a_large_plan() -> None:
    node = snapshot().nodes[0]
    nodes = tuple(dataclasses.replace(node, id=f"n{index}") for index in range(300))
    plan = Plan(pipelines=tuple(_deep(node) for node in nodes))
    drawn = plan_map(plan_to_mapping(plan), {"nodes": [dataclasses.asdict(node) for node in nodes[1:]]})
    assert [(row.name, row.share) for row in drawn.rows] == [
        ("pipeline 0", "1 x 1 samples"),
        ("299 pipelines", "each 1 x 1 samples"),
    ]
    assert drawn.rows[1].cells[0].title == "pipelines 1-299, stage 0: embedding + layers 0-11"
    assert (drawn.hidden_rows, len(drawn.places)) == (0, 4)
    assert drawn.places[0].device_type == "unknown" and drawn.places[2].num_replicas == 299


def test_many_kinds_are_drawn_in_part() -> None:
    node = snapshot().nodes[0]
    nodes = tuple(dataclasses.replace(node, id=f"n{index}") for index in range(MAX_ROWS + 5))
    pipelines = tuple(dataclasses.replace(_deep(node), micro_batches=index + 1) for index, node in enumerate(nodes))
    drawn = plan_map(
        plan_to_mapping(Plan(pipelines=pipelines)), {"nodes": [dataclasses.asdict(node) for node in nodes]}
    )
    assert (len(drawn.rows), drawn.hidden_rows, len(drawn.places)) == (MAX_ROWS, 5, 2 * (MAX_ROWS + 5))


def test_replicas_that_are_alike_share_a_box() -> None:
    node = snapshot().nodes[0]
    nodes = tuple(dataclasses.replace(node, id=f"n{index}") for index in range(1000))
    replicas = tuple(Replica(node=node.id, devices=(0,)) for node in nodes)
    plan = Plan(
        pipelines=(Pipeline(micro_batch=1000, micro_batches=1, stages=(Stage(layers=((0, 12),), replicas=replicas),)),)
    )
    drawn = plan_map(plan_to_mapping(plan), {"nodes": [dataclasses.asdict(node) for node in nodes]}, [[0.25]])
    ((cell,),) = (row.cells for row in drawn.rows)
    (box,) = cell.boxes
    assert box.lines == ("1000 x A100-80G", "tp 1, 1 sample") and "and 988 more" in box.title
    assert (cell.time, cell.pace) == ("250 ms a micro-batch, slowest", 1.0)
    assert drawn.height < 200 and len(drawn.places) == 1


def _deep(node: Node) -> Pipeline:
    """The head alone is a stage."""
    stages = tuple(
        Stage(layers=(layers,), replicas=(Replica(node=node.id, devices=(index,)),))
        for index, layers in enumerate(((0, 12), (12, 12)))
    )
    return Pipeline(micro_batch=1, micro_batches=1, stages=stages)


def test_the_timeline_shows_lives_of_nodes_and_states_of_the_job() -> None:
    drawn = timeline(events(), created_at_s=1000.0, end_at_s=1030.0)
    lanes = {lane.name: lane for lane in drawn.lanes}
    assert list(lanes) == ["job", "big-0", "big-1", "spot-0", "spot-1"]
    assert [band.style for band in lanes["job"].bands] == [
        *("queued", "starting", "running", "recovering", "running", "recovering", "running", "succeeded")
    ]
    assert len(lanes["spot-1"].bands) == 2
    assert [mark.text for mark in lanes["spot-1"].marks] == ["lost", "joined"]
    assert [mark.text for mark in drawn.recoveries] == ["R1", "R2"]
    assert drawn.ticks[0].text == "start" and 3 <= len(drawn.ticks) <= 9
    for lane in drawn.lanes:
        for band in lane.bands:
            assert LABEL_WIDTH <= band.x and band.width > 0


def test_what_was_rented_has_a_lane_of_its_own() -> None:
    rented = [(1001.0, "asked", "asked for 2 x l4"), (1001.2, "short", "none came"), (1020.0, "came", "n-1 came")]
    drawn = timeline(events(), created_at_s=1000.0, end_at_s=1030.0, rented=rented)
    assert [lane.name for lane in drawn.lanes[:3]] == ["job", "rented", "big-0"]
    assert len({lane.y for lane in drawn.lanes}) == len(drawn.lanes)
    marks = drawn.lanes[1].marks
    assert [mark.text for mark in marks] == ["asked", "", "came"], "words would stand on each other"
    assert [mark.title for mark in marks] == [reason for _, _, reason in rented]
    waiting = timeline((), created_at_s=1000.0, end_at_s=1030.0, rented=rented)
    assert [lane.name for lane in waiting.lanes] == ["job", "rented"], "a job that waits for them has no journal yet"


def test_bars_of_a_recovery_add_up() -> None:
    lost, joined = recoveries(events(), rfc3339)
    assert [part.name for part in lost.phases] == ["detect", "decide", "restore", "rebuild", "rest"]
    assert sum(part.width for part in lost.phases) == pytest.approx(100, abs=0.1)
    assert [part.text for part in lost.sources] == [
        *("31.4 MB, 7.85 GB/s", "8.2 MB, 1.37 GB/s", "12.9 MB, 1 GB/s", "0 B")
    ]
    assert lost.plans == "0123456789ab to ba9876543210"
    assert (*lost.failed_sources, *joined.failed_sources) == (
        "1.2 MB of step 20 from the agent of spot-0 (000001-2) were not used: what came is not what was sealed. "
        "Instead: agent of big-0",
    )
    assert (lost.redone_steps, joined.redone_steps, lost.total) == (1, 0, "487 ms")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0431, "43 ms"),
        (0.9999, "1 s"),
        (1.25, "1.25 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (12000, "3 h 20 min"),
        (187200, "2 d 4 h"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_bytes_for_people() -> None:
    assert [num_bytes(count) for count in (0, 812, 4100, 4.1e6, 9.999e8, 1.5e12, 2e15)] == [
        *("0 B", "812 B", "4.1 kB", "4.1 MB", "1 GB", "1.5 TB", "2e+03 TB")
    ]


def fresh(state: JobState) -> Status:
    return Status(state=state, state_code="a", reason="b", since_at_s=1.0)


@pytest.mark.parametrize("before", list(JobState))
@pytest.mark.parametrize("after", list(JobState))
def test_states_change_by_the_table_alone(before: JobState, after: JobState) -> None:
    result = moved(fresh(before), after, "code", "reason", 2.0)
    if before is after:
        # Another reason for the same state is news, unless all is over; since when stays.
        assert (result.reason == "reason") is (before not in TERMINAL)
        assert result.since_at_s == 1.0
    elif after in TRANSITIONS[before]:
        assert (result.state, result.state_code, result.since_at_s) == (after, "code", 2.0)
    else:
        assert result == fresh(before)


def test_the_newest_evaluation_is_the_one_that_is_shown() -> None:
    status = fresh(JobState.RUNNING)
    for step, loss in ((10, 3.0), (20, math.inf)):
        event = EvaluationDone(epoch=1, step=step, loss=loss, tokens=64, duration_s=0.1)
        status = advance(status, Entry(seq=step, at_s=1.0, event=event))
        assert (status.eval_step, status.eval_loss) == (step, loss if math.isfinite(loss) else None)
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(20)) == pytest.approx(20)
    assert perplexity(1e4) is None
    assert perplexity(None) is None


def test_skipped_steps_are_counted_and_leave_the_loss_as_it_was() -> None:
    told = story(job_mapping(), started_at_s=1000.0)
    newest = [entry.event for entry in told.entries if isinstance(entry.event, StepDone)][-1]
    before = dataclasses.replace(fresh(JobState.RUNNING), loss=2.5)
    skipped = dataclasses.replace(newest, loss=math.nan, grad_norm=math.nan, skipped=True)
    status = before
    for event in (StepSkipped(epoch=3, step=60, problem="not finite on rank 1 (b:0)"), skipped):
        status = advance(status, Entry(seq=1, at_s=1.0, event=event))
    assert (status.step, status.loss, status.skipped_steps) == (60, 2.5, 1)


def test_a_whole_journal_advances_a_status() -> None:
    told = story(job_mapping(), started_at_s=1000.0)
    status = fresh(JobState.QUEUED)
    for entry in told.entries:
        status = advance(status, entry)
    assert (status.state, status.step, status.epoch, status.plan_id) == ("succeeded", 60, 3, told.plan_id)
    assert (status.num_recoveries, status.redone_steps, status.lost_steps) == (2, 1, 0)
    assert status.last_seq == len(told.entries)
    assert status.tokens_per_s == pytest.approx(parse_job(job_mapping()).train.tokens_per_step / 0.4)
