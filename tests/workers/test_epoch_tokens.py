"""Who is given and may leave a job's state: the ranks of its newest epoch, by their token, and nobody else. Agents and
sockets are real, and each side makes passes as it does in a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import RunningAgent, open_slots, running_agents, write_snapshot

from shoal_recovery.state import OWNED_KINDS, ShardKey
from shoal_workers import messages as m
from shoal_workers.admission import Admission
from shoal_workers.greeting import Caller, Pass, cluster_pass, epoch_pass, epoch_pass_from, hold, job_pass, use_key
from shoal_workers.rendezvous import AgentStore
from shoal_workers.wire import Connection, ConnectionClosed, Server, connect

LAYOUT = tuple(ShardKey(fqn="w", kind=kind, first=0, last=50) for kind in OWNED_KINDS)
NAME = "000003-0"
FETCH = m.Fetch(job="job", name=NAME, step=3, ranges=[[0, 200]])
PUT = m.PutSnapshot(job="job", name=NAME, step=4, layout=open_slots(LAYOUT).layout, checksums=["crc32:00000000"] * 3)
OF_STATE = (
    open_slots(LAYOUT, epoch=3),
    m.BeginSnapshot(job="job", name=NAME, step=3),
    m.SealSnapshot(job="job", name=NAME, step=3),
    FETCH,
    m.SetKey(key="job/3/a", value="x"),
    m.GetKey(key="job/3/a", timeout_s=0.0),
)


@pytest.fixture(autouse=True)
def key() -> Iterator[None]:
    use_key(b"k" * 32)
    yield
    use_key(b"")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    """It holds step 3 of the job, written by epoch 3."""
    with running_agents(tmp_path, "n0") as (started,):
        write_snapshot(started, open_slots(LAYOUT, epoch=3), 3)
        assert started.ask(m.SealSnapshot(job="job", name=NAME, step=3)) == m.Done()
        yield started


def ask(agent: RunningAgent, request: object, shown: Pass, payload: bytes = b"") -> tuple[str | None, bytes]:
    """What was wrong, and the bytes that came."""
    connection = connect(agent.address, shown=shown)
    try:
        connection.set_timeout(20.0)
        connection.send(m.encode(request), (payload,) if payload else ())
        wire, num_bytes = connection.receive()
        data = bytearray(num_bytes)
        connection.read_into(memoryview(data))
        return getattr(m.decode(wire), "problem", None), bytes(data)
    finally:
        connection.close()


def stolen(claimed: str, real: Pass) -> Pass:
    """The token of one epoch under the name of another."""
    return Pass(claimed, real.token)


def test_a_newer_epoch_fetches_what_an_older_one_wrote(agent: RunningAgent) -> None:
    problem, data = ask(agent, FETCH, epoch_pass("job", 4))
    assert problem is None and len(data) == 200


@pytest.mark.parametrize("request_", OF_STATE, ids=lambda one: type(one).__name__)
def test_the_token_of_another_job_opens_nothing(agent: RunningAgent, request_: object) -> None:
    problem, data = ask(agent, request_, epoch_pass("other", 3))
    assert problem is not None and "is not for a process of epoch 3 of other" in problem and not data


@pytest.mark.parametrize("request_", OF_STATE, ids=lambda one: type(one).__name__)
def test_without_the_token_of_an_epoch_state_is_neither_given_nor_taken(agent: RunningAgent, request_: object) -> None:
    kind = type(request_).__name__
    asked = f"{kind} needs the token of an epoch of the job, and was asked by a process of"
    assert ask(agent, request_, cluster_pass()) == (f"{asked} the cluster", b"")
    assert ask(agent, request_, job_pass("job")) == (f"{asked} job", b"")


@pytest.mark.parametrize("request_", OF_STATE, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    ("claimed", "real"), [("job/4", ("job", 3)), ("job/3", ("other", 3)), ("job/3", ("job", 2))], ids=str
)
def test_a_forged_name_beside_the_token_is_refused_with_the_reason(
    agent: RunningAgent, request_: object, claimed: str, real: tuple[str, int]
) -> None:
    job, epoch = claimed.split("/")
    told = f"the token that was shown is not that of a process of epoch {epoch} of {job}"
    assert ask(agent, request_, stolen(claimed, epoch_pass(*real))) == (told, b"")


def test_tokens_that_were_made_up_are_refused(agent: RunningAgent) -> None:
    for token in (bytes(32), b"\xff" * 32, b"k" * 32):
        problem, data = ask(agent, FETCH, Pass("job/3", token))
        assert problem == "the token that was shown is not that of a process of epoch 3 of job" and not data
        with pytest.raises(ConnectionClosed):  # who knows nothing of the cluster is not answered at all
            ask(agent, FETCH, Pass("", token))


@pytest.mark.parametrize("scope", ["/3", "job/x", "job/3/4", "job/"])
def test_scopes_that_name_nothing_are_not_answered(agent: RunningAgent, scope: str) -> None:
    with pytest.raises(ConnectionClosed):
        ask(agent, FETCH, Pass(scope, bytes(32)))


def test_another_epoch_in_the_request_than_in_the_token_is_refused(agent: RunningAgent) -> None:
    shown = epoch_pass("job", 3)
    for forged in (
        open_slots(LAYOUT, epoch=4),
        m.BeginSnapshot(job="job", name="000004-0", step=3),
        m.SealSnapshot(job="job", name="000004-0", step=3),
    ):
        problem, _ = ask(agent, forged, shown)
        assert problem == f"{type(forged).__name__}: epoch 4 of job was named, and the token of epoch 3 shown"
    assert "is not for" in str(ask(agent, m.SetKey(key="job/4/a", value="x"), shown)[0])
    assert "no name of a snapshot" in str(ask(agent, m.BeginSnapshot(job="job", name="x", step=3), shown)[0])


def test_an_older_epoch_reads_nothing_once_a_newer_one_has_begun_here(agent: RunningAgent) -> None:
    assert ask(agent, FETCH, epoch_pass("job", 3))[0] is None
    assert ask(agent, FETCH, epoch_pass("job", 5))[0] is None
    assert ask(agent, FETCH, epoch_pass("job", 4)) == ("epoch 4 of job is over: epoch 5 has begun", b"")
    # What it has written it may still seal, until the newer one steps.
    assert ask(agent, m.BeginSnapshot(job="job", name=NAME, step=4), epoch_pass("job", 3))[0] is None
    agent.ask(m.Retire(job="job", before_epoch=5))
    for request in (*OF_STATE, PUT):
        payload = bytes(600) if request is PUT else b""
        told = ("epoch 3 of job is over: epoch 5 steps already", b"")
        assert ask(agent, request, epoch_pass("job", 3), payload) == told
    assert ask(agent, m.Fetch(job="other", name=NAME, step=3, ranges=[]), epoch_pass("other", 1))[0] is not None


def test_what_follows_a_refused_copy_is_understood(agent: RunningAgent) -> None:
    connection = agent.connect(epoch=3, job="other")
    for _ in range(2):
        answer = m.decode_as(m.Done, connection.request(m.encode(PUT), (bytes(600),)))
        assert answer.problem == "PutSnapshot: the state of job is not for a process of epoch 3 of other"


def test_ranks_ask_nothing_that_supervisors_ask(agent: RunningAgent) -> None:
    requests = (
        m.GetInventory(job="job"),
        m.GetEpoch(job="job"),
        m.Upload(job="job", name=NAME, step=3, uri="file:///nowhere"),
        m.Retire(job="job", before_epoch=None),
        m.MakeReady(job="job", local=[1], copies=[]),
        m.AppendJournal(job="job", entries=[]),
        m.ReadJournal(job="job"),
        m.GiveNotice(source="s", name="n", why="w", lead_s=1.0),
        m.Watch(job="job", after_step=0),
    )
    for request in requests:
        kind = type(request).__name__
        for shown, who in ((epoch_pass("job", 3), "epoch 3 of job"), (job_pass("job"), "job")):
            assert ask(agent, request, shown) == (
                f"{kind} is for processes of the cluster, not for a process of {who}",
                b"",
            )
    assert agent.held() == [(NAME, 3)]


def test_the_meeting_place_of_an_epoch_is_its_own(agent: RunningAgent) -> None:
    store = AgentStore(agent.address, 0.05, epoch_pass("job", 3))
    store.set("job/3/a", b"x")
    assert store.get("job/3/a") == b"x"
    with pytest.raises(m.ProtocolError, match="the key 'job/4/a' is not for a process of epoch 3 of job"):
        store.set("job/4/a", b"x")
    store.close()


def test_copies_go_to_other_nodes_with_the_token_of_their_epoch(tmp_path: Path) -> None:
    with running_agents(tmp_path, "n0", "n1") as (first, second):
        opened = open_slots(LAYOUT, epoch=3, backups=(second,))
        write_snapshot(first, opened, 3)
        second.ask(m.Retire(job="job", before_epoch=4))
        problem = first.ask(m.SealSnapshot(job="job", name=NAME, step=3)).problem
        assert problem == "epoch 3 of job is over: epoch 4 steps already"


def test_a_process_that_runs_code_of_users_makes_no_passes_and_hears_its_own_job_alone() -> None:
    passes = {"own": job_pass("job"), "other": job_pass("other"), "cluster": cluster_pass(), "forged": None}
    passes["forged"] = Pass("job", passes["other"].token)  # type: ignore[union-attr]

    def answer(connection: Connection) -> None:
        connection.receive()
        connection.send({"caller": str(connection.caller)})

    server = Server("127.0.0.1", answer, "rank")
    server.start()
    hold(passes["own"])  # type: ignore[arg-type]
    for make in (cluster_pass, lambda: job_pass("job"), lambda: epoch_pass("job", 1)):
        with pytest.raises(ValueError, match="a process of job cannot make a pass for"):
            make()
    said = {}
    for name, shown in passes.items():
        connection = connect(("127.0.0.1", server.port), shown=shown)
        said[name] = connection.request({"question": 1})
        connection.close()
    server.close()
    assert said["own"] == {"caller": "a process of job"}
    assert said["forged"]["problem"] == "the token that was shown is not that of a process of job"
    for name, who in (("other", "a process of other"), ("cluster", "a process of the cluster")):
        assert said[name]["problem"] == f"only a process of job is heard here, not {who}"


def test_passes_are_made_of_what_they_are_good_for() -> None:
    made = [cluster_pass(), job_pass("a"), job_pass("b"), epoch_pass("a", 1), epoch_pass("a", 11), epoch_pass("a1", 1)]
    assert len({one.token for one in made}) == len(made)
    assert epoch_pass_from("a", 1, made[3].token.hex()) == made[3]
    assert made[3].token.hex() not in repr(made[3])
    use_key(b"j" * 32)
    assert epoch_pass("a", 1).token != made[3].token
    for job in ("", "a/1"):
        with pytest.raises(ValueError, match="job: must be a name without '/'"):
            job_pass(job)
    with pytest.raises(ValueError, match="token: must have 32 bytes, has 2"):
        epoch_pass_from("a", 1, "abcd")


def test_every_request_of_state_is_admitted_to_an_epoch_alone() -> None:
    admission = Admission()
    for request in (*OF_STATE, PUT):
        assert admission.refusal(Caller("job", 3), request) is None
        assert admission.refusal(Caller(), request) is not None
