"""Passes notices that reach the cluster as a whole on to the agents of the nodes that they are about, each once. From
there on they are notices like any other.
"""

from __future__ import annotations

import threading

import structlog

from shoal_workers import messages as m
from shoal_workers.nodes import Cluster, NodeUnreachable
from shoal_workers.roster import ask
from shoal_workers.wire import ConnectionClosed

log = structlog.get_logger()

_ANSWER_S = 5.0


class Herald:
    """Any thread may call."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._begun: set[str] = set()

    def pass_on(self, node: str, notice: m.GiveNotice) -> None:
        """Returns at once: the agent of `node` (its id, or that of an incarnation) may have to be started. One that
        could not be reached is tried the next time."""
        with self._lock:
            if notice.name in self._begun:
                return
            self._begun.add(notice.name)
        threading.Thread(target=self._give, args=(node, notice), name=notice.name, daemon=True).start()

    def _give(self, node: str, notice: m.GiveNotice) -> None:
        try:
            for seen in self._cluster.nodes():
                # A connector that begins anew gives all notices again, and another machine may have taken the name.
                meant = node in (seen.node.id, seen.incarnation)
                if meant and self._cluster.first_meant(notice.name, seen.incarnation) == seen.incarnation:
                    ask(self._cluster.agent(seen), notice, _ANSWER_S)
        except (NodeUnreachable, ConnectionClosed) as error:
            log.warning("notice not passed on", node=node, source=notice.source, error=str(error))
            with self._lock:
                self._begun.discard(notice.name)
