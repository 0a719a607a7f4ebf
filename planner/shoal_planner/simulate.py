"""Runs the programs of a plan on costs: the same programs that the engine runs on tensors.

Owns the clock of each rank and where its seconds go, and the memory of each rank. Does not own whether that fits
(`score`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import NamedTuple

from shoal_planner.costs import CostModel, Holder, PartTime, model_flops
from shoal_planner.memory import ELEMENT_BYTES, GRADIENT_BYTES, StageMemory, stage_memory, unit_elements
from shoal_planner.plan import Plan, Prediction, RankPlace, Terms
from shoal_planner.programs import (
    Backward,
    Forward,
    Gather,
    Instruction,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
    Vote,
)
from shoal_planner.proof import ordered
from shoal_planner.schedule import programs, sync_units

_Key = tuple[int, int, bool, int, int]  # sender, receiver, activation?, micro-batch, first row


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """What a rank is to the cost model: its place, its work per micro-batch, and the state that it owns."""

    place: RankPlace
    node: str
    time: PartTime
    owned: float
    memory: StageMemory


class Span(NamedTuple):
    """What a rank spends [start_s, end_s) of a step on: an instruction, and the term of the prediction it counts to.
    One instruction may have several: what it waits for, and what it does."""

    rank: int
    instruction: Instruction
    term: str
    start_s: float
    end_s: float


def rank_costs(plan: Plan, costs: CostModel) -> tuple[RankCost, ...]:
    """By rank. Raises KeyError for a node that the cluster lacks."""
    holders = unit_holders(plan, costs)
    totals = {unit: sum(holder.share for holder in found) for unit, found in holders.items()}
    return tuple(_rank_cost(plan, place, costs, totals) for place in plan.places())


def _rank_cost(plan: Plan, place: RankPlace, costs: CostModel, totals: dict[int, float]) -> RankCost:
    model, train = costs.job.model, costs.job.train
    pipeline = plan.pipelines[place.pipeline]
    stage, depth = pipeline.stages[place.stage], len(pipeline.stages)
    replica, layers = stage.replicas[place.replica], stage.last - stage.first
    samples, share = replica.samples, replica.state_share
    embedding, head = place.stage == 0, place.stage == depth - 1
    units = sync_units(plan, model, place.pipeline, place.stage)
    owned = sum(unit_elements(model, unit, place.tp) * share / totals[unit] for unit in units)
    memory = stage_memory(
        model,
        train.seq_len,
        train.precision,
        tp=place.tp,
        samples=samples,
        in_flight=min(depth - place.stage, pipeline.micro_batches),
        layers=layers,
        embedding=embedding,
        head=head,
        owned=owned,
    )
    time = costs.stage(place.device.node, place.tp, samples, layers, embedding=embedding, head=head)
    return RankCost(place=place, node=place.device.node, time=time, owned=owned, memory=memory)


def unit_holders(plan: Plan, costs: CostModel) -> dict[int, tuple[Holder, ...]]:
    """The replicas that synchronise each unit."""
    found: dict[int, list[Holder]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for unit in sync_units(plan, costs.job.model, p, s):
                found[unit].extend(
                    Holder(node=replica.node, tp=replica.tp, share=replica.state_share) for replica in stage.replicas
                )
    return {unit: tuple(replicas) for unit, replicas in found.items()}


def simulate(plan: Plan, costs: CostModel) -> Prediction:
    """Seconds of a step and where they go, and the memory of each device. Raises KeyError for an unknown node."""
    ranks = rank_costs(plan, costs)
    run = _Run(plan, costs, ranks, programs(plan, costs.job.model))
    run.play()
    step_s = max(run.clock)
    tokens_per_s = costs.job.train.tokens_per_step / step_s
    used = {place.device.node: costs.node(place.device.node) for place in plan.places()}
    price_per_s = sum(node.price_per_hour for node in used.values()) / 3600
    return Prediction(
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        mfu=_mfu(costs, ranks, step_s),
        price_per_million_tokens=price_per_s / tokens_per_s * 1e6,
        terms=run.terms(step_s),
        memory_bytes=tuple((str(rank.place.device), rank.memory.total) for rank in ranks),
    )


def spans(plan: Plan, costs: CostModel, ranks: Collection[int]) -> tuple[Span, ...]:
    """The step of these ranks as `simulate` times it, each rank's in order of time and without gaps."""
    run = _Run(plan, costs, rank_costs(plan, costs), programs(plan, costs.job.model), frozenset(ranks))
    run.play()
    return tuple(sorted(run.spans, key=lambda span: (span.rank, span.start_s)))


def _mfu(costs: CostModel, ranks: tuple[RankCost, ...], step_s: float) -> float:
    train = costs.job.train
    peak = sum(costs.device(rank.node).flops_per_s(train.precision) for rank in ranks)
    return model_flops(costs.job.model, train.seq_len) * train.global_batch / (step_s * peak)


