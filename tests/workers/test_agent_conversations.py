"""What an agent answers: snapshots with copies on other nodes, ranges, journals, uploads, the meeting place."""

from __future__ import annotations

import json
import socket
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.numpy
from agents import RunningAgent, next_report, next_word, open_slots, running_agents, start_agent, watch, write_snapshot

from shoal_recovery.errors import StoreError, StoreUnreachable
from shoal_recovery.journal import NodeLost, StepDone
from shoal_recovery.state import OWNED_KINDS, Kind, ShardKey
from shoal_recovery.store import Store, open_store
from shoal_workers import messages as m
from shoal_workers.keeper import Copy, Keeper, read_journals
from shoal_workers.roster import ask
from shoal_workers.rows import stored_from_rows
from shoal_workers.wire import Connection, ConnectionClosed

LAYOUT = tuple(ShardKey(fqn="w", kind=kind, first=0, last=50) for kind in OWNED_KINDS)
NAME = "000001-0"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RunningAgent, RunningAgent]]:
    with running_agents(tmp_path, "n0", "n1") as (first, second):
        yield first, second


def step_done(step: int) -> StepDone:
    return StepDone(epoch=1, step=step, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, duration_s=0.1, samples=())


def seal(step: int) -> m.SealSnapshot:
    return m.SealSnapshot(job="job", name=NAME, step=step)


