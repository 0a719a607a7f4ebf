"""Plans that nobody would choose, for jobs whose label asks for them: drawn instead of searched for."""

from __future__ import annotations

import contextlib
import dataclasses
import random

from faults.drills import PLANS
from random_clusters import Instance
from random_plans import random_plan

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.plan import Plan
from shoal_planner.score import score
from shoal_workers.change import copies_of, vital_nodes
from shoal_workers.supervisor import Supervisor

_MOST_DRAWN = 60


def draw_plans(supervisor: Supervisor) -> None:
    """Before it begins. Each epoch's plan hangs on the seed, the epoch and the nodes alone, whoever supervises it."""
    seed = supervisor._spec.labels.get(PLANS)
    if seed is None:
        return
    changer = supervisor._changer
    search = changer._plan

    def plan(snapshot: ClusterSnapshot) -> Plan:
        rng = random.Random(f"plan {changer.highest_epoch} of {seed}")
        return drawn(rng, supervisor._spec, snapshot) or search(snapshot)

    changer._plan = plan  # type: ignore[method-assign]


def drawn(rng: random.Random, job: JobSpec, snapshot: ClusterSnapshot) -> Plan | None:
    """Of any shape that fits and needs all nodes: for what a plan leaves out, the supervisor would change it."""
    everywhere = frozenset(node.id for node in snapshot.nodes)
    if sum(node.devices for node in snapshot.nodes) < job.limits.min_devices:
        return None
    instance = Instance(kind="drill", seed=0, job=job, cluster=snapshot)
    for _ in range(_MOST_DRAWN):
        plan = random_plan(rng, instance)
        plan = dataclasses.replace(plan, copies=min(plan.copies, len(everywhere) - 1))
        if vital_nodes(plan, copies_of(plan, snapshot, job.model)) == everywhere:
            with contextlib.suppress(NoPlanFits, InvalidField):
                return score(plan, job, snapshot)
    return None
