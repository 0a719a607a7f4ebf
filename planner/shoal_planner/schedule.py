"""Turns a plan into one program per rank, and proves programs sound before anyone runs them.

Owns the 1F1B order, the routes between stages and the order of reductions. Does not own the proof's rules (`proof`,
whose `prove` is offered here too), what an instruction costs (`simulate`) nor what it does to tensors (the engine).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import stage_units
from shoal_planner.plan import Pipeline, Plan, Replica
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
from shoal_planner.proof import prove

__all__ = ["one_f_one_b", "programs", "prove", "sync_units"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Rows [first, last) of every micro-batch travel between this rank and `peer`."""

    peer: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routes:
    receive_activation: tuple[Route, ...]
    send_activation: tuple[Route, ...]
    receive_gradient: tuple[Route, ...]
    send_gradient: tuple[Route, ...]


def programs(plan: Plan, model: ModelSpec) -> tuple[Program, ...]:
    """The program of each rank, indexed by rank."""
    ranks = {(place.pipeline, place.stage, place.replica, place.tp_rank): place.rank for place in plan.places()}
    tails: dict[tuple[int, int], Program] = {}
    widest = max(
        len(sync_units(plan, model, p, s)) for p, pipe in enumerate(plan.pipelines) for s in range(len(pipe.stages))
    )
    built: list[Program] = []
    for place in plan.places():
        pipeline = plan.pipelines[place.pipeline]
        routes = _routes(pipeline, place.pipeline, place.stage, place.replica, place.tp_rank, ranks)
        key = (place.pipeline, place.stage)
        if key not in tails:
            tails[key] = _tail(sync_units(plan, model, *key), widest)
        depth = len(pipeline.stages)
        built.append((*_micro_batches(depth - place.stage, pipeline.micro_batches, routes), *tails[key]))
    return tuple(built)


def sync_units(plan: Plan, model: ModelSpec, pipeline: int, stage: int) -> tuple[int, ...]:
    """The units whose weights ranks of this stage keep equal with other holders, ascending.

    A tied embedding is synchronised under unit 0 alone, so a holder of only the last unit takes part in unit 0 too.
    """
    units = stage_units(plan, pipeline, stage)
    last_only = model.tie_embeddings and units[-1] == model.layers + 1 and units[0] != 0
    return (0, *units) if last_only else units


def one_f_one_b(depth: int, micro_batches: int) -> Iterator[Forward | Backward]:
    """The order of forwards and backwards in a stage with `depth` stages from itself to the end of its pipeline.

    At most min(depth, micro_batches) micro-batches are between their forward and their backward at any moment.
    """
    warm_up = min(depth - 1, micro_batches)
    for number in range(warm_up):
        yield Forward(micro_batch=number)
    for number in range(micro_batches):
        if number + warm_up < micro_batches:
            yield Forward(micro_batch=number + warm_up)
        yield Backward(micro_batch=number)


def _micro_batches(depth: int, micro_batches: int, routes: _Routes) -> Iterator[Instruction]:
    for work in one_f_one_b(depth, micro_batches):
        number = work.micro_batch
        if isinstance(work, Forward):
            for route in routes.receive_activation:
                yield ReceiveActivation(micro_batch=number, peer=route.peer, first=route.first, last=route.last)
            yield work
            for route in routes.send_activation:
                yield SendActivation(micro_batch=number, peer=route.peer, first=route.first, last=route.last)
        else:
            for route in routes.receive_gradient:
                yield ReceiveGradient(micro_batch=number, peer=route.peer, first=route.first, last=route.last)
            yield work
            for route in routes.send_gradient:
                yield SendGradient(micro_batch=number, peer=route.peer, first=route.first, last=route.last)


def _tail(units: tuple[int, ...], widest: int) -> Program:
    """One order of units for all ranks, or they would wait for each other in a ring: first the multiples of the most
    units that a stage has, then those one further, and so on.

    No stage has two units that far apart, so units side by side in this order have no rank in common and are exchanged
    at the same time. In ascending order, where pipelines are cut at different layers, each stage would wait for the one
    above it, and all units of the model would come one after the other.
    """
    dealt = sorted(units, key=lambda unit: (unit % widest, unit))
    return (
        *(Reduce(unit=unit) for unit in reversed(dealt)),
        Vote(),
        Update(),
        *(Gather(unit=unit) for unit in dealt),
    )


def _routes(
    pipeline: Pipeline, number: int, stage: int, replica: int, tp_rank: int, ranks: dict[tuple[int, int, int, int], int]
) -> _Routes:
    incoming: dict[int, tuple[Route, ...]] = {}
    outgoing: dict[int, tuple[Route, ...]] = {}
    for neighbour in (stage - 1, stage + 1):
        takes: list[Route] = []
        gives: list[Route] = []
        if 0 <= neighbour < len(pipeline.stages):
            for other, theirs, first, last in _overlaps(pipeline, stage, replica, neighbour):
                tp = pipeline.stages[stage].replicas[replica].tp
                source = ranks[number, neighbour, other, tp_rank % theirs.tp]
                takes.append(Route(peer=source, first=first, last=last))
                gives.extend(
                    Route(peer=ranks[number, neighbour, other, peer_tp_rank], first=first, last=last)
                    for peer_tp_rank in range(theirs.tp)
                    if peer_tp_rank % tp == tp_rank
                )
        incoming[neighbour], outgoing[neighbour] = tuple(takes), tuple(gives)
    return _Routes(
        receive_activation=incoming[stage - 1],
        send_activation=outgoing[stage + 1],
        receive_gradient=incoming[stage + 1],
        send_gradient=outgoing[stage - 1],
    )


def _overlaps(pipeline: Pipeline, stage: int, replica: int, neighbour: int) -> Iterator[tuple[int, Replica, int, int]]:
    """Replicas of the neighbouring stage that share samples with this one, and the rows they share.

    What a stage passes on is whole on every tp rank, so one rank of the sending group serves each receiver.
    """
    low, high = pipeline.stages[stage].sample_range(replica)
    for other, theirs in enumerate(pipeline.stages[neighbour].replicas):
        first, last = pipeline.stages[neighbour].sample_range(other)
        if max(low, first) < min(high, last):
            yield other, theirs, max(low, first), min(high, last)
