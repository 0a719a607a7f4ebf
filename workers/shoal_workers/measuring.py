"""Has ranks time layers and agents probe links for one supervisor, and writes what comes back into the journal.

Everything is measured before the first plan. Later only nodes of another kind than all before are measured, while they
are idle: no recovery ever waits for a figure. Owns who was asked and when. What is known stands in the record alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import structlog

from shoal_planner.cluster import DeviceOverride, Node
from shoal_planner.job import JobSpec
from shoal_planner.profile import Profile, link_kind, profile_to_mapping
from shoal_recovery.journal import FiguresMeasured
from shoal_workers import messages as m
from shoal_workers.links import Site, Survey, survey
from shoal_workers.measurements import figures, is_timed, order, untimed
from shoal_workers.record import JobRecord
from shoal_workers.roster import Contact, Roster
from shoal_workers.settings import WorkerSettings

log = structlog.get_logger()

Overrides = Callable[[], tuple[DeviceOverride, ...]]


class Measuring:
    """Use from one thread."""

    def __init__(
        self,
        spec: JobSpec,
        roster: Roster,
        record: JobRecord,
        settings: WorkerSettings,
        *,
        overrides: Overrides,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._roster = roster
        self._record = record
        self._settings = settings
        self._overrides = overrides
        self._clock = clock
        self._wall_clock = wall_clock
        self._asked: dict[str, tuple[Contact, float]] = {}
        self._surveyed: frozenset[str] = frozenset()
        self._survey_ends_s = 0.0
        self._surveys: queue.SimpleQueue[Survey | None] = queue.SimpleQueue()
        self._survey_runs = False

    # --- layers and updates ---

    def untimed(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """One node of every type that was never timed."""
        return tuple(untimed(self._spec, self._record.profile, nodes))

    def is_timed(self, device: str) -> bool:
        return is_timed(self._spec, self._record.profile, device)

    def time_layers(self, node: Node) -> Contact:
        """Asks a rank of this node; `heard` takes its answer."""
        contact = self._roster.ranks([node.id])[0]
        self._asked[node.device] = contact, self._clock()
        contact.send(order(self._spec, node, self._overrides()))
        return contact

    def heard(self, contact: Contact, answer: m.Measured) -> None:
        device = next((device for device, (asked, _) in self._asked.items() if asked is contact), None)
        if device is None:
            return  # asked by a supervisor before this one
        _, since_s = self._asked.pop(device)
        source = f"{self._now()}, one {device} of {contact.node} by itself, the quickest of some rounds"
        self._write(figures(self._spec, device, answer, source), 0, self._clock() - since_s)

    # --- links ---

    def survey(self, nodes: Iterable[Node], *, thorough: bool) -> bool:
        """Begins to probe links of these nodes, whose agents are known, if any was never probed; whether it began."""
        nodes = tuple(nodes)
        kinds = frozenset(map(link_kind, nodes))
        if self._survey_runs or kinds <= self._surveyed or not self._settings.link_limit_s:
            return False
        addresses = {agent.node: agent.address for agent in self._roster.agents(node.id for node in nodes)}
        sites = tuple(Site(node=node, address=addresses[node.id]) for node in nodes if node.id in addresses)
        self._surveyed |= kinds
        self._survey_runs = True
        self._survey_ends_s = self._clock() + self._settings.link_limit_s + self._settings.reply_timeout_s
        threading.Thread(target=self._probe, args=(sites, thorough), name="links", daemon=True).start()
        return True

    def survey_under_way(self) -> bool:
        """Takes the result, too."""
        while not self._surveys.empty():
            self._survey_runs = False
            found = self._surveys.get()
            if found is not None and found.num_pairs:
                self._write(found.profile, found.num_bytes, found.duration_s)
        return self._survey_runs

    def _probe(self, sites: tuple[Site, ...], thorough: bool) -> None:
        when = "before training" if thorough else "while others trained"
        source = f"{self._now()}, one flow between agents {when}"
        try:
            found = survey(sites, self._record.profile, self._settings.link_limit_s, source, thorough=thorough)
        except BaseException:
            self._surveys.put(None)  # nobody may wait for it for ever
            raise
        if found.num_bytes != found.received_bytes:
            log.warning("probes were not counted alike", sent=found.num_bytes, received=found.received_bytes)
        self._surveys.put(found)

    # --- both, beside a job that runs ---

    def beside(self, ready: Iterable[str], idle: frozenset[str]) -> bool:
        """Begins whatever is not known of nodes that are ready, on those that are idle; whether that is under way.

        Who waits for it does not wait for ever: what is not answered in time is as good as known.
        """
        nodes = tuple(self._roster.seen(node).node for node in sorted(ready))
        for node in self.untimed(node for node in nodes if node.id in idle):
            contact, _ = self._asked.get(node.device, (None, 0.0))
            if contact is None or not contact.connected:
                self.time_layers(node)
        self.survey(nodes, thorough=False)
        now_s, limit_s = self._clock(), self._settings.reply_timeout_s
        timing = any(now_s - since_s < limit_s for _, since_s in self._asked.values())
        return (self.survey_under_way() and now_s < self._survey_ends_s) or timing

    def _write(self, profile: Profile, num_bytes: int, duration_s: float) -> None:
        self._record.append(
            FiguresMeasured(profile=profile_to_mapping(profile), num_bytes=num_bytes, duration_s=duration_s)
        )

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
