"""How long ranks are in exchanges: timed where it happens, and told on ballots."""

from __future__ import annotations

import math

import torch

from shoal_workers.ballots import Ballot, count
from shoal_workers.exchange import Arriving, Pending, SoloExchange
from shoal_workers.tags import Purpose, tag
from shoal_workers.traffic import Link, Metered, Wait


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow(SoloExchange):
    """Every message takes a second to start and two to wait for."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def isend(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        self._clock.now_s += 1.0
        return self

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int) -> Arriving:
        self.isend(tensor, peer, tag)
        return self

    def content(self) -> torch.Tensor:
        self.wait()
        return torch.zeros(0)

    def wait(self) -> None:
        self._clock.now_s += 2.0


def test_time_in_an_exchange_counts_to_what_it_is_for() -> None:
    clock = Clock()
    metered = Metered(Slow(clock), (Link.NODE, Link.NODE), clock)
    tensor = torch.zeros(4)
    pending = metered.irecv(tensor, 1, tag(Purpose.GRADIENT, 3))
    clock.now_s += 10.0  # spent on computing
    metered.isend(tensor, 1, tag(Purpose.FETCH, 0)).wait()
    pending.wait()
    elapsed_s, waited_s = metered.take_waited()
    assert elapsed_s == 16.0
    assert {wait: found_s for wait, found_s in waited_s.items() if found_s} == {Wait.STAGES: 3.0, Wait.SHARDS: 3.0}
    assert metered.take_waited() == (0.0, dict.fromkeys(Wait, 0.0)), "told once"


def ballot(elapsed_s: float, **waited_s: float) -> torch.Tensor:
    return Ballot(
        step=1,
        epoch=0,
        loss=1.0,
        num_targets=1,
        grad_square=1.0,
        stop_after=math.inf,
        fed=((0, 4),),
        sent=dict.fromkeys(Link, 7),
        elapsed_s=elapsed_s,
        waited_s=dict.fromkeys(Wait, 0.0) | {Wait(name): found_s for name, found_s in waited_s.items()},
    ).packed(2)


def test_shares_are_of_each_ranks_own_time_and_leave_the_vote_out() -> None:
    ballots = torch.stack((ballot(4.0, tensor=1.0, vote=2.0), ballot(2.0, tensor=0.5, weights=0.5)))
    verdict = count(ballots, step=1, epoch=0, num_tokens=2)
    exposure = verdict.exposure
    assert (exposure.mean_share, exposure.most_share) == (0.375, 0.5)
    assert exposure.waited_s[Wait.TENSOR] == (0.75, 1.0)
    assert exposure.waited_s[Wait.VOTE] == (1.0, 2.0)
    assert verdict.sent == dict.fromkeys(Link, 14)
    assert verdict.samples == ((0, 4), (0, 4))


def test_a_step_is_held_up_by_copies_only_as_far_as_nobody_comes_later_anyway() -> None:
    def stalled_s(*ballots: torch.Tensor) -> float:
        return count(torch.stack(ballots), step=1, epoch=0, num_tokens=len(ballots)).exposure.stalled_s

    late, hidden = ballot(4.0, vote=0.5), ballot(3.5, safety=2.0)
    assert stalled_s(late, hidden) == 0.0, "the first would have held all up as long"
    assert stalled_s(ballot(4.0, vote=1.0, safety=0.5), ballot(2.75)) == 0.25
    assert stalled_s(ballot(4.0, vote=1.0, safety=0.5)) == 0.5
    found = count(torch.stack((hidden, hidden)), step=1, epoch=0, num_tokens=2).exposure
    assert (found.most_share, found.waited_s[Wait.SAFETY]) == (0.0, (2.0, 2.0)), "it is no exchange"
