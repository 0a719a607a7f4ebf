"""How a job stands beside the others of its cluster, in words: what it waits for, whom it shares with. Pure.

Whoever sees the job reads them, and jobs of other projects do not exist for everybody who does: these are not named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal_planner.allotment import Allotment, Contender
from shoal_planner.errors import price_above_limit

MOVED_CODE = "moved_to_cluster"
WAITING_CODES = ("waits_for_nodes", "no_plan_fits", "price_above_limit", "preempted_by_priority", MOVED_CODE)
_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """`code` for programs: `waits_for_nodes`, `no_plan_fits`, `price_above_limit`, `shares_nodes`,
    `preempted_by_priority`, or empty where the job is alone. `waits` is a sentence for a job that waits, `told` a
    clause that goes with its share, `held` one that says why a job has to rest ("as ...")."""

    code: str
    waits: str = ""
    told: str = ""
    held: str = ""


def standing_of(
    found: Allotment, jobs: Mapping[str, Contender], all_found: Collection[Allotment], cluster_id: str
) -> Standing:
    if found.preempted_by is not None:
        who = _names([found.preempted_by], jobs, found.job)
        if jobs[found.preempted_by].priority > jobs[found.job].priority:
            told, held = f"{who} has a higher priority", f"as {who}, of higher priority, needs its nodes"
        else:
            told = f"no plan of it fits what it has left, and {who} needs some of that"
            held = f"as no plan of it fits the nodes that it has left, and {who} needs some of them"
        return Standing(code="preempted_by_priority", told=told, held=held)
    if not found.grant:
        code = _waiting_code(found)
        return Standing(code=code, waits=_waits(found, jobs, all_found, cluster_id))
    others = [each for each in all_found if each.job != found.job and (each.target or jobs[each.job].uses)]
    return Standing(code="shares_nodes" if others else "", told=_told(found, jobs, others))


def _waiting_code(found: Allotment) -> str:
    if not found.never_fits:
        return "waits_for_nodes"
    return "no_plan_fits" if found.least_price_per_hour is None else "price_above_limit"


def _waits(found: Allotment, jobs: Mapping[str, Contender], all_found: Collection[Allotment], cluster_id: str) -> str:
    limit, least = jobs[found.job].max_price_per_hour, found.least_price_per_hour
    if limit is not None and least is not None:
        return f"waits for lower prices or a higher limit: {price_above_limit(limit, least)} on cluster {cluster_id}"
    if found.never_fits:
        return f"no plan of it fits all nodes of cluster {cluster_id} together: waits for others"
    queue = sorted((each for each in all_found if each.position is not None), key=lambda each: each.position or 0)
    before = [each.job for each in queue if (each.position or 0) < (found.position or 0)]
    place = f"waits for nodes of cluster {cluster_id}, as number {found.position} of {len(queue)} in the queue"
    if found.waits_for:
        leave = "leaves" if len(found.waits_for) == 1 else "leave"
        return f"{place}: {_names(found.waits_for, jobs, found.job)} {leave} {_listed(sorted(found.target))}"
    if found.behind is not None:
        return f"{place}, behind {_names(before, jobs, found.job)}"
    users = [job for job in jobs.values() if job.uses]
    kept = ", ".join(
        f"{_names([job.id], jobs, found.job)} ({len(job.uses)} nodes, {_why_kept(job, jobs[found.job])})"
        for job in users[:_SHOWN]
    )
    return f"{place}: what it needs at least is in use by {kept or 'nobody, but is about to go away'}"


def _why_kept(job: Contender, other: Contender) -> str:
    if job.priority > other.priority:
        return "of higher priority"
    if job.priority == other.priority:
        return "of the same priority"
    return "of lower priority" if job.yields else "without an object store to go to"


def _told(found: Allotment, jobs: Mapping[str, Contender], others: Collection[Allotment]) -> str:
    lost = jobs[found.job].share - found.grant
    takers = sorted(each.job for each in others if each.target & lost)
    if takers:
        return f"given to {_names(takers, jobs, found.job)}"
    if not others:
        return "nobody needs it"
    return f"the cluster is shared with {_names(sorted(each.job for each in others), jobs, found.job)}"


def _names(ids: Collection[str], jobs: Mapping[str, Contender], reader: str) -> str:
    """Of jobs, as whoever sees the job `reader` may read them."""
    own = [each for each in ids if jobs[each].project == jobs[reader].project]
    foreign = len(ids) - len(own)
    if not foreign:
        return _listed(own)
    others = "a job of another project" if foreign == 1 else f"{foreign} jobs of other projects"
    return f"{_listed(own)} and {others}" if own else others


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
