"""Whether a job could go on without nodes that are to go away. It is found out in a thread: an observer must not
wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal_planner.cluster import ClusterSnapshot
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.job import JobSpec
from shoal_planner.moving import Outlook
from shoal_planner.plan import Plan
from shoal_planner.profile import Profile
from shoal_planner.search import plan as search_plan

_PLAN_LIMIT_S = 5.0


class Leaving:
    """Use from one thread."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._found: dict[frozenset[str], str] = {}
        self._asked: set[frozenset[str]] = set()

    def obstacle(
        self,
        rest: frozenset[str],
        previous: Plan,
        profile: Profile,
        outlook: Outlook,
        snapshot: Callable[[frozenset[str]], ClusterSnapshot],
    ) -> str | None:
        """Why no plan fits on the `rest` of the nodes, which `snapshot` makes a cluster of; empty where one does, None
        as long as that is not known."""
        if rest not in self._asked:
            self._asked.add(rest)
            arguments = (rest, previous, profile, outlook, snapshot(rest))
            threading.Thread(target=self._find, args=arguments, name="leaving", daemon=True).start()
        return self._found.get(rest)

    def no_plan(self, rest: frozenset[str], obstacle: str) -> None:
        """Somebody has tried."""
        self._asked.add(rest)
        self._found[rest] = obstacle

    def _find(
        self, rest: frozenset[str], previous: Plan, profile: Profile, outlook: Outlook, snapshot: ClusterSnapshot
    ) -> None:
        try:
            search_plan(
                self._spec,
                snapshot,
                profile.on(snapshot.nodes),
                previous=previous,
                time_limit_s=_PLAN_LIMIT_S,
                outlook=outlook,
            )
            self._found[rest] = ""
        except (NoPlanFits, InvalidField) as error:
            self._found[rest] = str(error)
