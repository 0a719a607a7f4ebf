"""Sums of gradients have the same bits whichever rank makes them: they are made in the order of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
import torch
from engine_runs import job, part, plan
from torch import Tensor

from shoal_planner.schedule import sync_order
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Span
from shoal_workers.collective_routes import ways
from shoal_workers.exchange import SoloExchange
from shoal_workers.forms import Form, Parts, Source
from shoal_workers.live import LiveState
from shoal_workers.memory import DeviceMemory
from shoal_workers.reduction import UnitRoutes
from shoal_workers.sharing import Sharing

JOB = job()
PLAN = plan(*((1, (part(6, (1, 2)),)) for _ in range(4)))
SHARDS = shard_map(PLAN, JOB.model)


def contribution(rank: int, span: Span) -> Tensor:
    """Of sizes so unequal that every order of adding them rounds in another way."""
    numbers = torch.Generator().manual_seed(zlib.crc32(f"{rank} {span}".encode()))
    return torch.randn(span.numel, generator=numbers) * 10.0**rank


class Delivered:
    """As `Courier`: everything that others send is there at once."""

    def start(self, routes: UnitRoutes, number: int, form: Form, source: Source) -> UnitRoutes:
        return routes

    def arrived(self, started: UnitRoutes) -> Iterator[tuple[int, Parts]]:
        for message in started.receives:
            yield message.source, iter([(span, contribution(message.source, span)) for span in message.spans])

    def finish(self, started: UnitRoutes) -> None:
        pass


class Rank(SoloExchange):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank


@pytest.mark.parametrize("rank", range(4))
def test_sums_are_made_in_the_order_of_ranks(rank: int) -> None:
    live = LiveState.build(JOB.model, SHARDS.ranks[rank], "fp32", DeviceMemory("here:0", None, None))
    delivered: Any = Delivered()
    order = sync_order(PLAN, JOB.model)
    sharing = Sharing(ways(PLAN, JOB.model, SHARDS, rank, {}), order, live, Rank(rank), delivered)
    for span in SHARDS.ranks[rank].vouches:
        live.gradient(span).copy_(contribution(rank, span))
    for unit in reversed(order):
        sharing.reduce(unit)
    sharing.settle()
    for span in SHARDS.ranks[rank].vouches:
        wanted = reduce(torch.add, (contribution(source, span) for source in range(4)))
        assert torch.equal(live.gradient(span), wanted), span
