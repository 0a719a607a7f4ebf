"""Runs the programs of a plan on costs: the same programs that the engine runs on tensors.

Owns the clock of each rank and where its seconds go: the timeline of a step. Plans are chosen by the closed form
(`predict`): a thousand times faster, and how far from this is in docs/adr/0009.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import fields
from typing import NamedTuple

from shoal_planner.costs import CostModel
from shoal_planner.loads import replica_loads, segments
from shoal_planner.plan import Plan, Prediction, Terms
from shoal_planner.predict import prediction, synchronisation_splits, unit_exchange, vote_s
from shoal_planner.programs import (
    Backward,
    Forward,
    Gather,
    InputGradient,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
    Vote,
    WeightGradient,
)
from shoal_planner.proof import ordered
from shoal_planner.schedule import programs

# Sender, receiver, activation?, the receiver's chunk, micro-batch, first row.
_Key = tuple[int, int, bool, int, int, int]


class Span(NamedTuple):
    """What a rank spends [start_s, end_s) of a step on: an instruction, and the term of the prediction it counts to.
    One instruction may have several: what it waits for, and what it does."""

    rank: int
    instruction: Instruction
    term: str
    start_s: float
    end_s: float


def simulate(plan: Plan, costs: CostModel) -> Prediction:
    """Seconds of a step and where they go, and the memory of each device. Raises KeyError for an unknown node."""
    run = _Run(plan, costs)
    run.play()
    step_s = max(run.clock)
    return prediction(costs, run.loads, run.terms(step_s), step_s)


def spans(plan: Plan, costs: CostModel, ranks: Collection[int]) -> tuple[Span, ...]:
    """The step of these ranks as `simulate` times it, each rank's in order of time and without gaps."""
    run = _Run(plan, costs, frozenset(ranks))
    run.play()
    return tuple(sorted(run.spans, key=lambda span: (span.rank, span.start_s)))


