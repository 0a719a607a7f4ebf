"""The pure parts of the panels of a job's page: what they make of a history, and what they refuse to guess."""

from __future__ import annotations

import itertools

import pytest
from control_plane import ALL_NODES, WITHOUT_SPOT_1, Story, job_mapping, snapshot, story

from shoal_planner.job import parse_job
from shoal_planner.plan import plan_to_mapping
from shoal_recovery.journal import (
    CheckpointCommitted,
    CheckpointFailed,
    NodeNoticed,
    NodeSlowed,
    NoticeEnded,
    PredictionChecked,
    RecoveryDone,
    entry_to_mapping,
)
from shoal_service.continuity import Pair, Seam, continuity
from shoal_service.fleet import pools, record_of
from shoal_service.goodput import PRODUCTIVE, REDONE, goodput, num_devices
from shoal_service.jobs import rfc3339
from shoal_service.panels_checkpoints import Standing, checkpoints
from shoal_service.panels_curves import marks
from shoal_service.panels_goodput import goodput_panel
from shoal_service.panels_money import money, on_demand_prices
from shoal_service.panels_nodes import nodes_panel
from shoal_service.panels_prices import BY_CLUSTER, price_sources
from shoal_service.panels_recovery import shard_lines, source_lines, store_alone, waterfall
from shoal_service.plan_changes import plan_change
from shoal_service.plan_reasons import checked, reasons
from shoal_service.spending import spending
from shoal_service.step_sums import EpochSteps
from shoal_service.store_looks import StoreLook
from shoal_service.survival import survival
from shoal_service.timeline import Event

STEPS = (
    EpochSteps(epoch=1, rolled_back=False, num_steps=19, seconds=7.6, tokens=19 * 256),
    EpochSteps(epoch=1, rolled_back=True, num_steps=1, seconds=0.4, tokens=256),
    EpochSteps(epoch=2, rolled_back=False, num_steps=20, seconds=11.0, tokens=20 * 256),
    EpochSteps(epoch=3, rolled_back=False, num_steps=21, seconds=8.4, tokens=21 * 256),
)


def events(told: Story | None = None) -> list[Event]:
    told = told or story(job_mapping(), started_at_s=1000.0)
    every = (
        Event(seq=entry.seq, at_s=entry.at_s, kind=entry.event.kind, payload=entry_to_mapping(entry))
        for entry in told.entries
    )
    return [event for event in every if event.kind != "step_done"]


def test_goodput_tells_where_all_time_went() -> None:
    found = goodput(events(), STEPS, created_at_s=1000.0, end_at_s=1040.0)
    assert found.parts[PRODUCTIVE] == pytest.approx(27.0) and found.parts[REDONE] == 0.4
    assert found.parts["detect"] == pytest.approx(0.062) and found.parts["rebuild"] == pytest.approx(0.408)
    assert found.parts["starting"] == pytest.approx(3.0) and found.parts["waiting"] == pytest.approx(0.5)
    assert sum(found.parts.values()) == pytest.approx(found.elapsed_s) == pytest.approx(40.0)
    assert found.ratio == pytest.approx(27.0 / 40.0)
    assert found.held_device_s is not None and found.productive_device_s is not None
    assert found.productive_device_s == pytest.approx(7.6 * 6 + 11.0 * 5 + 8.4 * 6)
    assert found.productive_device_s < found.held_device_s
    shown = goodput_panel(found)
    assert shown.ratio == "67.5 %" and shown.rows[0] == (PRODUCTIVE, "steps that count", "27 s", "67.5 %")
    assert sum(part.width for part in shown.bar) == pytest.approx(100, abs=0.1)


def test_goodput_of_a_window_leaves_out_what_was_before() -> None:
    found = goodput(events(), STEPS[3:], created_at_s=1000.0, end_at_s=1040.0, since_s=1030.0)
    assert found.elapsed_s == pytest.approx(10.0)
    assert found.parts["starting"] == found.parts["detect"] == 0
    nothing = goodput([], (), created_at_s=1000.0, end_at_s=1000.0)
    assert nothing.ratio is None and nothing.held_device_s is None
    assert goodput_panel(nothing).device_rows == ()


