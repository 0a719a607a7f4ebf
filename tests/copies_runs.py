"""Ranks that bring every step to safety with real agents, and of which one stops, or does not see how a vote ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from engine_runs import Wrapped
from torch import Tensor

from shoal_recovery.shard_map import shard_map
from shoal_workers import messages as m
from shoal_workers.errors import EpochAbandoned, PeerLost
from shoal_workers.exchange import Exchange, Pending
from shoal_workers.greeting import epoch_pass_from
from shoal_workers.lifeline import Lifeline
from shoal_workers.node_exchange import nodes_of
from shoal_workers.processes import Seat
from shoal_workers.slot_maps import SlotMaps
from shoal_workers.slots import slots_of
from shoal_workers.snapshots import AgentSnapshots
from shoal_workers.solo import RunRequest, build_rank
from shoal_workers.tags import Purpose
from shoal_workers.tensor_parallel import tp_groups
from shoal_workers.wire import connect

Moment = Purpose | Literal["vote", "voted", "unsure"]


class Upset(Wrapped):
    """After so many votes the process stops itself: in front of the first message of a purpose, of the next vote, or
    behind it. Or it goes on and loses its peers in that vote, not knowing how it ended (`unsure`)."""

    def __init__(self, exchange: Exchange, moment: Moment, after_votes: int) -> None:
        super().__init__(exchange)
        self._moment = moment
        self._after_votes = after_votes

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        if isinstance(self._moment, Purpose) and tag % len(Purpose) == self._moment:
            self._stop_after(self._after_votes)
        return super().isend(tensor, peer, tag)

    def all_gather(self, vector: Tensor) -> Tensor:
        if self._moment == "vote":
            self._stop_after(self._after_votes)
        found = super().all_gather(vector)
        if self._moment == "voted":
            self._stop_after(self._after_votes + 1)
        if self._moment == "unsure" and self.num_votes == self._after_votes + 1:
            raise PeerLost(self.epoch, "voting", "the others are gone")
        return found

    def _stop_after(self, num_votes: int) -> None:
        if self.num_votes == num_votes:
            self._after_votes = -9
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a rank has when its epoch ends: the tag of its state, and why it could not leave that with its agent."""

    tag: int | None
    problem: str | None


def run_protected(
    seat: Seat, request: RunRequest, orders: tuple[m.Assign, ...], upsets: Mapping[int, Moment], after_votes: int
) -> Left:
    """The engine, every step of which is made safe as the orders say; until the epoch ends."""
    plan, order = request.plan, orders[seat.rank]
    exchange = seat.connect(tp_groups(plan), nodes=nodes_of(plan))
    if seat.rank in upsets:
        exchange = Upset(exchange, upsets[seat.rank], after_votes)
    state = shard_map(plan, request.job.model).ranks[seat.rank]
    host, port = order.agents[state.device.node]
    slots = slots_of(order, state, request.job)
    lifeline = Lifeline(cut_off_s=600.0, ends_itself_s=600.0)
    shown = epoch_pass_from(order.job, order.epoch, order.token)
    snapshots = AgentSnapshots(connect((host, port), shown=shown), slots, torch.device("cpu"), SlotMaps(), lifeline)
    built = build_rank(request, seat.rank, exchange, snapshots)
    try:
        built.engine.run(until_step=request.until_step, report=lambda report: None, stop_after=lambda: None)
    except (EpochAbandoned, PeerLost):
        snapshots.abandon()
        return Left(tag=built.live.tag, problem=snapshots.hand_over(built.live, (host, port), shown))
    raise AssertionError("the epoch did not end")
