"""A rank process under orders: what it answers, what it keeps when an epoch is interrupted, whom it speaks to."""

from __future__ import annotations

import argparse
import dataclasses
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from agents import RunningAgent, running_agents
from data_ground import documents, write_jsonl
from engine_runs import hosting, on_nodes
from process_cluster import SETTINGS
from supervised import tiny_job
from waiting import eventually

from shoal_planner.job import CheckpointSpec, JobSpec, job_to_mapping
from shoal_planner.plan import Plan, plan_to_mapping
from shoal_recovery.journal import EvaluationDone
from shoal_recovery.restore import plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import OWNED_KINDS, Inventory, Kind, Live, ShardKey, Tier, Transfer
from shoal_recovery.store_directory import DirectoryStore
from shoal_workers import arrivals, epoch_run
from shoal_workers import messages as m
from shoal_workers import rank as rank_module
from shoal_workers.data import samples_of, training_samples
from shoal_workers.data_marks import DataMarks
from shoal_workers.exchange import SoloExchange
from shoal_workers.greeting import epoch_pass
from shoal_workers.live import WEIGHTS
from shoal_workers.parts import in_parts
from shoal_workers.rank import Rank
from shoal_workers.rows import Row, transfer_rows
from shoal_workers.shortage import readable
from shoal_workers.solo import RunRequest, run_rank, run_solo, solo_plan
from shoal_workers.wire import Connection, ConnectionClosed, connect

M = TypeVar("M")
STEPS = 6


class Voice:
    """One connection to a rank."""

    def __init__(self, rank: Rank, after_step: int = 0) -> None:
        self.num_progress = 0
        self.connection: Connection = connect(("127.0.0.1", rank.port))
        self.connection.set_timeout(20.0)
        self.say(m.Watch(job="job", after_step=after_step))

    def say(self, message: Any) -> None:
        self.connection.send(m.encode(message))

    def next(self) -> Any:
        """Whatever is said next, but for heartbeats and progress."""
        while isinstance(message := m.decode(self.connection.receive()[0]), m.Heartbeat | m.Progress):
            self.num_progress += isinstance(message, m.Progress)
        return message

    def until(self, kind: type[M]) -> M:
        while not isinstance(message := self.next(), kind):
            pass
        return message


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    settings = SETTINGS.model_copy(update={"disk_dir": tmp_path / "disk"})
    started = Rank(node="n0", index=0, settings=settings)
    started.start()
    yield started
    started._server.close()
    started._end_run()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    with running_agents(tmp_path, "n0") as (started,):
        yield started


@pytest.fixture
def spec() -> JobSpec:
    return tiny_job(Path(argparse.__file__).as_uri(), steps=STEPS)


def test_a_rank_has_its_data_open_before_it_takes_part(rank: Rank, spec: JobSpec, tmp_path: Path) -> None:
    """What is wrong with them is told when they are needed, as it is of a rank that was not prepared."""
    nowhere = dataclasses.replace(spec, data=dataclasses.replace(spec.data, uri=(tmp_path / "none.txt").as_uri()))
    for job in (spec, nowhere):
        samples_of.cache_clear()
        voice = Voice(rank)
        assert isinstance(voice.next(), m.Hello)
        voice.say(m.Prepare(spec=job_to_mapping(job)))
        assert voice.next() == m.Prepared()
        assert samples_of.cache_info().currsize == (job is spec)
        voice.connection.close()


