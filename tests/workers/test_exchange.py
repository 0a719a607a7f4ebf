"""An epoch ends when it is told to, whatever its peers do, and leaves live state whole or marked as torn."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import (
    LAYOUTS,
    assert_holders_agree,
    assert_same_bits,
    die_on_rank,
    fail_on_rank,
    job,
    on_nodes,
    part,
    plan,
    receive_part_of_a_message,
    receive_until_abandoned,
    reduce_in_groups,
    run_beside_stopped,
)
from torch._C._distributed_c10d import FileStore
from waiting import stopped

from shoal_recovery.state import Kind
from shoal_workers.errors import EpochAbandoned, PeerLost
from shoal_workers.exchange import GlooExchange, SoloExchange
from shoal_workers.processes import Processes, ProcessLost, run_seat
from shoal_workers.solo import RunRequest, WholeState
from shoal_workers.tags import Purpose

THREE = plan((2, (part(6, (1, 1), (1, 1), (1, 2)),)))
VICTIM = 2
# Who shares a node with whom: all through shared memory, all over gloo, or both.
TOGETHER, APART, MIXED = ("a", "a", "a", "a", "a"), ("a", "b", "c", "d", "e"), ("b", "a", "a", "c", "c")
STEP = 3  # the victim stops in the middle of it


@pytest.mark.parametrize(
    ("purpose", "tag", "nodes"),
    [
        (Purpose.REDUCE, STEP - 1, TOGETHER),
        (Purpose.REDUCE, STEP - 1, MIXED),
        (Purpose.GATHER, None, TOGETHER),
        (Purpose.GATHER, None, APART),
    ],
)
def test_survivors_of_a_stopped_peer(
    processes: Processes, purpose: Purpose, tag: int | None, nodes: tuple[str, ...]
) -> None:
    """Stopped in a reduce or in a gather, continued when the survivors are steps ahead in the next epoch."""
    three = on_nodes(THREE, *nodes)
    request = RunRequest(job=job(), plan=three, until_step=20)
    before = processes.run(RunRequest(job=job(), plan=three, until_step=STEP - 1))
    onward = RunRequest(job=job(), plan=LAYOUTS["two equal pipelines"], until_step=STEP + 5, start=before.state)
    undisturbed = processes.run(onward)

    votes = STEP - 1 if purpose is Purpose.REDUCE else STEP
    call = processes.start(3, run_beside_stopped, request, VICTIM, purpose, votes)
    with stopped(processes.pid(VICTIM)):
        survivors = []
        for rank in (0, 1):
            call.abandon(rank)
            survivors.append(call.answer(rank))
        regrouped = processes.start(2, run_seat, onward)
    call.abandon(VICTIM)  # as a supervisor fences whom it finds alive after all
    late = call.answer(VICTIM)
    ranks = regrouped.results()

    assert survivors[0].error == "EpochAbandoned"
    assert survivors[1].error in ("PeerLost", "EpochAbandoned"), "rank 0 left before it was told to"
    for survivor in survivors:
        assert survivor.tag == tag
        assert survivor.reported == STEP - 1
        if tag is not None:
            _assert_state(survivor.held, before.state)
    assert late.error in ("PeerLost", "EpochAbandoned")
    again = processes.run(onward)
    for run, expected in zip(ranks, undisturbed.ranks, strict=True):
        assert run.losses == expected.losses
        assert {key: values.tobytes() for key, values in run.kept.items()} == {
            key: values.tobytes() for key, values in expected.kept.items()
        }
    assert_same_bits(again.state, undisturbed.state)
    assert_holders_agree(again, job())


def _assert_state(held: dict[tuple[str, int, int], Any], expected: WholeState) -> None:
    for (name, first, last), values in held.items():
        kind, _, fqn = name.partition(":")
        source = Kind.MASTER if kind == Kind.WEIGHT else Kind(kind)
        assert values.tobytes() == expected.values[source][fqn].reshape(-1)[first:last].tobytes(), name


@pytest.mark.parametrize("asked", [False, True], ids=["", "after a question"])
@pytest.mark.parametrize("nodes", [TOGETHER, APART])
def test_blocked_wait_wakes_at_once(processes: Processes, nodes: tuple[str, ...], asked: bool) -> None:
    for message, seconds_s in processes.call(2, receive_until_abandoned, nodes[:2], asked):
        assert "abandoned" in message
        assert seconds_s < 1.0, "milliseconds, but the machine may be busy"


def test_wait_for_the_rest_of_a_message_wakes_at_once(processes: Processes) -> None:
    """gloo itself never wakes it, not even when its sockets are shut."""
    call = processes.start(2, receive_part_of_a_message)
    with stopped(processes.pid(1)):
        assert call.answer(0) < 1.0
    call.abandon(1)
    with pytest.raises((PeerLost, EpochAbandoned)):
        call.answer(1)


@pytest.mark.parametrize("nodes", [TOGETHER, APART, MIXED])
def test_rank_that_fails_does_not_leave_the_others_waiting(processes: Processes, nodes: tuple[str, ...]) -> None:
    with pytest.raises(ZeroDivisionError):
        processes.call(3, fail_on_rank, nodes[:3], 1)


def test_process_that_dies_is_named() -> None:
    with Processes(2) as two, pytest.raises(ProcessLost, match="rank 1"):
        two.call(2, die_on_rank, 1)


@pytest.mark.parametrize("numel", [1, 5000])
@pytest.mark.parametrize("nodes", [TOGETHER, MIXED])
def test_collectives_over_replicas(processes: Processes, nodes: tuple[str, ...], numel: int) -> None:
    found = processes.call(5, reduce_in_groups, nodes, ((0,), (1, 2), (3, 4)), numel)
    assert found == [({0.0}, {0.0}), ({3.0}, {2.0}), ({3.0}, {2.0}), ({7.0}, {4.0}), ({7.0}, {4.0})]


def test_peer_that_never_comes_is_lost_after_the_timeout(tmp_path: Path) -> None:
    exchange = GlooExchange(FileStore(str(tmp_path / "store"), -1), "e1", 0, 2, (), 0.1, epoch=1, host="127.0.0.1")
    with pytest.raises(PeerLost, match="epoch 1"):
        exchange.connect()


def test_waiting_for_a_peer_that_never_comes_can_be_abandoned(tmp_path: Path) -> None:
    exchange = GlooExchange(FileStore(str(tmp_path / "store"), -1), "e1", 0, 2, (), 60.0, epoch=1, host="127.0.0.1")
    threading.Timer(0.05, exchange.abandon).start()
    with pytest.raises(EpochAbandoned, match="epoch 1"):
        exchange.connect()
    GlooExchange.forget()


def test_abandoned_exchange_refuses_everything() -> None:
    exchange = SoloExchange(epoch=4)
    assert exchange.all_gather(torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]]
    exchange.abandon()
    exchange.abandon()
    with pytest.raises(EpochAbandoned, match="epoch 4"):
        exchange.all_gather(torch.zeros(1))
    with pytest.raises(EpochAbandoned, match="epoch 4"), exchange.commit():
        raise AssertionError("an abandoned epoch must not write")


def test_abandoning_waits_for_a_commit_under_way() -> None:
    exchange = SoloExchange()
    order: list[str] = []
    inside, told = threading.Event(), threading.Event()

    def commit() -> None:
        with exchange.commit():
            inside.set()
            assert told.wait(timeout=10.0)
            order.append("committed")

    def abandon() -> None:
        told.set()
        exchange.abandon()
        order.append("abandoned")

    committing, abandoning = threading.Thread(target=commit), threading.Thread(target=abandon)
    committing.start()
    assert inside.wait(timeout=10.0)
    abandoning.start()
    for thread in (committing, abandoning):
        thread.join(timeout=10.0)
    assert order == ["committed", "abandoned"]
