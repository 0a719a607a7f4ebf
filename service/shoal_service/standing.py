"""How a job stands beside the others of its cluster, in words: what it waits for, whom it shares with. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal_planner.allotment import Allotment, Contender

WAITING_CODES = ("waits_for_nodes", "no_plan_fits", "preempted_by_priority")
_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """`code` for programs: `waits_for_nodes`, `no_plan_fits`, `shares_nodes`, `preempted_by_priority`, or empty where
    the job is alone. `waits` is a sentence for a job that waits, `told` a clause that goes with its share."""

    code: str
    waits: str = ""
    told: str = ""


def standing_of(
    found: Allotment, jobs: Mapping[str, Contender], all_found: Collection[Allotment], cluster_id: str
) -> Standing:
    if found.preempted_by is not None:
        return Standing(code="preempted_by_priority", told=f"{found.preempted_by} has a higher priority")
    if not found.grant:
        code = "no_plan_fits" if found.never_fits else "waits_for_nodes"
        return Standing(code=code, waits=_waits(found, jobs, all_found, cluster_id))
    others = [each for each in all_found if each.job != found.job and (each.target or jobs[each.job].uses)]
    return Standing(code="shares_nodes" if others else "", told=_told(found, jobs, others))


def _waits(found: Allotment, jobs: Mapping[str, Contender], all_found: Collection[Allotment], cluster_id: str) -> str:
    if found.never_fits:
        return f"no plan of it fits all nodes of cluster {cluster_id} together: waits for others"
    queue = sorted((each for each in all_found if each.position is not None), key=lambda each: each.position or 0)
    before = [each.job for each in queue if (each.position or 0) < (found.position or 0)]
    place = f"waits for nodes of cluster {cluster_id}, as number {found.position} of {len(queue)} in the queue"
    if found.waits_for:
        return f"{place}: {_names(found.waits_for)} leave {_names(sorted(found.target))}"
    if found.behind is not None:
        return f"{place}, behind {_names(before)}"
    users = [job for job in jobs.values() if job.uses]
    kept = ", ".join(f"{job.id} ({len(job.uses)} nodes, {_why_kept(job, jobs[found.job])})" for job in users[:_SHOWN])
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
        return f"given to {_names(takers)}"
    return f"the cluster is shared with {_names(sorted(each.job for each in others))}" if others else "nobody needs it"


def _names(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
