"""What messages of a collective do to vectors, and where holders stand on a tree: for benchmarks and tests alone.

The messages themselves are the product's (`collective_messages` of the planner).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numpy import float64
from numpy.typing import NDArray

from shoal_planner.algorithms import Tree
from shoal_planner.collective_messages import Message, MessagePlan
from shoal_planner.errors import InvalidField


def execute(plan: MessagePlan, vectors: Sequence[NDArray[float64]]) -> tuple[NDArray[float64], ...]:
    """What each holder has after all rounds; the vectors given are left as they are."""
    if len(vectors) != plan.holders:
        raise InvalidField("vectors", len(vectors), f"must be one for each of {plan.holders} holders")
    held = [vector.copy() for vector in vectors]
    for messages in plan.rounds:
        sent = [held[message.sender][elements(plan, message, held[0].size)].copy() for message in messages]
        for message, values in zip(messages, sent, strict=True):
            place = elements(plan, message, held[0].size)
            if message.reduce:
                held[message.receiver][place] += values
            else:
                held[message.receiver][place] = values
    return tuple(held)


def elements(plan: MessagePlan, message: Message, size: int) -> slice:
    """Where the blocks of a message lie in a vector of so many elements, which need not divide by the blocks."""
    return slice(message.first * size // plan.blocks, message.last * size // plan.blocks)


def paths(tree: Tree) -> Iterator[tuple[int, ...]]:
    """Where each holder stands: the index of the branch at every vertex, from the top."""
    branches = range(tree) if isinstance(tree, int) else tree
    for index, branch in enumerate(branches):
        if isinstance(tree, int):
            yield (index,)
        else:
            for rest in paths(branch):
                yield (index, *rest)