def test_pauses_are_no_waste() -> None:
    told = Story(job=parse_job(job_mapping()), cluster=snapshot(), now_s=1000.0)
    told.state("paused", "paused_by_user", "rests", 10.0)
    found = goodput(events(told), (), created_at_s=1000.0, end_at_s=1110.0)
    assert (found.parts["paused"], found.parts["waiting"]) == (100.0, 10.0)
    assert found.ratio == 0.0


def test_money_is_split_and_nothing_is_guessed() -> None:
    history = events()
    found = spending(history, end_at_s=1040.0, ended=False, tokens=60 * 256)
    prices = on_demand_prices([{"device": "T4", "devices": 1, "price_per_hour": 0.5}])
    told = money(history, found, STEPS, prices, created_at_s=1000.0, end_at_s=1040.0, eta_s=3600.0)
    assert [(rate.name, rate.market, rate.num_nodes) for rate in told.rates] == [
        ("2 x A100-80G", "on demand", 2),
        ("1 x T4", "spot", 2),
    ]
    assert told.to_come_usd == pytest.approx(15.0)
    assert found.usd is not None and told.wasted_usd is not None and 0 < told.wasted_usd < found.usd
    assert told.saved is not None and told.saved.usd is not None
    (spot,) = [charge for charge in found.charges if charge.spot]
    assert told.saved.usd == pytest.approx(0.3 * spot.node_hours)
    assert told.spent[-1][1] == pytest.approx(found.usd) and told.spent[0][1] == 0
    unknown = money(history, found, STEPS, {}, created_at_s=1000.0, end_at_s=1040.0, eta_s=None)
    assert unknown.saved is not None and unknown.saved.usd is None and unknown.to_come_usd is None


def test_phases_of_a_recovery_follow_each_other() -> None:
    (lost, _) = [event for event in events() if event.kind == RecoveryDone.kind]
    falls = waterfall(lost.payload, 0.55)
    assert [fall.name for fall in falls] == ["detect", "decide", "restore", "rebuild", "rest", "first-step"]
    assert [fall.text for fall in falls][:4] == ["62 ms", "48 ms", "131 ms", "204 ms"]
    for before, after in itertools.pairwise(falls):
        assert after.x == pytest.approx(before.x + before.width, abs=0.01)
    assert falls[-1].x + falls[-1].width == pytest.approx(100, abs=0.01)
    assert [fall.name for fall in waterfall(lost.payload, None)][-1] == "rest"


def test_the_store_alone_is_judged_by_what_it_did() -> None:
    (lost, _) = found = [event for event in events() if event.kind == RecoveryDone.kind]
    assert store_alone(lost.payload, found).seconds is None
    payload = {**lost.payload, "num_bytes": {"store": 10_000_000}, "source_s": {"store": 0.5}}
    read = Event(seq=9, at_s=1.0, kind=RecoveryDone.kind, payload=payload)
    stored = Event(seq=8, at_s=1.0, kind="checkpoint_committed", payload={"num_bytes": 50_000_000, "duration_s": 5.0})
    guessed = store_alone(lost.payload, [*found, stored])
    assert (guessed.bytes_per_s, guessed.by_uploads) == (10e6, True)
    alone = store_alone(lost.payload, [*found, stored, read])
    assert (alone.bytes_per_s, alone.by_uploads) == (20e6, False)
    assert alone.seconds == pytest.approx(52_500_000 / 20e6)


def test_what_came_from_where_and_what_was_refused() -> None:
    (lost, _) = [event for event in events() if event.kind == RecoveryDone.kind]
    refused = {"source": "node-b", "object": "slot-0", "step": 40, "num_bytes": 2_000_000, "problem": "its checksum is"}
    refused |= {"problem": "its checksum is another one", "instead": ["node-c"]}
    payload = {
        "num_bytes": {"own": 5_000_000, "node": 0, "peer": 40_000_000},
        "source_s": {"peer": 0.5},
        "failed_sources": [refused],
    }
    own, peer, bad = source_lines({**lost.payload, **payload})
    assert (own.source, own.size, own.took, own.verdict, own.is_bad) == ("own", "5 MB", "", "not moved", False)
    assert (peer.took, peer.speed, peer.verdict) == ("500 ms", "80 MB/s", "checksums agree")
    assert (bad.source, bad.size, bad.is_bad) == ("node-b: slot-0, step 40", "2 MB", True)
    assert bad.verdict == "not used: its checksum is another one. Instead: node-c"


