"""A rank's side of snapshots: copying its owned state to the agent of its node, and knowing when a step is safe.

The copy is the only thing that the step waits for; hashing and the copies on other nodes run while the next step
computes. Owns the mapped slots and one conversation with the agent.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable

import torch

from shoal_recovery.state import ShardKey
from shoal_workers import messages as m
from shoal_workers.errors import EpochAbandoned
from shoal_workers.live import LiveState
from shoal_workers.shards import NUM_SLOTS
from shoal_workers.wire import Connection, ConnectionClosed, connect


class AgentSnapshots:
    """The engine's SnapshotSink over the agent at `address`. One epoch of one rank."""

    def __init__(self, address: tuple[str, int], opened: m.OpenSlots, keys: tuple[ShardKey, ...]) -> None:
        self._epoch = opened.epoch
        self._connection: Connection = connect(address)
        answer = m.decode_as(m.SlotsOpen, self._connection.request(m.encode(opened)))
        self._job, self._name, self._keys = opened.job, answer.name, keys
        self._slots = [_map(path, keys) for path in answer.paths]
        self._changed = threading.Condition()
        self._safe_step = -1
        self._problem: str | None = None
        self._abandoned = False
        self._begun_step = -1

    def begin(self, step: int, live: LiveState) -> None:
        """Copies the owned state of `step` out. Returns when the live state may change."""
        if step == self._begun_step:
            return
        problem = self._ask(m.BeginSnapshot(job=self._job, name=self._name, step=step))
        if problem:
            self._problem = problem
            return  # nothing makes this step safe now; the vote waits until this epoch ends
        for key, target in zip(self._keys, self._slots[step % NUM_SLOTS], strict=True):
            target.copy_(live.view(key))
        self._begun_step = step
        threading.Thread(target=self._seal, args=(step,), name="seal", daemon=True).start()

    def wait_safe(self, step: int) -> None:
        """Returns when the snapshot of `step` stands in the agent and on its backups. Raises EpochAbandoned."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._safe_step >= step)
            if self._abandoned:
                raise EpochAbandoned(f"epoch {self._epoch} was abandoned while step {step} was brought to safety")

    def abandon(self) -> None:
        """Wakes every wait; a copy that failed (its node is gone) leaves the step unsafe until this is called."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        self._connection.close()

    @property
    def problem(self) -> str | None:
        """Why the newest step is not safe, if the agent said so."""
        return self._problem

    def _seal(self, step: int) -> None:
        problem = self._ask(m.SealSnapshot(job=self._job, name=self._name, step=step))
        with self._changed:
            if problem:
                self._problem = problem
            else:
                self._safe_step = max(self._safe_step, step)
            self._changed.notify_all()

    def _ask(self, request: m.BeginSnapshot | m.SealSnapshot) -> str | None:
        try:
            return m.decode_as(m.Done, self._connection.request(m.encode(request))).problem
        except ConnectionClosed as error:
            return f"the agent of this node does not answer: {error}"


def _map(path: str, keys: Iterable[ShardKey]) -> list[torch.Tensor]:
    """One fp32 tensor per key over the mapped file, in the agent's order; every page is mapped before training."""
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    tensors, offset = [], 0
    for key in keys:
        tensors.append(torch.frombuffer(mapped, dtype=torch.float32, count=key.numel, offset=offset))
        offset += key.numel * 4
    return tensors
