"""One change of plan in flight, from the claim of an epoch to ranks that step: halt, look what is there, plan, assign.

A procedure that can be interrupted at any point by the next loss; whoever runs it then observes and decides again, and
the next change begins with a higher epoch. Owns the order of these steps. Does not own decisions or the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import structlog

from shoal_planner.catalogue import device_type
from shoal_planner.cluster import ClusterSnapshot, DeviceRef
from shoal_planner.job import JobSpec, ModelSpec, job_to_mapping
from shoal_planner.plan import Plan, plan_to_mapping
from shoal_recovery.faults import Fault
from shoal_recovery.lineage import counts
from shoal_recovery.placement import RankCopies, place_copies
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import (
    OWNED_KINDS,
    Inventory,
    Kind,
    Live,
    RankState,
    RecoveryPlan,
    ShardKey,
    ShardMap,
    Snapshot,
    without,
)
from shoal_workers import messages as m
from shoal_workers.greeting import epoch_pass
from shoal_workers.host_room import host_limits
from shoal_workers.roster import Contact, Roster, ask
from shoal_workers.rows import Row, keys_from_rows, snapshots_from_rows, span_rows, transfer_rows
from shoal_workers.shards import epoch_of, is_mirror
from shoal_workers.slot_files import Sizes
from shoal_workers.wire import ConnectionClosed

log = structlog.get_logger()

Gone = Callable[[Contact], bool]  # whether waiting for its answer is of no use


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
    anybody reported done, `stored_step` the last that the object store was seen to have (0: none)."""

    plans: Mapping[int, Plan]
    starts: Mapping[int, int]
    done_step: int
    stored_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBehind(Interrupted):
    """Somebody knows a higher epoch than the one that was claimed."""

    def __init__(self, claimed: int, known: int) -> None:
        super().__init__(f"epoch {claimed} was claimed, but a checkpoint is of epoch {known}")
        self.known = known


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """State that survivors hold, only what counts; `spoilt` is what agents keep that is not as it was sealed, and
    `reports` what ranks said of steps and evaluations that nobody is known to have heard of."""

    inventory: Inventory
    newest_live_step: int
    spoilt: tuple[Fault, ...] = ()
    reports: tuple[m.Reported, ...] = ()

    @property
    def intact(self) -> tuple[Snapshot, ...]:
        """Snapshots of which nothing is spoilt."""
        spoilt = {(fault.node, fault.name, fault.step) for fault in self.spoilt}
        return tuple(one for one in self.inventory.snapshots if (one.node, one.name, one.step) not in spoilt)


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
    *,
    verified: bool = True,
    gone: Gone = lambda agent: False,
) -> Found:
    """Asks every agent what it holds and adds what ranks keep live. `verified`: agents look through all of it now, at
    some gigabytes per second; ranks verify what they fetch in any case. Raises Interrupted if the agent of a node that
    is `needed` does not answer; what others do not tell is not there."""
    wanted = {answer.layout_epoch for answer in halted.values() if answer.step is not None}
    layouts = {epoch: shard_map(history.plans[epoch], model_spec.model) for epoch in wanted & history.plans.keys()}
    live = tuple(
        Live(
            device=contact.device,
            step=answer.step,
            keys=live_keys(layouts[answer.layout_epoch].ranks[answer.layout_rank], model_spec.train.precision),
        )
        for contact, answer in halted.items()
        if answer.step is not None
        and answer.layout_epoch in layouts
        and counts(answer.layout_epoch, answer.step, history.starts)
    )
    newest_epoch = max(history.plans, default=0)
    question = m.GetInventory(job=job, verified=verified, epoch=newest_epoch, after=history.done_step)
    held = _inventories(question, agents, needed, timeout_s, gone)

    def counting(name: str, step: int) -> bool:
        return counts(epoch_of(name), step, history.starts)

    snapshots = tuple(one for found, _, _ in held for one in found if counting(one.name, one.step))
    spoilt = tuple(fault for _, faults, _ in held for fault in faults if counting(fault.name, fault.step))
    reports = tuple(report for _, _, said in held for report in said)
    newest = max((entry.step for entry in live), default=0)
    inventory = Inventory(live=live, snapshots=snapshots)
    return Found(inventory=inventory, newest_live_step=newest, spoilt=spoilt, reports=reports)


