"""How often spot nodes of a pool are lost, singly and many at once, estimated from what pools have suffered.

Owns the rate of a node, its uncertainty, and what it means for several nodes of one pool. Does not own how histories
are read (`pool_history`) nor what a loss costs (`goodput`).

The model: every node is lost on its own at `single_per_h`, and besides the whole pool is shaken at `shocks_per_h`; a
shock takes each of its nodes with the same chance, one of the shares seen. Pools with little history are drawn towards
the others (empirical Bayes): rates of pools follow a gamma distribution fitted to all of them, losses of one pool a
Poisson distribution, so the posterior is a gamma distribution again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal_planner.errors import InvalidField
from shoal_planner.pool_history import Observed
from shoal_planner.ranges import check_range

# Losses that what all pools say of shocks weighs as much as, against the losses that a pool itself saw.
BULK_PRIOR_LOSSES = 4.0
# Shares of shocks are kept as so many groups of equal weight: the tail matters, single recordings do not.
SHARE_GROUPS = 8

Share = tuple[float, float]  # of the pool's nodes that a shock takes, and its weight among all shocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePrior:
    """What is expected of a pool before its history: a gamma distribution of the rate with mean shape / node_h.

    `clump` is the mean size of the moment in which a lost node was lost: losses that come together say hardly more than
    one does, so counts and exposures are divided by it. `bulk_share` of the lost nodes are lost in shocks. `source`
    says of whom all this is known.
    """

    shape: float
    node_h: float
    bulk_share: float = 0.0
    shares: tuple[Share, ...] = ()
    clump: float = 1.0
    source: str = "other pools"

    def __post_init__(self) -> None:
        for name in ("shape", "node_h"):
            check_range(name, getattr(self, name), 1e-12, 1e12)
        check_range("clump", self.clump, 1, 1e9)
        check_range("bulk_share", self.bulk_share, 0, 1)
        if self.bulk_share and not self.shares:
            raise InvalidField("shares", [], "must have an entry where shocks take nodes")

    @property
    def per_node_h(self) -> float:
        return self.shape / self.node_h


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRate:
    """Losses of nodes of one pool. `deviation_per_h` is the standard deviation of what is known of `per_node_h`."""

    single_per_h: float
    shocks_per_h: float = 0.0
    shares: tuple[Share, ...] = ()
    deviation_per_h: float = 0.0
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("single_per_h", "shocks_per_h", "deviation_per_h"):
            check_range(name, getattr(self, name), 0, 1e9)
        if self.shocks_per_h and not self.shares:
            raise InvalidField("shares", [], "must have an entry where there are shocks")

    @property
    def per_node_h(self) -> float:
        """Losses that one node suffers in an hour."""
        return self.single_per_h + self.shocks_per_h * _mean(self.shares, lambda share: share)

    def interruptions_per_h(self, num_nodes: int) -> float:
        """Moments at which at least one of so many nodes of the pool is lost."""
        hit = _mean(self.shares, lambda share: 1 - (1 - share) ** num_nodes)
        return num_nodes * self.single_per_h + self.shocks_per_h * hit

    def any_lost_per_h(self, sizes: Sequence[int]) -> float:
        """Moments at which all nodes of at least one of several groups of the pool, of these sizes, are lost together.

        Groups that have nodes in common are counted as if they had none, which is slightly too often.
        """
        alone = sum(self.single_per_h for size in sizes if size == 1)
        return alone + self.shocks_per_h * _mean(
            self.shares, lambda share: 1 - math.prod(1 - share**size for size in sizes)
        )


# Machines fail without any market, too: 419 unplanned stops in 54 days on 2,048 nodes of 8 GPUs (the Llama 3 report).
ON_DEMAND = PreemptionRate(single_per_h=1.6e-4, reason="not a spot node: failures of machines alone")
# What `fit_prior` makes of twelve public recordings in which GPU instances were really held: V100 and T4 nodes on two
# clouds, 2020 to 2023. It stands for spot nodes of which nothing is known.
PUBLIC_PRIOR = RatePrior(
    shape=2.15,
    node_h=7.58,
    bulk_share=0.81,
    shares=tuple((share, 0.125) for share in (0.06, 0.13, 0.21, 0.43, 0.55, 0.76, 1.0, 1.0)),
    clump=7.44,
    source="public recordings of spot nodes",
)
# Pools that are enough to tell how much pools differ; of fewer, the public recordings say more.
LEAST_POOLS = 4


def fit_prior(pools: Sequence[Observed]) -> RatePrior:
    """The gamma distribution whose mean and variance are those of the pools' rates, less what chance alone explains.

    Pools that differ no more than by chance make it as sure as all their history together. Raises InvalidField if
    nothing was ever lost, which leaves no scale of a rate.
    """
    seen = [pool for pool in pools if pool.exposure_node_h > 0]
    losses = [entry for pool in seen for entry in pool.losses]
    lost = sum(count for count, _ in losses)
    if not lost:
        raise InvalidField("pools", len(seen), "must have lost a node at least once")
    clump = sum(count * count for count, _ in losses) / lost
    exposure = sum(pool.exposure_node_h for pool in seen)
    mean = lost / exposure
    spread = sum(pool.exposure_node_h * (pool.lost_nodes / pool.exposure_node_h - mean) ** 2 for pool in seen)
    width = exposure - sum(pool.exposure_node_h**2 for pool in seen) / exposure
    variance = max(0.0, spread - clump * mean * (len(seen) - 1)) / width if width > 0 else 0.0
    most_node_h = exposure / clump
    node_h = min(most_node_h, mean / variance) if variance > 0 else most_node_h
    return RatePrior(
        shape=mean * node_h,
        node_h=node_h,
        bulk_share=sum(pool.bulk_nodes for pool in seen) / max(1, sum(pool.plural_nodes for pool in seen)),
        shares=_grouped([share for pool in seen for share in pool.bulk_shares()]),
        clump=clump,
        source=f"the {len(seen)} pools whose history is given",
    )


def estimate(observed: Observed, prior: RatePrior = PUBLIC_PRIOR) -> PreemptionRate:
    """The rate of a pool's nodes from its own history and what other pools lead to expect."""
    shape = prior.shape + observed.lost_nodes / prior.clump
    node_h = prior.node_h + observed.exposure_node_h / prior.clump
    weight = prior.node_h / node_h
    plural = observed.plural_nodes + BULK_PRIOR_LOSSES
    bulk_share = (observed.bulk_nodes + BULK_PRIOR_LOSSES * prior.bulk_share) / plural
    own = _grouped(observed.bulk_shares())
    rate = _split(shape / node_h, bulk_share, own or prior.shares)
    reason = (
        f"{observed.lost_nodes} nodes lost in {observed.exposure_node_h:.3g} node-hours; "
        f"{weight:.0%} of the estimate comes from {prior.source}"
    )
    return PreemptionRate(
        single_per_h=rate.single_per_h,
        shocks_per_h=rate.shocks_per_h,
        shares=rate.shares,
        deviation_per_h=shape**0.5 / node_h,
        reason=reason,
    )


