"""Groups of a plan: which layers add up their gradients by which algorithm.

Owns the value and its invariants. Which algorithm suits where is chosen in `group_choice`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_planner.algorithms import DIRECT, check_name
from shoal_planner.errors import InvalidField


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Blocks [first, last) and their algorithm by name (`algorithms`). The embedding goes with the group that begins at
    layer 0, norm and head with the one that ends at the last layer; a group of no blocks there is about these alone.
    Layers in no group exchange directly."""

    layers: tuple[int, int]
    collective: str

    def __post_init__(self) -> None:
        first, last = self.layers
        if not 0 <= first <= last:
            raise InvalidField("layers", [first, last], "must be [first, last) with 0 <= first <= last")
        check_name(self.collective)


def group_text(group: Group, num_layers: int) -> str:
    """As in "layers 0-13 by ring", both included."""
    first, last = group.layers
    if first == last:
        return f"{'embedding' if first < num_layers else 'head'} by {group.collective}"
    return f"{f'layers {first}-{last - 1}' if last > first + 1 else f'layer {first}'} by {group.collective}"


def check_groups(groups: tuple[Group, ...], num_layers: int) -> None:
    """Raises InvalidField unless they are in order, apart from each other, and of these layers."""
    reached = 0
    for index, group in enumerate(groups):
        first, last = group.layers
        if not reached <= first or last > num_layers:
            problem = f"must lie within layers {reached} to {num_layers}, in order and apart from each other"
            raise InvalidField(f"groups[{index}].layers", [first, last], problem)
        if first == last and (first not in (0, num_layers) or (index and groups[index - 1].layers == group.layers)):
            problem = (
                f"must hold a layer, or be [0, 0] (the embedding) or [{num_layers}, {num_layers}] (the head), once"
            )
            raise InvalidField(f"groups[{index}].layers", [first, last], problem)
        reached = last


def collective_of(groups: tuple[Group, ...], num_layers: int, first: int, last: int) -> str:
    """Of units [first, last), which no group divides: unit 0 is the embedding, unit 1 + i block i, then the head."""
    if first == 0:
        return next((group.collective for group in groups if group.layers[0] == 0), DIRECT)
    if first > num_layers:
        return next((group.collective for group in reversed(groups) if group.layers[1] == num_layers), DIRECT)
    within = (group for group in groups if group.layers[0] < first and last <= group.layers[1] + 1)
    return next((group.collective for group in within), DIRECT)
