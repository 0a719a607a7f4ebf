"""Parts of a cluster: so many of its devices, chosen in every way that makes a difference.

Owns the enumeration, and a bound on what a part can do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shoal_planner.cluster import Node
from shoal_planner.costs import CostModel
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
    """About the same, quickly: with these sizes of micro-batches and without tensor parallelism."""
    rate = sum(
        node.devices * max(size / costs.part("block", node.id, 1, size).total_s for size in sizes) for node in nodes
    )
    return costs.job.train.global_batch * costs.job.model.layers / rate
