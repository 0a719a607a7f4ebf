"""The algorithms by which replicas add up their gradients, and the names that plans have for them.

Owns the grammar of those names. Does not own what an algorithm sends nor what it costs (`collective_counts`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from shoal_planner.errors import InvalidField

Kind = Literal["ring", "halving_doubling", "reduce_broadcast", "parameter_server"]
# Holders by place: an int is a vertex with so many of them; a tuple is what the next level up connects.
Tree: TypeAlias = "int | tuple[Tree, ...]"

# What a plan means that names nothing: everybody sends everybody's part at once; where replicas share a node and others
# do not, first those of a node among themselves, so that each sum leaves it once.
DIRECT = "direct"
_TREE, _UP, _OR = "tree: ", " > ", ", "
_ALGORITHM = re.compile(r"(ring|halving_doubling|parameter_server)(?: ([1-9]\d{0,4}(?:x[1-9]\d{0,4}){0,15}))?")
_LONGEST = 400
_PROBLEM = (
    "must be direct, ring, halving_doubling, parameter_server, one with its fan-ins (parameter_server 4x2), "
    "or what each level does, inside a node first (tree: parameter_server 8 > ring 3)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How `holders` add up their vectors. `factors` belongs to the parameter server alone: the fan-ins of its levels in
    order, whose product is `holders`; left out, every holder serves its part to all others at once."""

    kind: Kind
    holders: int
    factors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.holders < 1:
            raise InvalidField("holders", self.holders, "must be at least 1")
        if self.kind == "parameter_server":
            if not self.factors:
                object.__setattr__(self, "factors", (self.holders,))
            if min(self.factors) < 1 or math.prod(self.factors) != self.holders:
                raise InvalidField("factors", list(self.factors), f"must multiply to holders ({self.holders})")
        elif self.factors:
            raise InvalidField("factors", list(self.factors), f"belongs to parameter_server, not to {self.kind}")

    @property
    def name(self) -> str:
        if self.kind == "parameter_server" and len(self.factors) > 1:
            return f"parameter_server {_product(self.factors)}"
        return self.kind

    @property
    def sized_name(self) -> str:
        return f"{self.kind} {_product(self.factors or (self.holders,))}"


def check_name(name: str) -> None:
    """Raises InvalidField unless this is how some algorithm is called."""
    if name == DIRECT:
        return
    if name.startswith(_TREE):
        levels_of(name)
        return
    match = _ALGORITHM.fullmatch(name)
    if match is None:
        raise InvalidField("collective", name, _PROBLEM)
    if match[2]:
        algorithm_of(name, math.prod(_factors(match[2])))


def is_tree(name: str) -> bool:
    return name.startswith(_TREE)


def algorithm_of(name: str, holders: int) -> Algorithm:
    """The algorithm of a name that is neither `direct` nor a tree's, among so many. Raises InvalidField if it is for
    another number of them."""
    match = _ALGORITHM.fullmatch(name)
    if match is None:
        raise InvalidField("collective", name, _PROBLEM)
    kind, factors = cast(Kind, match[1]), _factors(match[2])
    if kind != "parameter_server" and len(factors) > 1:
        raise InvalidField("collective", name, f"is one {kind}: it has no fan-ins")
    if factors and math.prod(factors) != holders:
        raise InvalidField("collective", name, f"is for {math.prod(factors)} replicas, and {holders} take part")
    if kind == "halving_doubling" and holders & (holders - 1):
        raise InvalidField("collective", name, f"is for a power of two, and {holders} replicas take part")
    return Algorithm(kind=kind, holders=holders, factors=factors if kind == "parameter_server" else ())


def levels_of(name: str) -> tuple[tuple[Algorithm, ...], ...]:
    """By level, what vertices of each size do. Raises InvalidField."""
    texts = [level.split(_OR) for level in name.removeprefix(_TREE).split(_UP)] if len(name) <= _LONGEST else []
    matches = [[_ALGORITHM.fullmatch(text) for text in level] for level in texts]
    if len(matches) < 2 or not all(match and match[2] for level in matches for match in level):
        raise InvalidField("collective", name, _PROBLEM)
    return tuple(
        tuple(algorithm_of(text, math.prod(_factors(text.split(" ")[1]))) for text in level) for level in texts
    )


def tree_name(levels: Sequence[Sequence[Algorithm]]) -> str:
    return _TREE + _UP.join(_OR.join(algorithm.sized_name for algorithm in level) for level in levels)


def num_holders(tree: Tree) -> int:
    return tree if isinstance(tree, int) else sum(map(num_holders, tree))


def depth(tree: Tree) -> int:
    """Number of levels. Raises InvalidField where a vertex is empty or its branches differ in depth."""
    if isinstance(tree, int):
        if tree < 1:
            raise InvalidField("tree", tree, "must hold at least one holder in every node")
        return 1
    depths = set(map(depth, tree))
    if len(depths) != 1:
        raise InvalidField("tree", tree, "must have branches, all of the same depth")
    return 1 + depths.pop()


def _factors(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split("x"))) if text else ()


def _product(factors: tuple[int, ...]) -> str:
    return "x".join(map(str, factors))
