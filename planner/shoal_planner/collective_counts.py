"""What a collective costs: counts of rounds, bytes, reductions and memory traffic, and their seconds on a fabric.

Owns the terms of GenModel (arXiv 2409.04202) and its counts by algorithm; benchmarks hold these to counted messages.
Does not own how they add up over levels, nor the choice among algorithms (`collectives`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

from shoal_planner.algorithms import Algorithm
from shoal_planner.ranges import Range, check_range, check_ranges

_SECONDS: Range = (0, 3600)
_RANGES: dict[str, Range] = {
    "alpha_s": _SECONDS,
    "beta_s_per_byte": _SECONDS,
    "gamma_s_per_byte": _SECONDS,
    "delta_s_per_byte": _SECONDS,
    "epsilon_s_per_byte": _SECONDS,
    "fan_in": (1, 2**31),
    "peer_s": _SECONDS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What connects the members of one level of a topology, each through one port.

    Seconds for a round, and per byte that leaves (or enters) the busiest port, is added, is moved through memory by
    additions, and leaves the busiest port for each input of a reduction beyond `fan_in`. Between nodes the port is that
    of a whole node: its bytes per second are those of all its interfaces together. `peer_s` is not of the paper: what
    each message of a round beyond the first takes a holder by itself, whatever its size.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    delta_s_per_byte: float = 0.0
    epsilon_s_per_byte: float = 0.0
    fan_in: int = 2
    peer_s: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)


def link_fabric(
    latency_s: float,
    bytes_per_s: float,
    *,
    memory_bytes_per_s: float = math.inf,
    incast: float = 0.0,
    fan_in: int = 2,
    peer_s: float = 0.0,
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
        peer_s=peer_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The busiest port's and the busiest holder's share in an all-reduce: `sent`, `reduced` and `touched` (A, B, C, D
    and w of the paper are the fields in order) in multiples of the vector's bytes.

    `fan_in` is the number of inputs of the largest reduction, the receiver's own included. `peers` are those that a
    holder exchanges messages with in a round, beyond the first, added up over rounds.
    """

    rounds: int = 0
    sent: float = 0.0
    reduced: float = 0.0
    touched: float = 0.0
    fan_in: int = 0
    peers: int = 0


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
            return Counts(rounds=2, sent=2 * (n - 1), reduced=n - 1, touched=n + 1, fan_in=n, peers=2 * (n - 2))
        case "halving_doubling":
            return _halving_doubling(n)
        case "parameter_server":
            return Counts(
                rounds=2 * sum(factor > 1 for factor in algorithm.factors),
                sent=2 * (n - 1) / n,
                reduced=(n - 1) / n,
                touched=_touched(algorithm.factors),
                fan_in=max(algorithm.factors),
                peers=2 * sum(factor - 2 for factor in algorithm.factors if factor > 1),
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