def assignments(
    *,
    epoch: int,
    job: str,
    spec: JobSpec,
    plan: Plan,
    snapshot: ClusterSnapshot,
    shards: ShardMap,
    copies: tuple[RankCopies, ...],
    restore: RecoveryPlan | None,
    step: int,
    evaluated: bool,
    agents: Mapping[str, tuple[str, int]],
    marks: list[Row],
    files: list[Row],
) -> tuple[m.Assign, ...]:
    """One order per rank, in the order of ranks, as `shards`, the map of the plan, and `copies` are."""
    places = tuple(plan.places())
    rows: dict[int, list[Row]] = {place.rank: [] for place in places}
    if restore is not None:
        by_rank: dict[int, list[object]] = {place.rank: [] for place in places}
        for transfer in restore.transfers:
            by_rank[transfer.rank].append(transfer)
        rows = {rank: transfer_rows(found) for rank, found in by_rank.items()}  # type: ignore[arg-type]
    addresses = {node: list(address) for node, address in agents.items()}
    zones = {place.device.node: snapshot.node(place.device.node).zone for place in places}
    host_limits_bytes = host_limits(shards, snapshot, copies)
    spec_mapping, plan_mapping = job_to_mapping(spec), plan_to_mapping(plan)
    kinds = {node: device_type(snapshot.node(node).device, snapshot.overrides) for node in zones}
    accelerated = all(kind.threads is None for kind in kinds.values())
    orders, token = [], epoch_pass(job, epoch).token.hex()
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
                backups=_backup_rows(shards.ranks[place.rank], copies[place.rank], agents),
                mirrors=span_rows(copies[place.rank].mirrors),
                marks=marks,
                files=files,
                zones=zones,
                memory_limit_bytes=kind.memory_bytes,
                host_limit_bytes=host_limits_bytes[place.rank],
                num_threads=kind.threads,
                accelerated=accelerated,
                token=token,
            )
        )
    return tuple(orders)


def give(orders: tuple[m.Assign, ...], plan: Plan, contacts: Mapping[DeviceRef, Contact]) -> None:
    """To each rank its own. Raises Interrupted where one is gone; the others have theirs perhaps."""
    for place, order in zip(plan.places(), orders, strict=True):
        if place.device not in contacts:
            raise Interrupted(f"{place.device} is gone")
        contacts[place.device].send(order)


def _backup_rows(state: RankState, copies: RankCopies, agents: Mapping[str, tuple[str, int]]) -> list[Row]:
    """Who is sent all that the rank vouches for is the rule: that is not spelled out."""
    return [
        [node, *agents[node]] if spans == state.vouches else [node, *agents[node], span_rows(spans)]
        for node, spans in copies.sent
    ]


def retire(job: str, agents: tuple[Contact, ...], epoch: int | None, timeout_s: float) -> None:
    """Tells these agents that nothing older than this epoch is needed any more; None: nothing of the job at all."""
    for agent in agents:
        try:
            ask(agent.address, m.Retire(job=job, before_epoch=epoch), timeout_s)
        except ConnectionClosed:
            log.info("agent not told to retire", node=agent.node)


def make_ready(
    job: str, roster: Roster, timeout_s: float, sizes: Mapping[str, Sizes], *, joining: bool = False
) -> None:
    """Tells the agents of these nodes, in this order, what memory for snapshots an epoch to come may need: one after a
    loss, or one that nodes are `joining`."""
    agents = {agent.node: agent for agent in roster.agents(sizes)}
    for agent in (agents[node] for node in sizes if node in agents):
        try:
            local, copies = map(list, (sizes[agent.node].local, sizes[agent.node].copies))
            ask(agent.address, m.MakeReady(job=job, local=local, copies=copies, joining=joining), timeout_s)
        except ConnectionClosed:
            log.info("agent made nothing ready", node=agent.node)


