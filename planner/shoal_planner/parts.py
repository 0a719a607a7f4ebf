"""Parts of a cluster: so many of its devices, chosen in every way that makes a difference.

Owns the enumeration, and a bound on what a part can do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from shoal_planner.cluster import Node
from shoal_planner.costs import CostModel
from shoal_planner.memory import ELEMENT_BYTES, unit_elements
from shoal_planner.options import tp_degrees


def parts(nodes: tuple[Node, ...], size: int, costs: CostModel) -> Iterator[tuple[Node, ...]]:
    """Every choice of so many devices, up to exchange of equal nodes: nodes with what is chosen of their devices."""

    def chosen(place: int, left: int) -> Iterator[tuple[int, ...]]:
        if place == len(nodes):
            if not left:
                yield ()
            return
        for count in range(min(nodes[place].devices, left), -1, -1):
            for rest in chosen(place + 1, left - count):
                alike = place + 1 < len(nodes) and costs.kind(nodes[place].id) == costs.kind(nodes[place + 1].id)
                if not (alike and rest[0] > count):
                    yield (count, *rest)

    for counts in chosen(0, size):
        yield tuple(
            dataclasses.replace(node, devices=count, device_group=min(node.device_group, count))
            for node, count in zip(nodes, counts, strict=True)
            if count
        )


def fastest_s(nodes: tuple[Node, ...], costs: CostModel) -> float:
    """A bound: all devices at their best rates, all of the time, on blocks alone."""
    batch = costs.job.train.global_batch
    rate = 0.0
    for node in nodes:
        degrees = tp_degrees(costs, node.devices)
        rate += node.devices * max(
            size / (tp * costs.part("block", node.id, tp, size).total_s)
            for tp in degrees
            for size in range(1, batch + 1)
        )
    return batch * costs.job.model.layers / rate


def least_s(nodes: tuple[Node, ...], costs: CostModel, sizes: tuple[int, ...]) -> float:
    """About the least that a step may take, quickly: with the fastest nodes, so many that it pays, at these sizes of
    micro-batches, in ever so many pipelines of ever so equal stages. Counted are blocks, the time in which pipelines
    fill, and what copies of the weights on different nodes exchange through their interfaces."""
    found = math.inf
    for tp in tp_degrees(costs, max(node.devices for node in nodes)):
        wide = [node for node in nodes if node.devices >= tp]
        for size in sizes:
            block_s = np.array([costs.part("block", node.id, tp, size).total_s for node in wide])
            found = min(found, _least_s([wide[at] for at in np.argsort(block_s, kind="stable")], costs, tp, size))
    return found


def _least_s(nodes: list[Node], costs: CostModel, tp: int, size: int) -> float:
    """The same with the first of these nodes, which are in the order of their speed."""
    model, train = costs.job.model, costs.job.train
    units = np.array([node.devices // tp for node in nodes])
    block_s = np.array([costs.part("block", node.id, tp, size).total_s for node in nodes])
    rate, num_units = np.cumsum(units * size / block_s), np.cumsum(units)
    through = np.cumsum([node.inter_bytes_per_s * node.nics for node in nodes])
    number = np.arange(1, min(int(num_units[-1]), max(1, train.global_batch // size)) + 1)  # of pipelines [P]
    waiting = np.maximum(0, num_units[:, None] - number) * size  # samples' worth of filling [N, P]
    copies = number * np.arange(1, len(nodes) + 1)[:, None] / num_units[:, None]  # those of a node count once
    num_bytes = 2 * model.layers * unit_elements(model, 1, 1) * ELEMENT_BYTES[train.precision]
    work_s = model.layers * (train.global_batch + waiting) / rate[:, None]
    total_s = work_s + num_bytes * np.maximum(0, copies - 1) / through[:, None]
    return float(np.where(number <= num_units[:, None], total_s, np.inf).min())
