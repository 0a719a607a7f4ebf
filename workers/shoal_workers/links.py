"""Measures what connects the nodes of a cluster, by asking agents to probe each other.

Not every pair of a large cluster: of every two kinds of nodes (`link_kind`) a few pairs stand for all, and neighbours
in the order of ids show whether a node falls behind its kind. Owns which pairs, in which order and for how long. Does
not own the stop-watch (`link_probe`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from shoal_planner.cluster import Node
from shoal_planner.profile import KindLink, LinkFigure, Profile, link_kind
from shoal_workers import messages as m
from shoal_workers.roster import ask
from shoal_workers.wire import ConnectionClosed

log = structlog.get_logger()

_PAIR_LIMIT_S = 0.1
_PAIRS_PER_KINDS = 2
_AT_ONCE = 64
# How many times worse than its kind a pair must be, twice, to get a figure of its own: less is noise.
_FALLS_BEHIND = 2.0
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A node and its agent."""

    node: Node
    address: tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two sites, or one twice: devices within a node."""

    here: Site
    there: Site

    @property
    def within(self) -> bool:
        return self.here.node.id == self.there.node.id

    @property
    def on_one_machine(self) -> bool:
        """Two nodes that are parts of one machine: they say nothing of others, which are linked by the network."""
        return not self.within and self.here.node.host is not None and self.here.node.host == self.there.node.host

    @property
    def between(self) -> tuple[bool, frozenset[str]]:
        return self.within, frozenset((link_kind(self.here.node), link_kind(self.there.node)))

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset((self.here.address[0], self.there.address[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found, and what it took: `num_bytes` were sent, `received_bytes` of them counted at the other end."""

    profile: Profile
    num_pairs: int
    num_bytes: int
    received_bytes: int
    duration_s: float


Probe = Callable[[Pair, float], m.LinkProbed | None]


def representatives(sites: Iterable[Site], known: Profile) -> tuple[Pair, ...]:
    """Pairs for every two kinds of which nothing is known, and nodes of several devices of every such kind."""
    kinds: dict[str, list[Site]] = {}
    for site in sorted(sites, key=lambda site: site.node.id):
        kinds.setdefault(link_kind(site.node), []).append(site)
    found: list[Pair] = []
    for here, there in itertools.combinations_with_replacement(kinds, 2):
        if known.kind_link(here, there, within=False) is None:
            found += _few(kinds[here], kinds[there], here == there)
    for kind, members in kinds.items():
        if members[0].node.devices > 1 and known.kind_link(kind, kind, within=True) is None:
            found += [Pair(here=site, there=site) for site in members[:_PAIRS_PER_KINDS]]
    return tuple(found)


def neighbours(sites: Iterable[Site]) -> tuple[Pair, ...]:
    """Each site and the next one, in the order of ids, round to the first, unless both are on one machine."""
    ordered = sorted(sites, key=lambda site: site.node.id)
    others = ordered[1:] + ordered[:1] if len(ordered) > 2 else ordered[1:]
    pairs = (Pair(here=here, there=there) for here, there in zip(ordered, others, strict=False))
    return tuple(pair for pair in pairs if not pair.on_one_machine)


