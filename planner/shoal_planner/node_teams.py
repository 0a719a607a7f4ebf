"""Teams on one node of a small cluster: a pipeline of one stage, whose replicas split gradients, or weights too, within
their node.

Owns a family of plans that follows from numbers of devices, layers and samples alone, never from speeds, memories or
links: what a cluster has of it a better one has, too, and there each of them is no slower. So none of it is left out
but what is slower than the best that is known however little it exchanges. On larger clusters teams are made to measure
(`teams`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shoal_planner.again import marked
from shoal_planner.cluster import Node
from shoal_planner.costs import CostModel
from shoal_planner.errors import NoPlanFits
from shoal_planner.exact import MOST_DEVICES, num_devices
from shoal_planner.levels import sharding_of
from shoal_planner.options import tp_degrees, usable_nodes
from shoal_planner.plan import Level, Pipeline, Plan, Recompute, Replica, Stage
from shoal_planner.score import score_with
from shoal_planner.slices import most_slices
from shoal_planner.whole_layers import with_whole_layers

_LEAST_REPLICAS, _MOST_SAMPLES = 2, 16  # of a micro-batch, of one replica
_SLICES = (1, 2, 4, 8)
_WEIGHTS: tuple[Level, ...] = ("none", "node")
_OFFERED = 3  # with weights split, and without, of each degree: what hides of sums within replicas is not known here
_PARTS = 4  # layers are computed again by so manieth parts of all


class _Team(NamedTuple):
    """So many replicas on the first devices of a node, and how they run the batch."""

    node: str
    replicas: int
    tp: int
    micro_batch: int
    slices: int
    selective: int  # layers that are computed again so, ...
    full: int  # ... and so


def try_node_teams(costs: CostModel, copies: int, best_s: float, consider: Callable[[Plan], float]) -> None:
    """Offers `consider` the few best of them, if there may be any that are faster than `best_s`."""
    if costs.job.train.sharding == "none" or num_devices(costs) > MOST_DEVICES:
        return
    found: defaultdict[tuple[Level, int], list[tuple[float, Plan]]] = defaultdict(list)
    for team in _teams(costs):
        if _least_s(team, costs) < best_s:
            for weights in _WEIGHTS:
                made = _scored(_plan(team, weights, costs, copies), costs)
                if made is not None:
                    seconds, made = with_whole_layers(made, costs, best_s)
                    found[weights, team.tp].append((seconds, made))
                    best_s = min(best_s, seconds)
    for ranked in found.values():
        for _, made in sorted(ranked, key=lambda entry: entry[0])[:_OFFERED]:
            consider(made)


def _scored(made: Plan, costs: CostModel) -> Plan | None:
    try:
        return score_with(made, costs)
    except NoPlanFits:
        return None


def _teams(costs: CostModel) -> Iterator[_Team]:
    batch, least = costs.job.train.global_batch, costs.job.limits.min_devices
    for node in _one_of_each_kind(costs):
        for tp in tp_degrees(costs, node.devices // _LEAST_REPLICAS):
            # Many replicas first: what they reach rules out most of the others.
            for replicas in range(node.devices // tp, _LEAST_REPLICAS - 1, -1):
                sizes = [size for size in range(replicas, replicas * _MOST_SAMPLES + 1) if batch % size == 0]
                ways = itertools.product(sizes, _slices(costs, tp), _again(costs))
                if replicas * tp >= least:
                    yield from (_Team(node.id, replicas, tp, size, slices, *again) for size, slices, again in ways)


def _one_of_each_kind(costs: CostModel) -> list[Node]:
    nodes = usable_nodes(costs.job, costs.snapshot)
    return list({costs.kind(node.id): node for node in reversed(nodes)}.values())


def _slices(costs: CostModel, tp: int) -> tuple[int, ...]:
    most = 1 if costs.job.model.lora is not None else most_slices(costs.job.model, tp)
    return tuple(slices for slices in _SLICES if slices <= most)


def _again(costs: CostModel) -> list[tuple[int, int]]:
    """Numbers of layers that are computed again, selectively and fully."""
    if costs.job.train.recompute == "none":
        return [(0, 0)]
    layers = costs.job.model.layers
    numbers = sorted({layers * part // _PARTS for part in range(_PARTS + 1)})
    selective = numbers if costs.job.model.module is None else numbers[:1]
    return [(some, 0) for some in selective] + [(0, some) for some in numbers[1:]]


def _least_s(team: _Team, costs: CostModel) -> float:
    """Without what is exchanged, within replicas as well where that may go on beside computing."""
    layers: dict[Recompute, int] = {"selective": team.selective, "full": team.full}
    layers["none"] = costs.job.model.layers - team.selective - team.full
    samples = -(-team.micro_batch // team.replicas)
    time = costs.stage(team.node, team.tp, samples, layers, embedding=True, head=True, slices=team.slices)
    each_s = time.total_s if costs.job.train.overlap == "none" else time.forward_s + time.backward_s
    return costs.job.train.global_batch // team.micro_batch * each_s


def _plan(team: _Team, weights: Level, costs: CostModel, copies: int) -> Plan:
    layers, (each, more) = costs.job.model.layers, divmod(team.micro_batch, team.replicas)
    replicas = (
        Replica(
            node=team.node,
            devices=tuple(range(place * team.tp, (place + 1) * team.tp)),
            tp=team.tp,
            samples=each + (place < more),
        )
        for place in range(team.replicas)
    )
    recompute, overrides = marked(0, layers, team.selective, team.full)
    stage = Stage(
        layers=((0, layers),),
        replicas=tuple(replicas),
        recompute=recompute,
        overrides=overrides,
        slices=team.slices,
    )
    number = costs.job.train.global_batch // team.micro_batch
    pipeline = Pipeline(micro_batch=team.micro_batch, micro_batches=number, stages=(stage,))
    return Plan(pipelines=(pipeline,), copies=copies, sharding=sharding_of(costs.job.train, weights, "node"))