def estimates(pools: Sequence[Observed]) -> tuple[RatePrior, dict[str, PreemptionRate]]:
    """What to expect of any pool, and the rates of these. The first is fitted to them where they are enough and have
    lost nodes; else it is what public recordings say."""
    lost = any(pool.lost_nodes for pool in pools)
    prior = fit_prior(pools) if lost and len(pools) >= LEAST_POOLS else PUBLIC_PRIOR
    return prior, {pool.pool: estimate(pool, prior) for pool in pools}


def known_rate(per_node_h: float, prior: RatePrior = PUBLIC_PRIOR) -> PreemptionRate:
    """A rate that somebody states; how much of it comes in shocks is what other pools lead to expect."""
    return _split(per_node_h, prior.bulk_share, prior.shares)


def unknown_rate(prior: RatePrior = PUBLIC_PRIOR) -> PreemptionRate:
    """Of a spot node without any history."""
    found = estimate(Observed(pool="", exposure_node_h=0.0, losses=()), prior)
    return dataclasses.replace(found, reason=f"no history: what is known from {prior.source}")


def _split(per_node_h: float, bulk_share: float, shares: tuple[Share, ...]) -> PreemptionRate:
    taken = _mean(shares, lambda share: share)
    if not bulk_share or not taken:
        return PreemptionRate(single_per_h=per_node_h, reason="as stated")
    return PreemptionRate(
        single_per_h=per_node_h * (1 - bulk_share),
        shocks_per_h=per_node_h * bulk_share / taken,
        shares=shares,
        reason="as stated",
    )


def _grouped(shares: Sequence[float]) -> tuple[Share, ...]:
    """The shares in order, in groups as even as possible, each as its mean and its weight."""
    ordered = sorted(shares)
    groups = min(SHARE_GROUPS, len(ordered))
    found = []
    for group in range(groups):
        members = ordered[len(ordered) * group // groups : len(ordered) * (group + 1) // groups]
        found.append((sum(members) / len(members), len(members) / len(ordered)))
    return tuple(found)


def _mean(shares: tuple[Share, ...], value: Callable[[float], float]) -> float:
    total = sum(weight for _, weight in shares)
    return sum(value(share) * weight for share, weight in shares) / total if total else 0.0