class _Run:
    """One step of all ranks; of those `watched` it keeps when they do what."""

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        ranks: tuple[RankCost, ...],
        by_rank: tuple[Program, ...],
        watched: frozenset[int] = frozenset(),
    ) -> None:
        self.costs = costs
        self.ranks = ranks
        self.by_rank = by_rank
        self.holders = unit_holders(plan, costs)
        self.clock = [0.0] * len(ranks)
        self.spent: list[dict[str, float]] = [defaultdict(float) for _ in ranks]
        self.arrivals: dict[_Key, tuple[float, float]] = {}
        self.members: dict[Instruction, list[int]] = defaultdict(list)
        self.meetings: dict[Instruction, tuple[float, float]] = {}  # start, seconds
        self.network_free_s: dict[str, float] = defaultdict(float)
        self.watched = watched
        self.spans: list[Span] = []

    def play(self) -> None:
        for rank, program in enumerate(self.by_rank):
            for instruction in program:
                if isinstance(instruction, Reduce | Vote | Gather):
                    self.members[instruction].append(rank)
        for rank, instruction in ordered(self.by_rank):
            self._do(rank, instruction)

    def terms(self, step_s: float) -> Terms:
        """Of the rank that computes longest; what it waits at the end counts as bubble, so that all add up."""
        rank = max(range(len(self.clock)), key=lambda rank: self.spent[rank]["compute_s"])
        spent = dict(self.spent[rank])
        spent["bubble_s"] = spent.get("bubble_s", 0.0) + step_s - self.clock[rank]
        return Terms(**{field.name: spent.get(field.name, 0.0) for field in fields(Terms)})

    def _spend(self, rank: int, instruction: Instruction, term: str, seconds: float) -> None:
        if rank in self.watched and seconds > 0:
            start_s = self.clock[rank]
            self.spans.append(Span(rank, instruction, term, start_s, start_s + seconds))
        self.spent[rank][term] += seconds
        self.clock[rank] += seconds

    def _do(self, rank: int, instruction: Instruction) -> None:
        time = self.ranks[rank].time
        match instruction:
            case Forward():
                self._spend(rank, instruction, "compute_s", time.forward_s)
                self._spend(rank, instruction, "tensor_s", time.tensor_forward_s)
            case Backward():
                self._spend(rank, instruction, "compute_s", time.backward_s)
                self._spend(rank, instruction, "tensor_s", time.tensor_backward_s)
            case SendActivation() | SendGradient():
                kind = isinstance(instruction, SendActivation)
                rows = instruction.last - instruction.first
                link_s = self.costs.send_s(self.ranks[rank].node, self.ranks[instruction.peer].node, rows)
                key = (rank, instruction.peer, kind, instruction.micro_batch, instruction.first)
                self.arrivals[key] = (self.clock[rank] + link_s, link_s)
            case ReceiveActivation() | ReceiveGradient():
                kind = isinstance(instruction, ReceiveActivation)
                key = (instruction.peer, rank, kind, instruction.micro_batch, instruction.first)
                at_s, link_s = self.arrivals.pop(key)
                wait_s = max(0.0, at_s - self.clock[rank])
                self._spend(rank, instruction, "bubble_s", wait_s - min(wait_s, link_s))
                self._spend(rank, instruction, "pipeline_s", min(wait_s, link_s))
            case Reduce() | Vote() | Gather():
                self._meet(rank, instruction)
            case Update():
                self._spend(
                    rank, instruction, "optimizer_s", self.costs.update_s(self.ranks[rank].node, self.ranks[rank].owned)
                )

    def _meet(self, rank: int, instruction: Reduce | Vote | Gather) -> None:
        if instruction not in self.meetings:
            start_s = max(self.clock[member] for member in self.members[instruction])
            self.meetings[instruction] = (start_s, self._meeting_s(instruction, start_s))
        start_s, seconds = self.meetings[instruction]
        self._spend(rank, instruction, "bubble_s", start_s - self.clock[rank])
        self._spend(rank, instruction, "optimizer_s" if isinstance(instruction, Vote) else "gradient_s", seconds)

    def _meeting_s(self, instruction: Reduce | Vote | Gather, start_s: float) -> float:
        """Units of different stages meet at the same time, so each node's interfaces serve one after the other."""
        if isinstance(instruction, Vote):
            nodes = {rank.node for rank in self.ranks}
            return 2 * max(self.costs.link(here, there).latency_s for here in nodes for there in nodes)
        job = self.costs.job
        size = GRADIENT_BYTES if isinstance(instruction, Reduce) else ELEMENT_BYTES[job.train.precision]
        num_bytes = unit_elements(job.model, instruction.unit, 1) * size
        exchange = self.costs.exchange(self.holders[instruction.unit], num_bytes)
        end_s = start_s + exchange.inside_s
        for node_id, seconds in exchange.network_s:
            self.network_free_s[node_id] = max(start_s, self.network_free_s[node_id]) + seconds
            end_s = max(end_s, self.network_free_s[node_id])
        return end_s - start_s + exchange.latency_s
