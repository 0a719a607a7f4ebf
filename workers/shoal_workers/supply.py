"""What the ranks of one epoch are supplied from: the choice of the step and of every source, and of another source when
one does not give what it was said to hold.

Survivors come first, the store is asked only where it has a newer step, or for what they lack. Sources that failed are
not used again in the same change of plan. Owns no transfer of bytes: ranks fetch, and say what they lack.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from shoal_planner.job import JobSpec
from shoal_recovery.checkpoints import list_manifests, load_manifest, manifest_name
from shoal_recovery.errors import StateLost, StoreError, StoreUnreachable
from shoal_recovery.faults import Fault, disputed, fault_of, told, without
from shoal_recovery.journal import SourceFailed
from shoal_recovery.lineage import counts
from shoal_recovery.protection import Protection
from shoal_recovery.restore import Zones, plan_again, plan_restore
from shoal_recovery.state import Inventory, Manifest, RecoveryPlan, ShardMap, Transfer
from shoal_recovery.store import open_store
from shoal_workers import messages as m
from shoal_workers.change import EpochBehind, Found, History, Interrupted
from shoal_workers.roster import Contact
from shoal_workers.rows import transfer_rows, transfers_from_rows
from shoal_workers.store_check import patiently

log = structlog.get_logger()

_PATIENCE_S = 120.0  # with the store, until all manifests are read


class Supply:
    """Of `epoch`, whose ranks are to have the state of `shards`; `zones` by node. `faults` are those of earlier
    attempts of the same change, and get what is found here. While the store is waited for, `meanwhile` is called again
    and again, with the seconds that it took so far; it may raise Interrupted. Use from one thread."""

    def __init__(
        self,
        epoch: int,
        job: str,
        spec: JobSpec,
        shards: ShardMap,
        zones: Zones,
        found: Found,
        history: History,
        faults: list[Fault],
        meanwhile: Callable[[float], None],
    ) -> None:
        self._epoch = epoch
        self._job = job
        self._spec = spec
        self._shards = shards
        self._zones = zones
        self._found = found
        self._history = history
        self._faults = faults
        self._meanwhile = meanwhile
        # Who did not answer before may do now, and else tells nothing of what it holds.
        self._shunned = [fault for fault in faults if not fault.silent]
        self._manifests: tuple[Manifest, ...] | None = None
        self._unreadable: list[tuple[str, int, str]] = []
        self._transfers: tuple[Transfer, ...] = ()
        self._step = 0
        self._lacking: list[tuple[Contact, m.Lacking]] = []
        faults.extend(found.spoilt)

    def choose(self) -> tuple[RecoveryPlan | None, int]:
        """Where the new ranks get their state, and the step it is of; no plan means that the job begins.

        Raises StateLost, StoreError, and EpochBehind when the store knows of this epoch or a later one.
        """
        with contextlib.suppress(StateLost):
            plan, step = self._begin_with()
            if step >= self._history.stored_step:  # survivors may have an older one whole
                return plan, step
        try:
            manifests = self._load_manifests()
        except StoreError:
            if self._history.plans:
                raise
            manifests = ()  # a job that never began has nothing there; that it cannot be written will show soon enough
        known = max((manifest.epoch for manifest in manifests), default=0)
        if known >= self._epoch:
            raise EpochBehind(self._epoch, known)
        try:
            return self._begin_with()
        except StateLost:
            self._faults.clear()  # what looked wrong may be all that there is: whoever tries again looks at it again
            if manifests or self._unreadable or self._history.done_step:
                raise
            return None, 0  # nobody has done a step: what is lost follows from the seed

    @property
    def marks(self) -> tuple[tuple[int, ...], ...]:
        """That the manifest of the chosen step holds, if it was read."""
        found = (manifest.marks for manifest in self._manifests or () if manifest.step == self._step)
        return next(found, ())

    @property
    def files(self) -> tuple[Any, ...]:
        """The same of which data the job began with."""
        return next((manifest.files for manifest in self._manifests or () if manifest.files), ())

    def hear(self, contact: Contact, message: m.Lacking) -> None:
        if message.epoch == self._epoch:
            self._lacking.append((contact, message))

    def serve(self) -> None:
        """Tells every rank that lacks something where else to get it. Raises Interrupted where nobody has it: then the
        next attempt finds another step."""
        while self._lacking:
            contact, message = self._lacking.pop(0)
            transfers = self._again(contact, message)
            contact.send(m.Bring(epoch=self._epoch, transfers=transfer_rows(transfers)))

    def told(self) -> tuple[SourceFailed, ...]:
        """Which sources failed in this change, and what was used instead."""
        disputes = disputed(self._found.inventory, self._manifests or ())
        unreadable = tuple(
            SourceFailed(
                source="object store",
                object=name,
                step=step,
                num_bytes=0,
                problem=problem,
                instead=(f"step {self._step}",),
            )
            for name, step, problem in self._unreadable
        )
        return told((*self._faults, *disputes), self._step, self._transfers) + unreadable

    def _begin_with(self) -> tuple[RecoveryPlan, int]:
        """Raises StateLost, also where a job of which a step was safe would begin anew: who has it may be back soon."""
        plan, step = self._restore()
        starts, done_step = self._history.starts, self._history.done_step
        since = starts[max(starts)] if starts else 0
        if step == 0 and done_step > 0 and Protection.of(self._spec).newest(done_step - 1, since) > 0:
            raise StateLost(f"only step 0 is whole, and step {done_step} was done already", ())
        return plan, step

    def _restore(self) -> tuple[RecoveryPlan, int]:
        inventory, manifests = self._left()
        precision = self._spec.train.precision
        plan = plan_restore(self._shards, inventory, manifests, self._spec.model, precision, self._zones)
        self._transfers, self._step = plan.transfers, plan.step
        return plan, plan.step

    def _left(self) -> tuple[Inventory, tuple[Manifest, ...]]:
        manifests = self._manifests or ()
        disputes = disputed(self._found.inventory, manifests)
        return without((*self._shunned, *disputes), self._found.inventory, manifests)

    def _again(self, contact: Contact, message: m.Lacking) -> tuple[Transfer, ...]:
        rank = next(state.rank for state in self._shards.ranks if state.device == contact.device)
        failed = transfers_from_rows(rank, [row for row, _, _ in message.rows])
        for transfer, (_, problem, silent) in zip(failed, message.rows, strict=True):
            fault = fault_of(transfer, self._step, problem, silent=silent)
            self._faults.append(fault)
            self._shunned.append(fault)
        log.warning("sources failed", rank=contact.name, num_transfers=len(failed), problem=message.rows[0][1])
        found = self._plan_again(failed)
        gone = set(failed)
        self._transfers = tuple(transfer for transfer in self._transfers if transfer not in gone) + found
        return found

    def _plan_again(self, failed: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        with contextlib.suppress(StateLost):
            return self._from_left(failed)
        try:
            self._load_manifests()
            return self._from_left(failed)
        except (StateLost, StoreError) as error:
            raise Interrupted(f"sources of state failed, and there are no others: {error}") from error

    def _from_left(self, failed: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        inventory, manifests = self._left()
        precision = self._spec.train.precision
        return plan_again(failed, self._step, self._shards, inventory, manifests, precision, self._zones)

    def _load_manifests(self) -> tuple[Manifest, ...]:
        """Those that count and can be read. Raises StoreError."""
        uri = self._spec.checkpoint.uri
        if self._manifests is None and uri is not None:
            began_s, read = time.monotonic(), partial(self._readable, uri)
            found, self._unreadable = patiently(
                uri, read, _PATIENCE_S, lambda: self._meanwhile(time.monotonic() - began_s)
            )
            self._manifests = tuple(found)
        return self._manifests or ()

    def _readable(self, uri: str) -> tuple[list[Manifest], list[tuple[str, int, str]]]:
        """And those that cannot be read, and why."""
        store, found, unreadable = open_store(uri), list[Manifest](), list[tuple[str, int, str]]()
        for step in list_manifests(store, self._job):
            try:
                manifest = load_manifest(store, self._job, step)
            except StoreUnreachable:
                raise
            except StoreError as error:
                log.warning("manifest cannot be read", step=step, problem=str(error))
                unreadable.append((manifest_name(self._job, step), step, error.problem))
                continue
            if counts(manifest.epoch, manifest.step, self._history.starts):
                found.append(manifest)
        return found, unreadable
