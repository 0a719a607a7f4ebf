"""Predicts the step of a plan in closed form: the figure that plans are chosen by.

With 1F1B a pipeline takes sum_s t_s + (m - 1) max_s t_s (PAPERS 1.4 2b; other schedules: `closed_forms`), t_s being a
micro-batch's forward and backward in stage s with what its slowest replica sends on and passes round; the slowest
pipeline counts. Then the gradients of all layers are summed (PAPERS 3.2: every algorithm of use moves 2(n-1)/n of the
bytes), the optimizer steps, and weights are gathered. Replicas of a node share its network interfaces. Every term is a
sum or a maximum of costs of single parts, so nothing that gets faster makes a plan slower. Does not own whether a plan
fits (`score`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from shoal_planner.algorithms import DIRECT, is_tree
from shoal_planner.closed_forms import Passes, interleaved_s, zero_bubble_s
from shoal_planner.costs import CostModel, model_flops
from shoal_planner.errors import InvalidField
from shoal_planner.exchanges import topology
from shoal_planner.hiding import both_ways_s, carried_s, carrying_s
from shoal_planner.job import Schedule
from shoal_planner.loads import ReplicaLoad, Segment, replica_loads, segments
from shoal_planner.memory import ELEMENT_BYTES, unit_elements
from shoal_planner.plan import Pipeline, Plan, Prediction, Terms
from shoal_planner.sharding import Split, carried_bytes, exchanged_at, optimizer_split


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of a stage per micro-batch, by what its slowest replica does; what it sends in the `hidden_s` is beside
    what it does, and only the first and the last micro-batch wait for it."""

    compute_s: float
    tensor_s: float
    send_s: float
    share_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tensor_s + self.send_s + self.share_s


def predict(plan: Plan, costs: CostModel) -> Prediction:
    """Seconds of a step and where they go, and the memory of each device. Raises KeyError for an unknown node."""
    parts = segments(plan, costs)
    return predict_loads(plan, costs, parts, replica_loads(plan, costs, parts))


def predict_loads(
    plan: Plan, costs: CostModel, parts: tuple[Segment, ...], loads: tuple[ReplicaLoad, ...]
) -> Prediction:
    """As `predict`, where the plan's loads are known."""
    terms = _terms(plan, costs, parts, loads)
    return prediction(costs, loads, terms, sum(dataclasses.astuple(terms)))


def prediction(costs: CostModel, loads: tuple[ReplicaLoad, ...], terms: Terms, step_s: float) -> Prediction:
    """What a step of so many seconds means for throughput and price."""
    train = costs.job.train
    tokens_per_s = train.tokens_per_step / step_s
    used = {load.replica.node for load in loads}
    price_per_s = math.fsum(costs.node(node_id).price_per_hour for node_id in used) / 3600  # in whatever order
    peak = sum(costs.device(load.replica.node).flops_per_s(train.precision) * load.replica.tp for load in loads)
    return Prediction(
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        mfu=model_flops(costs.job.model, train.seq_len) * train.global_batch / (step_s * peak),
        price_per_million_tokens=price_per_s / tokens_per_s * 1e6,
        terms=terms,
        memory_bytes=tuple(
            (f"{load.replica.node}:{index}", total)
            for load in loads
            for total in (load.memory.total,)
            for index in load.replica.devices
        ),
        host_bytes=tuple(
            (f"{load.replica.node}:{index}", load.hosted_bytes)
            for load in loads
            if load.offloaded
            for index in load.replica.devices
        ),
    )


def _terms(plan: Plan, costs: CostModel, parts: tuple[Segment, ...], loads: tuple[ReplicaLoad, ...]) -> Terms:
    by_pipeline: dict[int, list[ReplicaLoad]] = defaultdict(list)
    for load in loads:
        by_pipeline[load.pipeline].append(load)
    slowest_s, bottleneck, times = -1.0, StageTime(compute_s=0, tensor_s=0, send_s=0), 1
    for p, pipeline in enumerate(plan.pipelines):
        stages = stage_times(pipeline, by_pipeline[p], costs, ahead=plan.overlap.stages)
        worst = max(stages, key=lambda stage: stage.total_s)
        seconds = pipeline_s(plan.schedule, pipeline, by_pipeline[p], stages, costs)
        if seconds > slowest_s:
            slowest_s, bottleneck, times = seconds, worst, pipeline.micro_batches
    crowded_s = max(slowest_s, _network_s(plan, costs))
    reduce_s, gather_s = synchronisation_s(plan, costs, parts)
    if plan.overlap.gradients:
        reduce_s = _beside_backward_s(plan, costs, parts, loads, reduce_s)
    update_s = max(costs.update_s(load.replica.node, load.owned, load.offloaded) for load in loads)
    return Terms(
        compute_s=times * bottleneck.compute_s,
        bubble_s=max(0.0, crowded_s - times * bottleneck.total_s),  # rounding may leave less than none
        tensor_s=times * bottleneck.tensor_s,
        pipeline_s=times * bottleneck.send_s,
        gradient_s=times * bottleneck.share_s + reduce_s + gather_s,
        optimizer_s=update_s + vote_s(costs, [load.replica.node for load in loads]),
    )


