"""What a collective costs: counts of rounds, bytes, reductions and memory traffic, and their seconds on a fabric.

Owns GenModel (arXiv 2409.04202), its counts by algorithm, and the count of any message plan on any tree. Does not own
the messages (`collective_plans`) nor the choice among algorithms (`collectives`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import assert_never

from shoal_planner.collective_plans import Algorithm, Message, MessagePlan, Round, Tree, depth, num_holders, paths
from shoal_planner.errors import InvalidField
from shoal_planner.ranges import Range, check_range, check_ranges

_SECONDS: Range = (0, 3600)
_RANGES: dict[str, Range] = {
    "alpha_s": _SECONDS,
    "beta_s_per_byte": _SECONDS,
    "gamma_s_per_byte": _SECONDS,
    "delta_s_per_byte": _SECONDS,
    "epsilon_s_per_byte": _SECONDS,
    "fan_in": (1, 2**31),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What connects the members of one level of a topology, each through one port.

    Seconds for a round, and per byte that leaves (or enters) the busiest port, is added, is moved through memory by
    additions, and leaves the busiest port for each input of a reduction beyond `fan_in`. Between nodes the port is that
    of a whole node: its bytes per second are those of all its interfaces together.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    delta_s_per_byte: float = 0.0
    epsilon_s_per_byte: float = 0.0
    fan_in: int = 2

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)


def link_fabric(
    latency_s: float, bytes_per_s: float, *, memory_bytes_per_s: float = math.inf, incast: float = 0.0, fan_in: int = 2
) -> Fabric:
    """The fabric of a link that is known by its data sheet alone; additions run as fast as memory brings their inputs.

    `incast`: which part of a byte's time on the link each input of a reduction beyond `fan_in` adds.
    """
    check_range("bytes_per_s", bytes_per_s, 1e-3, 1e18)
    check_range("memory_bytes_per_s", memory_bytes_per_s, 1e-3, math.inf)
    return Fabric(
        alpha_s=latency_s,
        beta_s_per_byte=1 / bytes_per_s,
        delta_s_per_byte=1 / memory_bytes_per_s,
        epsilon_s_per_byte=incast / bytes_per_s,
        fan_in=fan_in,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The busiest port's and the busiest holder's share in an all-reduce: `sent`, `reduced` and `touched` (A, B, C, D
    and w of the paper are the fields in order) in multiples of the vector's bytes.

    `fan_in` is the number of inputs of the largest reduction, the receiver's own included.
    """

    rounds: int = 0
    sent: float = 0.0
    reduced: float = 0.0
    touched: float = 0.0
    fan_in: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(
            rounds=self.rounds + other.rounds,
            sent=self.sent + other.sent,
            reduced=self.reduced + other.reduced,
            touched=self.touched + other.touched,
            fan_in=max(self.fan_in, other.fan_in),
        )


def seconds(counts: Counts, num_bytes: float, fabric: Fabric) -> float:
    """GenModel: T = A alpha + B beta + C gamma + D delta + max(w - w_t, 0) B epsilon."""
    return paced_seconds(counts, num_bytes, fabric) + incast_seconds(counts, num_bytes, fabric)


def paced_seconds(counts: Counts, num_bytes: float, fabric: Fabric) -> float:
    """All but the last term."""
    return counts.rounds * fabric.alpha_s + num_bytes * (
        counts.sent * fabric.beta_s_per_byte
        + counts.reduced * fabric.gamma_s_per_byte
        + counts.touched * fabric.delta_s_per_byte
    )


def incast_seconds(counts: Counts, num_bytes: float, fabric: Fabric) -> float:
    """The last term."""
    return max(counts.fan_in - fabric.fan_in, 0) * num_bytes * counts.sent * fabric.epsilon_s_per_byte


def halves(counts: Counts) -> tuple[Counts, Counts]:
    """The reduce-scatter, with all additions, and the all-gather. What crowds a port in one crowds it in the other, so
    both keep the fan-in."""
    one = dataclasses.replace(counts, rounds=counts.rounds // 2, sent=counts.sent / 2)
    return one, dataclasses.replace(one, reduced=0.0, touched=0.0)


def counts_of(algorithm: Algorithm) -> Counts:
    """The closed forms of the paper's table, among members of one level."""
    n = algorithm.holders
    if n == 1:
        return Counts()
    match algorithm.kind:
        case "ring":
            return Counts(
                rounds=2 * (n - 1), sent=2 * (n - 1) / n, reduced=(n - 1) / n, touched=3 * (n - 1) / n, fan_in=2
            )
        case "reduce_broadcast":
            return Counts(rounds=2, sent=2 * (n - 1), reduced=n - 1, touched=n + 1, fan_in=n)
        case "halving_doubling":
            return _halving_doubling(n)
        case "parameter_server":
            return Counts(
                rounds=2 * sum(factor > 1 for factor in algorithm.factors),
                sent=2 * (n - 1) / n,
                reduced=(n - 1) / n,
                touched=_touched(algorithm.factors),
                fan_in=max(algorithm.factors),
            )
    assert_never(algorithm.kind)


def _halving_doubling(n: int) -> Counts:
    core = 1 << (n.bit_length() - 1)
    fold = int(core < n)  # a whole vector there and back, and added once
    share = (core - 1) / core
    return Counts(
        rounds=2 * (core.bit_length() - 1 + fold),
        sent=2 * share + 2 * fold,
        reduced=share + fold,
        touched=3 * share + 3 * fold,
        fan_in=2,
    )


def _touched(factors: tuple[int, ...]) -> float:
    """A reduction of m inputs reads m and writes one; larger fan-ins first leave less for the rest."""
    touched, product = 0.0, 1
    for factor in factors:
        product *= factor
        touched += (factor + 1) / product if factor > 1 else 0.0
    return touched


def count(plan: MessagePlan) -> Counts:
    """Counted from the messages, every holder with a port of its own."""
    total = Counts()
    for (counts,) in count_on(plan, plan.holders):
        total = total.plus(counts)
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
        totals = [before.plus(counts) for before, counts in zip(totals, levels, strict=True)]
    return total_s + sum(
        incast_seconds(counts, num_bytes, fabric) for counts, fabric in zip(totals, fabrics, strict=True)
    )


def _count_round(
    messages: Round, where: tuple[tuple[int, ...], ...], num_levels: int, block: float
) -> tuple[Counts, ...]:
    ports: list[Counter[tuple[object, ...]]] = [Counter() for _ in range(num_levels)]
    inputs: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for message in messages:
        level, out, into = _ports(message, where)
        blocks = message.last - message.first
        ports[level]["out", out] += blocks
        ports[level]["into", into] += blocks
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
        )
        for level in range(num_levels)
    )


def _ports(message: Message, where: tuple[tuple[int, ...], ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The level of a message, and the branches that it leaves and enters there."""
    sender, receiver = where[message.sender], where[message.receiver]
    common = next(index for index in range(len(sender)) if sender[index] != receiver[index])
    return len(sender) - 1 - common, sender[: common + 1], receiver[: common + 1]


def least_touched(holders: int, fan_in: int) -> float:
    """The least memory traffic where no reduction has more than `fan_in` inputs (3.3 of the notes on the paper): each
    of k reductions of a block adds one write and one read of the running sum, and k >= (N - 1) / (fan_in - 1)."""
    if fan_in < 2:
        raise InvalidField("fan_in", fan_in, "must be at least 2: a reduction has two inputs or more")
    reductions = math.ceil((holders - 1) / (fan_in - 1))
    return (holders - 1 + 2 * reductions) / holders
