"""Over what a plan splits weights, gradients and optimizer state, and how its nodes' devices form groups.

Owns the values and their invariants. Who shares with whom follows from them in `circles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal_planner.errors import InvalidField
from shoal_planner.job import TrainSpec

Level = Literal["none", "group", "node", "cluster"]
LEVELS: tuple[Level, ...] = ("none", "group", "node", "cluster")  # each circle lies within one of the next level


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Over what each kind of state is split, by `state_share`: among those replicas of one stage of one pipeline that
    share a device group, a node, or just the stage (cluster). Optimizer state at level cluster is split among all
    holders of a weight. Who updates a weight needs its whole gradient, so gradients are split no further than that.

    Within a step weights come together as they are or in blocks of 8 bits (`gather`), and gradients go to their parts
    as they are or in blocks of 4 bits, inside nodes first and then between them (`scatter`). With `secondary` weights
    each node keeps what it gathered, split among its replicas, so that a backward asks no other node for it.
    """

    weights: Level = "none"
    gradients: Level = "none"
    optimizer: Level = "cluster"
    gather: Literal["plain", "int8"] = "plain"
    scatter: Literal["plain", "int4"] = "plain"
    secondary: bool = False

    def __post_init__(self) -> None:
        if LEVELS.index(self.gradients) > LEVELS.index(self.optimizer):
            most = " or ".join(map(repr, LEVELS[: LEVELS.index(self.optimizer) + 1]))
            problem = (
                f"must be {most} where sharding.optimizer is {self.optimizer!r}: an update needs all of a gradient"
            )
            raise InvalidField("gradients", self.gradients, problem)
        if self.gather != "plain" and self.weights == "none":
            problem = "must be 'plain' where sharding.weights is 'none': nothing is gathered within a step"
            raise InvalidField("gather", self.gather, problem)
        if self.scatter != "plain" and self.gradients == "none":
            problem = "must be 'plain' where sharding.gradients is 'none': nothing is scattered within a step"
            raise InvalidField("scatter", self.scatter, problem)
        if self.secondary and self.weights != "cluster":
            problem = f"must be false where sharding.weights is {self.weights!r}: only 'cluster' gathers between nodes"
            raise InvalidField("secondary", self.secondary, problem)

    @property
    def relayed(self) -> bool:
        """Whether gradients go to their parts in two hops."""
        return self.scatter != "plain" and self.gradients == "cluster"


OPTIMIZER_ALONE = Sharding()


def sharding_of(train: TrainSpec, weights: Level, gradients: Level) -> Sharding:
    """These levels, and what passes is as the job wants it where there is anything of the kind."""
    return Sharding(
        weights=weights,
        gradients=gradients,
        gather=train.gather if weights != "none" else "plain",
        scatter=train.scatter if gradients != "none" else "plain",
        secondary=train.secondary_weights and weights == "cluster",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroups:
    """Devices 0 to `size` - 1 of a node are a device group, the next `size` another one, and so on."""

    node: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidField("size", self.size, "must be at least 1")
