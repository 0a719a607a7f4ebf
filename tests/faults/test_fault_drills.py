"""Jobs that go through random faults finish as if nothing had been; and whoever judges that sees what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest
from faults import campaign
from faults.campaign import Campaign, summary
from faults.drills import KINDS, Kind, Level, Moment, draw
from faults.judging import PACES, Blow, Pace, judge
from faults.playing import NO_GOAL
from faults.watched_paces import WatchedPaces
from servers import ProgramMissing

from shoal_planner.cluster import GIB, ClusterSnapshot, DeviceRef, Node, snapshot_to_mapping
from shoal_planner.job import ModelSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage, plan_to_mapping
from shoal_recovery.journal import (
    CheckpointCommitted,
    Entry,
    Event,
    NodeSlowed,
    PlanAdopted,
    RecoveryDone,
    StateChanged,
    StepDone,
)

TESTS = Path(__file__).parent.parent
LEAST_FAULTS, LEAST_DRILLS = 300, 40  # on Ray, where all plans are random
STEPS, BATCH, LOSSES = 6, 2, (5.0, 4.5, 4.0, 3.6, 3.3, 3.1)
MODEL = ModelSpec(layers=2, hidden=8, heads=2, ffn=16, vocab=32)


def run(seeds: str, out: Path, *options: str, timeout_s: float) -> None:
    paths = [str(TESTS), str(TESTS / "planner"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "faults", "--seeds", seeds, "--out", str(out), *options]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    started = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with started:
        try:
            said, errors = started.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            started.terminate()  # it ends all that it started; killed, it would leave processes, disks and networks
            said, errors = started.communicate()
    assert started.returncode == 0, f"{said}\n{errors[-4000:]}"


@pytest.mark.timeout(660)
def test_jobs_survive_a_sample_of_faults_and_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    for _ in range(2):
        run("1000", tmp_path, "--steps", "30", timeout_s=300)
    (line,) = (tmp_path / "drills.jsonl").read_text().splitlines()
    assert json.loads(line)["seed"] == 1000
    assert json.loads(line)["blows"]


@pytest.mark.long(seconds=3900)
@pytest.mark.timeout(4500)
def test_jobs_survive_hundreds_of_faults(pytestconfig: pytest.Config) -> None:
    """What is left when its time is up, the next run plays."""
    out = Path(pytestconfig.getoption("--fault-out"))
    options = ("--least-faults", str(LEAST_FAULTS), "--within", "68")
    run(pytestconfig.getoption("--fault-seeds"), out, *options, timeout_s=4400)
    found = json.loads((out / "summary.json").read_text())
    is_all = found["faults_on_ray"] >= LEAST_FAULTS and found["drills_on_ray"] >= LEAST_DRILLS
    assert is_all, "time was up: the same command goes on from there"
    assert not found["never_fell"]


def test_nothing_is_drilled_where_the_store_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on for ever: as long as too few faults have fallen."""

    def stores(_: Path) -> NoReturn:
        raise ProgramMissing("no weed program")

    monkeypatch.setattr(campaign, "Stores", stores)
    with pytest.raises(ProgramMissing, match="no weed program"):
        Campaign(tmp_path, print).run(range(17, 18), 300, None, math.inf)


def test_no_drill_begins_that_would_not_end_in_time(tmp_path: Path) -> None:
    said: list[str] = []
    assert Campaign(tmp_path, said.append).run(range(17, 18), 0, None, within_s=60.0) == []
    assert said == ["no time is left for seed 17; the same command goes on there"]


def test_what_never_fell_is_said_unless_the_machine_does_not_allow_it() -> None:
    blows = [{"kind": kind.value, "moment": "step"} for kind in KINDS["processes"] if kind is not Kind.DISK_FULL]
    line = {"level": "processes", "seed": 1, "blows": blows, "problems": [], "seconds": 1.0}
    found = summary([{**line, "left_out": [["disk_full", NO_GOAL]]}])
    moments = [f"none in {moment}" for moment in Moment if moment is not Moment.STEP]
    kinds = ["disk_full on processes", *(f"{kind} on ray" for kind in KINDS["ray"])]
    assert found["never_fell"] == sorted([*kinds, *moments])
    assert "disk_full on processes" not in summary([{**line, "left_out": [["disk_full", "no mount"]]}])["never_fell"]


# --- drills ---


def test_a_seed_says_all_of_a_drill() -> None:
    drills = [draw(seed) for seed in range(50)]
    assert drills == [draw(seed) for seed in range(50)]
    faults = [fault for drill in drills for fault in drill.faults]
    assert {fault.moment for fault in faults} == set(Moment)
    of_auto = [fault for drill in drills if drill.copies == "auto" for fault in drill.faults]
    assert any(fault.kind is Kind.NODE and fault.moment is Moment.REDUCED for fault in of_auto), "two losses in a row"
    in_trouble = {fault.kind for fault in faults if fault.moment in (Moment.RECOVERY, Moment.REDUCED)}
    assert {Kind.PARTITION, Kind.PARTITION_STORE, Kind.HEAD_LOST} <= in_trouble, "where two epochs might go on"
    assert {drill.copies for drill in drills} == {1, 2, "auto"}
    on_ray = [drill for drill in drills if drill.level == "ray"]
    assert len(on_ray) >= LEAST_DRILLS and all(drill.random_plans for drill in on_ray)
    assert all(drill.store != "none" or Kind.HALF not in {f.kind for f in drill.faults} for drill in drills)


