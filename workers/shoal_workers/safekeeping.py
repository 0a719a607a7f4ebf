"""Which snapshots go to the object store when a job has to wait for nodes: those of the newest whole step. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_planner.plan import Plan
from shoal_recovery.intervals import Interval, covers, merge
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import OWNED_KINDS, Kind, Snapshot
from shoal_workers.shards import epoch_of, snapshot_name

_ByName = Mapping[str, list[Snapshot]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """`snapshots` of `step`, as `epoch` left it, that together are all of its state, each with a node that keeps it."""

    epoch: int
    step: int
    snapshots: tuple[Snapshot, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(snapshot.name for snapshot in self.snapshots)


def owners(epoch: int, plan: Plan, model: ModelSpec) -> frozenset[str]:
    """The names of the snapshots that together are a whole step of this epoch."""
    return frozenset(snapshot_name(epoch, state.rank) for state in shard_map(plan, model).ranks if state.vouches)


def newest_whole(snapshots: Iterable[Snapshot], plans: Mapping[int, Plan], model: ModelSpec) -> WholeStep | None:
    """The newest step that the agents hold as one epoch left it; None where that is none, or the step that the seed
    gives. Snapshots that do not count must have been left out. Holders are loaded evenly."""
    held: defaultdict[tuple[int, int], defaultdict[str, list[Snapshot]]] = defaultdict(lambda: defaultdict(list))
    for snapshot in snapshots:
        held[snapshot.step, epoch_of(snapshot.name)][snapshot.name].append(snapshot)
    for step, epoch in sorted(held, reverse=True):
        if step > 0 and epoch in plans:
            found = _enough(held[step, epoch], owners(epoch, plans[epoch], model), model)
            if found is not None:
                return WholeStep(epoch=epoch, step=step, snapshots=_one_each(found))
    return None


def _enough(found: _ByName, wanted: frozenset[str], model: ModelSpec) -> _ByName | None:
    """Of these the ones that make a step: what ranks vouch for, and where some of that is gone, what there is of it in
    parts and mirrors."""
    if wanted <= found.keys():
        return {name: found[name] for name in wanted}
    others = sorted(found.keys() - wanted)
    taken = sorted(found.keys() & wanted)
    have = _covered(found, taken)
    for name in others:
        more = _covered(found, [*taken, name])
        if more != have:
            taken, have = [*taken, name], more
    numel = {parameter.fqn: parameter.numel for parameter in parameters(model)}
    whole = all(covers(have.get((fqn, kind), ()), (0, count)) for fqn, count in numel.items() for kind in OWNED_KINDS)
    return {name: found[name] for name in taken} if whole else None


def _covered(found: _ByName, names: Iterable[str]) -> dict[tuple[str, Kind], tuple[Interval, ...]]:
    by_address: defaultdict[tuple[str, Kind], list[Interval]] = defaultdict(list)
    for name in names:
        for piece in found[name][0].pieces:
            by_address[piece.key.fqn, piece.key.kind].append((piece.key.first, piece.key.last))
    return {address: merge(intervals) for address, intervals in by_address.items()}


def _one_each(found: _ByName) -> tuple[Snapshot, ...]:
    load: Counter[str] = Counter()
    chosen = []
    for _, copies in sorted(found.items()):
        taken = min(copies, key=lambda copy: (load[copy.node], copy.node))
        load[taken.node] += sum(piece.num_bytes for piece in taken.pieces)
        chosen.append(taken)
    return tuple(chosen)