def test_shards_are_told_one_by_one() -> None:
    peer = {"source": "peer", "node": "node-b", "shard": "000002-1", "to": "node-a:0", "num_bytes": 40_000_000}
    stored = {"source": "store", "node": "", "shard": "shards/000000040/000002-0", "to": "node-a:1", "num_bytes": 1000}
    lines = shard_lines({"shards": [{**peer, "took_s": 0.5}, {**stored, "took_s": 0.0}]})
    assert [(line.shard, line.holder, line.to) for line in lines] == [
        ("000002-1", "node-b, peer", "node-a:0"),
        ("shards/000000040/000002-0", "object store", "node-a:1"),
    ]
    assert [(line.size, line.took, line.speed) for line in lines] == [
        ("40 MB", "500 ms", "80 MB/s"),
        ("1 kB", "0 ms", ""),
    ]
    assert shard_lines({}) == ()


def test_what_changed_between_plans_is_told_by_layers() -> None:
    change = plan_change(plan_to_mapping(ALL_NODES), plan_to_mapping(WITHOUT_SPOT_1))
    assert (change.num_units, change.same, change.devices_gone, change.devices_new) == (14, 10, "spot-1:0", "")
    assert [(move.units, move.gained, move.lost) for move in change.moves] == [
        ("layers 9-11", "big-1:0", "spot-1:0"),
        ("head", "big-1:0", "spot-1:0"),
    ]
    same = plan_change(plan_to_mapping(ALL_NODES), plan_to_mapping(ALL_NODES))
    assert same.moves == () and same.same == same.num_units
    assert num_devices(plan_to_mapping(ALL_NODES)) == 6


def test_any_one_node_may_go_while_each_copy_stands_elsewhere() -> None:
    adopted = events()[1].payload
    found = survival(job_mapping(), adopted)
    assert found.losses == 1
    assert [nodes for nodes, _ in found.coverage] == [2]
    alone = {**adopted, "plan": {**adopted["plan"], "copies": 0}}
    assert survival(job_mapping(), alone).losses == 0


def test_reasons_name_the_slowest_stage() -> None:
    adopted = events()[1].payload
    found = reasons(job_mapping(), adopted, {})
    assert found is not None
    assert [len(stages) for stages in found.stage_s] == [2, 2]
    assert all(seconds > 0 for stages in found.stage_s for seconds in stages)
    assert any("sets the pace" in text for text in found.sentences)
    assert sum(part for _, _, part in found.terms) == pytest.approx(1)
    assert reasons(job_mapping(), {**adopted, "plan": {"pipelines": "of another version"}}, {}) is None
    told = Story(job=parse_job(job_mapping()), cluster=snapshot(), now_s=1.0)
    told.add(PredictionChecked(epoch=1, step=9, num_steps=5, predicted_s=0.5, measured_s=0.6))
    assert [(each.predicted, each.measured, each.ratio) for each in checked(events(told))] == [
        ("500 ms", "600 ms", pytest.approx(1.2))
    ]


def test_nodes_with_news_go_first() -> None:
    told = story(job_mapping(), started_at_s=1000.0)
    told.add(NodeNoticed(node="spot-1", source="aws", why="terminate", lead_s=120.0))
    told.add(NodeSlowed(node="big-1", slowdown=2.5, reason="It computes slower."))
    leaves_at_s = told.now_s + 120.0
    shown = nodes_panel(events(told), told.now_s)
    assert [(node.id, node.leaves_at_s, node.slowdown) for node in shown.nodes] == [
        ("spot-1", leaves_at_s, None),
        ("big-1", None, 2.5),
        ("big-0", None, None),
        ("spot-0", None, None),
    ]
    assert [(group.name, group.num_nodes, group.num_leaving, group.num_slow) for group in shown.groups] == [
        ("1 x T4", 2, 1, 0),
        ("2 x A100-80G", 2, 0, 1),
    ]
    told.add(NoticeEnded(node="spot-1", source="aws", outcome="gone"))
    assert "spot-1" not in {node.id for node in nodes_panel(events(told), told.now_s).nodes}


