"""The real supervisor over real processes that are killed, stopped and brought back."""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_cluster import SETTINGS, ProcessCluster
from supervised import WAIT_S, Supervised, assert_same_training, supervised, tiny_job
from waiting import eventually

from shoal_planner.cluster import snapshot_from_mapping
from shoal_planner.job import CheckpointSpec, LimitsSpec
from shoal_planner.plan import parse_plan
from shoal_recovery.journal import (
    CheckpointCommitted,
    CheckpointFailed,
    EvaluationDone,
    JobState,
    NodeJoined,
    NodeLost,
    RecoveryDone,
    StateChanged,
    StepDone,
    StepSkipped,
)
from shoal_workers import changer
from shoal_workers import messages as m
from shoal_workers.change import assignments, copies_of
from shoal_workers.exchange import SoloExchange
from shoal_workers.keeper import Keeper
from shoal_workers.record import JobRecord
from shoal_workers.roster import Contact
from shoal_workers.solo import RunRequest, run_rank, run_solo, solo_plan
from shoal_workers.step_reports import StepReports
from shoal_workers.wire import connect

SHAPES = {"a": ("cpu-2t", 1), "b": ("cpu-1t", 2), "c": ("cpu-1t", 1), "d": ("cpu-1t", 1)}
LITTLE_BYTES = 1 << 17


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    started = ProcessCluster(tmp_path_factory.mktemp("nodes"), SHAPES)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def whole(cluster: ProcessCluster) -> Iterator[None]:
    """What one test leaves behind, the next one does not begin with: not even where it failed halfway."""
    yield
    cluster.heal()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    return path.as_uri()


def test_steps_to_the_end(cluster: ProcessCluster, text: str) -> None:
    spec = tiny_job(text, steps=30, min_devices=4)
    with supervised(cluster, "plain", spec) as running:
        running.succeeds()
        assert_same_training(running, spec)
        assert not running.events(RecoveryDone)


def test_a_killed_rank_costs_at_most_one_step(cluster: ProcessCluster, text: str) -> None:
    """Nothing is read from the store; the others' processes live on; its node is taken in again."""
    spec = tiny_job(text, steps=80, min_devices=3)
    with supervised(cluster, "rank", spec) as running:
        running.reaches(5)
        victim = min(running.devices() - {"b"})
        known = len(running.events(RecoveryDone))
        cluster.kill_rank("rank", victim)
        done = running.recovers(known)
        assert (done.cause, done.nodes_lost) == ("node_lost", (victim,))
        assert done.lost_steps == 0
        assert done.redone_steps <= 1
        assert done.num_bytes["store"] == 0
        assert done.num_bytes["own"] > 0
        assert sum(shard.num_bytes for shard in done.shards) == done.num_bytes["node"] + done.num_bytes["peer"] > 0
        assert {shard.to.rpartition(":")[0] for shard in done.shards} <= running.devices()
        assert done.total_s >= done.detect_s + done.decide_s
        assert "closed" in running.events(NodeLost)[0].evidence
        running.succeeds()
        assert_same_training(running, spec)
        joined = [joined.node for joined in running.events(NodeJoined)]
        assert joined.count(victim) == 2
        assert sorted(set(joined)) == sorted(SHAPES)


@pytest.mark.long
def test_each_evaluation_is_told_once_although_plans_change(cluster: ProcessCluster, text: str) -> None:
    """And says what one process finds."""
    spec = tiny_job(text, steps=60, min_devices=3)
    spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, eval_every=1, eval_batches=2))
    with supervised(cluster, "evaluates", spec) as running:
        running.reaches(5)
        cluster.kill_rank("evaluates", min(running.devices() - {"b"}))
        running.recovers()
        running.succeeds()
        found = running.events(EvaluationDone)
        assert [done.step for done in found] == list(range(1, 61))
        alone = run_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=60), 0, SoloExchange())
        for done, expected in zip(found, alone.evaluations, strict=True):
            assert done.loss == pytest.approx(expected.loss, rel=1e-4)


