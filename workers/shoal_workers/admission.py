"""Which requests an agent answers to whom. Pure but for what it remembers of epochs.

What takes or gives a job's state is answered to the ranks of an epoch of this job alone, as the pass says that they
showed; everything else to processes of the cluster (supervisors, connectors, other agents), which know its key.
"""

from __future__ import annotations

import threading
from typing import Any

from shoal_workers import messages as m
from shoal_workers.greeting import Caller
from shoal_workers.shards import epoch_of

_Named = m.BeginSnapshot | m.SealSnapshot | m.PutSnapshot
_OfState = m.OpenSlots | _Named | m.Fetch | m.SetKey | m.GetKey


class Admission:
    """Thread-safe. An agent that was started anew remembers no epochs; what older ones are told is then no worse than
    before they were over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._oldest: dict[str, int] = {}  # that snapshots are taken of
        self._newest: dict[str, int] = {}  # that a pass was shown of

    def oldest(self, job: str) -> int:
        """No snapshots of epochs before this one are taken."""
        with self._lock:
            return self._oldest.get(job, 0)

    def retire(self, job: str, before_epoch: int) -> None:
        with self._lock:
            self._oldest[job] = max(before_epoch, self._oldest.get(job, 0))

    def refusal(self, caller: Caller, request: Any) -> str | None:
        """Why this request is not answered to this caller; None: it is."""
        name = type(request).__name__
        if not isinstance(request, _OfState):
            return None if caller.job is None else f"{name} is for processes of the cluster, not for {caller}"
        if caller.job is None or caller.epoch is None:
            return f"{name} needs the token of an epoch of the job, and was asked by {caller}"
        if isinstance(request, m.SetKey | m.GetKey):
            if not request.key.startswith(f"{caller.job}/{caller.epoch}/"):
                return f"{name}: the key {request.key!r} is not for {caller}"
        elif request.job != caller.job:
            return f"{name}: the state of {request.job} is not for {caller}"
        return self._of_another_epoch(caller.job, caller.epoch, request)

    def _of_another_epoch(self, job: str, epoch: int, request: _OfState) -> str | None:
        match request:
            case m.OpenSlots():
                meant = request.epoch
            case m.BeginSnapshot() | m.SealSnapshot() | m.PutSnapshot():
                try:
                    meant = epoch_of(request.name)
                except ValueError:
                    return f"{type(request).__name__}: {request.name!r} is no name of a snapshot"
            case _:  # a new epoch fetches what older ones wrote
                meant = epoch
        if meant != epoch:
            return f"{type(request).__name__}: epoch {meant} of {job} was named, and the token of epoch {epoch} shown"
        with self._lock:
            if epoch < (oldest := self._oldest.get(job, 0)):
                return f"epoch {epoch} of {job} is over: epoch {oldest} steps already"
            newest = self._newest[job] = max(epoch, self._newest.get(job, 0))
            # Ranks of before may still seal what they have written, for the new epoch; they have nothing to read.
            if isinstance(request, m.Fetch) and epoch < newest:
                return f"epoch {epoch} of {job} is over: epoch {newest} has begun"
        return None


def refusal_of(request: Any, why: str) -> m.Done | m.Fetched:
    """The answer that whoever asked this expects."""
    return m.Fetched(problem=why, around=[]) if isinstance(request, m.Fetch) else m.Done(problem=why)
