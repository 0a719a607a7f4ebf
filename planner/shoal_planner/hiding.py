"""What overlapping hides of the seconds of exchanges, and what it leaves exposed.

An exchange goes on beside computing where something else carries it: between GPUs, and between nodes as far as it takes
longer than a CPU that copies from and to its sockets. CPUs of one node copy for each other themselves, so nothing is
hidden there. Every figure is a sum or a maximum of seconds of parts, so nothing that gets faster makes a plan slower.
Does not own what exchanges take (`costs`, `sharding`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

from shoal_planner.compute import matmul_flops
from shoal_planner.costs import CostModel, PartTime
from shoal_planner.sharding import Shards

# A send and its receive of 16 MiB over loopback took 3.7 and 2.0 ms of a CPU.
CARRIED_BYTES_PER_S = 4e9


def carrying_s(costs: CostModel, nodes: Iterable[str]) -> float:
    """Seconds for each byte that CPUs of these nodes, which exchange among each other, are at it themselves, and do not
    compute; inf: for as long as it takes."""
    names = set(nodes)
    if all(map(costs.on_gpu, names)):
        return 0.0
    return math.inf if len(names) == 1 else 1 / CARRIED_BYTES_PER_S


def carried_s(seconds: float, num_bytes: float, carrying: float) -> float:
    """Of an exchange of so many bytes, what cannot go on beside computing; `carrying` as in `carrying_s`."""
    return seconds if math.isinf(carrying) else min(seconds, num_bytes * carrying)


def hideable_among(costs: CostModel, nodes: Iterable[str]) -> float:
    """The share of what passes round among these nodes that can go on beside computing, by the slowest link there is:
    that is what it takes its time for."""
    of_kind: dict[int, list[str]] = {}
    for name in sorted(set(nodes)):
        of_kind.setdefault(costs.kind(name), []).append(name)
    names = [name for alike in of_kind.values() for name in alike[:2]]  # two of a kind stand for all
    carrying = carrying_s(costs, names)
    if math.isinf(carrying):
        return 0.0
    rates = (costs.link(here, there).bytes_per_s for here, there in itertools.combinations(names, 2))
    return max(0.0, 1 - carrying * min(rates, default=0.0))


def beside(share: float, seconds: float, computing_s: float) -> float:
    """What is left of an exchange of which that share can go on beside so many seconds of computing."""
    return seconds - min(share * seconds, computing_s)


def ahead_carrying_s(costs: CostModel, here: str, there: str) -> float:
    """As `carrying_s`, between stages on these nodes: plans of a job that lets exchanges overlap receive what passes
    there ahead of its use; all others wait for it."""
    return math.inf if costs.job.train.overlap == "none" else carrying_s(costs, (here, there))


def hop_s(costs: CostModel, here: str, there: str, samples: int) -> tuple[float, float]:
    """Of activations of these samples to the next stage, and of their gradients back: the seconds that computing does
    not hide, where it takes long enough, and those for which only the first micro-batch waits."""
    whole_s, exposed_s = both_ways_s(costs, here, there, samples, ahead_carrying_s(costs, here, there))
    return exposed_s, whole_s - exposed_s


def both_ways_s(costs: CostModel, here: str, there: str, samples: int, carrying: float) -> tuple[float, float]:
    """Of activations to the next stage and their gradients back: all seconds, and what of them is `carried_s`."""
    whole_s = 2 * costs.send_s(here, there, samples)
    return whole_s, carried_s(whole_s, 2 * costs.activation_bytes(samples), carrying)


def with_shards_hidden(its: Shards, time: PartTime, share: float, layers: int) -> Shards:
    """Of each pass of so many layers, what computing does not hide: weights come one unit ahead, also from pass to
    pass, so that nothing is on its way beside units whose neighbours are whole."""
    split = 1 - its.whole / layers if its.whole else 1.0
    return dataclasses.replace(
        its,
        forward_s=beside(share, its.forward_s, split * time.forward_s),
        backward_s=beside(share, its.backward_s, split * time.backward_s),
    )


def with_chunks(
    time: PartTime, costs: CostModel, node: str, tp: int, samples: int, blocks: int, again: int, chunks: int
) -> PartTime:
    """Of so many blocks, `again` of which run their forward twice, with sums in chunks beside products: of the two of
    a forward beside the products that they sum, of the two of a backward beside those for gradients of weights. Each
    chunk but one adds the latency of an all-reduce."""
    if tp == 1 or chunks == 1 or not blocks:
        return time
    model, train = costs.job.model, costs.job.train
    plain, share = costs.part("block", node, tp, samples), 1.0 if costs.on_gpu(node) else 0.0
    flops_s = plain.forward_s / matmul_flops(model, "block", train.seq_len) * 2 * train.seq_len * model.hidden
    keys, inner = model.key_width, (2 if model.gated_mlp else 1) * model.ffn
    late_s = (chunks - 1) * 2 * (tp - 1) * costs.link(node, node).latency_s
    forward_s = sum(
        share * min(plain.tensor_forward_s / 2 + late_s, width * flops_s) * (1 - 1 / chunks) - late_s
        for width in (model.query_width, model.ffn)
    )
    backward_s = sum(
        share * min(plain.tensor_backward_s / 2, width * flops_s) for width in (model.query_width + 2 * keys, inner)
    )
    return dataclasses.replace(
        time,
        tensor_forward_s=time.tensor_forward_s - blocks * forward_s,
        tensor_backward_s=time.tensor_backward_s - blocks * backward_s - again * forward_s,
    )