def rooms(plan: Plan | None, snapshot: ClusterSnapshot) -> dict[DeviceRef, int]:
    """Bytes of a process's own memory that ranks will need: those on CPUs. Of no plan nothing is known."""
    if plan is None or plan.prediction is None:
        return {}
    needed = dict(plan.prediction.memory_bytes)
    kinds = {node.id: device_type(node.device, snapshot.overrides) for node in snapshot.nodes}
    return {ref: int(needed[str(ref)]) for ref in plan.devices() if kinds[ref.node].threads is not None}


def copies_of(plan: Plan, snapshot: ClusterSnapshot, model: ModelSpec) -> tuple[RankCopies, ...]:
    return place_copies(shard_map(plan, model), snapshot, plan.copies)


def vital_nodes(plan: Plan, copies: tuple[RankCopies, ...]) -> frozenset[str]:
    """Nodes whose loss the epoch would feel: those that compute, and those that are sent copies by them."""
    computing = frozenset(device.node for device in plan.devices())
    return computing.union(node for rank in copies for node, _ in rank.sent)


_Held = tuple[tuple[Snapshot, ...], tuple[Fault, ...], tuple[m.Reported, ...]]


def _inventories(
    question: m.GetInventory, agents: tuple[Contact, ...], needed: frozenset[str], timeout_s: float, gone: Gone
) -> list[_Held]:
    if not agents:
        return []
    with ThreadPoolExecutor(max_workers=len(agents)) as pool:
        answers = [pool.submit(_held, question, agent, agent.node in needed, timeout_s, gone) for agent in agents]
        return [answer.result() for answer in answers]


def _held(question: m.GetInventory, agent: Contact, needed: bool, timeout_s: float, gone: Gone) -> _Held:
    try:
        answer = _inventory(question, agent, timeout_s, gone)
    except Interrupted as error:
        if needed:
            raise
        log.info("state of an agent not counted", node=agent.node, why=str(error))
        return (), (), ()
    spoilt = tuple(
        Fault(node=agent.node, name=name, step=step, key=key, problem=problem)
        for name, step, *row, problem in answer.spoilt
        for key in keys_from_rows((row,))
    )
    held = snapshots_from_rows(answer.snapshots)
    snapshots = tuple(replace(one, mirror=True) if is_mirror(one.name) else one for one in held)
    return snapshots, spoilt, tuple(_reported(answer.reports))


def _reported(reports: Iterable[dict[str, Any]]) -> Iterator[m.Reported]:
    """Without those that say nothing: ranks wrote them, and no change of plan may fail for it."""
    for report in reports:
        try:
            said = m.decode(report)
        except m.ProtocolError as error:
            log.warning("report of a step cannot be read", error=str(error))
        else:
            if isinstance(said, m.Reported):
                yield said
            else:
                log.warning("not a report of a step", kind=type(said).__name__)


def _inventory(question: m.GetInventory, agent: Contact, timeout_s: float, gone: Gone) -> m.InventoryIs:
    try:
        answer = ask(agent.address, question, timeout_s, lambda: gone(agent))
    except ConnectionClosed as error:
        raise Interrupted(f"{agent.name} did not say what it holds: {error}", (agent,)) from error
    if not isinstance(answer, m.InventoryIs):
        raise Interrupted(f"{agent.name} cannot say what it holds: {answer}", (agent,))
    return answer


def live_keys(state: RankState, precision: str) -> tuple[ShardKey, ...]:
    """What a rank keeps live. Weights in fp32 are their own masters, so it has those of all that it keeps."""
    weights = tuple(span.key(Kind.WEIGHT) for span in state.keeps)
    owned = tuple(span.key(kind) for kind in OWNED_KINDS for span in state.owns)
    if precision != "fp32":
        return weights + owned
    apart = {span.fqn for span in without(state.owns, state.keeps)}  # a view must lie in one place
    return weights + owned + tuple(span.key(Kind.MASTER) for span in state.keeps if span.fqn not in apart)