def _beside_backward_s(
    plan: Plan, costs: CostModel, parts: tuple[Segment, ...], loads: tuple[ReplicaLoad, ...], reduce_s: float
) -> float:
    """What is left of summing gradients where all but those of the last unit may go on beside the last backward, of
    which every replica has as long as the one that has least of it."""
    sums, _ = synchronisation_splits(plan, costs)
    carried = sum(together_s((part, _carried(part, costs, split)) for part in parts) for split in sums)
    least_s = min(load.time.backward_s for load in loads if load.replica.samples)
    fewest = min(stage.num_layers + 1 for pipeline in plan.pipelines for stage in pipeline.stages)
    return reduce_s - (1 - 1 / fewest) * min(max(0.0, reduce_s - carried), least_s)


def _carried(part: Segment, costs: CostModel, split: Split | None) -> Exchange:
    """What CPUs are at themselves of half an all-reduce of one unit."""
    seconds = unit_exchange(part, costs, split).seconds
    carrying = carrying_s(costs, (holder.node for holder in part.holders))
    return Exchange(seconds=carried_s(seconds, unit_bytes(part, costs), carrying), network_s=())


def pipeline_s(
    schedule: Schedule, pipeline: Pipeline, loads: list[ReplicaLoad], stages: list[StageTime], costs: CostModel
) -> float:
    """Seconds of all micro-batches; `loads` and `stages` are the pipeline's."""
    if schedule == "1f1b" or (schedule == "interleaved" and pipeline.num_chunks == 1):
        way_s = [stage.total_s + stage.hidden_s for stage in stages]
        # A stage has as many micro-batches in flight as there are stages from it on: one more only when one is back.
        round_s = (sum(way_s[s:]) / (len(way_s) - s) for s in range(len(way_s)))
        slowest_s = max(*(stage.total_s for stage in stages), *round_s)
        return sum(way_s) + (pipeline.micro_batches - 1) * slowest_s
    by_stage = _by_stage(pipeline, loads)
    if schedule == "interleaved":
        count = pipeline.num_chunks
        chunks = [
            [
                max(load.chunks[chunk].total_s + load.shards.total_s / count for load in here)
                + _send_s(pipeline, s, costs, chunk)
                for chunk in range(count)
            ]
            for s, here in enumerate(by_stage)
        ]
        return interleaved_s(chunks, pipeline.micro_batches)
    passes = []
    for s, here in enumerate(by_stage):
        once_s = _send_s(pipeline, s, costs) / 2
        times = [(load.time, load.shards) for load in here]
        passes.append(
            Passes(
                forward_s=max(time.forward_s + time.tensor_forward_s + its.forward_s for time, its in times) + once_s,
                input_s=max(
                    time.backward_s - time.weight_s + time.tensor_backward_s + its.backward_s for time, its in times
                )
                + once_s,
                weight_s=max(time.weight_s for time, _ in times),
            )
        )
    return zero_bubble_s(passes, pipeline.micro_batches)


def _by_stage(pipeline: Pipeline, loads: list[ReplicaLoad]) -> list[list[ReplicaLoad]]:
    found: list[list[ReplicaLoad]] = [[] for _ in pipeline.stages]
    for load in loads:
        found[load.stage].append(load)
    return found


def stage_times(
    pipeline: Pipeline, loads: list[ReplicaLoad], costs: CostModel, *, ahead: bool = False
) -> list[StageTime]:
    """By stage; `loads` are the pipeline's. `ahead`: what passes between stages is received ahead of its use."""
    slowest: list[StageTime] = []
    by_stage = _by_stage(pipeline, loads)
    for s, here in enumerate(by_stage):
        sends = [_sends_s(pipeline, s, costs, chunk) for chunk in range(pipeline.num_chunks)]
        send_s = sum(whole_s for whole_s, _ in sends)
        busiest = max(here, key=lambda load: load.total_s)
        busy = busiest.time
        exposed_s = send_s
        if ahead:
            hidden_s = send_s - sum(carried for _, carried in sends)
            exposed_s = send_s - min(hidden_s, busy.forward_s + busy.backward_s)
        slowest.append(
            StageTime(
                compute_s=busy.forward_s + busy.backward_s,
                tensor_s=busy.tensor_forward_s + busy.tensor_backward_s,
                send_s=exposed_s,
                share_s=busiest.shards.total_s,
                hidden_s=send_s - exposed_s,
            )
        )
    return slowest


