"""One change of plan in flight, from the claim of an epoch to ranks that step: halt, look what is there, plan, assign.

A procedure that can be interrupted at any point by the next loss; whoever runs it then observes and decides again, and
the next change begins with a higher epoch. Owns the order of these steps. Does not own decisions or the journal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.job import JobSpec, job_to_mapping
from shoal_planner.plan import Plan, plan_to_mapping
from shoal_recovery.checkpoints import list_manifests, load_manifest
from shoal_recovery.errors import StateLost, StoreError
from shoal_recovery.lineage import counts
from shoal_recovery.placement import backups
from shoal_recovery.restore import plan_restore
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import (
    OWNED_KINDS,
    Inventory,
    Kind,
    Live,
    Manifest,
    RankState,
    RecoveryPlan,
    ShardKey,
    ShardMap,
    Snapshot,
)
from shoal_recovery.store import open_store
from shoal_workers import messages as m
from shoal_workers.host_room import host_limits
from shoal_workers.roster import Contact, ask
from shoal_workers.rows import Row, snapshots_from_rows, transfer_rows
from shoal_workers.shards import epoch_of
from shoal_workers.wire import ConnectionClosed

log = structlog.get_logger()


class Interrupted(Exception):
    """Somebody was lost, or does not answer, while a plan was being changed. Observe again. `gone` do not answer
    although they may show life: they are as good as lost."""

    def __init__(self, problem: str, gone: tuple[Contact, ...] = ()) -> None:
        super().__init__(problem, gone)
        self.problem = problem
        self.gone = gone

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What is known of earlier epochs: their plans, and at which step each began. `done_step` is the last step that
    anybody reported done (0: none)."""

    plans: Mapping[int, Plan]
    starts: Mapping[int, int]
    done_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBehind(Interrupted):
    """Somebody knows a higher epoch than the one that was claimed."""

    def __init__(self, claimed: int, known: int) -> None:
        super().__init__(f"epoch {claimed} was claimed, but a checkpoint is of epoch {known}")
        self.known = known


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """State that survivors hold, only what counts."""

    inventory: Inventory
    newest_live_step: int


def highest_epoch(job: str, agents: tuple[Contact, ...], timeout_s: float) -> int:
    """That any of these agents has heard of: what claims epochs may have been lost with the head of the cluster."""
    if not agents:
        return 0
    with ThreadPoolExecutor(max_workers=len(agents)) as pool:
        return max(pool.map(lambda agent: _epoch(job, agent, timeout_s), agents))


def _epoch(job: str, agent: Contact, timeout_s: float) -> int:
    try:
        answer = ask(agent.address, m.GetEpoch(job=job), timeout_s)
    except ConnectionClosed as error:
        log.info("epoch of an agent not known", node=agent.node, why=str(error))
        return 0
    return answer.epoch if isinstance(answer, m.EpochIs) else 0


def take_stock(
    job: str,
    model_spec: JobSpec,
    halted: Mapping[Contact, m.Halted],
    agents: tuple[Contact, ...],
    needed: frozenset[str],
    history: History,
    timeout_s: float,
) -> Found:
    """Asks every agent what it holds and adds what ranks keep live. Raises Interrupted if the agent of a node that is
    `needed` does not answer; what others do not tell is not there."""
    wanted = {answer.layout_epoch for answer in halted.values() if answer.step is not None}
    layouts = {epoch: shard_map(history.plans[epoch], model_spec.model) for epoch in wanted & history.plans.keys()}
    live = tuple(
        Live(
            device=contact.device, step=answer.step, keys=_keys(layouts[answer.layout_epoch].ranks[answer.layout_rank])
        )
        for contact, answer in halted.items()
        if answer.step is not None
        and answer.layout_epoch in layouts
        and counts(answer.layout_epoch, answer.step, history.starts)
    )
    snapshots = tuple(
        snapshot
        for snapshot in _inventories(job, agents, needed, timeout_s)
        if counts(epoch_of(snapshot.name), snapshot.step, history.starts)
    )
    newest = max((entry.step for entry in live), default=0)
    return Found(inventory=Inventory(live=live, snapshots=snapshots), newest_live_step=newest)


def choose_state(
    job: str, spec: JobSpec, shards: ShardMap, found: Found, history: History, epoch: int
) -> tuple[RecoveryPlan | None, int]:
    """Where the new ranks get their state, and the step it is of; no plan means that the job begins.

    The store is asked only when survivors do not hold a whole step. Raises StateLost, StoreError, and EpochBehind when
    the store knows of this `epoch` or a later one.
    """
    with contextlib.suppress(StateLost):
        restore = plan_restore(shards, found.inventory, (), spec.model, spec.train.precision)
        return restore, restore.step
    try:
        manifests = _manifests(job, spec, history)
    except StoreError:
        if history.plans:
            raise
        manifests = ()  # a job that never began has nothing there; that it cannot be written will show soon enough
    known = max((manifest.epoch for manifest in manifests), default=0)
    if known >= epoch:
        raise EpochBehind(epoch, known)
    try:
        restore = plan_restore(shards, found.inventory, manifests, spec.model, spec.train.precision)
    except StateLost:
        if manifests or history.done_step:
            raise
        return None, 0  # nobody has done a step: what is lost follows from the seed
    return restore, restore.step


