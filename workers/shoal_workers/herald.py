"""Passes notices that reach the cluster as a whole on to the agents of the nodes that they are about. From there
on they are notices like any other. An agent that dies takes what it was told with it, so as long as a notice lasts it
is given again: to an agent that has it already it is no news.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import structlog

from shoal_workers import messages as m
from shoal_workers.nodes import Cluster, NodeUnreachable
from shoal_workers.roster import ask
from shoal_workers.wire import ConnectionClosed

log = structlog.get_logger()

_ANSWER_S = 5.0
_AGAIN_S = 5.0


class Herald:
    """Any thread may call."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._lock = threading.Lock()
        self._due_s: dict[str, float] = {}  # when to give which notice again

    def pass_on(self, node: str, notice: m.GiveNotice) -> None:
        """Returns at once: the agent of `node` (its id, or that of an incarnation) may have to be started. To be called
        often: one that could not be reached is tried the next time, one that could a while later, until the time of
        the notice is up."""
        with self._lock:
            due_s = self._due_s.get(notice.name)
            if due_s is not None and (self._clock() < due_s or notice.lead_s <= 0):
                return
            self._due_s[notice.name] = math.inf  # nobody else gives it meanwhile
        threading.Thread(target=self._give, args=(node, notice), name=notice.name, daemon=True).start()

    def _give(self, node: str, notice: m.GiveNotice) -> None:
        given = False
        try:
            for seen in self._cluster.nodes():
                # A connector that begins anew gives all notices again, and another machine may have taken the name.
                meant = node in (seen.node.id, seen.incarnation)
                if meant and self._cluster.first_meant(notice.name, seen.incarnation) == seen.incarnation:
                    ask(self._cluster.agent(seen), notice, _ANSWER_S)
            given = True
        except (NodeUnreachable, ConnectionClosed) as error:
            log.warning("notice not passed on", node=node, source=notice.source, error=str(error))
        except Exception:
            # Whatever the head of the cluster raises that has a hiccup: a notice that is lost costs a node's state, and
            # one that is given again costs nothing.
            log.exception("notice not passed on", node=node, source=notice.source)
        with self._lock:
            if given:
                self._due_s[notice.name] = self._clock() + _AGAIN_S
            else:
                del self._due_s[notice.name]