def test_a_node_that_vanishes_in_the_middle_of_the_recovery_from_another(cluster: ProcessCluster, text: str) -> None:
    """At the end just as many devices are left as the job must have: they all take part."""
    spec = tiny_job(text, steps=120, min_devices=3)
    with supervised(cluster, "nodes", spec) as running:
        running.reaches(5)
        first = min(running.devices() - {"b"})
        sent = _sent(running)
        second = next(
            node for node in "acd" if node != first and node not in sent[first] and first not in sent.get(node, ())
        )
        cluster.kill_node(first)
        running.eventually(lambda: running.state is JobState.RECOVERING or running.events(RecoveryDone))
        cluster.kill_node(second)
        running.eventually(lambda: not running.devices() & {first, second} and running.state is JobState.RUNNING)
        running.steps_on()
        assert len(running.devices()) == 2
        assert first in {lost.node for lost in running.events(NodeLost)}
        for done in running.events(RecoveryDone):
            assert done.lost_steps == 0
            assert done.redone_steps <= 1
            assert done.num_bytes["store"] == 0
        pids = cluster.pids("nodes")
        cluster.heal()
        running.succeeds()
        assert_same_training(running, spec)
        assert len(pids) == 3


def _sent(running: Supervised) -> dict[str, set[str]]:
    """By node that has state, those to which copies of it are sent."""
    plan, snapshot = parse_plan(running.epoch.plan), snapshot_from_mapping(running.epoch.snapshot)
    found: dict[str, set[str]] = {}
    for place, copies in zip(plan.places(), copies_of(plan, snapshot, running.spec.model), strict=True):
        found.setdefault(place.device.node, set()).update(node for node, _ in copies.sent)
    return found


def test_agents_that_outlive_all_ranks_still_have_the_state(cluster: ProcessCluster, text: str) -> None:
    """The processes of an owner and of whoever keeps its copies die together: only agents of lost nodes know more."""
    spec = tiny_job(text, steps=400, min_devices=2)
    cluster.kill_node("b")
    with supervised(cluster, "agents", spec) as running:
        running.reaches(5)
        cluster.bring_back("b")
        running.eventually(lambda: "b" in {joined.node for joined in running.events(NodeJoined)})
        known = len(running.events(RecoveryDone))
        for victim in ("a", "c", "d"):
            cluster.kill_rank("agents", victim)
        done = running.recovers(known)
        assert done.lost_steps == 0
        assert done.redone_steps <= 1
        assert done.num_bytes["store"] == 0
        assert done.num_bytes["peer"] + done.num_bytes["node"] > 0
        running.steps_on()


def test_a_node_that_cannot_do_its_part_is_left_out(cluster: ProcessCluster, text: str) -> None:
    """Its agent has no room for this job. It is needed at first; others make up for it later."""
    spec = tiny_job(text, steps=40, min_devices=3)
    cluster.kill_node("b")
    cluster.memory_of("d").mkdir(parents=True, exist_ok=True)
    (cluster.memory_of("d") / "faulty").write_text("a file where the folder of the job should be")
    with supervised(cluster, "faulty", spec) as running:
        running.becomes(JobState.WAITING)
        assert "Left out: d (rank process d:0 cannot go on there" in running.reason
        (lost,) = running.events(NodeLost)
        assert lost.node == "d"
        cluster.bring_back("b")
        running.succeeds()
        assert "d" not in running.devices()
        assert_same_training(running, spec)


def test_a_fault_that_every_node_has_is_the_jobs(cluster: ProcessCluster, tmp_path: Path) -> None:
    spec = tiny_job((tmp_path / "no such text").as_uri(), steps=5, min_devices=3)
    with supervised(cluster, "everywhere", spec) as running:
        assert running.ends() is JobState.FAILED
        assert running.code == "data_broken"
        told, _, where = running.reason.partition(". The same on ")
        assert "data.uri" in told and where.endswith(".")
        running.eventually(lambda: not _kept(cluster, "everywhere"))  # no step was done: nobody needs any of it


def _kept(cluster: ProcessCluster, job: str) -> list[Path]:
    """What all nodes keep of a job in memory."""
    return [path for seen in cluster.nodes() for path in cluster.memory_of(seen.node.id).glob(f"{job}/*.slot*")]