class _Run:
    """One step of all ranks; of those `watched` it keeps when they do what."""

    def __init__(self, plan: Plan, costs: CostModel, watched: frozenset[int] = frozenset()) -> None:
        self.costs = costs
        self.overlap = plan.overlap
        parts = segments(plan, costs)
        self.loads = replica_loads(plan, costs, parts)
        # Ranks count through replicas and tp ranks, in the order of the loads.
        self.ranks = [load for load in self.loads for _ in range(load.replica.tp)]
        self.by_rank = programs(plan, costs.job.model)
        self.holders = {unit: part for part in parts for unit in range(part.first, part.last)}
        self.rounds = synchronisation_splits(plan, costs)
        self.clock = [0.0] * len(self.ranks)
        self.spent: list[dict[str, float]] = [defaultdict(float) for _ in self.ranks]
        self.arrivals: dict[_Key, tuple[float, float]] = {}
        self.members: dict[Instruction, list[int]] = defaultdict(list)
        self.meetings: dict[Instruction, tuple[float, float]] = {}  # start, seconds
        self.exchanged_s: dict[int, float] = {}  # by rank, when its last meeting is over
        self.backward_s: dict[int, tuple[float, float]] = {}  # by rank, begin and end of its last one so far
        self.units = [[item.unit for item in program if isinstance(item, Reduce)] for program in self.by_rank]
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
        chunks, shards = self.ranks[rank].chunks, self.ranks[rank].shards
        match instruction:
            case Forward():
                time = chunks[instruction.chunk]
                self._spend(rank, instruction, "gradient_s", shards.forward_s / len(chunks))
                self._spend(rank, instruction, "compute_s", time.forward_s)
                self._spend(rank, instruction, "tensor_s", time.tensor_forward_s)
            case Backward() | InputGradient():
                time, began_s = chunks[instruction.chunk], self.clock[rank]
                later_s = time.weight_s if isinstance(instruction, InputGradient) else 0.0
                self._spend(rank, instruction, "compute_s", time.backward_s - later_s)
                self._spend(rank, instruction, "tensor_s", time.tensor_backward_s)
                self._spend(rank, instruction, "gradient_s", shards.backward_s / len(chunks))
                self.backward_s[rank] = (began_s, self.clock[rank])
            case WeightGradient():
                began_s = self.clock[rank]
                self._spend(rank, instruction, "compute_s", chunks[instruction.chunk].weight_s)
                self.backward_s[rank] = (began_s, self.clock[rank])
            case SendActivation() | SendGradient():
                kind = isinstance(instruction, SendActivation)
                rows = instruction.last - instruction.first
                link_s = self.costs.send_s(
                    self.ranks[rank].replica.node, self.ranks[instruction.peer].replica.node, rows
                )
                entered = instruction.peer_chunk
                key = (rank, instruction.peer, kind, entered, instruction.micro_batch, instruction.first)
                self.arrivals[key] = (self.clock[rank], link_s)
            case ReceiveActivation() | ReceiveGradient():
                kind = isinstance(instruction, ReceiveActivation)
                entered = instruction.chunk
                key = (instruction.peer, rank, kind, entered, instruction.micro_batch, instruction.first)
                sent_s, link_s = self.arrivals.pop(key)
                begun_s = sent_s if self.overlap.stages else max(sent_s, self.clock[rank])
                self._spend(rank, instruction, "bubble_s", max(0.0, begun_s - self.clock[rank]))
                self._spend(rank, instruction, "pipeline_s", max(0.0, begun_s + link_s - self.clock[rank]))
            case Reduce() | Vote() | Gather():
                self._meet(rank, instruction)
            case Update():
                load = self.ranks[rank]
                seconds = self.costs.update_s(load.replica.node, load.owned, load.offloaded)
                self._spend(rank, instruction, "optimizer_s", seconds)

    def _meet(self, rank: int, instruction: Reduce | Vote | Gather) -> None:
        if instruction not in self.meetings:
            members = self.members[instruction]
            start_s = max(self._free_s(member, instruction) for member in members)
            seconds = self._meeting_s(instruction, start_s)
            self.meetings[instruction] = (start_s, seconds)
            self.exchanged_s |= {member: start_s + seconds for member in members}
        start_s, seconds = self.meetings[instruction]
        self._spend(rank, instruction, "bubble_s", max(0.0, start_s - self.clock[rank]))
        term = "optimizer_s" if isinstance(instruction, Vote) else "gradient_s"
        self._spend(rank, instruction, term, max(0.0, start_s + seconds - self.clock[rank]))

    def _free_s(self, rank: int, instruction: Reduce | Vote | Gather) -> float:
        """When a rank can begin to exchange: gradients perhaps while its last backward makes those of lower units."""
        if not (self.overlap.gradients and isinstance(instruction, Reduce) and rank in self.backward_s):
            return self.clock[rank]
        begin_s, end_s = self.backward_s[rank]
        units = [unit for unit in self.units[rank] if unit >= instruction.unit]
        done_s = begin_s + (end_s - begin_s) * len(units) / len(self.units[rank])
        return max(done_s, self.exchanged_s.get(rank, 0.0))

    def _meeting_s(self, instruction: Reduce | Vote | Gather, start_s: float) -> float:
        """Units of different stages meet at the same time, so each node's interfaces serve one after the other."""
        if isinstance(instruction, Vote):
            return vote_s(self.costs, [load.replica.node for load in self.loads])
        part = self.holders[instruction.unit]
        end_s = start_s
        for split in self.rounds[isinstance(instruction, Gather)]:
            exchange = unit_exchange(part, self.costs, split)
            began_s, end_s = end_s, end_s + exchange.seconds
            for node_id, seconds in exchange.network_s:
                free_s = max(began_s, self.network_free_s[node_id]) + seconds
                self.network_free_s[node_id] = free_s
                end_s = max(end_s, free_s)
        return end_s - start_s
