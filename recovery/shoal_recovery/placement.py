"""Where the copies of each rank's state stand, in intervals: what its agent sends to whom, and what it mirrors. Pure.

The rule by nodes is the planner's (`shoal_planner.placement`), which has to know whether hosts have room. Owns turning
it into spans of the shard map, and the choice between owners and backups by what hosts have room for.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.memory import GENERATIONS, STATE_BYTES, snapshot_bytes
from shoal_planner.placement import Placement, backups, placements
from shoal_recovery.intervals import Interval, merge
from shoal_recovery.state import RankState, ShardMap, Span, common, without

__all__ = [
    "RankCopies",
    "backups",
    "held_by",
    "host_elements",
    "kept_by",
    "network_bytes_per_parameter",
    "place_copies",
    "told",
]

_Owned = Mapping[str, tuple[tuple[int, int, frozenset[str]], ...]]  # by parameter, segments and the nodes that own them


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCopies:
    """Of one rank. By node, what it is `sent` of what the rank vouches for. `mirrors` is what another rank vouches for
    and this one owns too: instead of being sent a copy, its node takes a snapshot of its own rank's memory."""

    sent: tuple[tuple[str, tuple[Span, ...]], ...] = ()
    mirrors: tuple[Span, ...] = ()


def place_copies(shards: ShardMap, snapshot: ClusterSnapshot, copies: int) -> tuple[RankCopies, ...]:
    """In the order of ranks. Every element that a rank vouches for stands on `copies` other nodes (on all, if there are
    fewer): on those that own it, as long as that reaches as many zones and hosts have room, and else on backups."""
    return _placed(shards, _placement(shards, snapshot.nodes, copies))


def held_by(shards: ShardMap, nodes: tuple[Node, ...], copies: int) -> Iterator[tuple[frozenset[str], int]]:
    """Elements by the nodes that keep snapshots of them: all of them, in parts."""
    return ((holders, span.numel) for holders, span in kept_by(shards, nodes, copies))


def kept_by(shards: ShardMap, nodes: tuple[Node, ...], copies: int) -> Iterator[tuple[frozenset[str], Span]]:
    """As `held_by`, naming the elements."""
    placement, owned = _placement(shards, nodes, copies), _owned_by_nodes(shards)
    for state in shards.ranks:
        home = state.device.node
        for span, owners in _segments(state, owned):
            others = placement.copies(home, owners - {home})
            yield frozenset((home, *others.live, *others.sent)), span


def host_elements(shards: ShardMap, found: tuple[RankCopies, ...]) -> Counter[str]:
    """By node, the elements of which it keeps snapshots: of its own ranks, mirrored, and received."""
    kept: Counter[str] = Counter()
    for state, rank in zip(shards.ranks, found, strict=True):
        kept[state.device.node] += _numel(state.vouches) + _numel(rank.mirrors)
        for node, spans in rank.sent:
            kept[node] += _numel(spans)
    return kept


def network_bytes_per_parameter(shards: ShardMap, found: tuple[RankCopies, ...]) -> float:
    """That all nodes together send in each step, so that its state is safe."""
    sent = sum(_numel(spans) for rank in found for _, spans in rank.sent)
    return STATE_BYTES * sent / sum(_numel(state.vouches) for state in shards.ranks)


def told(shards: ShardMap, found: tuple[RankCopies, ...]) -> str:
    """For a user, as a sentence after others: what is sent so that steps are safe. Empty where there are no copies."""
    mirrored = any(rank.mirrors for rank in found)
    if not any(rank.sent for rank in found):
        return " No copies of its state are sent, as other nodes keep it live." if mirrored else ""
    some = " for what no other node keeps live" if mirrored else ""
    num_bytes = network_bytes_per_parameter(shards, found)
    return f" Copies of its state take {num_bytes:.3g} bytes per parameter and step on the network{some}."


def _placement(shards: ShardMap, nodes: tuple[Node, ...], copies: int) -> Placement:
    *better, last = placements(nodes, copies, shared=_several_own(shards))
    return next((found for found in better if _has_room(shards, _placed(shards, found), nodes)), last)


