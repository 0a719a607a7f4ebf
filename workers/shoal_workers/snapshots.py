"""A rank's side of snapshots: copying its owned state to the agent of its node, and knowing when a step is safe.

The copy, hashing and the copies on other nodes are made while the next step computes, which waits for them before it
writes anything. Owns the mapped slots and one conversation with the agent.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from shoal_recovery.state import ShardKey
from shoal_workers import messages as m
from shoal_workers.devices import Downloads
from shoal_workers.errors import EpochAbandoned, PeerLost
from shoal_workers.greeting import Pass
from shoal_workers.lifeline import Lifeline
from shoal_workers.live import LiveState
from shoal_workers.slot_maps import SlotMaps
from shoal_workers.slots import Slots
from shoal_workers.wire import Connection, ConnectionClosed, connect

_HAND_OVER_S = 5.0
_TOO_LATE = "it took too long"
_NO_ANSWER = "the agent of this node does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    """A snapshot that the rank takes again and again: one fp32 tensor per key in each slot."""

    job: str
    name: str
    keys: tuple[ShardKey, ...]
    slots: tuple[list[torch.Tensor], ...]


_MOST_REPORTS = 1024
_LOOK_S = 0.02  # whether somebody has answered meanwhile


class AgentSnapshots:
    """The engine's SnapshotSink over a new connection to the agent of the node. One epoch of one rank; `wanted` are all
    of one job, `maps` those of its process; `is_due` says of which steps, beside the first.

    Raises ConnectionClosed, also when somebody else closes the connection meanwhile.
    """

    def __init__(
        self,
        connection: Connection,
        wanted: Sequence[Slots],
        device: torch.device,
        maps: SlotMaps,
        lifeline: Lifeline,
        is_due: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self._epoch = wanted[0].opened.epoch
        self._lifeline = lifeline
        self._is_due = is_due
        self._connection = connection
        self._snapshots = tuple(_opened(connection, slots, maps) for slots in wanted)
        self._downloads = Downloads(device)
        self._changed = threading.Condition()
        self._safe_step = -1
        self._problem: str | None = None
        self._abandoned = False
        self._begun_step = -1
        self._copied_step = -1
        self._too_late = False
        self._sealing: threading.Thread | None = None
        self._num_writing = 0
        self._reports: deque[m.Reported] = deque(maxlen=_MOST_REPORTS)  # that no snapshot was begun after

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(snapshot.name for snapshot in self._snapshots)

    @property
    def at_rest(self) -> bool:
        """Whether nothing is on its way into the slots."""
        with self._changed:
            return not self._num_writing

    def done(self, said: m.Reported) -> None:
        """What this rank said of a step goes with the state after it, for whoever comes upon that and has not heard
        it; of an evaluation with the state after the next step, as without that it is done again."""
        self._reports.append(replace(said, marks=[], files=[]) if isinstance(said, m.Stepped) else said)

    def begin(self, step: int, live: LiveState, *, always: bool = False) -> None:
        """Copies the owned state of `step` out, beside the caller: until the step is safe nobody may write it. The
        first step of an epoch is always due: nothing has been kept of it by this epoch's owners."""
        if step == self._begun_step or not (always or self._begun_step < 0 or self._is_due(step)):
            return
        self._begun_step = step
        slots, self._problem = _begin(self._connection, self._snapshots, step, self._reports)
        if self._problem:
            return  # nothing makes this step safe now; waiting for it will say so
        self._reports.clear()
        with self._changed:
            self._num_writing += 1
        finish = self._copy(slots, live)
        self._sealing = threading.Thread(target=self._seal, args=(step, finish), name="seal", daemon=True)
        self._sealing.start()

    def wait_safe(self, step: int) -> None:
        """Returns when the newest snapshots that were begun stand in the agent and on their backups, and whoever gives
        orders is known to be there: else others may be about to do the next step, too. Raises EpochAbandoned, and
        PeerLost when they cannot be brought there: nobody may go on without, and whoever decides must know of it."""
        begun = self._begun_step
        assert begun <= step
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._safe_step >= begun or self._problem)
            if self._abandoned:
                raise EpochAbandoned(f"epoch {self._epoch} was abandoned while step {begun} was brought to safety")
            if self._safe_step < begun:
                raise PeerLost(self._epoch, f"bringing step {begun} to safety", str(self._problem))
            while not self._lifeline.holds(self._epoch):
                if self._changed.wait_for(lambda: self._abandoned, _LOOK_S):
                    raise EpochAbandoned(f"epoch {self._epoch} was abandoned while this rank was cut off")

    def abandon(self) -> None:
        """Wakes every wait."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        self._connection.close()

    def hand_over(self, live: LiveState, address: tuple[str, int], shown: Pass) -> str | None:
        """After the end of the epoch: what is whole in the memory of this rank, and perhaps not sealed yet, is left
        with its agent, so that any rank can get it. Sends no copies. What went wrong, if anything did."""
        step = live.tag
        if step is None or step <= self._safe_step:
            return None
        if self._sealing is not None:
            self._sealing.join(_HAND_OVER_S)
        try:
            connection = connect(address, _HAND_OVER_S, shown)
        except ConnectionClosed as error:
            return str(error)
        connection.set_timeout(_HAND_OVER_S)
        try:
            if self._copied_step != step:
                if not self.at_rest:
                    return _TOO_LATE  # and a second copy into the same memory would not be better
                slots, problem = _begin(connection, self._snapshots, step, self._reports)
                if problem := problem or self._copy_last(slots, live):
                    return problem
            return _seal(connection, self._snapshots, step, here=True)
        finally:
            connection.close()

    def _copy_last(self, slots: Sequence[int], live: LiveState) -> str | None:
        with self._changed:
            self._num_writing += 1
        self._copy(slots, live)()
        with self._changed:
            self._num_writing -= 1
            return _TOO_LATE if self._too_late else None

    def let_go(self) -> None:
        """From now on others may write into the live state: what has not been copied of it is not sealed any more."""
        with self._changed:
            self._too_late = True

    def _copy(self, slots: Sequence[int], live: LiveState) -> Callable[[], None]:
        """Begins to; it is done when what this returns has returned. A slot for each snapshot."""
        pairs = (
            (target, live.view(key))
            for snapshot, slot in zip(self._snapshots, slots, strict=True)
            for target, key in zip(snapshot.slots[slot], snapshot.keys, strict=True)
        )
        return self._downloads.begin(pairs)

    def _seal(self, step: int, finish: Callable[[], None]) -> None:
        try:
            finish()
            with self._changed:
                self._num_writing -= 1
                self._copied_step = self._copied_step if self._too_late else step
            problem = _TOO_LATE if self._copied_step < step else _seal(self._connection, self._snapshots, step)
        except Exception as error:  # whatever it is, who waits must learn of it
            problem = f"the copy to the host failed: {error}"
        with self._changed:
            if problem:
                self._problem = problem
            else:
                self._safe_step = max(self._safe_step, step)
            self._changed.notify_all()


def _opened(connection: Connection, slots: Slots, maps: SlotMaps) -> _Mapped:
    answer = m.decode_as(m.SlotsOpen, connection.request(m.encode(slots.opened)))
    mapped = tuple(_tensors(maps.map(path), slots.keys) for path in answer.paths)
    return _Mapped(job=slots.opened.job, name=answer.name, keys=slots.keys, slots=mapped)


def _begin(
    connection: Connection, snapshots: Iterable[_Mapped], step: int, reports: Iterable[m.Reported]
) -> tuple[tuple[int, ...], str | None]:
    """The slot into which each of them goes, and what is wrong."""
    slots, said = [], [m.encode(one) for one in reports]
    for one in snapshots:
        request = m.BeginSnapshot(job=one.job, name=one.name, step=step, reports=said)
        try:
            answer = m.decode(connection.request(m.encode(request)))
        except (ConnectionClosed, m.ProtocolError) as error:
            return (), f"{_NO_ANSWER}: {error}"
        if not isinstance(answer, m.SlotFree):
            return (), f"the agent of this node refused {one.name} of step {step}: {answer}"
        slots.append(answer.slot)
    return tuple(slots), None


def _seal(connection: Connection, snapshots: Iterable[_Mapped], step: int, *, here: bool = False) -> str | None:
    asked = (m.SealSnapshot(job=one.job, name=one.name, step=step, here=here) for one in snapshots)
    return next(filter(None, (_ask(connection, request) for request in asked)), None)


def _ask(connection: Connection, request: m.SealSnapshot) -> str | None:
    try:
        return m.decode_as(m.Done, connection.request(m.encode(request))).problem
    except (ConnectionClosed, m.ProtocolError) as error:
        return f"{_NO_ANSWER}: {error}"


def _tensors(slot: mmap.mmap, keys: Iterable[ShardKey]) -> list[torch.Tensor]:
    """One fp32 tensor per key, in the agent's order."""
    tensors, offset = [], 0
    for key in keys:
        tensors.append(torch.frombuffer(slot, dtype=torch.float32, count=key.numel, offset=offset))
        offset += key.numel * 4
    return tensors
