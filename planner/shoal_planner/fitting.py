"""Whether a plan of a job is found on some nodes of a cluster, asked often: what was found once is remembered by the
kinds of nodes, and more of what fits fits, less of what does not fit does not either. Pure but for the memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shoal_planner.cluster import ClusterSnapshot, Node
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.profile import Profile
from shoal_planner.script_spec import AnyJob, ScriptSpec
from shoal_planner.search import plan

_Kinds = Counter[Node]  # how many nodes of each kind, named like the first


@dataclass(slots=True)
class Known:
    """Of one job on one cluster."""

    job: AnyJob
    fit: list[_Kinds] = field(default_factory=list)
    unfit: list[_Kinds] = field(default_factory=list)


class Fitting:
    """Use from one thread at a time. `known` outlives it, by the ids of jobs; what is known of a job that has changed,
    or is none of these `jobs` any more, is forgotten."""

    def __init__(
        self,
        jobs: Mapping[str, AnyJob],
        snapshot: ClusterSnapshot,
        profile: Profile,
        known: dict[str, Known],
        time_limit_s: float,
    ) -> None:
        self._snapshot, self._profile, self._limit_s = snapshot, profile, time_limit_s
        self._nodes = {node.id: node for node in snapshot.nodes}
        self._known = known
        for gone in [job for job, found in known.items() if jobs.get(job) != found.job]:
            del known[gone]
        for job, spec in jobs.items():
            known.setdefault(job, Known(spec))

    def __call__(self, job: str, nodes: frozenset[str]) -> bool:
        known = self._known[job]
        mine = [self._nodes[node] for node in sorted(nodes) if _may_use(known.job, self._nodes[node])]
        if isinstance(known.job, ScriptSpec):
            return self._has_room(known.job, mine)
        if not mine or sum(node.devices for node in mine) < known.job.limits.min_devices:
            return False
        if not known.job.model.is_known:
            return True  # nobody has looked at the user's modules yet; that takes a node
        kinds = Counter(dataclasses.replace(node, id="n", reclaim_at_s=None) for node in mine)
        if any(found <= kinds for found in known.fit):
            return True
        if any(kinds <= found for found in known.unfit):
            return False
        fits = self._search(known.job, mine)
        (known.fit if fits else known.unfit).append(kinds)
        return fits

    def _search(self, job: AnyJob, nodes: Collection[Node]) -> bool:
        assert not isinstance(job, ScriptSpec)
        snapshot = dataclasses.replace(self._snapshot, nodes=tuple(nodes))
        profile = self._profile.on(snapshot.nodes)
        try:
            plan(job, snapshot, profile, time_limit_s=self._limit_s, thorough=False)
        except (NoPlanFits, InvalidField):
            return False
        return True

    def _has_room(self, job: ScriptSpec, nodes: Collection[Node]) -> bool:
        """A device for each worker that is needed, or all that there is: what else workers take only the cluster
        itself can tell."""
        everything = [node for node in self._nodes.values() if _may_use(job, node)]
        return bool(nodes) and (sum(node.devices for node in nodes) >= job.workers.min or len(nodes) == len(everything))


def _may_use(job: AnyJob, node: Node) -> bool:
    return not job.limits.device_types or node.device in job.limits.device_types
