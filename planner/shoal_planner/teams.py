"""Pipelines of one stage whose replicas share its gradients, or its weights too: each node a team, or all nodes one.

Owns which teams there are, how they deal out samples by speed, and in how many slices units come together where memory
is short. They are tried beside what the search finds: without stages there are no bubbles, and what is split leaves
room for larger micro-batches. Who shares with whom, and at what cost, is asked from `sharding`; `score` has the last
word.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal_planner.costs import CostModel
from shoal_planner.dealing import deal
from shoal_planner.distinct import distinct
from shoal_planner.hiding import hideable_among
from shoal_planner.levels import sharding_of
from shoal_planner.memory import ELEMENT_BYTES, held_elements, stage_memory, usable_bytes
from shoal_planner.options import Floats, Ints, Kind, group_kinds, tp_degrees, usable_nodes
from shoal_planner.plan import Level, Pipeline, Plan, Recompute, Replica, Sharding, Stage
from shoal_planner.relief import relieved
from shoal_planner.sharding import Shards, shards, shares_inside
from shoal_planner.slices import most_slices

# On fewer, all that shares nothing is searched exactly. On more devices than the second of these numbers all nodes are
# not one team too, as it takes long to add up what so many share; and on more than the third there are no teams.
LEAST_DEVICES, _ONE_TEAM, MOST_DEVICES = 9, 256, 2048
_FEW_NODES = 8  # of so many, fewer are one team, too: what all add up between them may take longer
_AS_MUCH = 1.15
_MOST_SAMPLES = 16  # of a micro-batch, of one replica
_FEW_TIMES = 2  # micro-batches
_SCORED, _OF_EACH = 3, 2  # ways in all, and of each kind of sharing
# Tried where the best so far takes so many times what they could at best, by the number of devices up to which that
# holds.
_FAR = ((_ONE_TEAM, 1.02), (MOST_DEVICES, 1.35))
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_SLICES = (2, 4, 8)  # of each unit, where whole units leave too little memory

Team = tuple[Replica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crew:
    """Equal replicas of a team: how many, their seconds by samples, as far as these fit, and whether as many as fit
    hide not all of what is passed round."""

    count: int
    seconds: Floats
    exposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Teams, what they share, and the least seconds in which they deal out the batch."""

    seconds: float
    teams: tuple[Team, ...]
    sharding: Sharding
    recompute: Recompute
    slices: int
    crews: tuple[dict[tuple[int, int], _Crew], ...]
    samples: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def wants_larger(self) -> bool:
        """Whether micro-batches are too small to hide what is passed round, or few, where one less is worth most."""
        few = any(size < samples <= _FEW_TIMES * size for samples, size in zip(self.samples, self.sizes, strict=True))
        return few or self.exposed

    @property
    def exposed(self) -> bool:
        return any(crew.exposed for crews in self.crews for crew in crews.values())

    @property
    def nodes(self) -> int:
        return len({replica.node for team in self.teams for replica in team})


def try_teams(
    costs: CostModel,
    copies: int,
    best_s: float,
    consider: Callable[[Plan], float],
    consider_exposed: Callable[[Plan], float],
) -> None:
    """Offers `consider` the few that may be faster than `best_s`, where that is far from what the devices can do;
    infinite: there is no plan yet, and any is welcome. Those that wait for what they pass round are offered
    `consider_exposed`."""
    nodes = usable_nodes(costs.job, costs.snapshot)
    num_devices = sum(node.devices for node in nodes)
    many = LEAST_DEVICES <= num_devices or np.isinf(best_s)
    if costs.job.train.sharding == "none" or not many or num_devices > MOST_DEVICES:
        return
    teams, kinds = _Teams(costs, best_s), group_kinds(nodes, costs)
    if best_s < teams.bound_s(kinds) * next(far for limit, far in _FAR if num_devices <= limit):
        return
    found = sorted(teams.ways(kinds), key=lambda way: way.seconds)
    found += [other for way in found[:_SCORED] for other in teams.in_slices(way)]
    found.sort(key=lambda way: way.seconds)
    # What nodes add up between them is not in these seconds, and hangs on what each of them shares.
    alike: dict[object, list[_Way]] = {}
    for way in found:
        alike.setdefault((way.sharding, way.nodes if len(nodes) <= _FEW_NODES else 0), []).append(way)
    best = [*found[:_SCORED], *itertools.chain(*(ways[:_OF_EACH] for ways in alike.values()))]
    for way in {id(way): way for way in best}.values():
        made = teams.plan(way, copies)
        for tried in dict.fromkeys((made, _without_idle(made))):
            eased = relieved(tried, costs, offload=False) if way.recompute != "none" else None
            (consider_exposed if way.exposed else consider)(eased or tried)


