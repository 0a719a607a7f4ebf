"""Which nodes of a cluster each of its jobs may use (its share), and what follows for each of them now. Pure.

The unit is a node. Every job gets its least, a smallest set of nodes for which a plan of it is found, or nothing; what
is left goes to jobs that may grow. Higher priorities go first, and among equals the project that has fewest devices,
then the oldest job. Shares begin as they are, and a node moves only for one of these reasons: a job lacks its least, a
node is nobody's, a job of higher priority may grow, or one of the same priority has more by more than the node itself.
A job makes room by shrinking to its least, for anybody's least; for that of a higher priority it goes entirely, if its
state can be kept, and so it does, where it lacks its own least, for anybody who is to have what it still uses beside
its share. Nobody overtakes a job that waits and that the cluster could run.

Two phases: what a job is to leave is granted to another one only when nobody uses it any more.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal_planner.cluster import Node

Fits = Callable[[str, frozenset[str]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A job that wants nodes, or has some. `share` is what it was told that it may use, `uses` what it may be using,
    which is more while it leaves something, and `plan` what its newest plan needs. `begun`: somebody runs it; until
    then a share that it was given stays. `wants`: it is not about to rest or to end. `yields`: its state outlives it
    where it has to go. At most `max_devices` and `max_price_per_hour` (nodes without a price cost nothing), of
    `device_types` (none: all)."""

    id: str
    project: str = "default"
    priority: int = 0
    created_at_s: float = 0.0
    share: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    plan: frozenset[str] = frozenset()
    begun: bool = False
    wants: bool = True
    yields: bool = False
    device_types: tuple[str, ...] = ()
    max_devices: int | None = None
    max_price_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """`target` is what the job is to have, `grant` what it may use from now on. `position` counts from 1 among those
    that wait. `preempted_by` is set where the job has to go entirely: it keeps its share until its state is safe.
    `waits_for` are the jobs that still use nodes of its target; `behind` the one that it must not overtake;
    `never_fits`: not even on all nodes; `least_price_per_hour` is then what the cheapest nodes cost that it was found
    to fit, where its `max_price_per_hour` alone is in its way."""

    job: str
    target: frozenset[str]
    grant: frozenset[str]
    position: int | None = None
    preempted_by: str | None = None
    waits_for: tuple[str, ...] = ()
    behind: str | None = None
    never_fits: bool = False
    least_price_per_hour: float | None = None


def allot(jobs: Collection[Contender], nodes: Collection[Node], fits: Fits) -> tuple[Allotment, ...]:
    """One for each job, in the order of ids; equal arguments give equal answers. `fits` says whether a plan of a job is
    found for some of the nodes; more nodes must never make that false. Nodes that are about to be reclaimed are given
    to nobody who does not have them."""
    table = _Table(jobs=_by_id(jobs), nodes={node.id: node for node in nodes}, fits=fits)
    for _ in range(len(table.jobs) + 2):  # each round but the last lets somebody begin or moves a node, for good
        before = {job: set(share) for job, share in table.shares.items()}
        table.admit()
        table.hand_out()
        table.balance()
        if table.shares == before:
            break
    return tuple(_answer(table, job) for job in table.jobs.values())


def _by_id(jobs: Iterable[Contender]) -> dict[str, Contender]:
    return {job.id: job for job in sorted(jobs, key=lambda job: job.id)}


