"""Which snapshots go to the object store when a job has to wait for nodes: those of the newest whole step. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal_planner.job import ModelSpec
from shoal_planner.plan import Plan
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import Snapshot
from shoal_workers.shards import epoch_of, snapshot_name


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """`snapshots` of `step`, one of each rank of `epoch` that vouches for state, each with a node that keeps it."""

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
        found = held[step, epoch]
        if step > 0 and epoch in plans and owners(epoch, plans[epoch], model) <= found.keys():
            return WholeStep(epoch=epoch, step=step, snapshots=_one_each(found))
    return None


def _one_each(found: Mapping[str, list[Snapshot]]) -> tuple[Snapshot, ...]:
    load: Counter[str] = Counter()
    chosen = []
    for _, copies in sorted(found.items()):
        taken = min(copies, key=lambda copy: (load[copy.node], copy.node))
        load[taken.node] += sum(piece.num_bytes for piece in taken.pieces)
        chosen.append(taken)
    return tuple(chosen)
