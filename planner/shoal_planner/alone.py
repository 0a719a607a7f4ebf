"""What a job would run by that has a cluster to itself: its plan on the nodes that its limits leave it at one time."""

from __future__ import annotations

import dataclasses

from shoal_planner.allotment import Contender, allot
from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.errors import NoPlanFits, PriceAboveLimit
from shoal_planner.fitting import Fitting
from shoal_planner.job import JobSpec
from shoal_planner.profile import Profile
from shoal_planner.search import PlanResult, plan

_ID = "alone"


def plan_alone(
    job: JobSpec, snapshot: ClusterSnapshot, profile: Profile, *, seed: int = 0, time_limit_s: float = 60.0
) -> PlanResult:
    """As `plan`, on the nodes that `limits.max_devices` and `limits.max_price_per_hour` allow beside each other; the
    plan's reason says so where these are not all. Raises what `plan` does."""
    share = share_of(job, snapshot, profile, time_limit_s)
    found = plan(job, share, profile, seed=seed, time_limit_s=time_limit_s)
    if len(share.nodes) == len(snapshot.nodes):
        return found
    text = f"With {_limits(job)} it has {len(share.nodes)} of {len(snapshot.nodes)} nodes. {found.plan.reason}"
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, reason=text))


def share_of(job: JobSpec, snapshot: ClusterSnapshot, profile: Profile, time_limit_s: float = 60.0) -> ClusterSnapshot:
    """The cluster without the nodes that the scheduler would not give the job if it were the only one. Raises
    NoPlanFits, and PriceAboveLimit where that limit alone is in its way."""
    limits = job.limits
    if limits.max_devices is None and limits.max_price_per_hour is None:
        return snapshot
    alone = Contender(
        id=_ID,
        device_types=limits.device_types,
        max_devices=limits.max_devices,
        max_price_per_hour=limits.max_price_per_hour,
    )
    (found,) = allot([alone], snapshot.nodes, Fitting({_ID: job}, snapshot, profile, {}, time_limit_s))
    if limits.max_price_per_hour is not None and found.least_price_per_hour is not None:
        raise PriceAboveLimit(limits.max_price_per_hour, found.least_price_per_hour)
    if not found.target:
        raise NoPlanFits(f"none was found on nodes that {_limits(job)} allow beside each other")
    return snapshot.without(node.id for node in snapshot.nodes if node.id not in found.target)


def _limits(job: JobSpec) -> str:
    names = ("max_devices", "max_price_per_hour")
    given = {name: getattr(job.limits, name) for name in names}
    return " and ".join(f"limits.{name} = {value:g}" for name, value in given.items() if value is not None)