def mend_teams(running: Plan, costs: CostModel, consider: Callable[[Plan], float]) -> bool:
    """Offers `consider` the teams of a running plan that are left when nodes are gone, and idle nodes in the place of
    these, among which the batch is dealt out anew; whether that is about as much as so many devices did before."""
    stages = [pipeline.stages[0] for pipeline in running.pipelines if len(pipeline.stages) == 1]
    if len(stages) < len(running.pipelines) or running.prediction is None or not shares_inside(running):
        return False
    if running.num_layers != costs.job.model.layers or len({stage.slices for stage in stages}) > 1:
        return False
    nodes = {node.id: node for node in usable_nodes(costs.job, costs.snapshot)}
    known = {replica.node for replica in running.replicas()} | {name.rpartition(":")[0] for name in running.unused}

    def is_there(replica: Replica) -> bool:
        return replica.node in nodes and max(replica.devices) < nodes[replica.node].devices

    left = [
        tuple(dataclasses.replace(one, samples=1, state_share=1.0) for one in stage.replicas if is_there(one))
        for stage in stages
    ]
    before, after = (sum(one.tp for team in teams for one in team) for teams in ([s.replicas for s in stages], left))
    if not 0 < after < before or nodes.keys() - known:
        return False
    used = {one.node for team in left for one in team}
    idle = sorted((node for node in nodes.values() if node.id not in used), key=lambda node: (node.devices, node.id))
    for place, stage in enumerate(stages):
        needed = 1 + max(max(replica.devices) for replica in stage.replicas)
        spare = next((node for node in idle if node.devices >= needed), None)
        if not left[place] and spare is not None:
            idle.remove(spare)
            left[place] = tuple(
                dataclasses.replace(one, node=spare.id, samples=1, state_share=1.0) for one in stage.replicas
            )
    teams = _Teams(costs, float("inf"))
    ways = teams.dealt(tuple(team for team in left if team), running.sharding, stages[0].slices)
    if not ways:
        return False
    way = min(ways, key=lambda way: way.seconds)
    made = teams.plan(way, running.copies)
    eased = relieved(made, costs, offload=False) if way.recompute != "none" else None
    return consider(eased or made) <= running.prediction.step_s * before / after * _AS_MUCH


class _Times(NamedTuple):
    """Of a micro-batch, by its samples: in all, and in each pass without what is exchanged."""

    total_s: Floats
    forward_s: Floats
    backward_s: Floats

    def exposed_s(self, its: Shards, hideable: float) -> Floats:
        """What each pass does not hide of what is passed round, for any samples."""
        found = its.total_s - sum(
            np.minimum(hideable * passed_s, computing_s)
            for passed_s, computing_s in ((its.forward_s, self.forward_s), (its.backward_s, self.backward_s))
        )
        return np.where(np.arange(len(self.total_s)) > 0, found, 0.0)