@dataclass(slots=True, kw_only=True)
class _Table:
    """Shares on their way to what they are to be. `stuck` are nodes still used, beside their share, by jobs that cannot
    run and have no store to go to."""

    jobs: Mapping[str, Contender]
    nodes: Mapping[str, Node]
    fits: Fits
    shares: dict[str, set[str]] = field(default_factory=dict)
    preempted_by: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    behind: dict[str, str] = field(default_factory=dict)
    never: dict[str, float | None] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        left = set(self.nodes)
        for job in self.jobs.values():
            kept = job.share & left if job.wants else frozenset()
            self.shares[job.id] = {node for node in kept if self._type_fits(job, node)}
            left -= self.shares[job.id]
            if job.wants and job.begun and not job.yields and not self.has_least(job):
                self.stuck |= (job.share | job.uses) - self.shares[job.id]
            self._trim(job)

    # --- what is there ---

    def allows(self, job: Contender, node: str) -> bool:
        stays = self.nodes[node].reclaim_at_s is None or node in job.share
        return stays and self._type_fits(job, node)

    def _type_fits(self, job: Contender, node: str) -> bool:
        return not job.device_types or self.nodes[node].device in job.device_types

    def free(self) -> list[str]:
        taken = set(itertools.chain.from_iterable(self.shares.values()))
        return sorted(self.nodes.keys() - taken - self.stuck)

    def has_least(self, job: Contender) -> bool:
        share = self.shares[job.id]
        return bool(share) and self.fits(job.id, frozenset(share))

    def devices(self, nodes: Iterable[str]) -> int:
        return sum(self.nodes[node].devices for node in nodes)

    def of_project(self, project: str) -> int:
        return sum(self.devices(self.shares[job.id]) for job in self.jobs.values() if job.project == project)

    def _by_project(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for job in self.jobs.values():
            found[job.project] += self.devices(self.shares[job.id])
        return found

    def level(self, job: Contender) -> tuple[int, int, float, str]:
        """The least of all has the first claim."""
        return self.of_project(job.project), self.devices(self.shares[job.id]), job.created_at_s, job.id

    def may_add(self, job: Contender, share: Collection[str], node: str) -> bool:
        """Within its limits. One node is always within `max_devices`: it is the least that there is to give."""
        if not self.allows(job, node):
            return False
        whole = {*share, node}
        if job.max_devices is not None and share and self.devices(whole) > job.max_devices:
            return False
        return job.max_price_per_hour is None or self._price(whole) <= job.max_price_per_hour

    def _price(self, nodes: Iterable[str]) -> float:
        return math.fsum(self.nodes[node].price_per_hour for node in nodes)  # in whatever order

    def _trim(self, job: Contender) -> None:
        """Limits may have changed since; a job that has begun keeps its least all the same."""
        share = self.shares[job.id]
        for node in sorted(share, key=lambda node: (node in job.plan, -self.nodes[node].price_per_hour, node)):
            rest = share - {node}
            over = job.max_price_per_hour is not None and self._price(share) > job.max_price_per_hour
            over |= job.max_devices is not None and self.devices(share) > job.max_devices and bool(rest)
            if over and job.begun and self.fits(job.id, frozenset(rest)):
                share.discard(node)

    # --- everybody's least ---

    def admit(self) -> None:
        self.waiting, self.behind, self.never = [], {}, {}
        blocked: str | None = None
        for job in self._in_turn():
            found = None if blocked else self._least(job)
            if found is not None:
                self._take(job, found)
                continue
            self.waiting.append(job.id)
            if blocked:
                self.behind[job.id] = blocked
            elif self._could_run(job):
                blocked = job.id
            else:
                self.never[job.id] = self._least_price(job)

    def _in_turn(self) -> Iterator[Contender]:
        """Those that lack their least. Who has begun was here before."""
        lacking = [job for job in self.jobs.values() if job.wants and not self.has_least(job)]
        for _, alike in itertools.groupby(sorted(lacking, key=lambda job: -job.priority), lambda job: job.priority):
            left = list(alike)
            while left:
                devices = self._by_project()  # who was before may have taken some
                job = min(left, key=lambda job: (not job.begun, devices[job.project], job.created_at_s, job.id))
                left.remove(job)
                yield job

    def _could_run(self, job: Contender) -> bool:
        everything = sorted(self.nodes)
        if self.fits(job.id, frozenset(self._within(job, (), everything))):
            return True
        return self._affordable(job, set(), everything) is not None

    def _least_price(self, job: Contender) -> float | None:
        """None where it is not its limit that is in its way."""
        found = None if job.max_price_per_hour is None else self._cheapest(job, set(), sorted(self.nodes))
        return None if found is None else self._price(found)

    def _affordable(self, job: Contender, own: set[str], nodes: Sequence[str]) -> set[str] | None:
        """What is cheapest node by node may fill its limit without sufficing: so whole sets are compared."""
        if job.max_price_per_hour is None:
            return None
        found = self._cheapest(job, own, nodes)
        return found if found is not None and self._price(found) <= job.max_price_per_hour else None

    def _cheapest(self, job: Contender, own: set[str], nodes: Sequence[str]) -> set[str] | None:
        """Of small sets for it, whatever they cost, the cheapest: one of all kinds, the cheaper kinds first, and one of
        each kind. None where it fits none of them."""
        unlimited = dataclasses.replace(job, max_price_per_hour=None)
        in_order = sorted(nodes, key=lambda node: self.nodes[node].price_per_hour)
        kinds = self._alike(node for node in in_order if self.allows(job, node))
        together = self._alike(self._within(unlimited, own, in_order))
        tried = [together, *([self._within(unlimited, own, kind)] for kind in kinds)]
        fitting = [groups for groups in tried if groups and self.fits(job.id, frozenset(own.union(*groups)))]
        return min((self._pruned(job, own, groups) for groups in fitting), key=self._price, default=None)

    def _within(self, job: Contender, have: Iterable[str], more: Iterable[str]) -> list[str]:
        """Of `more`, in that order, what its limits allow beside what it has."""
        share, found = set(have), []
        for node in more:
            if node not in share and self.may_add(job, share, node):
                share.add(node)
                found.append(node)
        return found

    def _least(self, job: Contender) -> set[str] | None:
        """A smallest set for it, from where it hurts least; None where there is none."""
        own = self.shares[job.id]
        groups: list[list[str]] = []
        seen: list[str] = []
        for source in self._sources(job):
            if job.max_price_per_hour is not None:
                source = sorted(source, key=lambda node: self.nodes[node].price_per_hour)
            have = own.union(*groups)
            seen.extend(source)
            groups.extend(self._alike(self._within(job, have, source)))
            if groups and self.fits(job.id, frozenset(own.union(*groups))):
                return self._pruned(job, own, groups)
        return self._affordable(job, own, seen)

    def _sources(self, job: Contender) -> Iterator[list[str]]:
        """What nobody has, what others can spare, and all that those of lower priority have."""
        free = [node for node in self.free() if self.allows(job, node)]
        yield sorted(free, key=lambda node: (node not in job.uses, self._in_use(node), node))
        others = [other for other in self.jobs.values() if other.id != job.id and self.shares[other.id]]
        for other in sorted(others, key=self._gives_first):
            yield self.spare(other, [node for node in self._given_up_first(other) if self.allows(job, node)])
        lower = [other for other in others if other.priority < job.priority and other.begun and other.yields]
        for other in sorted(lower, key=lambda other: (other.priority, -other.created_at_s, other.id)):
            yield self._given_up_first(other)

    def _gives_first(self, job: Contender) -> tuple[int, int, int, str]:
        of_project, devices, *_ = self.level(job)
        return job.priority, -of_project, -devices, job.id

    def _in_use(self, node: str) -> bool:
        return any(node in job.uses for job in self.jobs.values())

    def _given_up_first(self, job: Contender) -> list[str]:
        return sorted(self.shares[job.id], key=lambda node: (node in job.plan, node))

    def spare(self, job: Contender, wanted: Sequence[str]) -> list[str]:
        """Of the nodes of its share that are `wanted`, in that order, those that it can do without all together."""
        share = frozenset(self.shares[job.id])
        if not wanted or not job.begun or not self.fits(job.id, share):
            return []
        found: list[str] = []
        for alike in self._alike(wanted):
            rest = share.difference(found)
            keeps = [not self.fits(job.id, rest.difference(alike[:count])) for count in (1, len(alike))]
            if keeps[0]:
                continue
            most = len(alike)
            if keeps[1]:
                counts = range(1, len(alike))
                most = bisect.bisect_left(counts, True, key=lambda n: not self.fits(job.id, rest.difference(alike[:n])))
            found.extend(alike[:most])
        return found

    def _alike(self, nodes: Iterable[str]) -> list[list[str]]:
        """Nodes that differ in nothing that a plan knows of, together, in the order of the first of each."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for node in nodes:
            known = self.nodes[node]
            key = known.device, known.devices, known.zone, known.spot, known.host_memory_bytes, known.price_per_hour
            groups.setdefault(key, []).append(node)
        return list(groups.values())

    def _pruned(self, job: Contender, own: set[str], groups: list[list[str]]) -> set[str]:
        """Without what is not needed; what hurts most goes first."""
        for index in reversed(range(len(groups))):
            rest = own.union(*groups[:index], *groups[index + 1 :])
            group = groups[index]
            counts = range(len(group) + 1)
            least = bisect.bisect_left(counts, True, key=lambda n: self.fits(job.id, frozenset(rest.union(group[:n]))))
            groups[index] = group[:least]
        return own.union(*groups)

    def _take(self, job: Contender, found: set[str]) -> None:
        self.shares[job.id] = found
        for other in self.jobs.values():
            if other.id != job.id and self.shares[other.id] & found:
                self.shares[other.id] -= found
                if not self.has_least(other):
                    self.shares[other.id] = set()
                    self.preempted_by[other.id] = job.id

    # --- more than that ---

    def _growing(self, priority: int) -> list[Contender]:
        alike = (job for job in self.jobs.values() if job.wants and job.priority == priority)
        return sorted((job for job in alike if self.has_least(job)), key=self.level)

    def _priorities(self) -> list[int]:
        return sorted({job.priority for job in self.jobs.values()}, reverse=True)

    def hand_out(self) -> None:
        """What nobody has, one by one."""
        for priority in self._priorities():
            while self._hand_one(priority):
                pass

    def _hand_one(self, priority: int) -> bool:
        free = self.free()
        for job in self._growing(priority):
            share = self.shares[job.id]
            for node in sorted(free, key=lambda node: (node not in job.uses, self._in_use(node), node)):
                if self.may_add(job, share, node):
                    share.add(node)
                    return True
        return False

    def balance(self) -> None:
        while any(self._move(poor, rich) for rich, poor in self._pairs()):
            pass

    def _pairs(self) -> Iterator[tuple[Contender, Contender]]:
        """Who may have to give to whom, the most unequal first."""
        classes = [(priority, self._growing(priority)) for priority in self._priorities()]
        for (_, above), (_, below) in itertools.combinations(classes, 2):
            yield from itertools.product(reversed(below), above)
        for _, alike in classes:
            yield from ((rich, poor) for rich in reversed(alike) for poor in alike if poor is not rich)

    def _move(self, poor: Contender, rich: Contender) -> bool:
        share = self.shares[poor.id]
        wanted = [node for node in self._given_up_first(rich) if self.may_add(poor, share, node)]
        for node in wanted:
            if self._is_due(poor, rich, self.nodes[node].devices) and self.spare(rich, [node]):
                self.shares[rich.id].discard(node)
                share.add(node)
                return True
        return False

    def _is_due(self, poor: Contender, rich: Contender, devices: int) -> bool:
        if poor.priority != rich.priority:
            return poor.priority > rich.priority
        if poor.project != rich.project:
            return self.of_project(rich.project) - self.of_project(poor.project) > devices
        return self.devices(self.shares[rich.id]) - self.devices(self.shares[poor.id]) > devices


def _answer(table: _Table, job: Contender) -> Allotment:
    target = frozenset(table.shares[job.id])
    others = [other for other in table.jobs.values() if other.id != job.id]
    free = target.difference(*(other.uses | other.share for other in others))
    gone_for = _displaced_by(table, job) if target else table.preempted_by.get(job.id) or _displaced_by(table, job)
    grant = job.share if gone_for or not job.wants else _granted(table, job, target, free)
    queue = _queue(table)
    return Allotment(
        job=job.id,
        target=target,
        grant=grant,
        position=queue.index(job.id) + 1 if job.id in queue else None,
        preempted_by=gone_for,
        waits_for=tuple(other.id for other in others if (other.uses | other.share) & (target - grant)),
        behind=table.behind.get(job.id),
        never_fits=job.id in table.never,
        least_price_per_hour=table.never.get(job.id),
    )


def _displaced_by(table: _Table, job: Contender) -> str | None:
    """Who is to have nodes that a job still uses, or has and may not use, while it lacks its least: it steps on no
    more, so that nothing else would ever let it leave them."""
    if not (job.wants and job.begun and job.yields and job.id in table.waiting):
        return None
    return next(
        (o.id for o in table.jobs.values() if o is not job and table.shares[o.id] & (job.share | job.uses)), None
    )


def _granted(table: _Table, job: Contender, target: frozenset[str], free: frozenset[str]) -> frozenset[str]:
    """Of its target, what nobody else uses any more. A job that runs keeps something as long as there is a target."""
    if not job.begun:
        return job.share | free if job.share else free if free and table.fits(job.id, free) else free - free
    return (job.share & target) | free or job.share


def _queue(table: _Table) -> list[str]:
    """Who waits for its turn, after those for whose nodes others make room."""
    made_room = (job for job in table.jobs.values() if not job.begun and not job.share and table.shares[job.id])
    first = sorted(made_room, key=lambda job: (-job.priority, job.created_at_s, job.id))
    return [*(job.id for job in first), *table.waiting]
