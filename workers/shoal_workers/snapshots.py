"""A rank's side of snapshots: copying its owned state to the agent of its node, and knowing when a step is safe.

On a CPU the copy is the only thing that the step waits for, on other devices it is made beside the step; hashing and
the copies on other nodes run while the next step computes. Owns the mapped slots and one conversation with the agent.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable

import torch

from shoal_recovery.state import ShardKey
from shoal_workers import messages as m
from shoal_workers.devices import Downloads
from shoal_workers.errors import EpochAbandoned, PeerLost
from shoal_workers.lifeline import Lifeline
from shoal_workers.live import LiveState
from shoal_workers.shards import NUM_SLOTS
from shoal_workers.slot_maps import SlotMaps
from shoal_workers.wire import Connection, ConnectionClosed

_LOOK_S = 0.02  # whether somebody has answered meanwhile


class AgentSnapshots:
    """The engine's SnapshotSink over a new connection to the agent of the node. One epoch of one rank; `maps` are those
    of its process.

    Raises ConnectionClosed, also when somebody else closes the connection meanwhile.
    """

    def __init__(
        self,
        connection: Connection,
        opened: m.OpenSlots,
        keys: tuple[ShardKey, ...],
        device: torch.device,
        maps: SlotMaps,
        lifeline: Lifeline,
    ) -> None:
        self._epoch = opened.epoch
        self._lifeline = lifeline
        self._connection = connection
        answer = m.decode_as(m.SlotsOpen, self._connection.request(m.encode(opened)))
        self._job, self.name, self._keys = opened.job, answer.name, keys
        self._slots = [_tensors(maps.map(path), keys) for path in answer.paths]
        self._downloads = Downloads(device)
        self._changed = threading.Condition()
        self._safe_step = -1
        self._problem: str | None = None
        self._abandoned = False
        self._begun_step = -1
        self._num_writing = 0

    @property
    def at_rest(self) -> bool:
        """Whether nothing is on its way into the slots."""
        with self._changed:
            return not self._num_writing

    def begin(self, step: int, live: LiveState) -> None:
        """Copies the owned state of `step` out; from a device, while that computes on."""
        if step == self._begun_step:
            return
        self._problem = self._ask(m.BeginSnapshot(job=self._job, name=self.name, step=step))
        if self._problem:
            return  # nothing makes this step safe now; waiting for it will say so
        with self._changed:
            self._num_writing += 1
        sources = map(live.view, self._keys)
        finish = self._downloads.begin(zip(self._slots[step % NUM_SLOTS], sources, strict=True))
        self._begun_step = step
        threading.Thread(target=self._seal, args=(step, finish), name="seal", daemon=True).start()

    def wait_safe(self, step: int) -> None:
        """Returns when the snapshot of `step` stands in the agent and on its backups, and whoever gives orders is known
        to be there: else others may be about to do the next step, too. Raises EpochAbandoned, and PeerLost when it
        cannot be brought there: nobody may go on without, and whoever decides must know of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._safe_step >= step or self._problem)
            if self._abandoned:
                raise EpochAbandoned(f"epoch {self._epoch} was abandoned while step {step} was brought to safety")
            if self._safe_step < step:
                raise PeerLost(self._epoch, f"bringing step {step} to safety", str(self._problem))
            while not self._lifeline.holds(self._epoch):
                if self._changed.wait_for(lambda: self._abandoned, _LOOK_S):
                    raise EpochAbandoned(f"epoch {self._epoch} was abandoned while this rank was cut off")

    def abandon(self) -> None:
        """Wakes every wait."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        self._connection.close()

    def _seal(self, step: int, finish: Callable[[], None]) -> None:
        try:
            finish()
            with self._changed:
                self._num_writing -= 1
            problem = self._ask(m.SealSnapshot(job=self._job, name=self.name, step=step))
        except Exception as error:  # whatever it is, who waits must learn of it
            problem = f"the copy to the host failed: {error}"
        with self._changed:
            if problem:
                self._problem = problem
            else:
                self._safe_step = max(self._safe_step, step)
            self._changed.notify_all()

    def _ask(self, request: m.BeginSnapshot | m.SealSnapshot) -> str | None:
        try:
            return m.decode_as(m.Done, self._connection.request(m.encode(request))).problem
        except (ConnectionClosed, m.ProtocolError) as error:
            return f"the agent of this node does not answer: {error}"


def _tensors(slot: mmap.mmap, keys: Iterable[ShardKey]) -> list[torch.Tensor]:
    """One fp32 tensor per key, in the agent's order."""
    tensors, offset = [], 0
    for key in keys:
        tensors.append(torch.frombuffer(slot, dtype=torch.float32, count=key.numel, offset=offset))
        offset += key.numel * 4
    return tensors
