"""Ranks of one node exchange through memory that only its owner can write, and that vanishes with them."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
from engine_runs import LAYOUTS, assert_same_bits, job, on_nodes
from exchange_runs import exchange_many, read_in_place, receive_from_the_dead, sum_of_three, sums_two_under_way
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.arena import Arena, NeighbourArena
from shoal_workers.processes import Processes, ProcessLost
from shoal_workers.solo import RunRequest


def test_engine_has_the_same_bits_whichever_way_tensors_go(processes: Processes) -> None:
    layout = LAYOUTS["3 stages beside 1"]
    ways = (layout, on_nodes(layout, "a", "b", "b", "a"), on_nodes(layout, "a", "b", "c", "d"))
    spec = job(tied=False)  # a tied gradient is a sum of three here, of which nodes add up their own first
    together, mixed, apart = (processes.run(RunRequest(job=spec, plan=way, until_step=3)) for way in ways)
    assert_same_bits(together.state, apart.state)
    assert_same_bits(together.state, mixed.state)
    assert [rank.losses for rank in together.ranks] == [rank.losses for rank in apart.ranks]


def test_no_send_waits_for_its_receiver(processes: Processes) -> None:
    assert processes.call(2, exchange_many) == [True, True]


def test_what_is_made_where_others_can_read_it_is_copied_nowhere(processes: Processes) -> None:
    sender, *receivers = processes.call(3, read_in_place)
    assert sender == ([], True)
    assert receivers == [([0.0, 0.0, -1.0, 1.0, 1.0, -1.0, 2.0, 2.0, -1.0], True)] * 2


@pytest.mark.parametrize("numel", [1, 5000])
def test_all_ranks_sum_in_the_order_of_ranks(processes: Processes, numel: int) -> None:
    expected = (torch.tensor([1e8]) + 1.0 - 1e8).tolist()
    assert processes.call(3, sum_of_three, numel) == [expected] * 3


@pytest.mark.parametrize(("numel", "over_gloo"), [(1, False), (5000, False), (5000, True)])
def test_two_sums_may_be_under_way(processes: Processes, numel: int, over_gloo: bool) -> None:
    assert processes.call(3, sums_two_under_way, numel, over_gloo) == [True] * 3


def test_neighbour_that_is_killed_leaves_what_it_sent() -> None:
    with Processes(2) as two:
        call = two.start(2, receive_from_the_dead)
        total, message, seconds_s = call.answer(0)
        with pytest.raises(ProcessLost):
            call.answer(1)
    assert total == 700_000.0
    assert "rank 1 is gone" in message
    assert seconds_s < 1.0, "milliseconds, but the machine may be busy"


def test_nobody_but_the_owner_writes() -> None:
    owner = Arena()
    offset = owner.allocate(4000)
    owner.view(offset, 1000, torch.float32).fill_(3.0)
    neighbour = NeighbourArena(os.dup(owner.fd))
    assert neighbour.view(offset, torch.empty(1000)).sum().item() == 3000.0
    with pytest.raises(PermissionError):
        mmap.mmap(owner.fd, 4096, flags=mmap.MAP_SHARED)
    with pytest.raises(PermissionError):
        os.ftruncate(owner.fd, 4096)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9)), max_size=40))
def test_blocks_in_use_never_overlap_and_all_memory_comes_back(steps: list[tuple[int, int]]) -> None:
    arena, blocks = Arena(), dict[int, int]()
    shared = arena.allocate(100, readers=2)
    arena.free(shared)
    assert arena.used_bytes
    arena.free(shared)
    for size, index in steps:
        if index < len(blocks):
            offset = sorted(blocks)[index]
            arena.free(offset)
            del blocks[offset]
        offset = arena.allocate(size)
        assert all(offset + size <= other or other + length <= offset for other, length in blocks.items())
        blocks[offset] = size
    for offset in blocks:
        arena.free(offset)
    assert arena.used_bytes == 0
    assert arena.allocate(arena.num_bytes) == 0
