"""Ranks in processes of their own that find each other through an agent, and wake up when they are told to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from agents import RunningAgent, running_agents

from shoal_workers.errors import EpochAbandoned, PeerLost
from shoal_workers.exchange import GlooExchange
from shoal_workers.greeting import epoch_pass
from shoal_workers.processes import Processes, Seat
from shoal_workers.rendezvous import AgentStore, Gate
from shoal_workers.wire import ConnectionClosed

HOST = "127.0.0.1"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    with running_agents(tmp_path, "n0") as (started,):
        yield started


def meet(seat: Seat, address: tuple[str, int], epochs: int, groups: tuple[tuple[int, ...], ...]) -> list[list[float]]:
    """Several epochs over one connection to the agent: what each gathers, and the sum within this rank's group."""
    store = AgentStore(address, 20.0, epoch_pass("job", seat.epoch))
    found = []
    for epoch in range(epochs):
        exchange = GlooExchange(
            store, f"job/{seat.epoch}/{epoch}", seat.rank, seat.size, groups, 20.0, epoch=epoch, host=HOST
        )
        exchange.connect()
        total = torch.tensor([float(seat.rank + 1)])
        exchange.all_reduce_sum(total)
        gathered = exchange.all_gather(torch.tensor([float(10 * epoch + seat.rank)]))
        found.append([*gathered.flatten().tolist(), total.item()])
        exchange.abandon()
    store.close()
    return found


def test_ranks_meet_epoch_after_epoch(processes: Processes, agent: RunningAgent) -> None:
    found = processes.call(3, meet, agent.address, 3, ((0, 2),))
    for rank, epochs in enumerate(found):
        alone = rank + 1.0 if rank == 1 else 4.0
        assert epochs == [[10.0 * epoch, 10.0 * epoch + 1, 10.0 * epoch + 2, alone] for epoch in range(3)]


def wait_for_nobody(seat: Seat, address: tuple[str, int], timeout_s: float) -> str:
    store = AgentStore(address, timeout_s, epoch_pass("job", seat.epoch))
    exchange = GlooExchange(store, f"job/{seat.epoch}", 0, 2, (), timeout_s, host=HOST)
    try:
        exchange.connect()
    except PeerLost as error:
        return str(error)
    raise AssertionError("there is nobody to meet")


def test_a_rank_that_never_comes_is_a_lost_peer(processes: Processes, agent: RunningAgent) -> None:
    assert processes.call(1, wait_for_nobody, agent.address, 0.5) == [
        "epoch 0: a peer was lost during connecting: not all of 2 ranks came in 0.5 s"
    ]


def abandon_while_waiting(seat: Seat, address: tuple[str, int]) -> str:
    store = AgentStore(address, 60.0, epoch_pass("job", seat.epoch))
    exchange = GlooExchange(store, f"job/{seat.epoch}", 0, 2, (), 60.0, host=HOST)
    threading.Timer(0.1, exchange.abandon).start()
    try:
        exchange.connect()
    except EpochAbandoned as error:
        return str(error)
    raise AssertionError("there is nobody to meet")


def test_abandoning_wakes_a_rank_that_waits_for_others(processes: Processes, agent: RunningAgent) -> None:
    assert processes.call(1, abandon_while_waiting, agent.address) == ["epoch 0 was abandoned"]


def test_what_a_store_must_answer(agent: RunningAgent) -> None:
    store = AgentStore(agent.address, 0.05, epoch_pass("job", 1))
    assert not store.check(["job/1/a"])
    with pytest.raises(RuntimeError, match="no rank has set job/1/a within"):
        store.get("job/1/a")
    with pytest.raises(RuntimeError, match="no rank has set job/1/b in time"):
        store.wait(["job/1/b"])
    store.set("job/1/a", b"\x00\xff")
    store.set("job/1/b", "text")
    assert store.check(["job/1/a", "job/1/b"])
    store.wait(["job/1/a", "job/1/b"])
    assert (store.get("job/1/a"), store.get("job/1/b")) == (b"\x00\xff", b"text")
    store.close()
    with pytest.raises(ConnectionClosed):
        store.get("job/1/a")


def test_one_thread_may_wait_for_what_another_sets(agent: RunningAgent) -> None:
    store = AgentStore(agent.address, 10.0, epoch_pass("job", 1))
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("job/1/late")))
    waiting.start()
    store.set("job/1/late", b"x")
    waiting.join(5.0)
    store.close()
    waiting.join()
    assert found == [b"x"]


def pass_gate(store: AgentStore, rank: int, num_ranks: int, passed: queue.SimpleQueue[int | str]) -> None:
    try:
        Gate(store, f"job/1/{num_ranks}", rank, num_ranks).pass_with_all("whole")
        passed.put(rank)
    except ConnectionClosed:
        passed.put("closed")


def test_who_is_ready_waits_longer_than_for_any_message_and_until_it_is_told_not_to(agent: RunningAgent) -> None:
    """One of three comes when the others have waited many times what a store allows; then one never comes."""
    stores = [AgentStore(agent.address, 0.05, epoch_pass("job", 1)) for _ in range(3)]
    passed: queue.SimpleQueue[int | str] = queue.SimpleQueue()
    first = [threading.Thread(target=pass_gate, args=(stores[rank], rank, 3, passed)) for rank in (0, 1)]
    for thread in first:
        thread.start()
    with pytest.raises(queue.Empty):
        passed.get(timeout=0.5)
    pass_gate(stores[2], 2, 3, passed)
    assert {passed.get(timeout=10.0) for _ in range(3)} == {0, 1, 2}
    for thread in first:
        thread.join()
    lonely = threading.Thread(target=pass_gate, args=(stores[0], 0, 2, passed))
    lonely.start()
    for store in stores:
        store.close()
    lonely.join(10.0)
    assert passed.get(timeout=10.0) == "closed"