def test_a_seal_is_answered_when_the_copy_stands_on_the_other_node(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, second = pair
    content = write_snapshot(first, open_slots(LAYOUT, backups=(second,)), 3)
    assert first.held() == second.held() == []
    assert first.ask(seal(3)) == m.Done()
    assert first.held() == second.held() == [(NAME, 3)]
    assert first.inventory()[0].node == "n0"
    assert second.inventory()[0].node == "n1"
    assert first.inventory()[0].pieces == second.inventory()[0].pieces
    assert (second.memory_dir / "job" / f"{NAME}.slot1").read_bytes() == content


def test_without_its_backup_a_step_is_not_safe(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, second = pair
    opened = open_slots(LAYOUT, backups=(second,))
    second.close()
    write_snapshot(first, opened, 3)
    answer = first.ask(seal(3))
    assert answer.problem.startswith(f"no copy on 127.0.0.1:{second.agent.port}")


def test_a_backup_that_cannot_keep_a_copy_says_so_and_goes_on(
    pair: tuple[RunningAgent, RunningAgent], tmp_path: Path
) -> None:
    """A whole copy is under way when it fails: what comes behind it must still be understood."""
    first, second = pair
    (second.memory_dir / "job").write_text("a file where the folder of the job should be")
    opened = open_slots(LAYOUT, backups=(second,))
    for step in (3, 4):
        write_snapshot(first, opened, step)
        assert "cannot keep a copy" in first.ask(seal(step)).problem
    (second.memory_dir / "job").unlink()
    write_snapshot(first, opened, 5)
    assert first.ask(seal(5)) == m.Done()
    assert second.held() == [(NAME, 5)]


def test_a_damaged_copy_is_refused(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, _ = pair
    opened = open_slots(LAYOUT)
    copy = m.PutSnapshot(job="job", name=NAME, step=1, layout=opened.layout, checksums=["crc32:00000000"] * 3)
    connection = first.connect(epoch=1)
    answer = connection.request(m.encode(copy), (bytes(600),))
    assert "does not match its checksums" in m.decode_as(m.Done, answer).problem
    assert first.ask(m.GetInventory(job="job")) == m.InventoryIs(snapshots=[], spoilt=[])
    with pytest.raises(ConnectionClosed):
        connection.request(m.encode(copy), (bytes(599),))


def test_ranges_come_exactly_and_with_the_sums_of_what_is_around_them(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, _ = pair
    content = write_snapshot(first, open_slots(LAYOUT), 3)
    connection = first.connect(epoch=1)
    ranges = [[0, 4], [400, 200], [8, 0], [10, 3]]
    fetch = m.Fetch(job="job", name=NAME, step=3, ranges=ranges)
    assert _fetch(connection, fetch) == (f"not held: '{NAME} of step 3'", [], b"")
    assert first.ask(seal(3)) == m.Done()
    wanted = b"".join(content[offset : offset + num_bytes] for offset, num_bytes in ranges)
    around = [(0, 4, 200), (400, 600, 600), (0, 8, 200), (0, 13, 200)]  # a shard begins, the range ends, the shard ends
    sums = [
        [zlib.crc32(content[first:offset]), zlib.crc32(content[end:last])]
        for (first, end, last), (offset, _) in zip(around, ranges, strict=True)
    ]
    assert _fetch(connection, fetch) == (None, sums, wanted)
    for step, name in ((1, NAME), (3, "000002-0")):
        problem, _, data = _fetch(connection, m.Fetch(job="job", name=name, step=step, ranges=ranges))
        assert problem is not None and not data
    beyond = m.Fetch(job="job", name=NAME, step=3, ranges=[[590, 11]])
    connection.send(m.encode(beyond))
    assert "not within one shard" in m.decode_as(m.Done, connection.receive()[0]).problem
    connection.send(m.encode(m.Fetch(job="job", name=NAME, step=3, ranges=[[190, 20]])))
    assert "not within one shard" in m.decode_as(m.Done, connection.receive()[0]).problem


def _fetch(connection: Connection, fetch: m.Fetch) -> tuple[str | None, list[list[int]], bytes]:
    connection.send(m.encode(fetch))
    wire, num_bytes = connection.receive()
    answer, data = m.decode_as(m.Fetched, wire), bytearray(num_bytes)
    connection.read_into(memoryview(data))
    return answer.problem, answer.around, bytes(data)


def test_a_restarted_agent_adopts_what_is_whole(tmp_path: Path) -> None:
    before = start_agent(tmp_path, "n0")
    opened = open_slots(LAYOUT)
    for step in (3, 4):
        write_snapshot(before, opened, step)
        before.ask(seal(step))
    before.ask(m.BeginSnapshot(job="job", name=NAME, step=5))
    before.close()
    with running_agents(tmp_path, "n0") as (after,):
        assert after.held() == [(NAME, 4)]
        assert "000001-0" in after.ask(seal(5)).problem  # it knows no writer of it, nor where its copies go


def test_what_was_said_of_a_step_is_kept_with_it_and_with_its_copy(tmp_path: Path) -> None:
    """And found by whoever asks the agent, or the one after it, of later steps than it knows."""
    with running_agents(tmp_path, "n0", "n1") as (first, second):
        opened = open_slots(LAYOUT, backups=(second,))
        for step in (3, 4, 5):
            reports = [{"epoch": 1, "step": done} for done in range(step - 1, step + 1)]  # one of them known already
            write_snapshot(first, opened, step, reports)
            if step < 5:
                first.ask(seal(step))
        for agent, last in ((first, 5), (second, 4)):
            for after in (0, 3, 5):
                found = agent.ask(m.GetInventory(job="job", epoch=1, after=after)).reports
                assert [report["step"] for report in found] == list(range(max(after + 1, 2), last + 1))
        assert first.ask(m.GetInventory(job="other", epoch=1)).reports == []
        assert first.ask(m.GetInventory(job="job", epoch=2)).reports == []
    with running_agents(tmp_path, "n0") as (again,):
        assert [report["step"] for report in again.ask(m.GetInventory(job="job", epoch=1, after=3)).reports] == [4, 5]
        again.ask(m.Retire(job="job", before_epoch=None))
        assert again.ask(m.GetInventory(job="job", epoch=1)).reports == []


def test_retiring_closes_older_epochs(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, second = pair
    write_snapshot(first, open_slots(LAYOUT, backups=(second,)), 3)
    first.ask(seal(3))
    first.ask(m.Retire(job="job", before_epoch=1))
    assert first.held() == [(NAME, 3)]
    first.ask(m.Retire(job="job", before_epoch=2))
    assert first.held() == []
    assert second.held() == [(NAME, 3)]
    assert first.ask(seal(3)).problem


def test_nothing_of_an_epoch_that_is_over_is_taken(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, second = pair
    opened = open_slots(LAYOUT, backups=(second,))
    write_snapshot(first, opened, 3)
    for agent in pair:
        agent.ask(m.Retire(job="job", before_epoch=4))
        agent.ask(m.Retire(job="job", before_epoch=2))  # one that was late
    over = "epoch 1 of job is over: epoch 4 steps already"
    assert first.ask(opened) == m.Done(problem=over)
    assert first.ask(m.BeginSnapshot(job="job", name=NAME, step=4)) == m.Done(problem=over)
    assert first.ask(seal(3)) == m.Done(problem=over)
    copy = m.PutSnapshot(job="job", name=NAME, step=1, layout=opened.layout, checksums=["crc32:00000000"] * 3)
    answer = m.decode_as(m.Done, second.connect(epoch=1).request(m.encode(copy), (bytes(600),)))
    assert str(answer.problem).endswith(over)
    assert second.ask(m.GetEpoch(job="job")) == m.EpochIs(epoch=4)
    assert not list(second.memory_dir.glob("job/*"))
    write_snapshot(first, open_slots(LAYOUT, epoch=4), 3)


def test_a_late_copy_does_not_revive_a_job_that_is_over(pair: tuple[RunningAgent, RunningAgent]) -> None:
    """Its sender is told of the end after this agent. What began anew has another epoch."""
    first, second = pair
    opened = open_slots(LAYOUT, epoch=3, backups=(second,))
    content = write_snapshot(first, opened, 3)
    assert first.ask(m.SealSnapshot(job="job", name="000003-0", step=3)) == m.Done()
    second.ask(m.Retire(job="job", before_epoch=2))
    second.ask(m.Retire(job="job", before_epoch=None))
    assert "epoch 3 of job is over" in first.ask(m.SealSnapshot(job="job", name="000003-0", step=3)).problem
    copy = m.PutSnapshot(job="job", name="000001-0", step=1, layout=opened.layout, checksums=["crc32:00000000"] * 3)
    connection = second.connect(epoch=1)
    assert "is over" in m.decode_as(m.Done, connection.request(m.encode(copy), (content,))).problem
    assert not list(second.memory_dir.glob("job*"))
    assert second.ask(m.GetEpoch(job="job")) == m.EpochIs(epoch=3)
    write_snapshot(first, open_slots(LAYOUT, epoch=4, backups=(second,)), 4)
    assert first.ask(m.SealSnapshot(job="job", name="000004-0", step=4)) == m.Done()
    assert second.held() == [("000004-0", 4)]
    second.ask(m.MakeReady(job="job", local=[100], copies=[]))
    assert list(second.memory_dir.glob("job/spare-*")), "it is a job like any other again"


def test_the_highest_epoch_is_known_from_snapshots(tmp_path: Path) -> None:
    with running_agents(tmp_path, "n0") as (agent,):
        assert agent.ask(m.GetEpoch(job="job")) == m.EpochIs(epoch=0)
        write_snapshot(agent, open_slots(LAYOUT, epoch=7), 3)
        write_snapshot(agent, open_slots(LAYOUT, epoch=5), 3)
    with running_agents(tmp_path, "n0") as (agent,):
        assert agent.ask(m.GetEpoch(job="job")) == m.EpochIs(epoch=7)
        assert agent.ask(m.GetEpoch(job="other")) == m.EpochIs(epoch=0)


# --- journals ---


def entries(*numbers: int) -> list[dict[str, object]]:
    return [
        {"seq": seq, "at_s": 0.0, "kind": "node_lost", "node": f"n{seq}", "evidence": "e", "detect_s": 0.0}
        for seq in numbers
    ]


def test_a_journal_is_read_as_it_was_written(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, _ = pair
    assert first.ask(m.ReadJournal(job="job")) == m.JournalIs(entries=[])
    first.ask(m.AppendJournal(job="job", entries=entries(1, 2)))
    first.ask(m.AppendJournal(job="job", entries=entries(2, 3)))
    first.ask(m.AppendJournal(job="other", entries=entries(1)))
    assert first.ask(m.ReadJournal(job="job")).entries == entries(1, 2, 3)


def test_a_torn_line_costs_that_line_alone(tmp_path: Path) -> None:
    with running_agents(tmp_path, "n0") as (agent,):
        agent.ask(m.AppendJournal(job="job", entries=entries(1, 2, 3)))
        path = agent.disk_dir / "journal" / "job.jsonl"
        path.write_text(path.read_text()[:-20])
        assert agent.ask(m.ReadJournal(job="job")).entries == entries(1, 2)
    with running_agents(tmp_path, "n0") as (agent,):
        agent.ask(m.AppendJournal(job="job", entries=entries(3, 4)))
        assert agent.ask(m.ReadJournal(job="job")).entries == entries(1, 2, 3, 4)
        assert len(path.read_text().splitlines()) == 5


def test_what_comes_after_a_gap_is_not_given_out(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, _ = pair
    first.ask(m.AppendJournal(job="job", entries=entries(1, 2, 4)))
    assert first.ask(m.ReadJournal(job="job")).entries == entries(1, 2)


def test_two_agents_keep_the_journal_and_a_third_takes_over(tmp_path: Path) -> None:
    with running_agents(tmp_path, "n0", "n1", "n2") as agents:
        addresses = [agent.address for agent in agents]
        keeper = Keeper("job", wall_clock=lambda: 1.5)
        keeper.append(NodeLost(node="a", evidence="e", detect_s=0.0))
        keeper.keep_on(addresses)
        keeper.append(NodeLost(node="b", evidence="e", detect_s=0.0))
        keeper.flush(10.0)
        kept = [len(agent.ask(m.ReadJournal(job="job")).entries) for agent in agents]
        assert kept == [2, 2, 0]
        keeper.keep_on(addresses[1:])
        keeper.append(NodeLost(node="c", evidence="e", detect_s=0.0))
        keeper.flush(10.0)
        assert [len(agent.ask(m.ReadJournal(job="job")).entries) for agent in agents] == [2, 3, 3]
        assert read_journals("job", addresses, ask) == keeper.entries()
        assert [entry.seq for entry in keeper.entries_after(1, 0.0)] == [2, 3]
        keeper.close()


def test_short_steps_are_given_out_together_and_nothing_else_waits_for_them() -> None:
    now_s, asked = [0.0], threading.Event()

    def clock() -> float:
        if now_s[0] < 0.0:
            asked.set()
        return now_s[0]

    keeper = Keeper("job", wall_clock=lambda: 1.5, clock=clock)
    keeper.append(step_done(1))
    assert [entry.seq for entry in keeper.entries_after(0, 60.0)] == [1]  # nobody was told anything for long
    keeper.append(step_done(2))
    assert [entry.seq for entry in keeper.entries_after(1, 0.0)] == [2]  # nor does who would not wait
    now_s[0] = -60.0  # a minute before the steps would be given out by themselves
    keeper.append(step_done(3))
    with ThreadPoolExecutor() as pool:
        found = pool.submit(keeper.entries_after, 2, 60.0)
        assert asked.wait(60.0)
        keeper.append(step_done(4))
        keeper.append(NodeLost(node="a", evidence="e", detect_s=0.0))
        assert [entry.seq for entry in found.result(60.0)] == [3, 4, 5]


def test_what_was_shown_while_there_was_no_agent_stays_shown_when_one_comes() -> None:
    """Also before that one has it, as here, where nothing of it is ever answered."""
    keeper = Keeper("job", wall_clock=lambda: 1.5)
    keeper.append(NodeLost(node="a", evidence="e", detect_s=0.0))
    assert len(keeper.entries_after(0, 0.0)) == 1
    with socket.create_server(("127.0.0.1", 0)) as silent:
        keeper.keep_on([silent.getsockname()])
        keeper.append(NodeLost(node="b", evidence="e", detect_s=0.0))
        assert [entry.seq for entry in keeper.entries_after(0, 0.0)] == [1]
        keeper.close()


def test_an_agent_that_cannot_write_is_no_keeper(tmp_path: Path, eventually: object) -> None:
    from waiting import eventually as wait_until

    with running_agents(tmp_path, "n0") as (agent,):
        (agent.disk_dir / "journal" / "job.jsonl").mkdir()
        keeper = Keeper("job", wall_clock=lambda: 1.5)
        kept: list[int] = []
        copy = Copy("job", agent.address, kept.append)
        keeper.append(NodeLost(node="a", evidence="e", detect_s=0.0))
        copy.put(keeper.entries())
        wait_until(lambda: copy.broken)
        copy.flush(60.0)  # returns at once: nothing will ever be written there
        assert not any(kept)


# --- the object store ---


def test_uploads_go_when_they_are_due_and_are_reported_to_whoever_watches(
    pair: tuple[RunningAgent, RunningAgent], tmp_path: Path
) -> None:
    first, _ = pair
    uri = (tmp_path / "store").as_uri()
    opened = open_slots(LAYOUT, uri=uri, every=2)
    watching = watch(first)
    contents = {}
    for step in (1, 2, 3, 4):
        contents[step] = write_snapshot(first, opened, step)
        first.ask(seal(step))
    reports = [next_report(watching), next_report(watching)]
    assert [report.step for report in reports] == [2, 4]
    assert [next_report(watch(first)).step for _ in range(1)] == [2]  # who comes late hears of all
    for report in reports:
        assert (report.problem, report.epoch, report.name) == (None, 1, NAME)
        pieces = stored_from_rows(report.rows)
        assert [piece.key for piece in pieces] == list(LAYOUT)
        store = open_store(uri)
        for piece in pieces:
            first_byte = piece.offset - pieces[0].offset  # before the content stands a header
            expected = contents[report.step][first_byte : first_byte + piece.num_bytes]
            assert store.read(piece.object, piece.offset, piece.num_bytes) == expected
    assert not list((first.disk_dir / "uploads").iterdir())
    assert pieces[0].key.kind is Kind.MASTER


def test_an_upload_can_be_asked_for(pair: tuple[RunningAgent, RunningAgent], tmp_path: Path) -> None:
    first, _ = pair
    write_snapshot(first, open_slots(LAYOUT), 3)
    first.ask(seal(3))
    uri = (tmp_path / "store").as_uri()
    assert first.ask(m.Upload(job="job", name=NAME, step=3, uri=uri)) == m.Done()
    assert next_report(watch(first)).step == 3
    assert "of step 2" in first.ask(m.Upload(job="job", name=NAME, step=2, uri=uri)).problem


class Doubtful:
    """Opens stores, unless it is `down`."""

    def __init__(self, problem: type[StoreError] = StoreUnreachable) -> None:
        self.down = threading.Event()
        self._problem = problem

    def __call__(self, uri: str) -> Store:
        if self.down.is_set():
            raise self._problem(uri, "does not answer")
        return open_store(uri)


def test_while_a_store_cannot_be_reached_copies_wait_and_it_is_said_once(tmp_path: Path) -> None:
    opener = Doubtful()
    opener.down.set()
    agent = start_agent(tmp_path, "n0", opener)
    opened = open_slots(LAYOUT, uri=(tmp_path / "store").as_uri())
    watching = watch(agent)
    write_snapshot(agent, opened, 1)
    assert agent.ask(seal(1)) == m.Done()
    word = next_word(watching)
    assert isinstance(word, m.UploadDelayed)
    assert (word.step, word.job) == (1, "job")
    assert "does not answer" in word.problem
    assert isinstance(next_word(watch(agent)), m.UploadDelayed)  # who comes late hears of it, too
    opener.down.clear()
    assert (done := next_report(watching)).problem is None
    assert done.step == 1
    write_snapshot(agent, opened, 2)
    assert agent.ask(seal(2)) == m.Done()
    assert (next_report(watching).step, next_report(watch(agent)).step) == (2, 1)
    agent.close()


def test_an_error_that_will_not_pass_costs_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    opener = Doubtful(StoreError)
    opener.down.set()
    agent = start_agent(tmp_path, "n0", opener)
    opened = open_slots(LAYOUT, uri=(tmp_path / "store").as_uri())
    watching = watch(agent)
    write_snapshot(agent, opened, 1)
    assert agent.ask(seal(1)) == m.Done()
    assert "does not answer" in str(next_report(watching).problem)
    agent.close()


def test_what_a_dead_agent_left_is_brought_once_somebody_watches(tmp_path: Path) -> None:
    opener = Doubtful()
    opener.down.set()
    uri = (tmp_path / "store").as_uri()
    first = start_agent(tmp_path, "n0", opener)
    content = write_snapshot(first, open_slots(LAYOUT, uri=uri), 1)
    first.ask(seal(1))
    assert isinstance(next_word(watch(first)), m.UploadDelayed)
    first.close()
    (first.disk_dir / "uploads" / "half").write_bytes(b"of one that died while it wrote")
    second = start_agent(tmp_path, "n0")
    done = next_report(watch(second))
    assert (done.step, done.problem) == (1, None)
    piece = stored_from_rows(done.rows)[0]
    assert open_store(uri).read(piece.object, piece.offset, piece.num_bytes) == content[: piece.num_bytes]
    assert not list((second.disk_dir / "uploads").iterdir())
    second.close()


def test_objects_are_safetensors_files(pair: tuple[RunningAgent, RunningAgent], tmp_path: Path) -> None:
    first, _ = pair
    content = write_snapshot(first, open_slots(LAYOUT, uri=(tmp_path / "store").as_uri()), 1)
    first.ask(seal(1))
    pieces = stored_from_rows(next_report(watch(first)).rows)
    (name,) = {piece.object for piece in pieces}
    tensors = safetensors.numpy.load(open_store((tmp_path / "store").as_uri()).read(name))
    assert (
        b"".join(tensors[f"{p.key.fqn}/{p.key.kind}/{p.key.first}-{p.key.last}"].tobytes() for p in pieces) == content
    )


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    with running_agents(tmp_path, "n0") as (agent,):
        folder = agent.disk_dir / "uploads"
        folder.rmdir()
        folder.write_text("no folder any more")
        write_snapshot(agent, open_slots(LAYOUT, uri=(tmp_path / "store").as_uri()), 1)
        assert agent.ask(seal(1)) == m.Done()
        assert "no copy on the node's disk" in str(next_report(watch(agent)).problem)


def test_a_place_that_cannot_be_understood_is_a_failed_upload(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, _ = pair
    write_snapshot(first, open_slots(LAYOUT, uri="file://elsewhere/x"), 1)
    first.ask(seal(1))
    assert "must name an absolute folder" in str(next_report(watch(first)).problem)


# --- the meeting place ---


def test_keys_meet(pair: tuple[RunningAgent, RunningAgent]) -> None:
    first, _ = pair
    assert first.ask(m.GetKey(key="job/1/a", timeout_s=0.0)) == m.KeyIs(value=None)
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(first.ask(m.GetKey(key="job/1/a", timeout_s=10.0))))
    waiting.start()
    first.ask(m.SetKey(key="job/1/a", value="x"))
    waiting.join()
    assert found == [m.KeyIs(value="x")]
    first.ask(m.Retire(job="job", before_epoch=None))
    assert first.ask(m.GetKey(key="job/1/a", timeout_s=0.0)) == m.KeyIs(value=None)


# --- strangers ---


def test_strangers_are_answered_or_hung_up_on_and_others_are_still_served(
    pair: tuple[RunningAgent, RunningAgent],
) -> None:
    first, _ = pair
    for raw in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x03" + bytes(8) + b"{x}",
        b"\x00\x00\x00\x02" + bytes(8) + b"[]",
    ):
        stranger = first.connect()
        stranger._socket.sendall(raw)
        with pytest.raises(ConnectionClosed):
            stranger.receive()
    assert "cannot read a message" in m.decode_as(m.Done, first.connect().request({"kind": "Explode"})).problem
    assert "cannot read a message" in m.decode_as(m.Done, first.connect().request({"kind": "GetKey", "kye": 1})).problem
    assert first.held() == []


def test_rows_of_a_layout_travel_as_json() -> None:
    opened = open_slots(LAYOUT)
    assert m.decode(json.loads(json.dumps(m.encode(opened)))) == opened
