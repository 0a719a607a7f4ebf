"""Turns a plan into one program per rank, and proves programs sound before anyone runs them.

Owns the routes between stages and the order of reductions. Does not own the order of micro-batches (`orders`), the
proof's rules (`proof`, whose `prove` is offered here too), what an instruction costs (`simulate`) nor what it does to
tensors (the engine).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal_planner.job import ModelSpec, Schedule
from shoal_planner.orders import Place, order
from shoal_planner.parameters import stage_units
from shoal_planner.plan import Pipeline, Plan, RankPlace, Replica
from shoal_planner.programs import (
    Backward,
    Forward,
    Gather,
    InputGradient,
    Instruction,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
    Vote,
    WeightGradient,
    Work,
)
from shoal_planner.proof import prove

__all__ = ["programs", "prove", "sync_order", "sync_units"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Rows [first, last) of every micro-batch travel between this rank and `peer`, which works on `peer_chunk` then."""

    peer: int
    peer_chunk: int
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
    all_units = sync_order(plan, model)
    built: list[Program] = []
    for place in plan.places():
        pipeline = plan.pipelines[place.pipeline]
        routes = tuple(_routes(pipeline, place, chunk, ranks) for chunk in range(pipeline.num_chunks))
        key = (place.pipeline, place.stage)
        if key not in tails:
            here = sync_units(plan, model, *key)
            tails[key] = _tail(tuple(unit for unit in all_units if unit in here))
        built.append((*_micro_batches(plan.schedule, place_of(pipeline, place.stage), routes), *tails[key]))
    return tuple(built)


def place_of(pipeline: Pipeline, stage: int) -> Place:
    """Where a stage stands, as orders see it."""
    return Place(
        stage=stage,
        stages=len(pipeline.stages),
        micro_batches=pipeline.micro_batches,
        chunks=pipeline.num_chunks,
    )


def sync_units(plan: Plan, model: ModelSpec, pipeline: int, stage: int) -> tuple[int, ...]:
    """The units whose weights ranks of this stage keep equal with other holders, ascending.

    A tied embedding is synchronised under unit 0 alone, so a holder of only the last unit takes part in unit 0 too.
    """
    units = stage_units(plan, pipeline, stage)
    last_only = model.tie_embeddings and units[-1] == model.layers + 1 and units[0] != 0
    return (0, *units) if last_only else units


def sync_order(plan: Plan, model: ModelSpec) -> tuple[int, ...]:
    """All units, as weights are gathered; gradients are reduced the other way round. One order for all ranks, or they
    would wait for each other in a ring: first the multiples of the most units that a stage has, then those one further,
    and so on.

    No stage has two units that far apart, so units side by side in this order have no rank in common and are exchanged
    at the same time. In ascending order, where pipelines are cut at different layers, each stage would wait for the one
    above it, and all units of the model would come one after the other. Only where gradients are summed while a
    backward makes them does the backward's order hold.
    """
    if plan.overlap.gradients:
        return tuple(range(model.layers + 2))
    widest = max(
        len(sync_units(plan, model, p, s)) for p, pipe in enumerate(plan.pipelines) for s in range(len(pipe.stages))
    )
    return tuple(sorted(range(model.layers + 2), key=lambda unit: (unit % widest, unit)))


def _micro_batches(schedule: Schedule, place: Place, routes: tuple[_Routes, ...]) -> Iterator[Instruction]:
    for work in order(schedule, place):
        here = routes[work.chunk]
        match work:
            case Forward():
                for route in here.receive_activation:
                    yield ReceiveActivation(**_message(work, route))
                yield work
                for route in here.send_activation:
                    yield SendActivation(**_message(work, route))
            case Backward() | InputGradient():
                for route in here.receive_gradient:
                    yield ReceiveGradient(**_message(work, route))
                yield work
                for route in here.send_gradient:
                    yield SendGradient(**_message(work, route))
            case WeightGradient():
                yield work


def _message(work: Work, route: Route) -> dict[str, int]:
    return {
        "micro_batch": work.micro_batch,
        "peer": route.peer,
        "first": route.first,
        "last": route.last,
        "chunk": work.chunk,
        "peer_chunk": route.peer_chunk,
    }


def _tail(units: tuple[int, ...]) -> Program:
    return (
        *(Reduce(unit=unit) for unit in reversed(units)),
        Vote(),
        Update(),
        *(Gather(unit=unit) for unit in units),
    )


def _routes(pipeline: Pipeline, place: RankPlace, chunk: int, ranks: dict[tuple[int, int, int, int], int]) -> _Routes:
    before, after = _neighbours(pipeline, place.stage, chunk)
    incoming, outgoing = _with_neighbour(pipeline, place, before, ranks), _with_neighbour(pipeline, place, after, ranks)
    return _Routes(
        receive_activation=incoming[0],
        send_activation=outgoing[1],
        receive_gradient=outgoing[0],
        send_gradient=incoming[1],
    )


def _neighbours(pipeline: Pipeline, stage: int, chunk: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """(stage, chunk) before and after this one on the way of a micro-batch: from the last stage it goes on to the first
    one's next chunk."""
    end = len(pipeline.stages) - 1
    before = (stage - 1, chunk) if stage else (end, chunk - 1) if chunk else None
    after = (stage + 1, chunk) if stage < end else (0, chunk + 1) if chunk + 1 < pipeline.num_chunks else None
    return before, after


def _with_neighbour(
    pipeline: Pipeline,
    place: RankPlace,
    neighbour: tuple[int, int] | None,
    ranks: dict[tuple[int, int, int, int], int],
) -> tuple[tuple[Route, ...], tuple[Route, ...]]:
    """What this rank takes from ranks of the neighbour, and what it gives them."""
    if neighbour is None:
        return (), ()
    stage, chunk = neighbour
    takes: list[Route] = []
    gives: list[Route] = []
    for other, theirs, first, last in _overlaps(pipeline, place.stage, place.replica, stage):
        source = ranks[place.pipeline, stage, other, place.tp_rank % theirs.tp]
        takes.append(Route(peer=source, peer_chunk=chunk, first=first, last=last))
        gives.extend(
            Route(peer=ranks[place.pipeline, stage, other, peer_tp_rank], peer_chunk=chunk, first=first, last=last)
            for peer_tp_rank in range(theirs.tp)
            if peer_tp_rank % place.tp == place.tp_rank
        )
    return tuple(takes), tuple(gives)


def _overlaps(pipeline: Pipeline, stage: int, replica: int, neighbour: int) -> Iterator[tuple[int, Replica, int, int]]:
    """Replicas of the neighbouring stage that share samples with this one, and the rows they share.

    What a stage passes on is whole on every tp rank, so one rank of the sending group serves each receiver.
    """
    low, high = pipeline.stages[stage].sample_range(replica)
    for other, theirs in enumerate(pipeline.stages[neighbour].replicas):
        first, last = pipeline.stages[neighbour].sample_range(other)
        if max(low, first) < min(high, last):
            yield other, theirs, max(low, first), min(high, last)
