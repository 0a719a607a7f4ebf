"""What message plans cost, counted message by message: rounds, bytes, reductions and memory traffic, and their seconds.

Owns the count on any tree, and GenModel's sum for one level and for a tree. The planner has closed forms of these.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

from benchmarks.collective_vectors import paths
from shoal_planner.algorithms import Tree, depth, num_holders
from shoal_planner.collective_counts import Counts, Fabric
from shoal_planner.collective_messages import Message, MessagePlan, Round
from shoal_planner.errors import InvalidField


def seconds(counts: Counts, num_bytes: float, fabric: Fabric) -> float:
    """GenModel: T = A alpha + B beta + C gamma + D delta + max(w - w_t, 0) B epsilon."""
    return paced_seconds(counts, num_bytes, fabric) + incast_seconds(counts, num_bytes, fabric)


def paced_seconds(counts: Counts, num_bytes: float, fabric: Fabric) -> float:
    """All but the last term."""
    return (
        counts.rounds * fabric.alpha_s
        + counts.peers * fabric.peer_s
        + num_bytes
        * (
            counts.sent * fabric.beta_s_per_byte
            + counts.reduced * fabric.gamma_s_per_byte
            + counts.touched * fabric.delta_s_per_byte
        )
    )


def incast_seconds(counts: Counts, num_bytes: float, fabric: Fabric) -> float:
    """The last term."""
    return max(counts.fan_in - fabric.fan_in, 0) * num_bytes * counts.sent * fabric.epsilon_s_per_byte


def halves(counts: Counts) -> tuple[Counts, Counts]:
    """The reduce-scatter, with all additions, and the all-gather. What crowds a port in one crowds it in the other, so
    both keep the fan-in."""
    one = dataclasses.replace(counts, rounds=counts.rounds // 2, sent=counts.sent / 2, peers=counts.peers // 2)
    return one, dataclasses.replace(one, reduced=0.0, touched=0.0)


def count(plan: MessagePlan) -> Counts:
    """Counted from the messages, every holder with a port of its own."""
    total = Counts()
    for (counts,) in count_on(plan, plan.holders):
        total = _plus(total, counts)
    return total


def count_on(plan: MessagePlan, tree: Tree) -> tuple[tuple[Counts, ...], ...]:
    """By round and level (0: inside a node). A message belongs to the lowest level that joins its two ends, and passes
    a port of the branch on either side; a reduction belongs to the highest level among its inputs."""
    if num_holders(tree) != plan.holders:
        raise InvalidField("tree", tree, f"must have {plan.holders} holders")
    where = tuple(paths(tree))
    return tuple(_count_round(messages, where, depth(tree), 1 / plan.blocks) for messages in plan.rounds)


def tree_seconds(rounds: tuple[tuple[Counts, ...], ...], num_bytes: float, fabrics: tuple[Fabric, ...]) -> float:
    """GenModel on a tree, from the counts of `count_on` and a fabric for each level.

    Levels work side by side within a round. The incast term keeps the paper's form at each level: the largest
    reduction there times all bytes there.
    """
    total_s = 0.0
    totals = [Counts()] * len(fabrics)
    for levels in rounds:
        total_s += max(paced_seconds(counts, num_bytes, fabric) for counts, fabric in zip(levels, fabrics, strict=True))
        totals = [_plus(before, counts) for before, counts in zip(totals, levels, strict=True)]
    return total_s + sum(
        incast_seconds(counts, num_bytes, fabric) for counts, fabric in zip(totals, fabrics, strict=True)
    )


def _count_round(
    messages: Round, where: tuple[tuple[int, ...], ...], num_levels: int, block: float
) -> tuple[Counts, ...]:
    ports: list[Counter[tuple[object, ...]]] = [Counter() for _ in range(num_levels)]
    peers: list[defaultdict[tuple[str, int], set[int]]] = [defaultdict(set) for _ in range(num_levels)]
    inputs: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for message in messages:
        level, out, into = _ports(message, where)
        blocks = message.last - message.first
        ports[level]["out", out] += blocks
        ports[level]["into", into] += blocks
        peers[level]["to", message.sender].add(message.receiver)
        peers[level]["from", message.receiver].add(message.sender)
        if message.reduce:
            for index in range(message.first, message.last):
                inputs[message.receiver, index].append(level)
    reduced: list[Counter[int]] = [Counter() for _ in range(num_levels)]
    touched: list[Counter[int]] = [Counter() for _ in range(num_levels)]
    fan_in = [0] * num_levels
    for (receiver, _), levels in inputs.items():
        reduced[max(levels)][receiver] += len(levels)
        touched[max(levels)][receiver] += len(levels) + 2
        fan_in[max(levels)] = max(fan_in[max(levels)], len(levels) + 1)
    return tuple(
        Counts(
            rounds=int(bool(ports[level])),
            sent=max(ports[level].values(), default=0) * block,
            reduced=max(reduced[level].values(), default=0) * block,
            touched=max(touched[level].values(), default=0) * block,
            fan_in=fan_in[level],
            peers=max(map(len, peers[level].values()), default=1) - 1,
        )
        for level in range(num_levels)
    )


def _ports(message: Message, where: tuple[tuple[int, ...], ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The level of a message, and the branches that it leaves and enters there."""
    sender, receiver = where[message.sender], where[message.receiver]
    common = next(index for index in range(len(sender)) if sender[index] != receiver[index])
    return len(sender) - 1 - common, sender[: common + 1], receiver[: common + 1]


def _plus(one: Counts, other: Counts) -> Counts:
    return Counts(
        rounds=one.rounds + other.rounds,
        sent=one.sent + other.sent,
        reduced=one.reduced + other.reduced,
        touched=one.touched + other.touched,
        fan_in=max(one.fan_in, other.fan_in),
        peers=one.peers + other.peers,
    )
