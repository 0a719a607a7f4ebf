"""The journal's wire form, and the table of the lifecycle."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest

from shoal_planner.errors import InvalidField
from shoal_recovery.journal import (
    TERMINAL,
    TRANSITIONS,
    CheckpointAsked,
    CheckpointCommitted,
    CheckpointFailed,
    ClusterEntered,
    Entry,
    EvaluationDone,
    Event,
    FiguresMeasured,
    JobState,
    ModelSeen,
    NodeJoined,
    NodeLost,
    NodeNoticed,
    NodeRecovered,
    NodeSlowed,
    NodeStays,
    NoticeEnded,
    PlanAdopted,
    PredictionChecked,
    RecoveryDone,
    RoomShort,
    ShardBrought,
    SourceFailed,
    StateChanged,
    StepDone,
    StepSkipped,
    StoreFailed,
    StoreRecovered,
    entry_from_mapping,
    entry_to_mapping,
)
from shoal_recovery.journal_scripts import (
    CheckpointReported,
    ScriptFailed,
    ScriptPrinted,
    ScriptReported,
    ScriptStarted,
    TrainerAdjusted,
    WorkersStarted,
)
from shoal_recovery.journal_shares import ShareChanged, ShareTaken

EVENTS: tuple[Event, ...] = (
    StateChanged(state="running", code="running", reason="All ranks step."),
    PlanAdopted(
        epoch=2, plan_id="p", step=4, reason="fast", plan={"pipelines": [{"micro_batch": 1}]}, snapshot={"n": []}
    ),
    StepDone(
        epoch=2, step=5, loss=5.5, grad_norm=1.0, lr=3e-4, tokens=64, duration_s=0.1, samples=((16, 18), (18, 20))
    ),
    NodeLost(node="a", evidence="the connection closed", detect_s=0.1),
    NodeJoined(node="b", device="cpu-1t", devices=2),
    NodeNoticed(node="b", source="drill", why="asked for by a user", lead_s=120.0),
    NodeStays(node="b", reason="No plan fits without it."),
    NodeSlowed(node="b", slowdown=2.1, reason="It computes 2.1 times slower than it should."),
    NodeRecovered(node="b", reason="It computes as fast as it should again."),
    NoticeEnded(node="b", source="drill", outcome="gone"),
    RecoveryDone(
        epoch=3,
        cause="node_lost",
        reason="Lost a.",
        step=4,
        redone_steps=1,
        lost_steps=0,
        detect_s=0.1,
        decide_s=0.2,
        restore_s=0.3,
        rebuild_s=0.4,
        total_s=1.0,
        num_bytes={"own": 1, "node": 2, "peer": 3, "store": 0},
        nodes_lost=("a",),
        nodes_joined=("b",),
        nodes_drained=("c",),
        source_s={"own": 0.1, "node": 0.0, "peer": 0.2, "store": 0.0},
        shards=(ShardBrought(source="peer", node="a", shard="000002-0", to="b:0", num_bytes=3, took_s=0.2),),
        num_shards=1,
        failed_sources=(
            SourceFailed(source="agent of a", object="o", step=4, num_bytes=4, problem="cut", instead=("agent of b",)),
        ),
        plan_before="p",
        plan_after="q",
    ),
    CheckpointCommitted(step=4, epoch=3, uri="file:///tmp/x", num_bytes=12, duration_s=0.1),
    CheckpointAsked(number=2, step=7),
    CheckpointFailed(step=4, uri="s3://b/p", problem="does not answer"),
    StoreFailed(step=4, uri="s3://b/p", problem="does not answer"),
    RoomShort(node="a", num_bytes=12, on_disk=False, room_bytes=8),
    StoreRecovered(step=8, uri="s3://b/p", duration_s=2.5),
    FiguresMeasured(profile={"updates": [{"device": "T4"}]}, num_bytes=12, duration_s=0.1),
    PredictionChecked(epoch=3, step=9, num_steps=5, predicted_s=0.2, measured_s=0.3),
    ModelSeen(model={"layers": 2}, packages=("gcs://a.zip",)),
    EvaluationDone(epoch=2, step=5, loss=5.4, tokens=256, duration_s=0.1),
    StepSkipped(epoch=2, step=5, problem="loss or gradients are not finite on rank 1 (b:0)"),
    ClusterEntered(cluster="ray", incarnation="1"),
    ScriptStarted(attempt=2, node="a", reason="The script is started on a."),
    TrainerAdjusted(attempt=2, trainer=1, settings={"num_workers": "1 to 2 (the script said 8)"}),
    WorkersStarted(epoch=3, trainer=1, step=4, nodes=("a", "b"), checkpoint=None, snapshot={"nodes": []}),
    ScriptReported(epoch=3, step=5, metrics={"loss": 1.5, "worst": "inf"}, loss=1.5, duration_s=0.1),
    CheckpointReported(epoch=3, step=5, uri="s3://b/p/job/checkpoint_1", num_bytes=12),
    ScriptPrinted(attempt=2, lines=("one", "two"), left_out=3),
    ShareChanged(version=3, nodes=("a", "b"), reason="given to job_2"),
    ShareTaken(version=3, nodes=("a", "b")),
    ScriptFailed(attempt=2, rank=None, node="a", problem="ValueError: x", traceback="Traceback ..."),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_every_event_survives_json(event: Event) -> None:
    entry = Entry(seq=7, at_s=1.5, event=event)
    wire = json.loads(json.dumps(entry_to_mapping(entry)))
    assert wire["kind"] == event.kind
    assert entry_from_mapping(wire) == entry


def test_all_kinds_are_tested_and_differ() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert len({event.kind for event in EVENTS}) == len(EVENTS)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stte": "running"}, "stte"),
        ({"reason": None}, "reason"),
        ({"code": 3}, "code"),
    ],
)
def test_what_is_no_entry_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    wire = entry_to_mapping(Entry(seq=1, at_s=0.0, event=EVENTS[0])) | change
    with pytest.raises(InvalidField) as caught:
        entry_from_mapping(wire)
    assert caught.value.field == field


def test_an_unknown_kind_or_no_number_is_refused() -> None:
    wire = entry_to_mapping(Entry(seq=1, at_s=0.0, event=EVENTS[0]))
    for change in ({"kind": "exploded"}, {"kind": None}):
        with pytest.raises(KeyError):
            entry_from_mapping(wire | change)
    with pytest.raises(KeyError):
        entry_from_mapping({key: value for key, value in wire.items() if key != "seq"})


def test_events_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EVENTS[3].node = "other"  # type: ignore[misc, union-attr]


def test_the_lifecycle_knows_every_state_and_ends() -> None:
    assert set(TRANSITIONS) == set(JobState)
    for state, targets in TRANSITIONS.items():
        assert (not targets) == (state in TERMINAL), state
    for state in set(JobState) - TERMINAL - {JobState.CANCELLING}:
        assert JobState.CANCELLED in TRANSITIONS[state], state
    assert JobState.RECOVERING in TRANSITIONS[JobState.WAITING]
    assert JobState.WAITING in TRANSITIONS[JobState.RECOVERING]
    assert JobState.RUNNING not in TRANSITIONS[JobState.QUEUED]
