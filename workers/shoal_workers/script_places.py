"""Where the script of a job and its workers may be: from the nodes that answer and what Ray says that they offer. Owns
the look at them; what follows is `decide_script`'s."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import structlog

from shoal_planner.script_spec import ScriptSpec
from shoal_recovery.decide_script import Place
from shoal_workers.doomed import Doomed
from shoal_workers.nodes import NodeSeen
from shoal_workers.roster import Roster
from shoal_workers.scripts import Scripts
from shoal_workers.share import Share

log = structlog.get_logger()

HEAD = "the head"
_LEAVE_S = 60.0  # that a script has to store what it has, where its nodes go to another job
_MARGIN_S = 5.0  # before a node goes, that workers on it are to have left


class ScriptPlaces:
    """`refresh` looks; the others tell of the newest look."""

    def __init__(
        self,
        spec: ScriptSpec,
        scripts: Scripts,
        roster: Roster,
        doomed: Doomed,
        share: Share,
        clock: Callable[[], float],
    ) -> None:
        self._spec, self._scripts, self._roster, self._doomed, self._clock = spec, scripts, roster, doomed, clock
        self._share = share
        self._resources: dict[str, dict[str, float]] = {}
        self._head: str | None = None
        self._names: dict[str, str] = {}
        self._looking = threading.Thread()

    def refresh(self) -> None:
        """Beside everything else: the head may be away for a while."""
        if not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, name="resources", daemon=True)
            self._looking.start()

    def _look(self) -> None:
        try:
            self._resources, self._head = self._scripts.resources(), self._scripts.head()
        except Exception as error:  # of many kinds where the head is away; what was seen last holds until it is back
            log.info("resources not seen", why=str(error))
        self._names |= {seen.incarnation: seen.node.id for seen in self._roster.nodes}

    def expected(self) -> frozenset[str]:
        return frozenset(seen.node.id for seen in self._mine())

    def all(self) -> tuple[Place, ...]:
        ready, doomed = self._roster.ready(), self._left_s()
        found = [
            Place(
                node=seen.node.id,
                slots=slots(self._resources.get(seen.incarnation, {}), self.per_worker()),
                spot=bool(seen.node.spot),
                doomed=seen.node.id in doomed,
            )
            for seen in self._mine()
            if seen.node.id in ready
        ]
        if self._head is not None and self._head not in {seen.incarnation for seen in self._roster.nodes}:
            found.append(Place(node=HEAD, slots=0, head=True))
        return tuple(sorted(found, key=lambda place: place.node))

    def leaving_s(self) -> dict[str, float]:
        """When the nodes that are to go away have to be left."""
        return {node: max(0.0, left_s - _MARGIN_S) for node, left_s in self._left_s().items()}

    def _left_s(self) -> dict[str, float]:
        """For how long they may still be used: nodes that are to go away, and those that belong to other jobs now."""
        given_up = self._share.given_up(seen.node.id for seen in self._roster.nodes)
        return {node: _LEAVE_S for node, _ in given_up} | self._doomed.left_s()

    def per_worker(self) -> dict[str, float]:
        given = self._spec.workers.resources
        if "GPU" in given or not any(offered.get("GPU", 0) >= 1 for offered in self._resources.values()):
            return dict(given)
        return {**given, "GPU": 1.0}

    def incarnation(self, node: str) -> str | None:
        if node == HEAD:
            return self._head
        return next((seen.incarnation for seen in self._roster.nodes if seen.node.id == node), None)

    def name(self, incarnation: str) -> str:
        """Of a node that was seen at any time."""
        return self._names.get(incarnation, incarnation[:12])

    def quiet(self, nodes: Iterable[str], within_s: float) -> bool:
        """Whether one of them was not heard for so long, or has no agent that answers."""
        wanted, ready = frozenset(nodes), self._roster.ready()
        heard = (member for member in self._roster.members(self._clock()) if member.node in wanted)
        return not wanted <= ready or any(member.silent_s > within_s for member in heard)

    def nodes(self) -> tuple[NodeSeen, ...]:
        return self._mine()

    def _mine(self) -> tuple[NodeSeen, ...]:
        types = self._spec.limits.device_types
        return tuple(seen for seen in self._roster.nodes if not types or seen.node.device in types)


def slots(offered: Mapping[str, float], per_worker: Mapping[str, float]) -> int:
    """How many workers fit on a node."""
    return int(min(offered.get(name, 0.0) // amount for name, amount in per_worker.items() if amount > 0))