def test_a_rank_makes_room_until_an_epoch_needs_it(rank: Rank, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: queue.SimpleQueue[tuple[int, Callable[[], bool]]] = queue.SimpleQueue()
    monkeypatch.setattr(rank_module, "make_room", lambda num_bytes, wanted: asked.put((num_bytes, wanted)))
    voice = Voice(rank)
    assert isinstance(voice.next(), m.Hello)
    voice.say(m.MakeRoom(num_bytes=1 << 20))
    num_bytes, wanted = asked.get(timeout=20)
    assert num_bytes == 1 << 20 and wanted()
    halt(voice, 1)
    assert not wanted()
    voice.connection.close()


@pytest.fixture
def voices(rank: Rank) -> Iterator[list[Voice]]:
    opened: list[Voice] = []
    yield opened
    for voice in opened:
        voice.connection.close()


@pytest.fixture
def voice(rank: Rank, voices: list[Voice]) -> Voice:
    voices.append(Voice(rank))
    assert voices[0].until(m.Hello).epoch == 0
    return voices[0]


def assign(
    spec: JobSpec,
    agent: RunningAgent,
    *,
    epoch: int = 1,
    step: int = 0,
    evaluated: bool = False,
    transfers: list[Row] | None = None,
    backups: tuple[tuple[str, int], ...] = (),
    others: dict[str, tuple[str, int]] | None = None,
    files: list[Row] | None = None,
) -> m.Assign:
    addresses = {"n0": agent.address, **(others or {})}
    return m.Assign(
        epoch=epoch,
        job="job",
        spec=job_to_mapping(spec),
        plan=plan_to_mapping(on_n0(spec)),
        rank=0,
        step=step,
        evaluated=evaluated,
        transfers=transfers,
        agents={node: list(address) for node, address in addresses.items()},
        rendezvous=list(agent.address),
        backups=[["elsewhere", *address] for address in backups],
        zones={},
        memory_limit_bytes=None,
        host_limit_bytes=None,
        num_threads=1,
        accelerated=False,
        token=epoch_pass("job", epoch).token.hex(),
        files=files or [],
    )


def on_n0(spec: JobSpec) -> Plan:
    plan = solo_plan(spec)
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    replica = dataclasses.replace(stage.replicas[0], node="n0")
    stage = dataclasses.replace(stage, replicas=(replica,))
    return dataclasses.replace(plan, pipelines=(dataclasses.replace(pipeline, stages=(stage,)),))


def halt(voice: Voice, epoch: int) -> m.Halted:
    voice.say(m.Halt(epoch=epoch))
    halted = voice.until(m.Halted)
    assert halted.epoch == epoch
    return halted


def test_it_steps_on_its_own_to_the_end(voice: Voice, agent: RunningAgent, spec: JobSpec) -> None:
    assert halt(voice, 1) == m.Halted(epoch=1, step=None, layout_epoch=0, layout_rank=0)
    voice.say(assign(spec, agent))
    assert voice.next().epoch == 1
    losses = []
    while isinstance(message := voice.next(), m.Stepped):
        losses.append(message.loss)
    assert message == m.Left(epoch=1, step=STEPS, finished=True)
    assert losses == pytest.approx(run_solo(spec, STEPS).losses, rel=1e-6)
    assert agent.held() == [("000001-0", STEPS - 1), ("000001-0", STEPS)]
    assert halt(voice, 2) == m.Halted(epoch=2, step=STEPS, layout_epoch=1, layout_rank=0)


def of_documents(spec: JobSpec, folder: Path, **source: Any) -> JobSpec:
    data = dataclasses.replace(write_jsonl(folder, documents()), **source)
    return dataclasses.replace(spec, data=data)


def test_it_tells_where_samples_begin_and_goes_on_from_there(
    voice: Voice, agent: RunningAgent, spec: JobSpec, tmp_path: Path
) -> None:
    reading = of_documents(spec, tmp_path / "data")
    halt(voice, 1)
    voice.say(assign(reading, agent))
    marks, losses = DataMarks(), []
    for step in range(1, STEPS + 1):
        told = voice.until(m.Stepped)
        marks.hear(step, told.marks)
        assert marks.hear_files(told.files) is None
        assert bool(told.files) == (step == 1)
        losses.append(told.loss)
    assert losses == pytest.approx(run_solo(reading, STEPS).losses, rel=1e-6)
    samples = training_samples(reading)
    samples.learn(marks.at(STEPS))
    first = STEPS * spec.train.global_batch
    wanted = training_samples(reading).read(range(first + 8))[first:]
    assert torch.equal(samples.read(range(first, first + 8)), wanted)


def test_broken_data_ends_the_job_and_is_named(
    voice: Voice, agent: RunningAgent, spec: JobSpec, tmp_path: Path
) -> None:
    reading = of_documents(spec, tmp_path / "data")
    for name in ("a", "b"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"text": "cut\n' * 100)
    halt(voice, 1)
    voice.say(assign(reading, agent))
    trouble = voice.until(m.Trouble)
    assert (trouble.fatal, trouble.code) == (True, "data_broken")
    assert ".jsonl line " in trouble.problem
    assert "is no JSON" in trouble.problem


@pytest.mark.filterwarnings("ignore")  # torch warns of what it does itself when it compiles
@pytest.mark.long
def test_it_compiles_before_it_is_ready(voice: Voice, agent: RunningAgent, spec: JobSpec) -> None:
    compiling = dataclasses.replace(spec, train=dataclasses.replace(spec.train, compile=True))
    halt(voice, 1)
    voice.say(assign(compiling, agent))
    assert voice.until(m.Ready).step == 0
    assert voice.until(m.Stepped).loss == pytest.approx(run_solo(spec, 1).losses[0], rel=1e-5)
    assert voice.until(m.Left).finished


def test_out_of_memory_says_where_how_much_for_what_and_what_was_believed(
    voice: Voice, agent: RunningAgent, spec: JobSpec
) -> None:
    run = run_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=1), 0, SoloExchange())
    order = dataclasses.replace(assign(spec, agent), memory_limit_bytes=run.peak_bytes - 1)
    order.plan["predicted"] = {"memory_bytes": {"n0:0": float(2**20)}}
    halt(voice, 1)
    voice.say(order)
    trouble = voice.until(m.Trouble)
    assert (trouble.local, trouble.fatal) == (True, False)
    assert trouble.problem.startswith("out of memory on n0:0 in stage 0 of pipeline 0 (layers 0 to 3): ")
    assert " MiB for activations, beside " in trouble.problem
    assert "(activations " in trouble.problem
    assert f"weights {readable(run.breakdown[WEIGHTS])}" in trouble.problem
    assert f"make {readable(run.peak_bytes)}, and it may use {readable(run.peak_bytes - 1)}" in trouble.problem
    assert trouble.problem.endswith("; 1.000 MiB were predicted for this device")


