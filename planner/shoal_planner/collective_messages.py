"""Collectives as messages: who sends which blocks to whom in which round, so that every holder ends with the sum.

What the planner reckons with are closed forms (`collective_counts`). These are the messages themselves: the engine
sends them, benchmarks carry them out on arrays, and tests count them, to see that the closed forms hold. Blocks are
numbers here; which elements they are is up to whoever has holders.

Every all-reduce here is a reduce-scatter and its mirror image: the same messages backwards, with copies for sums.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from shoal_planner.algorithms import DIRECT, Algorithm, Tree, algorithm_of, depth, is_tree, num_holders
from shoal_planner.collectives import algorithms_by_level


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Blocks [first, last) as the sender has them when the round begins; added to the receiver's, or put in place."""

    sender: int
    receiver: int
    first: int
    last: int
    reduce: bool

    def mirrored(self) -> Message:
        return Message(sender=self.receiver, receiver=self.sender, first=self.first, last=self.last, reduce=False)


Round: TypeAlias = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePlan:
    """An all-reduce of vectors that are cut into `blocks` blocks. A round begins when the one before has ended.

    The first half of the rounds is a reduce-scatter that leaves block b summed with `owners[b]`; the second half is an
    all-gather from there.
    """

    holders: int
    blocks: int
    rounds: tuple[Round, ...]
    owners: tuple[int, ...]

    @property
    def reduce_rounds(self) -> tuple[Round, ...]:
        return self.rounds[: len(self.rounds) // 2]

    @property
    def gather_rounds(self) -> tuple[Round, ...]:
        return self.rounds[len(self.rounds) // 2 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scatter:
    """A reduce-scatter: its rounds, and by block who has the sum in the end."""

    rounds: tuple[Round, ...]
    owners: tuple[int, ...]


def all_reduce(algorithm: Algorithm) -> MessagePlan:
    return _with_mirror(algorithm.holders, _scatter(algorithm))


def tree_all_reduce(tree: Tree, pick: Callable[[int, int], Algorithm]) -> MessagePlan:
    """An all-reduce along a tree, from the nodes up: every level carries only what the level below has added up.

    `pick(level, members)` names the algorithm among the members of one vertex, level 0 being inside a node; it must
    leave every member with a part (not reduce_broadcast, nor halving_doubling unless members is a power of two).
    Holders count through the tree from left to right.
    """
    levels, owners = _tree_scatter(tree, 0, pick)
    rounds = tuple(itertools.chain.from_iterable(levels))
    return _with_mirror(num_holders(tree), _Scatter(rounds=rounds, owners=owners))


@functools.lru_cache(maxsize=256)
def message_plan(name: str, tree: Tree) -> MessagePlan:
    """The messages of an algorithm that a plan names, among holders as they count through the tree. Raises InvalidField
    if it is not for such a tree."""
    if name == DIRECT:
        return tree_all_reduce(tree, lambda _, members: Algorithm(kind="parameter_server", holders=members))
    if not is_tree(name):
        return all_reduce(algorithm_of(name, num_holders(tree)))
    found = algorithms_by_level(name, tree)
    return tree_all_reduce(
        tree, lambda level, members: found.get((level, members)) or Algorithm(kind="ring", holders=members)
    )


def _with_mirror(holders: int, scatter: _Scatter) -> MessagePlan:
    mirror = tuple(tuple(message.mirrored() for message in messages) for messages in reversed(scatter.rounds))
    return MessagePlan(
        holders=holders, blocks=len(scatter.owners), rounds=scatter.rounds + mirror, owners=scatter.owners
    )


def _scatter(algorithm: Algorithm) -> _Scatter:
    match algorithm.kind:
        case "ring":
            return _ring(algorithm.holders)
        case "halving_doubling":
            return _halving_doubling(algorithm.holders)
        case "reduce_broadcast":
            return _reduce_broadcast(algorithm.holders)
        case "parameter_server":
            return _parameter_server(algorithm.factors)
    assert_never(algorithm.kind)


def _ring(holders: int) -> _Scatter:
    rounds = []
    for step in range(holders - 1):
        blocks = [(sender - step - 1) % holders for sender in range(holders)]
        rounds.append(
            tuple(
                Message(sender=sender, receiver=(sender + 1) % holders, first=block, last=block + 1, reduce=True)
                for sender, block in enumerate(blocks)
            )
        )
    return _Scatter(rounds=tuple(rounds), owners=tuple(range(holders)))


def _reduce_broadcast(holders: int) -> _Scatter:
    senders = range(1, holders)
    messages = tuple(Message(sender=sender, receiver=0, first=0, last=1, reduce=True) for sender in senders)
    return _Scatter(rounds=(messages,) if messages else (), owners=(0,))


def _halving_doubling(holders: int) -> _Scatter:
    """Neighbours first, so that the long way carries the short messages. The holders beyond the largest power of two
    fold their whole vector into a partner's before, and have the sum copied back after."""
    core = 1 << (holders.bit_length() - 1)
    scatter = _parameter_server((2,) * (core.bit_length() - 1))
    extra = range(holders - core)
    if not extra:
        return scatter
    fold = tuple(Message(sender=core + index, receiver=index, first=0, last=core, reduce=True) for index in extra)
    return _Scatter(rounds=(fold, *scatter.rounds), owners=scatter.owners)


def _parameter_server(factors: tuple[int, ...]) -> _Scatter:
    """Level i splits what a holder is left with among the holders that differ in digit i of their number alone."""
    holders = math.prod(factors)
    first = [0] * holders
    stride, length = 1, holders
    rounds = []
    for factor in factors:
        length //= factor
        messages = []
        for sender in range(holders):
            digit = sender // stride % factor
            for other in range(factor):
                if other != digit:
                    block = first[sender] + other * length
                    receiver = sender + (other - digit) * stride
                    messages.append(
                        Message(sender=sender, receiver=receiver, first=block, last=block + length, reduce=True)
                    )
        first = [first[holder] + holder // stride % factor * length for holder in range(holders)]
        stride *= factor
        if messages:
            rounds.append(tuple(messages))
    owners = sorted(range(holders), key=lambda holder: first[holder])
    return _Scatter(rounds=tuple(rounds), owners=tuple(owners))


def _tree_scatter(
    tree: Tree, start: int, pick: Callable[[int, int], Algorithm]
) -> tuple[list[tuple[Round, ...]], tuple[int, ...]]:
    """Rounds by level, and owners by block. Blocks of a branch are cut further until those of all branches agree."""
    branches: list[tuple[list[tuple[Round, ...]], tuple[int, ...]]] = []
    if isinstance(tree, int):
        branches = [([], (start + index,)) for index in range(tree)]
    else:
        for branch in tree:
            branches.append(_tree_scatter(branch, start, pick))
            start += num_holders(branch)
    level = depth(tree) - 1
    scatter = _scatter(pick(level, len(branches)))
    cut = len(scatter.owners)
    chunks = math.lcm(*(len(owners) for _, owners in branches))
    found = [
        _side_by_side([_rescaled(rounds[lower], chunks * cut // len(owners)) for rounds, owners in branches])
        for lower in range(level)
    ]
    members = [tuple(owners[chunk * len(owners) // chunks] for _, owners in branches) for chunk in range(chunks)]
    found.append(_side_by_side([_placed(scatter.rounds, who, chunk * cut) for chunk, who in enumerate(members)]))
    return found, tuple(who[owner] for who in members for owner in scatter.owners)


def _side_by_side(parts: Sequence[tuple[Round, ...]]) -> tuple[Round, ...]:
    return tuple(tuple(itertools.chain.from_iterable(same)) for same in itertools.zip_longest(*parts, fillvalue=()))


def _rescaled(rounds: tuple[Round, ...], factor: int) -> tuple[Round, ...]:
    return tuple(
        tuple(
            Message(
                sender=message.sender,
                receiver=message.receiver,
                first=message.first * factor,
                last=message.last * factor,
                reduce=message.reduce,
            )
            for message in messages
        )
        for messages in rounds
    )


def _placed(rounds: tuple[Round, ...], members: tuple[int, ...], offset: int) -> tuple[Round, ...]:
    return tuple(
        tuple(
            Message(
                sender=members[message.sender],
                receiver=members[message.receiver],
                first=offset + message.first,
                last=offset + message.last,
                reduce=message.reduce,
            )
            for message in messages
        )
        for messages in rounds
    )