@pytest.mark.parametrize(("level", "fall"), [("processes", 10), ("ray", 7)])
def test_every_kind_falls_about_as_often(level: Level, fall: int) -> None:
    """Where fewer faults fall in a drill than are thought to, too; those that need a store are not in all of them."""
    drills = [drill for drill in map(draw, range(50)) if drill.level == level]
    fallen = Counter(fault.kind for drill in drills for fault in drill.faults[:fall])
    usual = len(drills) * fall / len(KINDS[level])
    assert fallen.keys() == set(KINDS[level])
    assert usual / 3 <= min(fallen.values()) and max(fallen.values()) <= usual * 3, fallen


# --- the judge ---


def plan_of(epoch: int, step: int, nodes: str, copies: int = 1) -> PlanAdopted:
    plan = Plan(
        pipelines=tuple(
            Pipeline(
                micro_batch=1,
                micro_batches=1,
                stages=(Stage(layers=((0, 2),), replicas=(Replica(node=node, devices=(0,)),)),),
            )
            for node in nodes
        ),
        copies=copies,
    )
    snapshot = ClusterSnapshot(
        nodes=tuple(
            Node(
                id=node,
                device="cpu-1t",
                devices=1,
                host_memory_bytes=GIB,
                intra_bytes_per_s=1e9,
                inter_bytes_per_s=1e9,
            )
            for node in nodes
        )
    )
    return PlanAdopted(
        epoch=epoch,
        plan_id=plan.plan_id,
        step=step,
        reason="",
        plan=plan_to_mapping(plan),
        snapshot=snapshot_to_mapping(snapshot),
    )


def step(epoch: int, number: int) -> StepDone:
    return StepDone(
        epoch=epoch,
        step=number,
        loss=LOSSES[number - 1],
        grad_norm=1.0,
        lr=1e-3,
        tokens=8,
        duration_s=0.1,
        samples=(((number - 1) * BATCH, number * BATCH),),
    )


def recovered(epoch: int, at: int, *, redone: int = 0, lost: int = 0, store_bytes: int = 0) -> RecoveryDone:
    return RecoveryDone(
        epoch=epoch,
        cause="node_lost",
        reason="Lost c.",
        step=at,
        redone_steps=redone,
        lost_steps=lost,
        detect_s=0.0,
        decide_s=0.0,
        restore_s=0.0,
        rebuild_s=0.0,
        total_s=0.5,
        num_bytes={"own": 1, "node": 0, "peer": 0, "store": store_bytes},
    )


def state(name: str) -> StateChanged:
    return StateChanged(state=name, code="", reason="")


GOOD: tuple[Event, ...] = (
    plan_of(1, 0, "abc"),
    state("running"),
    step(1, 1),
    step(1, 2),
    step(1, 3),
    plan_of(2, 2, "ab"),
    step(2, 3),
    recovered(2, 2, redone=1),
    step(2, 4),
    step(2, 5),
    step(2, 6),
    state("succeeded"),
)


def problems(events: tuple[Event, ...], blows: tuple[Blow, ...] = (), *, stored: bool = False) -> tuple[str, ...]:
    """Entries are a second apart."""
    entries = [Entry(seq=index, at_s=float(index), event=event) for index, event in enumerate(events, start=1)]
    return judge(entries, model=MODEL, steps=STEPS, batch=BATCH, losses=LOSSES, blows=blows, stored=stored).problems


def blow(*out: str, at_s: float = 5.5) -> Blow:
    return Blow(kind="node", moment="step", nodes=out, out=out, step=3, at_s=at_s, healed_at_s=at_s + 1)


def test_a_good_history_is_good() -> None:
    assert problems(GOOD, (blow("c"),)) == ()


def test_one_that_went_back_too_far_is_not_unless_no_copy_was_left() -> None:
    events = (*GOOD[:5], plan_of(2, 1, "ab"), step(2, 2), step(2, 3), recovered(2, 1, redone=1, lost=1), *GOOD[8:])
    (problem,) = problems(events, (blow("c"),))
    assert "1 safe steps lost, 1 done again, from 3 back to 1" in problem
    assert problems(events, (blow("b", "c"), blow("a"))) == ()
    assert problems(events, (blow("a", "b", "c", at_s=100.0),)), "that was later"


def test_copies_may_survive_more_losses_than_there_are_copies() -> None:
    """Of four nodes with a copy each on the next one two that are not neighbours."""
    begun = (plan_of(1, 0, "abcd"), *GOOD[1:5])
    events = (*begun, plan_of(2, 1, "bd"), step(2, 2), step(2, 3), recovered(2, 1, redone=1, lost=1), *GOOD[8:])
    (problem,) = problems(events, (blow("a", "c"),))
    assert "a copy survived" in problem
    assert problems(events, (blow("a", "b"),)) == ()