def test_out_of_memory_on_the_host_is_told_apart(voice: Voice, agent: RunningAgent, spec: JobSpec) -> None:
    plan = hosting(solo_plan(spec), (1, 3))
    run = run_rank(RunRequest(job=spec, plan=plan, until_step=0), 0, SoloExchange())
    limit_bytes = sum(run.host_breakdown.values()) - 1
    order = dataclasses.replace(assign(spec, agent), host_limit_bytes=limit_bytes)
    mapping = plan_to_mapping(on_nodes(plan, "n0")) | {"predicted": {"host_bytes": {"n0:0": float(2**19)}}}
    halt(voice, 1)
    voice.say(dataclasses.replace(order, plan=mapping))
    problem = voice.until(m.Trouble).problem
    assert problem.startswith("out of memory on the host of n0:0 in stage 0 of pipeline 0 (layers 0 to 3): ")
    assert f"make {readable(limit_bytes + 1)}, and it may use {readable(limit_bytes)}" in problem
    assert problem.endswith("; 0.500 MiB were predicted for its rank")


def test_whoever_comes_later_hears_what_it_missed(
    voice: Voice, voices: list[Voice], rank: Rank, agent: RunningAgent, spec: JobSpec
) -> None:
    halt(voice, 1)
    voice.say(assign(spec, agent))
    left = voice.until(m.Left)
    voices.append(Voice(rank, after_step=2))
    assert voices[1].until(m.Hello).epoch == 1
    assert [voices[1].next().step for _ in range(3, STEPS + 1)] == [3, 4, 5, 6]
    assert voices[1].next() == left


def test_a_connection_that_is_served_late_takes_nothing_from_the_others(voices: list[Voice], rank: Rank) -> None:
    """As when a rank was too busy to answer, was given up, and was connected to once more."""
    voices += [Voice(rank), Voice(rank)]
    for each in voices:
        each.until(m.Hello)
    late = voices.pop()
    late.connection.close()
    assert halt(voices[0], 3).epoch == 3


def test_evaluations_are_told_and_heard_by_whoever_comes_later(
    voice: Voice, voices: list[Voice], rank: Rank, agent: RunningAgent, spec: JobSpec
) -> None:
    """One who knows of a step may not know of its evaluation, which comes after."""
    spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, eval_every=2, eval_batches=1))
    halt(voice, 1)
    voice.say(assign(spec, agent))
    voice.until(m.Ready)
    told = [voice.next() for _ in range(STEPS + 3)]
    found = [message for message in told if isinstance(message, EvaluationDone)]
    assert [type(message) is EvaluationDone for message in told] == [False, False, True] * 3
    assert [(message.epoch, message.step, message.tokens) for message in found] == [(1, 2, 64), (1, 4, 64), (1, 6, 64)]
    assert isinstance(voice.next(), m.Left)
    voices.append(Voice(rank, after_step=4))
    voices[1].until(m.Hello)
    assert [voices[1].next() for _ in range(4)] == told[5:]
    for epoch, evaluated in ((2, True), (3, False)):
        halt(voice, epoch)
        voice.say(assign(spec, agent, epoch=epoch, step=STEPS, evaluated=evaluated, transfers=_restore(spec)))
        voice.until(m.Ready)
        again = voice.next()
        assert isinstance(again, m.Left if evaluated else EvaluationDone)
        if isinstance(again, EvaluationDone):
            assert again == dataclasses.replace(found[-1], epoch=epoch, duration_s=again.duration_s)
            assert isinstance(voice.next(), m.Left)


