"""Which nodes of its cluster a job may use beside other jobs, as the control plane tells its supervisor, and how far
the job is with that. Owns its part of the journal; nodes are left as after a notice of their end (`decide`).

A job that is told nothing has all nodes. What it was told last stands in the journal, and holds while the control plane
is away. Nodes are given back, `share_taken`, when no plan needs them and the state stands elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal_recovery.journal import Entry, Event
from shoal_recovery.journal_shares import ShareChanged, ShareTaken


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldShare:
    """As a wish carries it; `nodes` None: all that the cluster has and will have."""

    version: int
    nodes: tuple[str, ...] | None
    reason: str = ""


class Share:
    """`tell` may be called by any thread, everything else by one."""

    def __init__(self, append: Callable[[Event], None], told: ToldShare | None) -> None:
        self._append = append
        self._told = told
        self._now = ToldShare(version=0, nodes=None)
        self._taken = self._now

    def tell(self, told: ToldShare) -> None:
        """The same one again, or an older one, changes nothing."""
        before = self._told
        if before is None or told.version > before.version:
            self._told = told

    def adopt(self, entries: Iterable[Entry]) -> None:
        """What the supervisors before this one have written."""
        for entry in entries:
            match entry.event:
                case ShareChanged(version=version, nodes=nodes, reason=reason):
                    self._now = ToldShare(version=version, nodes=nodes, reason=reason)
                case ShareTaken(version=version, nodes=nodes):
                    self._taken = ToldShare(version=version, nodes=nodes)
                case _:
                    pass

    def hear(self) -> None:
        """Takes up what was told meanwhile."""
        told = self._told
        if told is None or told.version <= self._now.version:
            return
        if told.nodes != self._now.nodes:
            self._append(ShareChanged(version=told.version, nodes=told.nodes, reason=told.reason))
        self._now = told

    @property
    def nodes(self) -> frozenset[str] | None:
        return None if self._now.nodes is None else frozenset(self._now.nodes)

    def allows(self, node: str) -> bool:
        return self.nodes is None or node in self.nodes

    def given_up(self, nodes: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Those of these nodes that the job has to leave, and why."""
        return tuple((node, self._now.reason) for node in sorted(nodes) if not self.allows(node))

    def settle(self, needs: frozenset[str], *, elsewhere: bool) -> frozenset[str] | None:
        """Gives back what is left: the job `needs` these nodes, and what it kept on others before stands `elsewhere`.
        The nodes that it keeps, where this was news."""
        kept = self.nodes
        if kept is None or self._taken.version >= self._now.version or not needs <= kept:
            return None
        leaves = self._taken.nodes is None or not kept.issuperset(self._taken.nodes)
        if leaves and not elsewhere:
            return None
        self._taken = self._now
        self._append(ShareTaken(version=self._now.version, nodes=self._now.nodes))
        return kept
