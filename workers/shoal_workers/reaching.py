"""Which nodes of an epoch do not reach each other although both are well: no supervisor sees that by itself.

When a rank loses its peers and no node is lost, the agents of nodes that exchange are asked to reach each other, over
connections like those that ranks have. Owns who is asked, how often, and what the answers mean. What comes of it is
decided elsewhere.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import structlog

from shoal_planner.plan import Plan
from shoal_workers import messages as m
from shoal_workers.epoch_view import EpochView
from shoal_workers.roster import Contact, Roster, ask
from shoal_workers.wire import ConnectionClosed

log = structlog.get_logger()

# A machine that others share may stand still for one of them.
_TRIES = 3
_ANSWER_S = 5.0
_AT_ONCE = 64
# Of the largest plans not all: those within a pipeline come first.
_MOST_PAIRS = 2048

Pair = frozenset[str]


class Reaching:
    """Use from one thread; the agents are asked beside it."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._asked: int | None = None
        self._found: frozenset[Pair] | None = None

    def apart(self, epoch: EpochView | None) -> frozenset[Pair] | None:
        """Pairs of nodes that do not reach each other, where a rank of this epoch has lost its peers; None as long as
        nobody knows. Begins to find out."""
        if epoch is None or not epoch.has_lost_peers:
            return frozenset()
        if self._asked != epoch.number:
            self._asked, self._found = epoch.number, None
            agents = {agent.node: agent for agent in self._roster.agents(epoch.computing)}
            threading.Thread(target=self._find, args=(epoch, agents), name="reaching", daemon=True).start()
        return self._found

    def _find(self, epoch: EpochView, agents: dict[str, Contact]) -> None:
        pairs = list(itertools.islice((pair for pair in pairs_of(epoch.plan) if pair <= agents.keys()), _MOST_PAIRS))
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            reached = pool.map(lambda pair: _reach(*(agents[node] for node in sorted(pair))), pairs)
            found = frozenset(pair for pair, well in zip(pairs, reached, strict=True) if not well)
        if found:
            log.warning("nodes do not reach each other", epoch=epoch.number, pairs=sorted(map(sorted, found)))
        if self._asked == epoch.number:
            self._found = found


def pairs_of(plan: Plan) -> Iterator[Pair]:
    """Every pair of the plan's nodes, once; first those whose ranks send to each other: in a stage, from one stage to
    the next, and where they hold the same layers."""
    together: list[frozenset[str]] = []
    holders: dict[int, set[str]] = {}
    for pipeline in plan.pipelines:
        stages = [frozenset(replica.node for replica in stage.replicas) for stage in pipeline.stages]
        together += [here | there for here, there in itertools.pairwise(stages)] or stages
        for stage, nodes in zip(pipeline.stages, stages, strict=True):
            for first, end in stage.layers:
                for layer in range(first, end):
                    holders.setdefault(layer, set()).update(nodes)
    everyone = frozenset(device.node for device in plan.devices())
    told: set[Pair] = set()
    for group in (*together, *dict.fromkeys(map(frozenset, holders.values())), everyone):
        for pair in map(frozenset, itertools.combinations(sorted(group), 2)):
            if pair not in told:
                told.add(pair)
                yield pair


def _reach(here: Contact, there: Contact) -> bool:
    """Whether the first of these agents reaches the second. Where it cannot be asked, nobody knows: then it does."""
    host, port = there.address
    for _ in range(_TRIES):
        try:
            answer = ask(here.address, m.ProbeLink(host=host, port=port, limit_s=0.0), _ANSWER_S)
        except ConnectionClosed:
            return True
        if not (isinstance(answer, m.Done) and answer.problem):
            return True
    return not (here.connected and there.connected)