def assignments(
    *,
    epoch: int,
    job: str,
    spec: JobSpec,
    plan: Plan,
    snapshot: ClusterSnapshot,
    shards: ShardMap,
    restore: RecoveryPlan | None,
    step: int,
    evaluated: bool,
    agents: Mapping[str, tuple[str, int]],
) -> tuple[m.Assign, ...]:
    """One order per rank, in the order of ranks. `shards` is the map of the plan."""
    places = tuple(plan.places())
    copies = backups(snapshot.nodes, plan.copies)
    rows: dict[int, list[Row]] = {place.rank: [] for place in places}
    if restore is not None:
        by_rank: dict[int, list[object]] = {place.rank: [] for place in places}
        for transfer in restore.transfers:
            by_rank[transfer.rank].append(transfer)
        rows = {rank: transfer_rows(found) for rank, found in by_rank.items()}  # type: ignore[arg-type]
    addresses = {node: list(address) for node, address in agents.items()}
    zones = {place.device.node: snapshot.node(place.device.node).zone for place in places}
    host_limits_bytes = host_limits(shards, snapshot, plan.copies)
    spec_mapping, plan_mapping = job_to_mapping(spec), plan_to_mapping(plan)
    kinds = {node: device_type(snapshot.node(node).device, snapshot.overrides) for node in zones}
    accelerated = all(kind.threads is None for kind in kinds.values())
    orders = []
    for place in places:
        node = snapshot.node(place.device.node)
        kind = kinds[node.id]
        orders.append(
            m.Assign(
                epoch=epoch,
                job=job,
                spec=spec_mapping,
                plan=plan_mapping,
                rank=place.rank,
                step=step,
                evaluated=evaluated,
                transfers=None if restore is None else rows[place.rank],
                agents=addresses,
                rendezvous=addresses[places[0].device.node],
                backups=[[backup, *agents[backup]] for backup in copies[node.id]],
                zones=zones,
                memory_limit_bytes=kind.memory_bytes,
                host_limit_bytes=host_limits_bytes[place.rank],
                num_threads=kind.threads,
                accelerated=accelerated,
            )
        )
    return tuple(orders)


def retire(job: str, agents: tuple[Contact, ...], epoch: int, timeout_s: float) -> None:
    """Tells these agents that nothing older than this epoch is needed any more."""
    for agent in agents:
        try:
            ask(agent.address, m.Retire(job=job, before_epoch=epoch), timeout_s)
        except ConnectionClosed:
            log.info("agent not told to retire", node=agent.node)


def vital_nodes(plan: Plan, snapshot: ClusterSnapshot) -> frozenset[str]:
    """Nodes whose loss the epoch would feel: those that compute, and those that keep copies for them."""
    computing = frozenset(device.node for device in plan.devices())
    copies = backups(snapshot.nodes, plan.copies)
    return computing.union(*(copies[node] for node in computing))


def _inventories(job: str, agents: tuple[Contact, ...], needed: frozenset[str], timeout_s: float) -> list[Snapshot]:
    if not agents:
        return []
    with ThreadPoolExecutor(max_workers=len(agents)) as pool:
        answers = [pool.submit(_held, job, agent, agent.node in needed, timeout_s) for agent in agents]
        return [snapshot for answer in answers for snapshot in answer.result()]


def _held(job: str, agent: Contact, needed: bool, timeout_s: float) -> tuple[Snapshot, ...]:
    try:
        return snapshots_from_rows(_inventory(job, agent, timeout_s).snapshots)
    except Interrupted as error:
        if needed:
            raise
        log.info("state of an agent not counted", node=agent.node, why=str(error))
        return ()


def _inventory(job: str, agent: Contact, timeout_s: float) -> m.InventoryIs:
    try:
        answer = ask(agent.address, m.GetInventory(job=job), timeout_s)
    except ConnectionClosed as error:
        raise Interrupted(f"{agent.name} did not say what it holds: {error}", (agent,)) from error
    if not isinstance(answer, m.InventoryIs):
        raise Interrupted(f"{agent.name} cannot say what it holds: {answer}", (agent,))
    return answer


def _manifests(job: str, spec: JobSpec, history: History) -> tuple[Manifest, ...]:
    if spec.checkpoint.uri is None:
        return ()
    store = open_store(spec.checkpoint.uri)
    steps = list_manifests(store, job)
    loaded = (load_manifest(store, job, step) for step in steps)
    return tuple(manifest for manifest in loaded if counts(manifest.epoch, manifest.step, history.starts))


def _keys(state: RankState) -> tuple[ShardKey, ...]:
    weights = tuple(span.key(Kind.WEIGHT) for span in state.keeps)
    return weights + tuple(span.key(kind) for kind in OWNED_KINDS for span in state.owns)