def survey(
    sites: Iterable[Site],
    known: Profile,
    limit_s: float,
    source: str,
    *,
    thorough: bool,
    probe: Probe | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Survey:
    """Probes what `known` lacks; nothing where it lacks nothing. Ends soon after `limit_s`: what was not probed by then
    stays unknown. A pair that does not answer is left out. `thorough`: neighbours, too."""
    sites = tuple(sites)
    began_s = clock()
    first = representatives(sites, known)
    done = {_ids(pair) for pair in first}
    others = tuple(pair for pair in neighbours(sites) if _ids(pair) not in done) if first and thorough else ()
    probing = _Probing(probe or _ask, began_s + limit_s, clock)
    probing.run((*first, *others))
    kind_links = tuple(_kind_links(probing.found, source))
    behind = [pair for pair, seen in probing.found if not pair.within and _is_behind(pair, seen, kind_links)]
    probing.run(behind)
    return Survey(
        profile=Profile(kind_links=kind_links, links=tuple(_own_figures(behind, probing.found, kind_links, source))),
        num_pairs=len({_ids(pair) for pair, _ in probing.found}),
        num_bytes=sum(seen.num_bytes for _, seen in probing.found),
        received_bytes=sum(seen.received_bytes for _, seen in probing.found),
        duration_s=clock() - began_s,
    )


class _Probing:
    """Pairs at once only if they share no machine: several nodes may be on one, and would slow each other down."""

    def __init__(self, probe: Probe, deadline_s: float, clock: Callable[[], float]) -> None:
        self._probe = probe
        self._deadline_s = deadline_s
        self._clock = clock
        self.found: list[tuple[Pair, m.LinkProbed]] = []

    def run(self, pairs: Iterable[Pair]) -> None:
        for batch in _batches(list(pairs)):
            left_s = self._deadline_s - self._clock()
            if left_s <= 0:
                return
            limit_s = min(_PAIR_LIMIT_S, left_s)
            with ThreadPoolExecutor(max_workers=len(batch)) as pool:
                answers = list(pool.map(lambda pair, limit_s=limit_s: self._probe(pair, limit_s), batch))
            self.found += [(pair, seen) for pair, seen in zip(batch, answers, strict=True) if seen is not None]


def _few(here: list[Site], there: list[Site], same: bool) -> list[Pair]:
    """The first with the first and the last with the last; within a kind, each with its neighbour. Of nodes on one
    machine the nearest to that which are not."""

    def apart(one: Site, others: Sequence[Site]) -> list[Pair]:
        pairs = (Pair(here=one, there=other) for other in others)
        return list(itertools.islice((pair for pair in pairs if not pair.on_one_machine), 1))

    if same:
        chosen = [*apart(here[0], here[1:]), *apart(here[-1], here[-2::-1])] if len(here) > 1 else []
    else:
        chosen = [*apart(here[0], there), *apart(here[-1], there[::-1])]
    found: dict[object, Pair] = {}
    for pair in chosen:
        found.setdefault(_ids(pair), pair)
    return list(found.values())[:_PAIRS_PER_KINDS]


def _batches(pairs: list[Pair]) -> Iterator[list[Pair]]:
    while pairs:
        busy: set[str] = set()
        batch: list[Pair] = []
        later: list[Pair] = []
        for pair in pairs:
            if pair.hosts & busy or len(batch) == _AT_ONCE:
                later.append(pair)
            else:
                batch.append(pair)
                busy |= pair.hosts
        pairs = later
        yield batch


def _kind_links(found: list[tuple[Pair, m.LinkProbed]], source: str) -> Iterator[KindLink]:
    by_kinds: dict[tuple[bool, frozenset[str]], list[m.LinkProbed]] = {}
    for pair, seen in found:
        by_kinds.setdefault(pair.between, []).append(seen)
    for (within, kinds), each in sorted(by_kinds.items(), key=lambda item: (item[0][0], sorted(item[0][1]))):
        names = sorted(kinds)
        yield KindLink(
            from_kind=names[0],
            to_kind=names[-1],
            within=within,
            latency_s=statistics.median(seen.latency_s for seen in each),
            bytes_per_s=statistics.median(seen.bytes_per_s for seen in each),
            source=f"{source}, {len(each)} pairs" if len(each) > 1 else source,
        )


def _is_behind(pair: Pair, seen: m.LinkProbed, kind_links: tuple[KindLink, ...]) -> bool:
    kind = next(figure for figure in kind_links if figure.between == pair.between)
    return kind.bytes_per_s > _FALLS_BEHIND * seen.bytes_per_s


def _own_figures(
    behind: list[Pair],
    found: list[tuple[Pair, m.LinkProbed]],
    kind_links: tuple[KindLink, ...],
    source: str,
) -> Iterator[LinkFigure]:
    """Of pairs that fell behind each time that they were probed, the better time."""
    for pair in behind:
        each = [seen for other, seen in found if other == pair]
        if len(each) > 1 and all(_is_behind(pair, seen, kind_links) for seen in each):
            yield LinkFigure(
                from_node=pair.here.node.id,
                to_node=pair.there.node.id,
                latency_s=min(seen.latency_s for seen in each),
                bytes_per_s=max(seen.bytes_per_s for seen in each),
                source=source,
            )


def _ids(pair: Pair) -> frozenset[str]:
    return frozenset((pair.here.node.id, pair.there.node.id))


def _ask(pair: Pair, limit_s: float) -> m.LinkProbed | None:
    host, port = pair.there.address
    order = m.ProbeLink(host=host, port=port, limit_s=limit_s)
    try:
        answer = ask(pair.here.address, order, _ANSWER_S)
    except ConnectionClosed as error:
        answer = m.Done(problem=str(error))
    if isinstance(answer, m.LinkProbed):
        return answer
    log.info("link not measured", here=pair.here.node.id, there=pair.there.node.id, why=str(answer))
    return None
