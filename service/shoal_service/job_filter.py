"""Which jobs a list is to have, as conditions on their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement

from shoal_planner.errors import InvalidField
from shoal_planner.labels import check_labels
from shoal_recovery.journal import JobState
from shoal_service.errors import BadInput
from shoal_service.models import JobRow


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Of these projects (None: of all), in one of these states (none: any), with `name` in their names, with all of
    these labels (KEY=VALUE, or KEY for any value), created from `since_s` up to `until_s`, by this person."""

    projects: frozenset[str] | None = None
    states: tuple[JobState, ...] = ()
    name: str | None = None
    labels: tuple[str, ...] = ()
    since_s: float | None = None
    until_s: float | None = None
    created_by: str | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        if self.projects is not None:
            yield JobRow.project_id.in_(self.projects)
        if self.states:
            yield JobRow.state.in_([state.value for state in self.states])
        if self.name is not None:
            yield JobRow.name.icontains(self.name, autoescape=True)
        for label in self.labels:
            key, given, value = label.partition("=")
            stored = JobRow.spec["labels"][key].as_string()
            yield stored == value if given else stored.is_not(None)
        if self.since_s is not None:
            yield JobRow.created_at_s >= self.since_s
        if self.until_s is not None:
            yield JobRow.created_at_s <= self.until_s
        if self.created_by is not None:
            yield JobRow.created_by == self.created_by


def read_filter(**given: Any) -> JobFilter:
    """Of what a request asks for. Raises BadInput for what no job can have."""
    found = JobFilter(**given)
    if found.name is not None and not found.name.isprintable():
        raise BadInput("invalid_field", f"name = {found.name!r}: must be printable characters", "name")
    for label in found.labels:
        key, _, value = label.partition("=")
        try:
            check_labels({key: value})
        except InvalidField as error:
            raise BadInput("invalid_field", f"label = {label!r}: {error.problem}", "label") from error
    return found