def _placed(shards: ShardMap, placement: Placement) -> tuple[RankCopies, ...]:
    owned = _owned_by_nodes(shards)
    on_node: defaultdict[str, list[RankState]] = defaultdict(list)
    for state in shards.ranks:
        on_node[state.device.node].append(state)
    sent: list[defaultdict[str, list[Span]]] = [defaultdict(list) for _ in shards.ranks]
    mirrors: list[list[Span]] = [[] for _ in shards.ranks]
    for state in shards.ranks:
        home = state.device.node
        for span, owners in _segments(state, owned):
            others = placement.copies(home, owners - {home})
            for node in others.sent:
                sent[state.rank][node].append(span)
            for node in others.live:
                for rank, part in _shared(span, on_node[node]):
                    mirrors[rank].append(part)
    return tuple(
        RankCopies(sent=tuple((node, _merged(spans)) for node, spans in by_node.items()), mirrors=_merged(mirrored))
        for by_node, mirrored in zip(sent, mirrors, strict=True)
    )


def _owned_by_nodes(shards: ShardMap) -> _Owned:
    """Nothing where each element has but one owner."""
    if not _several_own(shards):
        return {}
    by_name: defaultdict[str, defaultdict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for state in shards.ranks:
        for span in state.owns:
            by_name[span.fqn][state.device.node].append((span.first, span.last))
    return {fqn: tuple(_swept(by_node)) for fqn, by_node in by_name.items()}


def _several_own(shards: ShardMap) -> bool:
    return any(state.owns != state.vouches for state in shards.ranks)


def _swept(by_node: Mapping[str, list[Interval]]) -> Iterator[tuple[int, int, frozenset[str]]]:
    merged = {node: merge(intervals) for node, intervals in by_node.items()}
    begins: defaultdict[int, set[str]] = defaultdict(set)
    ends: defaultdict[int, set[str]] = defaultdict(set)
    for node, intervals in merged.items():
        for first, last in intervals:
            begins[first].add(node)
            ends[last].add(node)
    present: frozenset[str] = frozenset()
    for first, last in itertools.pairwise(sorted({*begins, *ends})):
        present = present - ends.get(first, set()) | begins.get(first, set())
        yield first, last, present


def _segments(state: RankState, owned: _Owned) -> Iterator[tuple[Span, frozenset[str]]]:
    """What the rank vouches for, and which nodes own it; its own may be left out."""
    for span in state.vouches:
        if span.fqn not in owned:
            yield span, frozenset()
            continue
        for first, last, nodes in owned[span.fqn]:
            low, high = max(first, span.first), min(last, span.last)
            if low < high:
                yield Span(fqn=span.fqn, first=low, last=high), nodes


def _shared(span: Span, states: list[RankState]) -> Iterator[tuple[int, Span]]:
    """Which ranks of one node mirror which part of it: each element is mirrored once."""
    left: tuple[Span, ...] = (span,)
    for state in states:
        for part in common(left, state.owns):
            yield state.rank, part
        left = without(left, state.owns)


def _has_room(shards: ShardMap, found: tuple[RankCopies, ...], nodes: tuple[Node, ...]) -> bool:
    """For snapshots, beside state that lives on hosts."""
    hosted: Counter[str] = Counter()
    for state in shards.ranks:
        hosted[state.device.node] += GENERATIONS * STATE_BYTES * _numel(state.hosted)
    kept = host_elements(shards, found)
    return all(snapshot_bytes(kept[node.id]) + hosted[node.id] <= node.host_memory_bytes for node in nodes)


def _merged(spans: list[Span]) -> tuple[Span, ...]:
    by_name: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        by_name[span.fqn].append((span.first, span.last))
    return tuple(
        Span(fqn=fqn, first=first, last=last) for fqn in sorted(by_name) for first, last in merge(by_name[fqn])
    )


def _numel(spans: tuple[Span, ...]) -> int:
    return sum(span.numel for span in spans)
