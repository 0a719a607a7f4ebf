"""What to ask of each pool now, and which nodes to give back. Pure: how things stand goes in, what follows comes out.

A pool that does not give what is asked of it in time is short: the request is taken back, nothing more is asked of it
for a while (longer each time in a row), and whoever chooses the fleet chooses among the others. While a pool cannot be
reached nothing is concluded about it: what was asked of it stands, and that time is none that it has been waited for.
Nothing is asked for that, with all that is there, costs more than the jobs may spend. A node that no plan has used for
a while is given back, and one that a plan stands on never is. Owns no choice of a fleet: that is `rent`'s, by
`fleet_wish`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "pool_asked", "pool_short", "pool_withdrawn", "nodes_came", "nodes_went", "node_released", "nothing_rented"
]
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a pool is waited for and left alone, in seconds. `start_s` is for nodes that the cloud has given and
    that have yet to join."""

    wait_s: float = 120.0
    start_s: float = 900.0
    back_off_s: float = 60.0
    most_back_off_s: float = 3600.0
    idle_s: float = 600.0

    def back_off(self, shortages: int) -> float:
        """After so many in a row."""
        return min(self.most_back_off_s, self.back_off_s * 2.0 ** min(shortages - 1, 30))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSeen:
    """`nodes` are the ids of those that have joined, `starting` counts those that the cloud has given and that have
    not. `problem`: why it gives no more, where somebody says so; `said`: what is heard while it still may; `unreached`:
    why nobody can ask it now, so that `starting` and these two are of before. Of a pool that its cloud does not offer
    at all (not `offered`), what is there is all that can be had."""

    name: str
    least: int
    most: int
    price_per_hour: float
    zones: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    starting: int = 0
    problem: str | None = None
    said: str | None = None
    unreached: str | None = None
    offered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """What is kept of a pool from one look to the next. `target` nodes are asked of it, since `asked_at_s` in vain
    (None: all are there); before `not_before_s` no more are. `unused` says since when no plan uses a node, and
    `unreached_s` since when the pool cannot be reached."""

    target: int = 0
    asked_at_s: float | None = None
    not_before_s: float = 0.0
    shortages: int = 0
    known: tuple[str, ...] = ()
    unused: tuple[tuple[str, float], ...] = ()
    leaving: tuple[str, ...] = ()
    unreached_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Something that was decided, or seen, of one pool: `reason` is a sentence for people."""

    kind: Kind
    pool: str
    count: int
    reason: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Provision:
    memories: Mapping[str, PoolMemory]
    acts: tuple[Act, ...]


def available(pool: PoolSeen, memory: PoolMemory | None, now_s: float) -> int:
    """How many nodes of it can be counted on, those that are there included."""
    memory = memory or PoolMemory()
    if pool.offered and now_s >= memory.not_before_s:
        return pool.most
    staying = len(set(pool.nodes) - set(memory.leaving))
    return min(pool.most, max(memory.target if pool.offered else 0, staying))


def decide_pools(
    pools: Sequence[PoolSeen],
    memories: Mapping[str, PoolMemory],
    wanted: Mapping[str, int],
    *,
    used: frozenset[str],
    budget_per_hour: float,
    patience: Patience,
    now_s: float,
    awaited: Mapping[str, int] | None = None,
) -> Provision:
    """`wanted` nodes by pool are what the fleets of all jobs have of it. As long as some of those `awaited`, for jobs
    that cannot begin before, have not come, the others are not idle. `used` are the nodes that plans stand on, or may
    before long; `budget_per_hour` is what all these jobs may spend at one time, beside what pools keep anyway."""
    acts: list[Act] = []
    tables = [_Table(pool, memories.get(pool.name) or _first(pool), used, patience, now_s, acts) for pool in pools]
    awaited = awaited or {}
    if any(len(table.staying) < awaited.get(table.pool.name, 0) for table in tables):
        for table in tables:
            table.keep(awaited.get(table.pool.name, 0))
    for table in tables:
        table.look()
    for table in tables:
        table.withdraw(wanted.get(table.pool.name, 0))
    for table in tables:
        table.give_back(wanted.get(table.pool.name, 0))
    room = budget_per_hour + sum(pool.price_per_hour * pool.least for pool in pools)
    for table in sorted(tables, key=lambda table: table.pool.price_per_hour * table.target_for(wanted)):
        room_left = room - sum(other.cost for other in tables)
        if (lacking := table.ask(wanted.get(table.pool.name, 0), room_left)) > _ROUNDING:
            for other in tables:  # what nobody uses makes room for what somebody wants
                lacking -= other.make_room(wanted.get(other.pool.name, 0), lacking)
    return Provision(
        memories={table.pool.name: table.memory() for table in tables},
        acts=tuple(acts),
    )


def _first(pool: PoolSeen) -> PoolMemory:
    """Of a pool that nobody asked anything of yet."""
    return PoolMemory(target=len(pool.nodes), known=pool.nodes)


@dataclass(slots=True)
class _Table:
    """One pool on its way to its next memory."""

    pool: PoolSeen
    before: PoolMemory
    used: frozenset[str]
    patience: Patience
    now_s: float
    acts: list[Act]
    target: int = 0
    leaving: set[str] = field(default_factory=set)
    unused: dict[str, float] = field(default_factory=dict)
    asked_at_s: float | None = None
    not_before_s: float = 0.0
    shortages: int = 0
    unreached_s: float | None = None

    def __post_init__(self) -> None:
        self.target, self.asked_at_s = self.before.target, self.before.asked_at_s
        self.unreached_s = self.before.unreached_s
        self.not_before_s, self.shortages = self.before.not_before_s, self.before.shortages
        self.leaving = set(self.before.leaving) & set(self.pool.nodes)
        since_s = dict(self.before.unused)
        self.unused = {node: since_s.get(node, self.now_s) for node in self.staying if node not in self.used}

    @property
    def staying(self) -> list[str]:
        return [node for node in self.pool.nodes if node not in self.leaving]

    @property
    def cost(self) -> float:
        """Of what is there, under way or asked for, in an hour."""
        return self.pool.price_per_hour * max(self.target, len(self.staying) + self.pool.starting)

    @property
    def where(self) -> str:
        zones = f" in {' or '.join(self.pool.zones)}" if self.pool.zones else ""
        return f"{self.pool.name}{zones}"

    @property
    def hint(self) -> str:
        return "" if self.pool.said is None else f" ({self.pool.said})"

    def target_for(self, wanted: Mapping[str, int]) -> int:
        return max(wanted.get(self.pool.name, 0), self.pool.least)

    def keep(self, count: int) -> None:
        """So many that nobody uses yet wait for others."""
        for node in sorted(self.unused, key=lambda node: (self.unused[node], node))[:count]:
            self.unused[node] = self.now_s

    def look(self) -> None:
        """What has happened since: nodes that came, nodes that went, and a pool that gave nothing in time."""
        self.reach()
        came = sorted(set(self.pool.nodes) - set(self.before.known))
        if came:
            self.tell("nodes_came", len(came), f"pool {self.pool.name} has got {_listed(came)}", came)
        went = sorted(set(self.before.known) - set(self.pool.nodes))
        if lost := [node for node in went if node not in self.before.leaving]:
            self.tell("nodes_went", len(lost), f"pool {self.pool.name} has lost {_listed(lost)}", lost)
        missing = self.target - len(self.staying)
        if missing <= 0:
            self.target = max(self.target, min(len(self.staying), self.pool.most))
            self.asked_at_s, self.shortages = None, 0 if came else self.shortages
            return
        self.asked_at_s = self.now_s if self.asked_at_s is None or came else self.asked_at_s
        if self.pool.unreached is None and self.now_s >= self.not_before_s:
            self.judge(missing, self.now_s - self.asked_at_s)

    def reach(self) -> None:
        """For as long as nobody could ask the pool, it has not been waited for."""
        if self.pool.unreached is not None:
            self.unreached_s = self.now_s if self.unreached_s is None else self.unreached_s
        elif self.unreached_s is not None:
            if self.asked_at_s is not None:
                self.asked_at_s += self.now_s - max(self.unreached_s, self.asked_at_s)
            self.unreached_s = None

    def judge(self, missing: int, waited_s: float) -> None:
        """Whether it is short of what it lacks."""
        given = missing <= self.pool.starting
        if self.pool.problem is not None and not given:
            self.fall_short(missing - self.pool.starting, f"it says: {self.pool.problem}")
        elif given and waited_s >= self.patience.start_s:
            self.fall_short(missing, f"what came has not joined in {waited_s:.0f} s{self.hint}")
        elif not given and waited_s >= self.patience.wait_s:
            self.fall_short(missing - self.pool.starting, f"they did not come in {waited_s:.0f} s{self.hint}")

    def fall_short(self, missing: int, why: str) -> None:
        self.target = max(self.target - missing, self.pool.least)
        self.shortages += 1
        pause_s = self.patience.back_off(self.shortages)
        self.not_before_s, self.asked_at_s = self.now_s + pause_s, None
        reason = f"pool {self.pool.name} lacks {missing} of what was asked of it: {why}; asked again in {pause_s:.0f} s"
        self.tell("pool_short", missing, reason)

    def withdraw(self, wanted: int) -> None:
        """What nobody wants any more and is not there yet."""
        keep = max(wanted, self.pool.least, len(self.staying))
        if self.target > keep:
            count = self.target - keep
            self.target, self.asked_at_s = keep, None
            self.tell("pool_withdrawn", count, f"asks no more for {count} x {self.where}: nobody wants them any more")

    def give_back(self, wanted: int) -> None:
        """What no plan has used for long. Where it was wanted all the same, the plan that runs is better without."""
        if self.target > len(self.staying) and wanted > len(self.staying):
            return  # a pool that still owes some of its nodes does not lose others
        for node, since_s in sorted(self.unused.items(), key=lambda item: (item[1], item[0])):
            if self.now_s - since_s >= self.patience.idle_s and len(self.staying) > self.pool.least:
                if len(self.staying) <= wanted:
                    self.not_before_s = self.now_s + self.patience.most_back_off_s
                self.release(node, f"no plan has used it for {self.now_s - since_s:.0f} s")

    def make_room(self, wanted: int, lacking: float) -> float:
        """Dollars an hour that come free: nodes beyond what is wanted of this pool, which nobody uses."""
        freed = 0.0
        for node in sorted(self.unused):
            if freed < lacking and len(self.staying) > max(wanted, self.pool.least):
                self.release(node, "no plan uses it, and its money is needed for others")
                freed += self.pool.price_per_hour
        return freed

    def release(self, node: str, why: str) -> None:
        self.leaving.add(node)
        self.unused.pop(node, None)
        self.target = max(self.target - 1, self.pool.least)
        self.tell("node_released", 1, f"gives back {node} of pool {self.pool.name}, as {why}", [node])

    def ask(self, wanted: int, room_per_hour: float) -> float:
        """Dollars an hour that are lacking for what is wanted: nothing is asked for then, as half a fleet is none."""
        if self.pool.unreached is not None:
            return 0.0  # nobody would hear it
        # What leaves would be taken for what is asked for.
        if self.now_s < self.not_before_s or self.leaving or not self.pool.offered:
            wanted = min(wanted, max(self.target, len(self.staying)))
        new_target = min(max(wanted, self.pool.least), self.pool.most)
        count = new_target - max(self.target, 0)
        if count <= 0:
            return 0.0
        more = new_target - max(self.target, len(self.staying) + self.pool.starting)
        price = self.pool.price_per_hour
        kept_anyway = new_target <= self.pool.least
        if not kept_anyway and price * max(more, 0) > room_per_hour * (1 + _ROUNDING) + _ROUNDING:
            return price * more - room_per_hour
        self.target, self.asked_at_s = new_target, self.now_s
        why = "it always has so many" if kept_anyway else f"at {price:g} USD an hour each"
        self.tell("pool_asked", count, f"asked for {count} x {self.where}, {why}")
        return 0.0

    def tell(self, kind: Kind, count: int, reason: str, nodes: Sequence[str] = ()) -> None:
        self.acts.append(Act(kind=kind, pool=self.pool.name, count=count, reason=reason, nodes=tuple(nodes)))

    def memory(self) -> PoolMemory:
        return dataclasses.replace(
            self.before,
            target=self.target,
            asked_at_s=self.asked_at_s,
            not_before_s=self.not_before_s,
            shortages=self.shortages,
            known=self.pool.nodes,
            unused=tuple(sorted(self.unused.items())),
            leaving=tuple(sorted(self.leaving)),
            unreached_s=self.unreached_s,
        )


def _listed(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