def test_a_loss_that_jumps_is_seen() -> None:
    assert continuity((), ()).good is None
    smooth = Seam(step=20, before=(3.0, 2.9, 2.8), after=2.75)
    same = continuity([Pair(step=20, before=2.5, after=2.5)], [smooth])
    assert same.good and "exactly (step 20)" in same.text
    near = continuity([Pair(step=20, before=2.5, after=2.5001), Pair(step=19, before=2.6, after=2.6)], ())
    assert near.good and "2 steps done again agree with what was rolled back within 4e-05" in near.text
    assert continuity([Pair(step=20, before=2.5, after=3.5)], ()).good is False
    jumped = continuity((), [smooth, Seam(step=40, before=(2.0, 1.9, 1.8), after=3.0)])
    assert jumped.good is False and "at step 40" in jumped.text


def test_marks_stand_in_the_order_of_the_journal() -> None:
    told = story(job_mapping(), started_at_s=1000.0)
    told.add(NodeNoticed(node="spot-1", source="aws", why="terminate", lead_s=120.0))
    stored = [event for event in events(told) if event.kind == CheckpointCommitted.kind]
    found = marks([event for event in events(told) if event.kind != CheckpointCommitted.kind], stored, rfc3339)
    assert [(mark["kind"], mark["label"], mark["step"]) for mark in found] == [
        ("recovery", "R1", 19),
        ("checkpoint", "", 39),
        ("recovery", "R2", 39),
        ("notice", "!", None),
    ]
    assert "re-done steps: 1" in found[0]["text"]


def test_checkpoints_tell_what_was_not_stored() -> None:
    told = Story(job=parse_job(job_mapping()), cluster=snapshot(), now_s=1000.0)
    told.add(CheckpointCommitted(step=20, epoch=1, uri="s3://b/p", num_bytes=52_500_000, duration_s=0.5))
    told.add(CheckpointFailed(step=40, uri="s3://b/p", problem="no room"))
    newest, older = checkpoints(events(told)[::-1], None)
    assert (newest.problem, newest.size, newest.standing) == ("no room", "", Standing.FAILED)
    assert older.standing is Standing.SAID
    assert (older.problem, older.size, older.took, older.speed) == ("", "52.5 MB", "500 ms", "105 MB/s")


def test_checkpoints_stand_as_somebody_has_seen_them() -> None:
    told = Story(job=parse_job(job_mapping()), cluster=snapshot(), now_s=1000.0)
    for step in (20, 40):
        told.add(CheckpointCommitted(step=step, epoch=1, uri="s3://b/p", num_bytes=52_500_000, duration_s=0.5))
    newest_first = events(told)[::-1]
    later_s = newest_first[0].at_s + 1

    def standing(look: StoreLook) -> list[Standing]:
        return [each.standing for each in checkpoints(newest_first, look)]

    assert standing(StoreLook(at_s=later_s, steps=frozenset({40}))) == [Standing.STANDS, Standing.DELETED]
    assert standing(StoreLook(at_s=later_s, problem="it does not answer")) == [Standing.SAID, Standing.SAID]
    before = StoreLook(at_s=newest_first[1].at_s - 1, steps=frozenset({20}))
    assert standing(before) == [Standing.SAID, Standing.STANDS], "what came after the look was not missed by it"


def test_pools_count_interruptions_by_the_hours_that_jobs_had_nodes() -> None:
    nodes = [{**node, "jobs": ["job_1"]} for node in events()[1].payload["snapshot"]["nodes"]]
    large, small = pools(nodes, [record_of(events(), 1040.0)])
    assert (large.name, large.market, large.num_devices, large.interruptions) == ("2 x A100-80G", "on demand", 4, 0)
    assert (small.name, small.interruptions, small.prices, small.usd_per_hour) == ("1 x T4", 1, (0.2,), 0.4)
    assert small.node_hours == pytest.approx((2 * 36.5 - 12) / 3600, rel=0.2)
    assert small.per_node_day is None, "seconds say nothing of days"


def test_prices_tell_who_states_them_and_since_when() -> None:
    found = price_sources(events(), {"spot-0": "pool small: aws"})
    assert [(each.num_nodes, each.name, each.usd_per_hour, each.by) for each in found] == [
        (2, "2 x A100-80G", 7.3, BY_CLUSTER),
        (1, "1 x T4", 0.2, "pool small: aws"),
        (1, "1 x T4", 0.2, BY_CLUSTER),
    ]
    first = next(event for event in events() if event.kind == "plan_adopted")
    assert found[0].since_s == first.at_s, "no plan since has changed it"
    assert price_sources([], {}) == ()