def _send_s(pipeline: Pipeline, s: int, costs: CostModel, chunk: int = 0) -> float:
    return _sends_s(pipeline, s, costs, chunk)[0]


def _sends_s(pipeline: Pipeline, s: int, costs: CostModel, chunk: int = 0) -> tuple[float, float]:
    """Activations on to the next stage (from the last: to the first, for its next chunk) and their gradients back, for
    the replica that is longest at it; and what of that cannot go on beside computing."""
    if s + 1 == len(pipeline.stages) and chunk + 1 == pipeline.num_chunks:
        return 0.0, 0.0
    here, there = pipeline.stages[s], pipeline.stages[(s + 1) % len(pipeline.stages)]
    if len(here.replicas) == len(there.replicas) == 1:
        return _both_ways_s(here.replicas[0].node, there.replicas[0].node, pipeline.micro_batch, costs)
    spent = defaultdict[tuple[bool, int], list[float]](lambda: [0.0, 0.0])
    for i, source in enumerate(here.replicas):
        for j, target in enumerate(there.replicas):
            low, high = _overlap(here.sample_range(i), there.sample_range(j))
            if low < high:
                both = _both_ways_s(source.node, target.node, high - low, costs)
                for end in ((False, i), (True, j)):
                    spent[end] = [sum(pair) for pair in zip(spent[end], both, strict=True)]
    return max(whole_s for whole_s, _ in spent.values()), max(carried for _, carried in spent.values())


def _both_ways_s(here: str, there: str, samples: int, costs: CostModel) -> tuple[float, float]:
    return both_ways_s(costs, here, there, samples, carrying_s(costs, (here, there)))


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def _network_s(plan: Plan, costs: CostModel) -> float:
    """What the busiest node's network interfaces need for all activations of a step, and all that is passed round in
    it: no pipeline goes faster."""
    carried: dict[str, float] = defaultdict(float, carried_bytes(plan, costs))
    for pipeline in plan.pipelines:
        way = pipeline.stages * pipeline.num_chunks
        for here, there in itertools.pairwise(way):
            for i, source in enumerate(here.replicas):
                for j, target in enumerate(there.replicas):
                    low, high = _overlap(here.sample_range(i), there.sample_range(j))
                    if low < high and not costs.are_one_machine(source.node, target.node):
                        moved = costs.activation_bytes(high - low) * pipeline.micro_batches
                        carried[source.node] += moved
                        carried[target.node] += moved
    return max((moved / costs.node_rate(node_id) for node_id, moved in carried.items()), default=0.0)


def synchronisation_s(plan: Plan, costs: CostModel, parts: tuple[Segment, ...]) -> tuple[float, float]:
    """Seconds of summing gradients and of gathering weights."""
    known: dict[int, float] = {}

    def seconds(split: Split | None) -> float:
        if id(split) not in known:
            known[id(split)] = _half_s(costs, parts, split)
        return known[id(split)]

    sums, gathers = synchronisation_splits(plan, costs)
    return sum(map(seconds, sums)), sum(map(seconds, gathers))


def synchronisation_splits(plan: Plan, costs: CostModel) -> tuple[tuple[Split | None, ...], tuple[Split | None, ...]]:
    """How what is exchanged is split, each exchange half of an all-reduce: of gradients, and then of weights. Where
    several own the same state the sum goes on to all of them; if they own all of it there is nothing to gather."""
    sharding = plan.sharding
    reduced = exchanged_at(plan, sharding.gradients, costs)
    gathered = reduced if sharding.weights == sharding.gradients else exchanged_at(plan, sharding.weights, costs)
    if sharding.optimizer == "cluster":
        return (reduced,), (gathered,)
    owned = optimizer_split(plan, costs)
    return (reduced, owned), () if owned is None else (gathered,)


def _half_s(costs: CostModel, parts: tuple[Segment, ...], split: Split | None) -> float:
    return together_s((part, unit_exchange(part, costs, split)) for part in parts)


