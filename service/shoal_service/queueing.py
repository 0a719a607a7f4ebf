"""Which of the jobs that wait for a cluster are looked at: there may be thousands, and only those whose turn may come
next can get anything. Queries alone; who gets what is `allot`'s.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, Text, cast, func, or_, select

from shoal_recovery.journal import JobState
from shoal_service.models import JobRow, ShareRow

SEEN = 200  # by priority; as many again by their turn within their project
HOLD_UP_NOBODY = ("no_plan_fits", "price_above_limit")

_AGE = (JobRow.created_at_s, JobRow.id)


def in_turn(cluster_id: str) -> Select[str]:
    """Ids of the waiting jobs of a cluster that may be next: by priority, where projects take turns among equals; by
    project, where each has its first, then its second, and so on, whatever its priority; and all that have nodes.

    The latter let nobody be overlooked for what others have submitted. Jobs that fit no nodes of the cluster take no
    turns from others of their project, as they hold up nobody: they have turns of their own."""
    by_priority = func.row_number().over(partition_by=(JobRow.project_id, ShareRow.priority), order_by=_AGE)
    unfit = ShareRow.code.in_(HOLD_UP_NOBODY)
    first = (ShareRow.priority.desc(), *_AGE)
    of_project = func.row_number().over(partition_by=(JobRow.project_id, unfit), order_by=first)
    turns = _waiting(
        cluster_id,
        JobRow.id,
        ShareRow.priority,
        JobRow.created_at_s,
        _has_nodes().label("has_nodes"),
        by_priority.label("by_priority"),
        of_project.label("of_project"),
    ).subquery()
    now = turns.c
    age = (now.created_at_s, now.id)
    places = (
        select(
            now.id,
            now.has_nodes,
            func.row_number().over(order_by=(now.priority.desc(), now.by_priority, *age)).label("by_priority"),
            func.row_number().over(order_by=(now.of_project, now.priority.desc(), *age)).label("by_project"),
        )
        .where(or_(now.by_priority <= SEEN, now.of_project <= SEEN, now.has_nodes))  # no other can have such a place
        .subquery()
    )
    place = places.c
    return select(place.id).where(or_(place.by_priority <= SEEN, place.by_project <= SEEN, place.has_nodes))


def that_may_rent(cluster_id: str) -> Select[str]:
    """Ids of the waiting jobs of a cluster for which nodes may be rented, the first in turn of them, and of those that
    have nodes: what others have submitted who may not rent is nothing to them."""
    may = or_(_has_nodes(), JobRow.spec["limits"]["rent"].as_boolean())
    order = (ShareRow.priority.desc(), *_AGE)
    return _waiting(cluster_id, JobRow.id).where(may).order_by(*order).limit(SEEN)


def _has_nodes() -> ColumnElement[bool]:
    """Given, and not begun on yet. Lists are JSON, which PostgreSQL does not compare."""
    return or_(*(or_(nodes.is_(None), cast(nodes, Text) != "[]") for nodes in (ShareRow.nodes, ShareRow.held)))


def _waiting(cluster_id: str, *columns: Any) -> Select[Any]:
    query: Select[Any] = select(*columns).join(ShareRow, ShareRow.job_id == JobRow.id)
    return query.where(JobRow.cluster_id == cluster_id, JobRow.state == JobState.QUEUED.value)