class _Teams:
    """Every question is answered once."""

    def __init__(self, costs: CostModel, best_s: float) -> None:
        self.costs = costs
        self.best_s = best_s
        self.batch = costs.job.train.global_batch
        self._recomputes = _RECOMPUTES if costs.job.train.recompute != "none" else _RECOMPUTES[:1]
        self._hidden: dict[tuple[str, ...], float] = {}
        self._divisors = tuple(size for size in range(1, self.batch + 1) if self.batch % size == 0)
        self._known: dict[tuple[int, int, Recompute, int], list[tuple[float, float, float]]] = {}
        self._tables: dict[tuple[tuple[int, int, Recompute, int], int], _Times] = {}  # by how many samples they go to

    def bound_s(self, kinds: tuple[Kind, ...]) -> float:
        """Nothing is faster: every device by itself runs the whole model, and waits for nobody."""
        rates = [(kind.devices, self._times(kind.number, kind.node.id, 1, "none").total_s[1:]) for kind in kinds]
        return self.batch / sum(
            count * float((np.arange(1, len(seconds) + 1) / seconds).max()) for count, seconds in rates
        )

    def ways(self, kinds: tuple[Kind, ...]) -> Iterator[_Way]:
        """With the nodes of all kinds, of ever fewer of the fastest, of each kind alone, and of all but one."""
        names = {kind.number: kind.node.id for kind in kinds}
        by_speed = sorted(kinds, key=lambda kind: self._times(kind.number, names[kind.number], 1, "none").total_s[1])
        some = [tuple(by_speed[:count]) for count in range(len(kinds), 0, -1)] + [(kind,) for kind in by_speed[1:]]
        some += [tuple(other for other in by_speed if other is not kind) for kind in by_speed if len(kinds) > 1]
        every = tp_degrees(self.costs, max(kind.slice for kind in kinds))
        for chosen, most in itertools.product(dict.fromkeys(some), every):
            degrees = [max(tp_degrees(self.costs, min(most, kind.slice))) for kind in chosen]
            if max(degrees) < most:
                continue  # a smaller one is the same
            nodes = [_team(name, kind, tp) for kind, tp in zip(chosen, degrees, strict=True) for name in kind.nodes]
            if self._least_s(nodes, {}) >= self.best_s:
                continue
            for way in self._shared(tuple(nodes), "node", self._between_s(chosen)):
                yield way
                # Where the batch does not divide, fewer teams may take no longer, and have less to add up.
                fewer = -(-self.batch // max(way.samples))
                if fewer < len(nodes):
                    yield from self._shared(tuple(nodes[:fewer]), "node", 0.0)
            if sum(map(len, nodes)) <= _ONE_TEAM:
                fewest = 2 if len(nodes) <= _FEW_NODES else len(nodes)
                for count in range(len(nodes), fewest - 1, -1):
                    yield from self._shared((tuple(itertools.chain(*nodes[:count])),), "cluster", 0.0)

    def _between_s(self, kinds: tuple[Kind, ...]) -> float:
        """The least that nodes of these kinds need to add up gradients and to gather weights: all of them cross."""
        if not self.costs.are_apart([node for kind in kinds for node in kind.nodes]):
            return 0.0
        count = sum(len(kind.nodes) for kind in kinds)
        model, size = self.costs.job.model, ELEMENT_BYTES[self.costs.job.train.precision]
        num_bytes = held_elements(model, 1, model.layers, embedding=True, head=True) * size
        slowest = min(self.costs.node_rate(kind.node.id) for kind in kinds)
        return 2 * num_bytes * (1 - 1 / count) / slowest

    def _shared(self, teams: tuple[Team, ...], level: Level, after_s: float) -> Iterator[_Way]:
        if len(teams) > self.batch or after_s >= self.best_s:
            return
        for weights in ("none", level):
            sharding = sharding_of(self.costs.job.train, weights, level)
            for slices in (1, *self._slices(teams)):
                ways = self._by_recompute(teams, sharding, slices, after_s)
                yield from (way for way in ways or [] if way.seconds + after_s < self.best_s)
                if ways is None or ways:
                    break

    def in_slices(self, way: _Way) -> Iterator[_Way]:
        """The same teams with units in more slices, where with more memory they could have larger micro-batches, or
        less to compute again."""
        most = min(_MOST_SAMPLES, self.batch)
        limited = any(len(crew.seconds) <= most for crews in way.crews for crew in crews.values())
        if limited or way.recompute != "none":
            for slices in self._slices(way.teams):
                if slices > way.slices:
                    yield from self._by_recompute(way.teams, way.sharding, slices, 0.0) or []

    def dealt(self, teams: tuple[Team, ...], sharding: Sharding, slices: int) -> list[_Way]:
        """The batch, to teams that are given."""
        return (self._by_recompute(teams, sharding, slices, 0.0) or []) if len(teams) <= self.batch else []

    def _by_recompute(
        self, teams: tuple[Team, ...], sharding: Sharding, slices: int, after_s: float
    ) -> list[_Way] | None:
        """Those that fit, up to the first that is fast enough and gains nothing from larger micro-batches: to recompute
        more pays where less does not fit, or they hide more; what is best in between, `relieved` finds. None: however
        much fits, none is fast enough."""
        one_of = {self._key(team): team for team in teams}
        shared = {key: self._shards(team, sharding, slices) for key, team in one_of.items()}
        if self._least_s(list(teams), shared) + after_s >= self.best_s:
            return None
        found = []
        for recompute in self._recomputes:
            way = self._way(teams, sharding, recompute, slices, one_of, shared)
            if way is not None:
                found.append(way)
                if way.seconds + after_s < self.best_s and not way.wants_larger:
                    break
        return found

    def _slices(self, teams: tuple[Team, ...]) -> tuple[int, ...]:
        """Those that these teams may have."""
        model, degrees = self.costs.job.model, {replica.tp for team in teams for replica in team}
        if model.lora is not None:
            return ()
        most = most_slices(model, max(degrees)) if len(degrees) == 1 else 1
        return tuple(slices for slices in _SLICES if slices <= most)

    def _way(
        self,
        teams: tuple[Team, ...],
        sharding: Sharding,
        recompute: Recompute,
        slices: int,
        one_of: dict[object, Team],
        shared: dict[object, dict[tuple[int, int], Shards]],
    ) -> _Way | None:
        owners = sum(len(team) for team in teams)
        crews = {key: self._crews(team, shared[key], recompute, owners) for key, team in one_of.items()}
        if slices > 1 and not all(crew.seconds.size for found in crews.values() for crew in found.values()):
            return None  # slices are for devices that can hold their parts, and lack room for what is whole
        tables = {key: self._table(found) for key, found in crews.items()}
        keys = [self._key(team) for team in teams]
        dealt = deal([tables[key][0] for key in keys], self.batch)
        if dealt is None:
            return None
        seconds = max(float(tables[key][0][samples]) for key, samples in zip(keys, dealt, strict=True))
        return _Way(
            seconds=seconds,
            teams=teams,
            sharding=sharding,
            recompute=recompute,
            slices=slices,
            crews=tuple(crews[key] for key in keys),
            samples=dealt,
            sizes=tuple(int(tables[key][1][samples]) for key, samples in zip(keys, dealt, strict=True)),
        )

    def _key(self, team: Team) -> object:
        """Equal for teams that cost the same."""
        return tuple((self.costs.kind(replica.node), replica.tp, replica.node == team[0].node) for replica in team)

    def _crew_key(self, replica: Replica) -> tuple[int, int]:
        return self.costs.kind(replica.node), replica.tp

    def _shards(self, team: Team, sharding: Sharding, slices: int) -> dict[tuple[int, int], Shards]:
        """By crew; of its replicas that share least, as nodes of a kind need not have equal parts."""
        stage = Stage(layers=((0, self.costs.job.model.layers),), replicas=team, slices=slices)
        pipeline = Pipeline(micro_batch=len(team), micro_batches=1, stages=(stage,))
        found: dict[tuple[int, int], Shards] = {}
        for (_, _, place), its in shards(Plan(pipelines=(pipeline,), sharding=sharding), self.costs).items():
            found.setdefault(self._crew_key(team[place]), its)
        return found

    def _least_s(self, teams: list[Team], shared: dict[object, dict[tuple[int, int], Shards]]) -> float:
        """No deal is faster: all replicas run micro-batches of their best size all the time."""
        rate = 0.0
        keys: list[object] = []
        firsts: list[Team] = []
        counts: Counter[tuple[int, tuple[int, int], str]] = Counter()
        for team in teams:
            key = self._key(team)  # as long as the team: too long for one of each replica
            if key not in keys:
                keys.append(key)
                firsts.append(team)
            number = keys.index(key)
            counts.update((number, self._crew_key(one), one.node) for one in team)
        most: dict[tuple[int, tuple[int, int]], float] = {}
        for (number, crew, name), count in counts.items():
            if (number, crew) not in most:
                times = self._times(crew[0], name, crew[1], "none")
                seconds = times.total_s[1:]
                if shared:
                    seconds = seconds + times.exposed_s(shared[keys[number]][crew], self._hideable(firsts[number]))[1:]
                most[number, crew] = float((np.arange(1, len(seconds) + 1) / seconds).max())
            rate += count * most[number, crew]
        return self.batch / rate

    def _crews(
        self, team: Team, shared: dict[tuple[int, int], Shards], recompute: Recompute, owners: int
    ) -> dict[tuple[int, int], _Crew]:
        found = {}
        hideable = self._hideable(team)
        counts = Counter(self._crew_key(replica) for replica in team)
        for replica in team:
            crew = self._crew_key(replica)
            if crew not in found:
                most = self._most_samples(replica, shared[crew], recompute, owners)
                times = self._times(crew[0], replica.node, replica.tp, recompute, shared[crew].slices, most)
                its = times.exposed_s(shared[crew], hideable)
                exposed = bool(its.size) and float(its[-1]) > 0
                rising = np.maximum.accumulate(times.total_s + its)
                found[crew] = _Crew(count=counts[crew], seconds=rising, exposed=exposed)
        return found

    def _hideable(self, team: Team) -> float:
        """The share of what a team passes round that may go on beside computing."""
        nodes = tuple(dict.fromkeys(replica.node for replica in team))
        if nodes not in self._hidden:
            overlaps = self.costs.job.train.overlap != "none"
            self._hidden[nodes] = hideable_among(self.costs, nodes) if overlaps else 0.0
        return self._hidden[nodes]

    def _times(
        self, kind: int, node: str, tp: int, recompute: Recompute, slices: int = 1, most: int = _MOST_SAMPLES
    ) -> _Times:
        """By samples, up to so many, of all layers; of -1 not even none."""
        most = min(self.batch, most)
        key = (kind, tp, recompute, slices)
        if (key, most) not in self._tables:
            known = self._known.setdefault(key, [(0.0, 0.0, 0.0)])
            layers = {recompute: self.costs.job.model.layers}
            for samples in range(len(known), most + 1):
                time = self.costs.stage(node, tp, samples, layers, embedding=True, head=True, slices=slices)
                known.append((max(known[-1][0], time.total_s), time.forward_s, time.backward_s))
            self._tables[key, most] = _Times(*np.array(known[: most + 1]).reshape(-1, 3).T)
        return self._tables[key, most]

    def _most_samples(self, replica: Replica, its: Shards, recompute: Recompute, owners: int) -> int:
        model, train = self.costs.job.model, self.costs.job.train
        held = held_elements(model, replica.tp, model.layers, embedding=True, head=True)

        def needed(samples: int) -> float:
            return stage_memory(
                model,
                train.seq_len,
                train.precision,
                tp=replica.tp,
                samples=samples,
                in_flight=1,
                layers={recompute: model.layers},
                embedding=True,
                head=True,
                owned=held / owners,
                weights=its.weights,
                gradients=its.gradients,
                near=its.near,
                slices=its.slices,
            ).total

        room = usable_bytes(self.costs.device(replica.node))
        if its.slices > 1 and needed(0) > room:
            return -1  # it cannot even hold its part
        return bisect.bisect_right(range(1, min(_MOST_SAMPLES, self.batch) + 1), room, key=needed)

    def _table(self, crews: dict[tuple[int, int], _Crew]) -> tuple[Floats, Ints]:
        """By samples per step: seconds, inf where they cannot be, and the size of the micro-batch."""
        times = distinct(np.concatenate([crew.seconds for crew in crews.values()]))
        done = _done(crews, times)
        seconds, sizes = np.full(self.batch + 1, np.inf), np.zeros(self.batch + 1, dtype=np.int64)
        for size in sorted({*done.tolist(), *self._divisors}):
            if not 0 < size <= min(self.batch, int(done[-1])):
                continue
            each_s = times[np.searchsorted(done, size)]
            numbers = np.arange(1, self.batch // size + 1)
            better = numbers * each_s < seconds[numbers * size]
            seconds[numbers[better] * size] = numbers[better] * each_s
            sizes[numbers[better] * size] = size
        return seconds, sizes

    def plan(self, way: _Way, copies: int) -> Plan:
        pipelines = []
        for team, crews, samples, size in zip(way.teams, way.crews, way.samples, way.sizes, strict=True):
            counts = self._counts(team, crews, size)
            replicas = (
                Replica(node=replica.node, devices=replica.devices, tp=replica.tp, samples=count)
                for replica, count in zip(team, counts, strict=True)
            )
            stage = Stage(
                layers=((0, self.costs.job.model.layers),),
                replicas=tuple(replicas),
                recompute=way.recompute,
                slices=way.slices,
            )
            pipelines.append(Pipeline(micro_batch=size, micro_batches=samples // size, stages=(stage,)))
        return Plan(pipelines=tuple(pipelines), copies=copies, sharding=way.sharding)

    def _counts(self, team: Team, crews: dict[tuple[int, int], _Crew], size: int) -> list[int]:
        """Samples of each replica: as many as it can in the time, and what is too much is taken from the slowest."""
        times = distinct(np.concatenate([crew.seconds for crew in crews.values()]))
        time_s = times[np.searchsorted(_done(crews, times), size)]
        mine = [crews[self._crew_key(replica)].seconds for replica in team]
        counts = [int(np.searchsorted(seconds, time_s, side="right")) - 1 for seconds in mine]
        for _ in range(sum(counts) - size):
            slowest = max(range(len(team)), key=lambda place: mine[place][counts[place]])
            counts[slowest] -= 1
        return counts


def _without_idle(plan: Plan) -> Plan:
    """Without those that are too slow for a sample, and only hold their parts."""
    pipelines = []
    for pipeline in plan.pipelines:
        stage = pipeline.stages[0]
        busy = tuple(replica for replica in stage.replicas if replica.samples)
        pipelines.append(dataclasses.replace(pipeline, stages=(dataclasses.replace(stage, replicas=busy),)))
    return dataclasses.replace(plan, pipelines=tuple(pipelines))


def _done(crews: dict[tuple[int, int], _Crew], times: Floats) -> Ints:
    """Samples of a micro-batch within each of these times."""
    found = np.zeros(len(times), dtype=np.int64)
    for crew in crews.values():
        found += crew.count * (np.searchsorted(crew.seconds, times, side="right") - 1)
    return found


def _team(name: str, kind: Kind, tp: int) -> Team:
    """All devices of a node, as far as the degree divides them."""
    return tuple(
        Replica(node=name, devices=tuple(range(begin, begin + tp)), tp=tp)
        for begin in range(0, kind.slice - tp + 1, tp)
    )