def test_nothing_is_read_from_the_store_while_a_copy_is_left() -> None:
    events = tuple(recovered(2, 2, redone=1, store_bytes=7) if event == GOOD[7] else event for event in GOOD)
    (problem,) = problems(events, (blow("c"),))
    assert "7 bytes came from the store" in problem


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (GOOD[:-1], "ended as running"),
        ((*GOOD[:-2], GOOD[-1]), "steps are missing: [6]"),
        ((*GOOD[:6], step(1, 4), *GOOD[6:]), "step 4 of epoch 1 was done after step 2 of epoch 2"),
        (
            (*GOOD[:5], plan_of(2, 0, "ab"), *map(lambda n: step(2, n), range(1, 7)), GOOD[-1]),
            "began anew after step 3",
        ),
        ((*GOOD[:3], dataclasses.replace(step(1, 2), loss=4.6), *GOOD[4:]), "the loss of step 2 is 0.022 off"),
        ((*GOOD[:3], dataclasses.replace(step(1, 2), samples=((2, 3),)), *GOOD[4:]), "left out or fed twice"),
    ],
)
def test_what_is_wrong_is_seen(events: tuple[Event, ...], said: str) -> None:
    assert any(said in problem for problem in problems(events)), problems(events)


def test_the_last_step_must_be_stored() -> None:
    (problem,) = problems(GOOD, stored=True)
    assert "not stored" in problem


def test_an_epoch_that_another_went_back_behind_stores_nothing_more() -> None:
    def problems_with(stored: int) -> tuple[str, ...]:
        committed = CheckpointCommitted(step=stored, epoch=1, uri="", num_bytes=1, duration_s=0.1)
        return problems((*GOOD[:6], committed, *GOOD[6:]))

    assert problems_with(2) == (), "it was late, and of a step that counts"
    assert problems_with(3) == ("step 3 was stored by epoch 1 after epochs [2] began before that step",)


# --- stragglers ---


def paces(
    num: int, slow: float = 4.0, *, epoch: int = 1, of_others: float = 2.0, duration_s: float = 0.1
) -> list[Pace]:
    """Steps in which b is so many times slower than others, which take longer than predicted, too."""
    times = {"a": of_others, "b": of_others * slow, "c": of_others}
    pace = Pace(epoch=epoch, at_s=4.0, duration_s=duration_s, times=times, known=frozenset())
    return [pace] * num


def overlooked(steps: list[Pace], events: tuple[Event, ...] = GOOD) -> tuple[str, ...]:
    """Whether somebody should have found that b was slow in these steps of a blow."""
    entries = [Entry(seq=index, at_s=float(index), event=event) for index, event in enumerate(events, start=1)]
    slow = Blow(kind="straggler", moment="step", nodes=("b",), out=(), step=2, at_s=3.5, healed_at_s=5.5)
    found = judge(
        entries, model=MODEL, steps=STEPS, batch=BATCH, losses=LOSSES, blows=(slow,), stored=False, paces=steps
    )
    assert found.found == any(isinstance(event, NodeSlowed) for event in events)
    return found.problems


def test_a_node_that_is_slow_for_two_windows_must_be_found() -> None:
    (problem,) = overlooked(paces(2 * PACES.least_steps))
    assert "b was slow for 16 steps" in problem
    slowed = NodeSlowed(node="b", slowdown=4.0, reason="")
    assert overlooked(paces(2 * PACES.least_steps), (*GOOD[:4], slowed, *GOOD[4:])) == ()


@pytest.mark.parametrize(
    "steps",
    [
        paces(15),
        paces(16, duration_s=0.01),  # windows are longer
        paces(16, PACES.slow * PACES.trusted - 0.1),  # it may have been so always
        [*paces(9), *paces(9, epoch=2)],
        [*paces(9), *paces(1, 1.0), *paces(9)],
        [dataclasses.replace(pace, times={"b": 8.0}) for pace in paces(16)],  # nobody to compare it with
        [dataclasses.replace(pace, known=frozenset("ac")) for pace in paces(16)],
        [dataclasses.replace(pace, known=frozenset("b")) for pace in paces(16)],
        [dataclasses.replace(pace, at_s=6.0) for pace in paces(16)],  # healed by then
    ],
)
def test_of_less_than_that_nothing_is_asked(steps: list[Pace]) -> None:
    assert overlooked(steps) == ()


def test_a_supervisor_finds_whom_the_judge_says_it_must() -> None:
    """Also where the node has been slow from the first step of its plan on, and others were slower before."""
    for before in (paces(0), paces(7), paces(7, 0.1)):
        kept: list[Pace] = []
        watched = WatchedPaces(kept)
        watched.rules = PACES
        watched.begin()
        found = [
            finding.node
            for pace in (*before, *paces(16, PACES.slow * PACES.trusted))
            for finding in watched.add(
                {DeviceRef(node=node, index=0): times for node, times in pace.times.items()}, pace.duration_s, {}, {}
            )
        ]
        assert "b" in found
        assert [(pace.epoch, pace.times) for pace in kept[-16:]] == [(1, paces(1, 2.25)[0].times)] * 16
