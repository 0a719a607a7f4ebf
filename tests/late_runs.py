"""Ranks of which some come to their gradients long after the others, for tests of what overlaps: those of the last
pipeline of a plan."""

from __future__ import annotations

from device_wires import over_wires
from engine_runs import Wrapped
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal_workers.engine import StepReport
from shoal_workers.exchange import Arriving, Exchange, Passing
from shoal_workers.live import LiveState
from shoal_workers.node_exchange import nodes_of
from shoal_workers.processes import Seat
from shoal_workers.solo import RankRun, RunRequest, build_rank
from shoal_workers.tags import Purpose, purpose_of
from shoal_workers.tensor_parallel import tp_groups


def _waits(epoch: int, rank: int) -> str:
    """The key under which a rank says so: stores outlive epochs."""
    return f"{epoch}/{rank} waits"


class _Late(Wrapped):
    """Gives nobody any gradient before the early ranks have nothing left to do but wait for it."""

    def __init__(self, exchange: Exchange, store: Store, early: range) -> None:
        super().__init__(exchange)
        self._store = store
        self._early = early

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        if purpose_of(tag) is Purpose.REDUCE:
            self._store.wait([_waits(self.epoch, rank) for rank in self._early])
        return super().isend(tensor, peer, tag)


class _Early(Wrapped):
    """Looks what gradients there are when it first waits for those of others."""

    def __init__(self, exchange: Exchange, store: Store) -> None:
        super().__init__(exchange)
        self._store = store
        self.live: LiveState | None = None
        self.made: tuple[bool, ...] = ()

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        arriving = super().irecv(tensor, peer, tag)
        return _Noted(arriving, self) if purpose_of(tag) is Purpose.REDUCE else arriving

    def note_wait(self) -> None:
        if not self.made:
            assert self.live is not None
            self.made = tuple(
                bool(self.live.gradient(span).any()) for span in self.live.state.sums if span.fqn.startswith("layers.")
            )
            self._store.set(_waits(self.epoch, self.rank), "")


class _Noted:
    def __init__(self, arriving: Arriving, early: _Early) -> None:
        self._arriving = arriving
        self._early = early

    def has_passed(self) -> bool:
        return self._arriving.has_passed()

    def content(self) -> Tensor:
        self._early.note_wait()
        return self._arriving.content()

    def wait(self) -> None:
        self._early.note_wait()
        self._arriving.wait()


def run_beside_late(seat: Seat, request: RunRequest, wires: bool) -> tuple[RankRun, tuple[bool, ...]]:
    """One step of the engine, over `wires` or as nodes are. Of an early rank, which of its gradients were there when it
    first waited for those of others."""
    groups, nodes = tp_groups(request.plan), nodes_of(request.plan)
    exchange = over_wires(seat, groups) if wires else seat.connect(groups, nodes=nodes)
    late = len(request.plan.pipelines) - 1
    early = range(sum(place.pipeline < late for place in request.plan.places()))
    wrapped = _Early(exchange, seat.store) if seat.rank in early else _Late(exchange, seat.store, early)
    built = build_rank(request, seat.rank, wrapped)
    if isinstance(wrapped, _Early):
        wrapped.live = built.live
    reports: list[StepReport] = []
    outcome = built.engine.run(until_step=1, report=reports.append, stop_after=lambda: None)
    return built.finish(outcome, reports), wrapped.made if isinstance(wrapped, _Early) else (True,)