def test_orders_of_older_epochs_are_ignored(voice: Voice, agent: RunningAgent, spec: JobSpec) -> None:
    halt(voice, 4)
    voice.say(m.Halt(epoch=3))
    voice.say(m.Halt(epoch=4))
    voice.say(assign(spec, agent, epoch=3))
    voice.say(m.StopAfter(epoch=3, step=1))
    voice.say(m.Halt(epoch=5))
    assert voice.next() == m.Halted(epoch=5, step=None, layout_epoch=0, layout_rank=0)
    assert agent.held() == []


def test_a_slow_end_of_one_epoch_does_not_bring_it_back(
    voice: Voice, voices: list[Voice], rank: Rank, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two supervisors give orders; the older one's takes so long that the newer one's epoch steps already."""
    spec = tiny_job(Path(argparse.__file__).as_uri(), steps=10_000)
    halt(voice, 1)
    voice.say(assign(spec, agent))
    voice.until(m.Stepped)
    voices.append(Voice(rank))
    run = rank._run
    assert run is not None
    joins, may_go_on = threading.Event(), threading.Event()
    join = run.join

    def slow_join(timeout_s: float) -> bool:
        if not joins.is_set():
            joins.set()
            may_go_on.wait(20.0)
        return join(timeout_s)

    monkeypatch.setattr(run, "join", slow_join)
    voice.say(m.Halt(epoch=5))
    assert joins.wait(20.0)
    halted = halt(voices[1], 6)
    assert (halted.layout_epoch, halted.layout_rank) == (1, 0)
    voices[1].say(assign(spec, agent, epoch=6))
    assert voices[1].until(m.Ready).epoch == 6
    may_go_on.set()
    voice.say(m.StopAfter(epoch=6, step=3))  # obeyed after the slow order, on the same connection
    heard = []
    while not isinstance(message := voice.next(), m.Left):
        heard.append(message)
    assert message.epoch == 6
    assert not [each for each in heard if isinstance(each, m.Halted) and each.epoch == 5]
    assert halt(voice, 7).layout_epoch == 6


def test_it_stops_after_the_step_it_is_told(voice: Voice, agent: RunningAgent) -> None:
    spec = tiny_job(Path(argparse.__file__).as_uri(), steps=10_000)
    halt(voice, 1)
    voice.say(assign(spec, agent))
    step = voice.until(m.Stepped).step
    voice.say(m.StopAfter(epoch=1, step=step + 1))
    left = voice.until(m.Left)
    assert not left.finished
    assert left.step > step
    assert ("000001-0", left.step) in agent.held()


def test_a_step_that_cannot_be_made_safe_is_told(voice: Voice, agent: RunningAgent, spec: JobSpec) -> None:
    """Nobody died, and yet no vote is possible: the supervisor has to hear of it."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = ("127.0.0.1", closed.getsockname()[1])
    halt(voice, 1)
    voice.say(assign(spec, agent, backups=(address,)))
    trouble = voice.until(m.Trouble)
    assert not trouble.fatal
    assert "bringing step 0 to safety" in trouble.problem
    assert halt(voice, 2) == m.Halted(epoch=2, step=0, layout_epoch=1, layout_rank=0)


def test_a_fault_that_is_no_peers_is_told_as_its_own(voice: Voice, agent: RunningAgent, tmp_path: Path) -> None:
    """Another node may have what this one lacks."""
    halt(voice, 1)
    voice.say(assign(tiny_job((tmp_path / "no such text").as_uri(), steps=1), agent))
    trouble = voice.until(m.Trouble)
    assert (trouble.fatal, trouble.local) == (False, True)
    assert "data.uri" in trouble.problem


def test_an_agent_that_has_no_room_is_a_fault_of_the_node(voice: Voice, agent: RunningAgent, spec: JobSpec) -> None:
    (agent.memory_dir / "job").write_text("a file where the folder of the job should be")
    halt(voice, 1)
    voice.say(assign(spec, agent))
    trouble = voice.until(m.Trouble)
    assert (trouble.fatal, trouble.local) == (False, True)


def test_an_interrupted_restore_leaves_the_state_of_before(voice: Voice, agent: RunningAgent, spec: JobSpec) -> None:
    """Its source accepts and never answers. What the rank came from stands as it was, and is used in the end."""
    halt(voice, 1)
    voice.say(assign(spec, agent))
    voice.until(m.Left)
    assert halt(voice, 2).step == STEPS
    half = _restore(spec, weights_from="silent")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = ("127.0.0.1", silent.getsockname()[1])
        voice.say(assign(spec, agent, epoch=2, step=STEPS, transfers=half, others={"silent": address}))
        accepted, _ = silent.accept()
        with accepted:
            assert halt(voice, 3) == m.Halted(epoch=3, step=STEPS, layout_epoch=1, layout_rank=0)
    voice.say(assign(spec, agent, epoch=3, step=STEPS, transfers=_restore(spec)))
    ready = voice.until(m.Ready)
    assert ready.num_bytes["own"] > 0
    assert ready.num_bytes["peer"] == 0
    assert voice.until(m.Left).step == STEPS
    assert halt(voice, 4) == m.Halted(epoch=4, step=STEPS, layout_epoch=3, layout_rank=0)


class _Stuck(DirectoryStore):
    """Answers nobody until it `may_answer`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_answer = threading.Event()
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read_into(self, name: str, offset: int, places: Sequence[memoryview]) -> None:
        self.asked.put(name)
        self.may_answer.wait(20.0)


def test_a_restore_that_does_not_end_leaves_the_state_of_before_and_reads_no_more(
    voice: Voice, rank: Rank, agent: RunningAgent, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is slow cannot be hung up on as an agent can. What is not asked for yet is not wanted any more."""
    store = _Stuck(tmp_path)
    monkeypatch.setattr(epoch_run, "open_store", lambda uri: store)
    monkeypatch.setattr("shoal_workers.rank._JOIN_S", 0.1)
    spec = dataclasses.replace(spec, checkpoint=CheckpointSpec(uri=(tmp_path / "store").as_uri(), every_steps=1000))
    halt(voice, 1)
    voice.say(assign(spec, agent))
    voice.until(m.Left)
    halt(voice, 2)
    half = _restore(spec, weights_from="store")
    voice.say(assign(spec, agent, epoch=2, step=STEPS, transfers=half))
    asked = [store.asked.get(timeout=20.0) for _ in range(4)]  # as many as are read side by side
    stuck = rank._run
    assert stuck is not None
    assert halt(voice, 3) == m.Halted(epoch=3, step=STEPS, layout_epoch=1, layout_rank=0)
    voice.say(assign(spec, agent, epoch=3, step=STEPS, transfers=_restore(spec)))
    assert voice.until(m.Ready).num_bytes["own"] > 0
    store.may_answer.set()
    eventually(lambda: not stuck.alive)
    assert len(asked) < len({row[8] for row in half if row[5] == "store"})
    assert store.asked.empty()
    assert voice.until(m.Left).step == STEPS
    assert halt(voice, 4) == m.Halted(epoch=4, step=STEPS, layout_epoch=3, layout_rank=0)


def test_a_long_restore_tells_of_its_progress(
    voice: Voice, agent: RunningAgent, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    halt(voice, 1)
    voice.say(assign(spec, agent))
    voice.until(m.Left)
    halt(voice, 2)
    monkeypatch.setattr(epoch_run, "in_parts", partial(in_parts, part_bytes=1))
    before, rows = voice.num_progress, _restore(spec)
    voice.say(assign(spec, agent, epoch=2, step=STEPS, transfers=rows))
    ready = voice.until(m.Ready)
    assert voice.num_progress - before == len(rows) + 2
    assert ready.num_bytes["own"] > 0
    assert halt(voice, 3).step == STEPS


def test_a_rank_tells_that_bytes_of_its_state_come(
    voice: Voice, agent: RunningAgent, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a part, too: a source may be slow."""
    halt(voice, 1)
    voice.say(assign(spec, agent))
    voice.until(m.Left)
    halt(voice, 2)
    monkeypatch.setattr(arrivals, "_TELL_S", 0.0)
    held = Inventory(snapshots=agent.inventory())
    restore = plan_restore(shard_map(on_n0(spec), spec.model), held, (), spec.model, "fp32")
    before, rows = voice.num_progress, transfer_rows(restore.transfers)
    assert restore.step == STEPS
    voice.say(assign(spec, agent, epoch=2, step=STEPS, transfers=rows))
    assert voice.until(m.Ready).num_bytes["node"] > 0
    assert voice.num_progress - before > len(rows) / 2


def test_parts_take_from_all_sources_and_make_weights_last() -> None:
    def transfer(node: str | None, num_bytes: int) -> Transfer:
        kind, tier = (Kind.MASTER, Tier.PEER) if node else (Kind.WEIGHT, Tier.OWN)
        key = ShardKey(fqn="w", kind=kind, first=0, last=num_bytes)
        return Transfer(rank=0, key=key, source_kind=Kind.MASTER, tier=tier, num_bytes=num_bytes, node=node, name=node)

    made = [transfer(None, 1), *(transfer("a", 10) for _ in range(4)), *(transfer("b", 10) for _ in range(4))]
    parts = list(in_parts(made, part_bytes=40))
    assert [[each.node for each in part] for part in parts] == [["a", "b", "a", "b"], ["a", "b", "a", "b"], [None]]
    assert list(in_parts([])) == [()]


def _restore(spec: JobSpec, weights_from: str | None = None) -> list[Row]:
    """All from its own memory, but for the master weights, if another node, or the store, is named."""
    shards = shard_map(on_n0(spec), spec.model)
    (state,) = shards.ranks
    keys = tuple(span.key(kind) for span in state.owns for kind in (*OWNED_KINDS, Kind.WEIGHT))
    live = Live(device=state.device, step=STEPS, keys=keys)
    plan = plan_restore(shards, Inventory(live=(live,)), (), spec.model, "fp32")
    rows = transfer_rows(plan.transfers)
    for row in rows:
        if weights_from == "store" and row[1] == "master":
            row[5], row[8] = "store", f"object-of-{row[0]}"
        elif weights_from is not None and row[1] == "master":
            row[5], row[7], row[8] = "peer", weights_from, "000001-0"
    return rows


@pytest.mark.parametrize("or_end", [True, False])
def test_a_process_whose_epoch_does_not_end_ends_where_that_was_ordered(
    voice: Voice, rank: Rank, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch, *, or_end: bool
) -> None:
    spec = tiny_job(Path(argparse.__file__).as_uri(), steps=10_000)
    halt(voice, 1)
    voice.say(assign(spec, agent))
    voice.until(m.Stepped)
    assert rank._run is not None
    monkeypatch.setattr(rank._run, "join", lambda timeout_s: False)
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def end(code: int) -> None:
        codes.put(code)
        raise ConnectionClosed("the process ended")

    monkeypatch.setattr("shoal_workers.rank.os._exit", end)
    voice.say(m.Halt(epoch=2, or_end=or_end))
    if or_end:
        assert codes.get(timeout=20.0) == 1
    else:
        assert voice.until(m.Halted).step is None, "it may still write into that state"
        assert codes.empty()


def test_data_that_changed_is_the_trouble_of_the_node_that_sees_it(
    voice: Voice, agent: RunningAgent, spec: JobSpec, tmp_path: Path
) -> None:
    reading = of_documents(spec, tmp_path / "data")
    began = samples_of(reading).files
    (tmp_path / "data" / "c.jsonl").write_text('{"text": "new"}')
    halt(voice, 1)
    voice.say(assign(reading, agent, files=began))
    trouble = voice.until(m.Trouble)
    assert (trouble.fatal, trouble.local, trouble.code) == (False, True, "data_broken")
    assert trouble.problem.startswith(f"{reading.data.uri} c.jsonl: 3 files of ")
    assert trouble.problem.endswith("this one is new")
    halt(voice, 2)
    voice.say(assign(reading, agent, epoch=2))
    assert voice.until(m.Stepped).files != began


def test_a_job_that_has_begun_with_what_none_begins_with_any_more_goes_on(
    voice: Voice, agent: RunningAgent, spec: JobSpec, tmp_path: Path
) -> None:
    reading = of_documents(spec, tmp_path / "data")
    (tmp_path / "data" / "a.jsonl").rename(tmp_path / "data" / "train.jsonl")
    (tmp_path / "data" / "b.jsonl").rename(tmp_path / "data" / "val.jsonl")
    halt(voice, 1)
    voice.say(assign(reading, agent))
    trouble = voice.until(m.Trouble)
    assert "has what is to be trained on (train.jsonl) beside what is to be evaluated on (val.jsonl)" in trouble.problem
    halt(voice, 2)
    voice.say(assign(reading, agent, epoch=2, files=samples_of(reading).files))
    assert voice.until(m.Stepped).step == 1
