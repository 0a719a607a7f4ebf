"""A copy of live state that is not done when others may write that state: whatever lies in the slot is not sealed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from agents import RunningAgent, open_slots, running_agents
from supervised import tiny_job
from torch import Tensor

from shoal_workers import snapshots as module
from shoal_workers.devices import CPU
from shoal_workers.errors import PeerLost
from shoal_workers.exchange import SoloExchange
from shoal_workers.greeting import epoch_pass
from shoal_workers.lifeline import Lifeline
from shoal_workers.live import LiveState
from shoal_workers.slot_maps import SlotMaps
from shoal_workers.slots import Slots
from shoal_workers.snapshots import AgentSnapshots
from shoal_workers.solo import RunRequest, build_rank, solo_plan


class Slow:
    """A rank of step 0 whose copy of it does not go on before it may."""

    def __init__(self, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = tiny_job("stdlib:", steps=3)
        self.agent = agent
        self.may_go_on = threading.Event()
        built = build_rank(RunRequest(job=spec, plan=solo_plan(spec), until_step=3), 0, SoloExchange())
        self.live: LiveState = built.live
        keys = self.live.vouched_keys()
        slots = (Slots(opened=open_slots(keys), keys=keys),)
        lifeline = Lifeline(cut_off_s=10.0, ends_itself_s=60.0)
        self.snapshots = AgentSnapshots(agent.connect(epoch=1), slots, CPU, SlotMaps(), lifeline)
        begin = self.snapshots._downloads.begin

        def begin_slowly(pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
            finish = begin(pairs)
            return lambda: (self.may_go_on.wait(20.0), finish())[1]

        monkeypatch.setattr(self.snapshots._downloads, "begin", begin_slowly)
        self.snapshots.begin(0, self.live)
        assert not self.snapshots.at_rest

    def hand_over(self) -> str | None:
        return self.snapshots.hand_over(self.live, self.agent.address, epoch_pass("job", 1))


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    with running_agents(tmp_path, "n0") as (agent,):
        made = Slow(agent, monkeypatch)
        yield made
        made.may_go_on.set()


def test_it_is_not_sealed_after_the_state_was_let_go(slow: Slow) -> None:
    slow.snapshots.let_go()
    slow.may_go_on.set()
    with pytest.raises(PeerLost, match="it took too long"):
        slow.snapshots.wait_safe(0)
    assert slow.snapshots.at_rest
    assert slow.hand_over() == "it took too long"
    assert slow.agent.inventory() == ()


def test_none_is_begun_beside_it(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HAND_OVER_S", 0.2)
    assert slow.hand_over() == "it took too long"
    assert slow.agent.inventory() == ()
    slow.may_go_on.set()
    slow.snapshots.wait_safe(0)
    assert [held.step for held in slow.agent.inventory()] == [0]


def test_one_that_comes_in_time_is_handed_over(slow: Slow) -> None:
    slow.snapshots.abandon()
    slow.may_go_on.set()
    assert slow.hand_over() is None
    assert [held.step for held in slow.agent.inventory()] == [0]
