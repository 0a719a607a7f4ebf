"""Two ranks of which one comes to its gradients long after the other, for tests of what overlaps."""

from __future__ import annotations

from engine_runs import Wrapped
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal_workers.exchange import Arriving, Exchange, Passing
from shoal_workers.live import LiveState
from shoal_workers.node_exchange import nodes_of
from shoal_workers.processes import Seat
from shoal_workers.solo import RunRequest, build_rank
from shoal_workers.tags import Purpose, purpose_of

_EARLY = 0  # rank
_WAITS = "the early rank waits"


class _Late(Wrapped):
    """Gives nobody any gradient before the early rank has nothing left to do but wait for it."""

    def __init__(self, exchange: Exchange, store: Store) -> None:
        super().__init__(exchange)
        self._store = store

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Passing:
        if purpose_of(tag) is Purpose.REDUCE:
            self._store.wait([_WAITS])
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
            self.made = tuple(bool(self.live.gradient(span).any()) for span in self.live.state.sums)
            self._store.set(_WAITS, "")


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


def run_beside_late(seat: Seat, request: RunRequest) -> tuple[bool, ...]:
    """One step of the engine. Of the early rank, which of its gradients were there when it first waited for others."""
    exchange = seat.connect(nodes=nodes_of(request.plan))
    wrapped = (_Early if seat.rank == _EARLY else _Late)(exchange, seat.store)
    built = build_rank(request, seat.rank, wrapped)
    if isinstance(wrapped, _Early):
        wrapped.live = built.live
    built.engine.run(until_step=1, report=lambda report: None, stop_after=lambda: None)
    return wrapped.made if isinstance(wrapped, _Early) else ()