def together_s(exchanges: Iterable[tuple[Segment, Exchange]]) -> float:
    """Reduce-scatter, or gather, of all units. A replica's own exchanges come one after the other; what the replicas of
    a node exchange at the same time adds up on its interfaces."""
    spent: dict[tuple[int, int, int], float] = defaultdict(float)
    crowded: dict[str, float] = defaultdict(float)
    for part, exchange in exchanges:
        count = part.last - part.first
        for holder in part.holders:
            spent[holder.pipeline, holder.stage, holder.replica] += count * exchange.seconds
        for node_id, seconds in exchange.network_s:
            crowded[node_id] += count * seconds
    return max(*spent.values(), *crowded.values(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Seconds of an exchange among its replicas, and of the network interfaces of each node that takes part."""

    seconds: float
    network_s: tuple[tuple[str, float], ...]


def unit_exchange(part: Segment, costs: CostModel, split: Split | None = None) -> Exchange:
    """Half an all-reduce (reduce-scatter or gather) of one unit of the segment. What is `split` is exchanged between
    circles, by all who keep the same part. Raises InvalidField where its algorithm is not for these holders."""
    if split is not None:
        return _split_exchange(part, costs, split)
    count = len(part.holders)
    if count < 2:
        return Exchange(seconds=0.0, network_s=())
    if part.collective != DIRECT:
        return _named_exchange(part, costs)
    num_bytes = unit_bytes(part, costs)
    seconds = costs.half_exchange_s(_members(part, costs), count, num_bytes)
    nodes = sorted({holder.node for holder in part.holders})
    if not costs.are_apart(nodes):
        return Exchange(seconds=seconds, network_s=())
    # Round the ring of a node's replicas the bytes leave the node once.
    moved = num_bytes * (1 - 1 / count)
    return Exchange(seconds=seconds, network_s=tuple((node_id, moved / costs.node_rate(node_id)) for node_id in nodes))


def _split_exchange(part: Segment, costs: CostModel, split: Split) -> Exchange:
    """Who keeps the unit whole is a circle by itself. Everybody sends all that it has to each of the others that have
    the same, and takes it from them, whichever nodes they are on."""
    places = [(holder.pipeline, holder.stage, holder.replica) for holder in part.holders]
    whole = {place for place, holder in zip(places, part.holders, strict=True) if holder.whole and not split.owned}
    count = len({split.circle[place] for place in places if place not in whole}) + len(whole)
    if count < 2:
        return Exchange(seconds=0.0, network_s=())
    num_bytes = unit_bytes(part, costs)
    kept = {place: 1.0 if place in whole else split.part[place] for place in places}
    largest = max(kept.values())
    seconds = costs.half_exchange_s(_members(part, costs), count, num_bytes * largest)
    on_node: dict[str, float] = defaultdict(float)
    for place, holder in zip(places, part.holders, strict=True):
        on_node[holder.node] += kept[place]
    if not costs.are_apart(on_node):
        return Exchange(seconds=seconds, network_s=())
    network = []
    for node_id, its in sorted(on_node.items()):
        elsewhere = max(0.0, 1 - max(1.0, its) / count)
        network.append((node_id, num_bytes * its * elsewhere / costs.node_rate(node_id)))
    return Exchange(seconds=seconds, network_s=tuple(network))


def unit_bytes(part: Segment, costs: CostModel) -> float:
    """Of the gradients, or the weights, of one unit of the segment."""
    return float(unit_elements(costs.job.model, part.first, 1) * ELEMENT_BYTES[costs.job.train.precision])


def _named_exchange(part: Segment, costs: CostModel) -> Exchange:
    """Half of what the algorithm takes for the whole all-reduce. Its additions all fall into the first half; counted to
    both alike they take as long in all, and nobody waits in between for who adds more."""
    place = topology(part.holders, costs)
    try:
        found = place.named(part.collective, unit_bytes(part, costs))
    except InvalidField as error:
        raise InvalidField("groups", error.value, error.problem) from error
    left = place.node_bytes(found, by_levels=is_tree(part.collective)) / 2
    nodes = sorted({holder.node for holder in part.holders})
    network = tuple((node_id, left / costs.node_rate(node_id)) for node_id in nodes) if costs.are_apart(nodes) else ()
    return Exchange(seconds=found.seconds / 2, network_s=network)


def _members(part: Segment, costs: CostModel) -> frozenset[tuple[str, int]]:
    """The (node, tp) of the holders, of each kind of node at most two: they stand for all links among them."""
    by_kind: dict[int, list[str]] = defaultdict(list)
    narrowest: dict[str, int] = {}
    for holder in part.holders:
        nodes = by_kind[costs.kind(holder.node)]
        if holder.node not in nodes and len(nodes) == 2:
            node = nodes[0]
        else:
            node = holder.node
            if node not in nodes:
                nodes.append(node)
        narrowest[node] = min(narrowest.get(node, holder.tp), holder.tp)
    return frozenset(narrowest.items())


def vote_s(costs: CostModel, nodes: Iterable[str]) -> float:
    """Everybody tells everybody, there and back."""
    some: dict[int, set[str]] = defaultdict(set)
    for node_id in nodes:
        if len(some[costs.kind(node_id)]) < 2:  # two of a kind stand for all links among them
            some[costs.kind(node_id)].add(node_id)
    named = [node_id for found in some.values() for node_id in sorted(found)]
    if len(named) == 1:
        return 2 * costs.link(named[0], named[0]).latency_s
    return 2 * max(costs.link(here, there).latency_s for here, there in itertools.combinations(named, 2))