def test_ranks_that_run_out_of_memory_say_in_the_job_where_and_for_what(
    cluster: ProcessCluster, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes have less than the plan believes: it fails, or waits for others, as they find out."""

    def with_little(**given: Any) -> tuple[m.Assign, ...]:
        return tuple(dataclasses.replace(order, memory_limit_bytes=LITTLE_BYTES) for order in assignments(**given))

    monkeypatch.setattr(changer, "assignments", with_little)
    with supervised(cluster, "large", tiny_job(text, steps=5, min_devices=3)) as running:
        running.eventually(lambda: running.state in (JobState.WAITING, JobState.FAILED))
        assert re.search(r"out of memory on [abcd]:\d in stage \d of pipeline \d \(layers \d to \d\): ", running.reason)
        assert re.search(r"make [\d.]+ MiB, and it may use 0.125 MiB; [\d.]+ MiB were predicted", running.reason)


def test_a_fault_of_the_last_node_is_not_the_end_while_others_are_away(
    cluster: ProcessCluster, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has less memory than the plan for it alone believes. What it holds is kept, and is what others go on from."""

    def with_little_alone(**given: Any) -> tuple[m.Assign, ...]:
        orders = assignments(**given)
        alone = [node.id for node in given["snapshot"].nodes] == ["c"]
        return tuple(
            dataclasses.replace(order, memory_limit_bytes=LITTLE_BYTES) if alone else order for order in orders
        )

    monkeypatch.setattr(changer, "assignments", with_little_alone)
    cluster.kill_node("b", "d")
    spec = tiny_job(text, steps=100, checkpoint=CheckpointSpec(uri=(tmp_path / "store").as_uri(), every_steps=1000))
    with supervised(cluster, "last", spec) as running:
        running.reaches(5)
        cluster.kill_node("a")
        running.becomes(JobState.WAITING)
        assert "no node is left that can be used. Left out: c (rank process c:0 cannot go on there: " in running.reason
        assert "out of memory on c:0" in running.reason
        running.eventually(lambda: running.events(CheckpointCommitted))
        cluster.heal()
        running.succeeds()
        assert "c" not in running.devices()
        assert all(done.lost_steps == 0 and done.redone_steps <= 1 for done in running.events(RecoveryDone))
        assert_same_training(running, spec)


def test_steps_that_come_out_not_finite_are_told(cluster: ProcessCluster, text: str) -> None:
    """The first update makes weights that no float can square; skipping does not help for ever."""
    spec = tiny_job(text, steps=30, min_devices=3)
    train = dataclasses.replace(spec.train, lr=1e30, warmup_steps=0, on_nan="skip")
    with supervised(cluster, "skips", dataclasses.replace(spec, train=train)) as running:
        assert running.ends() is JobState.FAILED
        assert running.code == "step_refused"
        assert "step 11 was refused: loss or gradients are not finite" in running.reason
        assert running.supervisor.ended.wait(20.0)
        assert _kept(cluster, "skips"), "nobody else has the steps before"
        assert "the first value that is not finite comes out of layer 0, on rank" in running.reason
        assert [event.step for event in running.events(StepSkipped)] == list(range(2, 11))
        assert [done.step for done in running.events(StepDone) if done.skipped] == list(range(2, 11))
        assert not running.events(RecoveryDone)


def test_a_node_of_a_type_that_nobody_knows_is_left_out(tmp_path: Path, text: str) -> None:
    odd = ProcessCluster(tmp_path, {"a": ("cpu-1t", 1), "odd": ("no such type", 1)})
    spec = tiny_job(text, steps=5)
    try:
        with supervised(odd, "odd", spec) as running:
            running.succeeds()
            assert running.devices() == {"a"}
            (began,) = [event for event in running.events(StateChanged) if event.state == "running"]
            assert began.reason.endswith("Left out: odd (its device type 'no such type' cannot be planned with).")
    finally:
        odd.close()


def test_a_state_that_is_away_is_waited_for(cluster: ProcessCluster, text: str) -> None:
    """What is left of the job holds no whole step; the nodes that do come back with what stood in their folders."""
    spec = tiny_job(text, steps=400, min_devices=2)
    cluster.kill_node("b")
    with supervised(cluster, "away", spec) as running:
        running.reaches(5)
        cluster.kill_node("a", "c", "d", wipe=False)
        cluster.bring_back("b")
        running.eventually(lambda: (running.state, running.code) == (JobState.WAITING, "state_lost"))
        assert "Waiting for nodes that have it" in running.reason
        for name in ("a", "c", "d"):
            cluster.bring_back(name)
        done = running.recovers()
        assert (done.lost_steps, done.num_bytes["store"]) == (0, 0)
        running.steps_on()


def test_a_stopped_rank_is_left_out_and_cannot_spoil_anything(cluster: ProcessCluster, text: str) -> None:
    """Its sockets stay open, so only its silence shows; when it wakes up its epoch is over."""
    spec = tiny_job(text, steps=400, min_devices=3)
    with supervised(cluster, "stopped", spec) as running:
        running.reaches(5)
        pids = cluster.pids("stopped")
        victim = min(running.devices() - {"b"})
        with cluster.stopped("stopped", victim):
            done = running.recovers()
            assert done.nodes_lost == (victim,)
            assert "silent" in running.events(NodeLost)[0].evidence
            running.steps_on(5)
            assert victim not in running.devices()
        running.eventually(lambda: [joined.node for joined in running.events(NodeJoined)].count(victim) == 2)
        running.steps_on(5)
        assert cluster.pids("stopped") == pids
        assert all(done.lost_steps == 0 and done.redone_steps <= 1 for done in running.events(RecoveryDone))
        losses, reference = running.losses(), run_solo(spec, running.step).losses
        assert all(abs(losses[step] - reference[step - 1]) < 1e-4 * reference[step - 1] for step in losses)


@pytest.mark.long
def test_a_stopped_rank_that_is_needed_is_waited_for(cluster: ProcessCluster, text: str) -> None:
    """No plan fits without it. Nobody but its own process has to be started, or lost, for the job to go on."""
    spec = tiny_job(text, steps=100, min_devices=5)
    with supervised(cluster, "needed", spec) as running:
        running.reaches(5)
        pids = cluster.pids("needed")
        with cluster.stopped("needed", "d"):
            running.becomes(JobState.WAITING)
        done = running.recovers()
        assert (done.cause, done.lost_steps, done.num_bytes["store"]) == ("node_lost", 0, 0)
        assert cluster.pids("needed") == pids
        running.succeeds()
        assert_same_training(running, spec)


def test_nodes_that_make_steps_faster_are_taken_in(
    cluster: ProcessCluster, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stop after the same step: nothing is done again. Those that come make room in memory until then."""
    rooms: dict[str, int] = {}
    send = Contact.send

    def watched(contact: Contact, message: Any) -> None:
        if isinstance(message, m.MakeRoom):
            rooms[contact.node] = message.num_bytes
        send(contact, message)

    monkeypatch.setattr(Contact, "send", watched)
    spec = tiny_job(text, steps=400)
    large = dataclasses.replace(spec.model, layers=6, hidden=128, heads=4, ffn=352)
    spec = dataclasses.replace(spec, model=large, train=dataclasses.replace(spec.train, seq_len=64, global_batch=8))
    cluster.kill_node("b", "c", "d")
    with supervised(cluster, "grows", spec) as running:
        running.reaches(3)
        assert running.devices() == {"a"}
        cluster.heal()
        done = running.recovers()
        assert (done.cause, done.redone_steps, done.lost_steps) == ("node_joined", 0, 0)
        assert running.devices() - {"a"}
        assert done.nodes_joined
        assert rooms and "a" not in rooms
        running.steps_on()
        losses, reference = running.losses(), run_solo(spec, running.step).losses
        assert all(abs(losses[step] - reference[step - 1]) < 1e-4 * reference[step - 1] for step in losses)


def test_all_nodes_lost_and_back_again(cluster: ProcessCluster, text: str, tmp_path: Path) -> None:
    """The state comes from the object store, of the newest step that stands there."""
    store = CheckpointSpec(uri=(tmp_path / "store").as_uri(), every_steps=5, keep=2)
    spec = tiny_job(text, steps=60, min_devices=3, checkpoint=store)
    with supervised(cluster, "all", spec) as running:
        running.eventually(lambda: any(done.step >= 10 for done in running.events(CheckpointCommitted)))
        cluster.kill_node(*SHAPES)
        running.becomes(JobState.WAITING)
        cluster.heal()
        done = running.recovers()
        stored = [event.step for event in running.events_before(done) if isinstance(event, CheckpointCommitted)]
        assert done.step == max(stored)
        assert done.num_bytes["store"] > 0
        assert done.num_bytes["node"] == done.num_bytes["peer"] == 0
        running.succeeds()
        assert_same_training(running, spec)
        assert running.events(CheckpointCommitted)[-1].step == 60


def test_a_job_that_has_to_wait_brings_its_newest_state_to_the_store(
    cluster: ProcessCluster, text: str, tmp_path: Path
) -> None:
    store = CheckpointSpec(uri=(tmp_path / "store").as_uri(), every_steps=1000)
    spec = tiny_job(text, steps=60, min_devices=5, checkpoint=store)
    with supervised(cluster, "waits", spec) as running:
        running.reaches(5)
        cluster.kill_node("d")
        running.becomes(JobState.WAITING)
        assert "min_devices" in running.reason or "5" in running.reason
        running.eventually(lambda: running.events(CheckpointCommitted))
        pushed = running.events(CheckpointCommitted)[0].step
        assert running.step - 1 <= pushed <= running.step
        cluster.kill_node("a", "b", "c")
        cluster.heal()
        done = running.recovers()
        assert (done.step, done.lost_steps) == (pushed, 0)
        assert done.num_bytes["store"] > 0
        running.succeeds()
        assert_same_training(running, spec)


def test_a_new_supervisor_adopts_what_runs(cluster: ProcessCluster, text: str) -> None:
    spec = tiny_job(text, steps=400, min_devices=3)
    with supervised(cluster, "adopted", spec) as first:
        first.reaches(5)
        first.vanish()
        seen, epoch, pids = first.step, first.epoch.epoch, cluster.pids("adopted")
        second = Supervised(cluster, "adopted", spec, restarted=True)
        second.reaches(seen + 5)
        assert cluster.pids("adopted") == pids
        assert second.epoch.epoch == epoch
        assert not second.events(RecoveryDone)
        assert sorted(second.losses()) == list(range(1, second.step + 1)), "a step was not written down"
        assert len(second.events(NodeJoined)) == len(SHAPES)
        second.supervisor.cancel()
        assert second.ends() is JobState.CANCELLED
        assert not cluster.pids("adopted")


def test_epochs_grow_although_the_head_lost_its_memory(cluster: ProcessCluster, text: str) -> None:
    """And the journal with it: only agents know which epoch was the last."""
    spec = tiny_job(text, steps=400, min_devices=3)
    cluster.forget_epochs("headless", 6)
    with supervised(cluster, "headless", spec) as first:
        first.reaches(5)
        assert first.epoch.epoch == 7
        first.vanish()
        cluster.end_ranks("headless")
        cluster.forget_epochs("headless")
        second = Supervised(cluster, "headless", spec)
        second.reaches(first.step)
        assert second.epoch.epoch == 8
        second.supervisor.cancel()
        assert second.ends() is JobState.CANCELLED


def test_ranks_that_are_ahead_are_not_watched_but_led(cluster: ProcessCluster, text: str) -> None:
    """A supervisor died after it had halted them, and before a word of it was written."""
    spec = tiny_job(text, steps=400, min_devices=3)
    with supervised(cluster, "ahead", spec) as first:
        first.reaches(5)
        first.vanish()
        for contact in cluster.addresses("ahead"):
            connection = connect(contact)
            connection.send(m.encode(m.Watch(job="ahead", after_step=0)))
            connection.send(m.encode(m.Halt(epoch=9)))
            while not isinstance(m.decode(connection.receive()[0]), m.Halted):
                pass
            connection.close()
        second = Supervised(cluster, "ahead", spec, restarted=True)
        done = second.recovers()
        assert (done.cause, done.epoch, done.lost_steps) == ("group_broken", 10, 0)
        assert "for epoch 9" in done.reason
        second.steps_on()
        second.supervisor.cancel()
        assert second.ends() is JobState.CANCELLED


def test_a_step_that_is_done_again_while_nobody_watches_is_written_down(cluster: ProcessCluster, text: str) -> None:
    """The journal ends with a plan that begins behind the last step that was done before."""
    spec = tiny_job(text, steps=400, min_devices=3)
    with supervised(cluster, "redone", spec) as first:
        first.reaches(5)
        first.vanish()
        done, adopted = first.step, first.epoch
        redone = dataclasses.replace(adopted, epoch=adopted.epoch + 1, step=done - 1)
        record = JobRecord(Keeper("redone", time.time), time.monotonic)
        for event in [*(entry.event for entry in first.supervisor.entries_after(0, 0.0)), redone]:
            record.append(event)
        first.supervisor._changer._record = record
        first.supervisor._changer.adopt()
        epoch = first.supervisor._changer.epoch
        assert epoch is not None
        assert (epoch.number, epoch.last_step) == (redone.epoch, done - 1)
        record.keeper.close()


def test_a_recovery_with_nothing_left_to_do_is_over_too(cluster: ProcessCluster, text: str) -> None:
    """All steps are done when a rank is lost: the new epoch begins at the end."""
    spec = tiny_job(text, steps=12, min_devices=3)
    with supervised(cluster, "nothing", spec) as running:
        deaf = running.supervisor._hear_message

        def hear(contact: Contact, message: object) -> None:
            epoch = running.supervisor._changer.epoch
            if isinstance(message, m.Left) and epoch is not None and message.epoch == 1:
                message = m.Trouble(epoch=message.epoch, problem="lost at the very end", fatal=False)
            deaf(contact, message)

        running.supervisor._hear_message = hear  # type: ignore[method-assign]
        running.succeeds()
        (done,) = running.events(RecoveryDone)
        assert (done.cause, done.step, done.redone_steps, done.lost_steps) == ("group_broken", 12, 0, 0)
        assert_same_training(running, spec)


def test_a_supervisor_that_comes_after_a_death_finds_it_out(cluster: ProcessCluster, text: str) -> None:
    """The only rank died while nobody watched: its new process is connected and well, and knows of nothing."""
    spec = dataclasses.replace(tiny_job(text, steps=400), limits=LimitsSpec(device_types=("cpu-2t",)))
    with supervised(cluster, "unseen", spec) as first:
        first.reaches(5)
        first.vanish()
        cluster.kill_rank("unseen", "a", 0)
        second = Supervised(cluster, "unseen", spec, restarted=True)
        done = second.recovers()
        assert done.lost_steps == 0
        assert done.redone_steps <= 1
        second.steps_on()
        second.supervisor.cancel()
        assert second.ends() is JobState.CANCELLED


def test_steps_that_nobody_heard_of_are_told_by_the_nodes_that_have_them(cluster: ProcessCluster, text: str) -> None:
    """Done while nobody watched, by ranks that are all dead by the time somebody does."""
    spec = tiny_job(text, steps=160, min_devices=3)
    spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, eval_every=2, eval_batches=1))
    with supervised(cluster, "unheard", spec) as first:
        first.reaches(5)
        first.vanish()
        heard, kept = first.step, cluster.memory_of(min(first.devices()))
        eventually(lambda: StepReports(kept).after("unheard", first.epoch.epoch, heard + 3), WAIT_S)
        cluster.kill_node(*SHAPES, wipe=False)
        for name in SHAPES:
            cluster.bring_back(name)
        second = Supervised(cluster, "unheard", spec, restarted=True)
        done = second.recovers()
        assert done.step > heard + 1
        second.succeeds()
        assert_same_training(second, spec)
        assert [said.step for said in second.events(EvaluationDone)] == list(range(2, spec.train.steps + 1, 2))


def test_a_job_that_no_plan_fits_waits_and_says_why(cluster: ProcessCluster, text: str) -> None:
    spec = tiny_job(text, steps=5, min_devices=6)
    with supervised(cluster, "large", spec) as running:
        running.becomes(JobState.WAITING)
        assert "limits.min_devices is 6" in running.reason
        running.supervisor.cancel()
        assert running.ends() is JobState.CANCELLED


def test_a_store_that_cannot_be_written_stops_no_training(cluster: ProcessCluster, text: str, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    store = CheckpointSpec(uri=(tmp_path / "store").as_uri(), every_steps=4)
    spec = tiny_job(text, steps=10, min_devices=2, checkpoint=store)
    with supervised(
        cluster, "unwritable", spec, settings=SETTINGS.model_copy(update={"last_step_wait_s": 2.0})
    ) as running:
        assert running.ends() is JobState.FAILED
        assert running.code == "last_step_not_stored"
        assert f"step 10, the last one, could not be brought to {store.uri} (" in running.reason
        assert_same_training(running, spec)
        assert {failed.step for failed in running.events(CheckpointFailed)} == {4, 8, 10}
        assert all(failed.problem for failed in running.events(CheckpointFailed))
