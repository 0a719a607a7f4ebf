"""Who a supervisor can speak to: agents and ranks of every node, found, connected and listened to.

Owns connections and the time of the last sign of life, taken by the reader of each connection, so that a busy
supervisor never mistakes its own delay for another's silence; tells agents whose heartbeats to listen for, and answers
those that come here. What silence means is decided elsewhere.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import structlog

from shoal_recovery.decide import Member, Witness
from shoal_workers import messages as m
from shoal_workers.contacts import Contact as Contact
from shoal_workers.greeting import job_pass
from shoal_workers.nodes import Cluster, NodeSeen, NodeUnreachable
from shoal_workers.rows import Row
from shoal_workers.wire import ConnectionClosed, connect

log = structlog.get_logger()

_FIRST_WORD_S = 5.0
_LOOK_S = 0.1  # whether who is asked is still there
_LAST_WORDS_S = 0.1
_ANSWER_S = 0.5  # between two answers to the heartbeats of one
_PREPARED_S = 45.0  # a rank that takes longer has to go on with it when all others wait
_NEIGHBOURS = 2  # of an agent on each side, which hear it


@dataclass(frozen=True, slots=True)
class Said:
    contact: Contact
    message: Any


@dataclass(frozen=True, slots=True)
class Closed:
    contact: Contact


@dataclass(frozen=True, slots=True)
class NodeReady:
    seen: NodeSeen


Event = Said | Closed | NodeReady


@dataclass(slots=True)
class _Entry:
    seen: NodeSeen
    contacts: list[Contact] = field(default_factory=list)
    ready: bool = False


class Roster:
    """Use from one thread, except where a method says otherwise; readers and recruiters run beside it."""

    def __init__(
        self,
        cluster: Cluster,
        job: str,
        events: queue.SimpleQueue[Event],
        clock: Callable[[], float],
        awake_s: Callable[[float, float], float] = lambda since_s, now_s: now_s - since_s,
        *,
        with_ranks: bool = True,
        order: m.Prepare | None = None,
    ) -> None:
        """Without ranks, agents alone are recruited. Where ranks are given an `order` to get ready, their node is when
        they are."""
        self._cluster = cluster
        self._order = order
        self._with_ranks = with_ranks
        self._job = job
        self._events = events
        self._clock = clock
        self._awake_s = awake_s
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._left: dict[str, Contact] = {}  # agents of nodes that were forgotten; what they hold outlives a rank
        self._recruiting: set[str] = set()
        # Incarnations of which a process ended while it got ready: an epoch has to find out why.
        self._unprepared: set[str] = set()
        self.nodes: tuple[NodeSeen, ...] = ()
        self.after_step = 0
        self.epoch: int | None = None  # the highest one claimed; as long as it is not known nobody is answered
        self._looking = threading.Thread()
        self.only: frozenset[str] | None = None  # the nodes that are looked at; None: all
        self.going: frozenset[str] = frozenset()  # of these, those that are not
        self._sight_s = -math.inf  # since when members can be heard
        self.forgive_s = math.inf  # who was silent for longer is as good as gone, and has to be recruited anew

    def refresh(self) -> None:
        """Looks at the cluster, beside everything else: its head may be away for a while. Agents hear who is there."""
        if not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, name="look", daemon=True)
            self._looking.start()
        agents = [agent for agent in self.agents() if agent.connected]
        for agent, peers in zip(agents, _neighbours(agents), strict=True):
            if agent.attends != peers:
                agent.attends = peers
                agent.send(m.Attend(peers=list(peers)))

    def _look(self) -> None:
        """Begins to recruit every node that nobody recruits yet."""
        only, going = self.only, self.going
        seen_now = (s for s in self._cluster.nodes() if only is None or s.node.id in only)
        nodes = self.nodes = tuple(s for s in seen_now if s.node.id not in going)
        for seen in nodes:
            with self._lock:
                if seen.node.id in self._entries or seen.incarnation in self._recruiting:
                    continue
                self._recruiting.add(seen.incarnation)
            threading.Thread(target=self._recruit, args=(seen,), name=f"recruit-{seen.node.id}", daemon=True).start()

    @property
    def expected(self) -> frozenset[str]:
        return frozenset(seen.node.id for seen in self.nodes)

    def ready(self) -> frozenset[str]:
        """Nodes whose agent and ranks all are connected."""
        with self._lock:
            entries = list(self._entries.items())
        return frozenset(
            node for node, entry in entries if entry.ready and all(contact.connected for contact in entry.contacts)
        )

    def coming(self) -> frozenset[str]:
        """Nodes that are being recruited and have an agent already."""
        with self._lock:
            return frozenset(node for node, entry in self._entries.items() if not entry.ready)

    def seen(self, node: str) -> NodeSeen:
        with self._lock:
            return self._entries[node].seen

    def members(self, now_s: float) -> tuple[Member, ...]:
        return tuple(
            Member(
                node=contact.node,
                name=contact.name,
                connected=contact.connected,
                silent_s=self._doubtful_s(contact, now_s),
                ended_by=contact.ended_by,
            )
            for contact in self.contacts()
        )

    def witnesses(self, now_s: float, within_s: float) -> tuple[Witness, ...]:
        """Agents that were heard within this time, and whom they hear."""
        return tuple(
            Witness(node=agent.node, silent=agent.silent)
            for agent in self.agents()
            if agent.connected and self._silent_s(agent, now_s) < within_s
        )

    def is_gone(self, contact: Contact, silence_s: float) -> bool:
        """Whether it closed its connection, or was not heard for so long."""
        return not contact.connected or self._silent_s(contact, self._clock()) > silence_s

    def sees_again(self) -> None:
        """Nobody could be heard until now. Words that were on their way come again one connection after the other, as
        late as the network doubles its pauses: until then silence is held against nobody."""
        self._sight_s = self._clock()

    def _doubtful_s(self, contact: Contact, now_s: float) -> float:
        """How much silence is held against it."""
        return max(0.0, min(self._silent_s(contact, now_s), now_s - self._sight_s))

    def _silent_s(self, contact: Contact, now_s: float) -> float:
        """Time in which nobody could listen here does not count."""
        return max(0.0, self._awake_s(contact.last_heard_s, now_s))

    def silences_s(self) -> dict[str, float]:
        """By node, for how many seconds nothing was heard of any of its processes, whoever was busy meanwhile. From any
        thread."""
        now_s = self._clock()
        with self._lock:
            contacts = [*self._left.values(), *(each for entry in self._entries.values() for each in entry.contacts)]
        found: dict[str, float] = {}
        for contact in contacts:
            silent_s = max(0.0, now_s - contact.last_heard_s)
            found[contact.node] = min(silent_s, found.get(contact.node, silent_s))
        return found

    def wordless_s(self, nodes: Iterable[str]) -> float:
        """For how long none of the ranks of these nodes has said anything but that it lives; 0 where there are none."""
        now_s = self._clock()
        return min((max(0.0, self._awake_s(rank.last_word_s, now_s)) for rank in self.ranks(nodes)), default=0.0)

    def contacts(self, nodes: Iterable[str] | None = None) -> tuple[Contact, ...]:
        """Of these nodes, or of all."""
        wanted = None if nodes is None else frozenset(nodes)
        with self._lock:
            return tuple(
                contact
                for node, entry in sorted(self._entries.items())
                if wanted is None or node in wanted
                for contact in entry.contacts
            )

    def ranks(self, nodes: Iterable[str]) -> tuple[Contact, ...]:
        return tuple(contact for contact in self.contacts(nodes) if contact.index is not None)

    def agents(self, nodes: Iterable[str] | None = None) -> tuple[Contact, ...]:
        return tuple(contact for contact in self.contacts(nodes) if contact.index is None)

    def living_agents(self, now_s: float, silence_s: float) -> tuple[Contact, ...]:
        """Every agent that answers and was heard of within this time, also of nodes that lost a rank."""
        with self._lock:
            known = dict(self._left)
        known |= {contact.node: contact for contact in self.agents() if contact.connected}
        living = (contact for contact in known.values() if contact.connected)
        return tuple(
            sorted((c for c in living if self._silent_s(c, now_s) <= silence_s), key=lambda contact: contact.node)
        )

    def there(self, now_s: float, silence_s: float) -> frozenset[str]:
        """Nodes whose agent lives, or may be heard again on the connection that it has: what it has told holds. One
        that was forgotten, or is heard after longer than `forgive_s`, is recruited anew and tells all of it again."""
        held = {a.node for a in self.agents() if a.connected and self._silent_s(a, now_s) <= self.forgive_s}
        return frozenset(held | {agent.node for agent in self.living_agents(now_s, silence_s)})

    def drop(self, keep: frozenset[str], now_s: float, silence_s: float) -> frozenset[str]:
        """Forgets nodes, all but those in `keep`, that have lost a connection or are silent: nobody else would, and
        they can only be recruited anew. Which ones."""
        gone = {
            contact.node
            for contact in self.contacts()
            if not contact.connected or self._doubtful_s(contact, now_s) > silence_s
        }
        with self._lock:
            whole = {node for node, entry in self._entries.items() if entry.ready}
        dropped = frozenset(gone & whole - keep)
        for node in sorted(dropped):
            log.info("node dropped", node=node)
            self.forget(node)
        return dropped

    def forget(self, node: str) -> None:
        """The node is recruited again if the cluster shows it. Its agent, if it lives, is still listened to."""
        with self._lock:
            entry = self._entries.pop(node, None)
        self._let_go(entry.contacts if entry else ())

    def _let_go(self, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            if contact.index is None and contact.connected:
                self._keep_agent(contact.node, contact)
            else:
                contact.connection.close()

    def keep_to(self, only: frozenset[str] | None) -> None:
        """Nobody else is recruited, nor listened to but for what their agents hold."""
        self.only = only
        for node in {contact.node for contact in self.contacts()} - (only or frozenset()) if only is not None else ():
            log.info("node left", node=node)
            self.forget(node)

    def leave(self, going: frozenset[str]) -> frozenset[str]:
        """As `keep_to`, by those whom nobody listens to, until this is said of fewer: who was listened to until now."""
        self.going = going
        left = going & {contact.node for contact in self.contacts()}
        for node in sorted(left):
            log.info("node left", node=node)
            self.forget(node)
        return left

    def close(self) -> None:
        for node in {contact.node for contact in self.contacts()}:
            self.forget(node)
        with self._lock:
            left = list(self._left.values())
        for contact in left:
            contact.connection.close()

    def _keep_agent(self, node: str, agent: Contact | None) -> None:
        """What is left of a node that was forgotten; None when it is recruited again."""
        with self._lock:
            before = self._left.pop(node, None)
            if agent is not None:
                self._left[node] = agent
        if before is not None and before is not agent:
            before.connection.close()

    def _recruit(self, seen: NodeSeen) -> None:
        entry = _Entry(seen)
        starting: dict[int | None, Future[tuple[str, int]]] = {None: Future()}
        starting |= {index: Future() for index in range(seen.node.devices if self._with_ranks else 0)}
        for index, address in starting.items():
            arguments = (seen, index, address)
            threading.Thread(target=self._start, args=arguments, name=f"start-{seen.node.id}", daemon=True).start()
        order = None if seen.incarnation in self._unprepared else self._order
        try:
            for index, address in starting.items():
                self._enter(entry, index, address.result(), order)
            if order is not None:
                self._await_prepared(entry)
            entry.ready = True
            self._events.put(NodeReady(seen))
        except (NodeUnreachable, ConnectionClosed, m.ProtocolError) as error:
            log.warning("node not recruited", node=seen.node.id, error=str(error))
            self._let_go(entry.contacts)  # first: the supervisor must not find its agent gone, with what that has told
            with self._lock:
                if self._entries.get(seen.node.id) is entry:
                    del self._entries[seen.node.id]
        finally:
            wait(starting.values())  # or those that hang would be asked for again and again while another one fails
            with self._lock:
                self._recruiting.discard(seen.incarnation)

    def _start(self, seen: NodeSeen, index: int | None, address: Future[tuple[str, int]]) -> None:
        """All processes of a node at once: each of them takes seconds to load what it needs."""
        try:
            known = self._cluster.agent(seen) if index is None else self._cluster.rank(seen, self._job, index)
            address.set_result(known)
        except Exception as error:  # NodeUnreachable; what else it may be is for whoever waits, too
            address.set_exception(error)

    def _await_prepared(self, entry: _Entry) -> None:
        """Raises NodeUnreachable where one of its processes is gone meanwhile."""
        deadline_s = self._clock() + _PREPARED_S
        for rank in [contact for contact in entry.contacts if contact.index is not None]:
            while not rank.prepared.wait(_LOOK_S) and self._clock() < deadline_s:
                for contact in entry.contacts:
                    if self.is_gone(contact, self.forgive_s):
                        self._unprepared.add(entry.seen.incarnation)
                        raise NodeUnreachable(contact.node, f"{contact.name} was lost while its ranks got ready")

    def _enter(self, entry: _Entry, index: int | None, address: tuple[str, int], order: m.Prepare | None) -> None:
        connection = connect(address, shown=None if index is None else job_pass(self._job))
        # The first word is waited for: the kernel of a process that is stopped accepts connections, too.
        connection.set_timeout(_FIRST_WORD_S)
        connection.send(m.encode(m.Watch(job=self._job, after_step=self.after_step)))
        try:
            wire, _ = connection.receive()
        except ConnectionClosed:
            connection.close()
            raise
        connection.set_timeout(None)
        connection.set_send_timeout(_FIRST_WORD_S)  # or a process that is stopped could hold up whoever gives orders
        contact = Contact(
            node=entry.seen.node.id,
            index=index,
            address=address,
            connection=connection,
            last_heard_s=self._clock(),
            last_word_s=self._clock(),
        )
        with self._lock:
            entry.contacts.append(contact)
            self._entries[contact.node] = entry
        if index is None:
            self._keep_agent(contact.node, None)
        self._hear(contact, wire)
        threading.Thread(target=self._listen, args=(contact,), name=f"listen-{contact.name}", daemon=True).start()
        if order is not None and index is not None:
            contact.send(order)

    def _listen(self, contact: Contact) -> None:
        try:
            while True:
                wire, _ = contact.connection.receive()
                self._hear(contact, wire)
        except (ConnectionClosed, m.ProtocolError) as error:
            contact.ended_by = self._signal(contact)
            log.info("contact closed", contact=contact.name, why=contact.ended_by or str(error))
            contact.connected = False
            contact.connection.close()  # also of an entry that a newer one of its node has taken the place of
            self._events.put(Closed(contact))

    def _signal(self, contact: Contact) -> str | None:
        """What a rank process died of, as it wrote down on its node. Takes a millisecond; where the agent is busy or
        gone, too, the loss is told without it."""
        known = self.contacts([contact.node])
        agent = next((each for each in known if each.index is None and each.connected), None)
        if contact.pid is None or agent is None or contact not in known:
            return None
        question = m.GetSignal(job=self._job, pid=contact.pid)
        try:
            answer = ask(agent.address, question, _LAST_WORDS_S, gone=lambda: not agent.connected)
        except (ConnectionClosed, m.ProtocolError):
            return None
        return answer.name if isinstance(answer, m.SignalIs) else None

    def _hear(self, contact: Contact, wire: dict[str, Any]) -> None:
        now_s = self._clock()
        if (silent_s := self._silent_s(contact, now_s)) > self.forgive_s:
            raise ConnectionClosed(f"it was silent for {silent_s:.1f} s")
        contact.last_heard_s = now_s
        message = m.decode(wire)
        if isinstance(message, m.Heartbeat):
            contact.silent = tuple((node, silent_s) for node, silent_s in message.silent)
            self._answer(contact, message)
        else:
            contact.last_word_s = now_s
            if isinstance(message, m.Hello):  # known before anybody plans with its node
                contact.pid, contact.cuda_devices = message.pid, message.cuda_devices
            if isinstance(message, m.Prepared):
                contact.prepared.set()
            self._events.put(Said(contact, message))

    def _answer(self, contact: Contact, heartbeat: m.Heartbeat) -> None:
        if self.epoch is not None and heartbeat.at_s - contact.answered_s >= _ANSWER_S:
            contact.answered_s = heartbeat.at_s
            contact.send(m.Heard(at_s=heartbeat.at_s, epoch=self.epoch))


def _neighbours(agents: list[Contact]) -> list[tuple[Row, ...]]:
    """Of each agent, those beside it in a ring: it sends to few, and each is heard by several. The ring is in no order
    that machines are in, too: those beside it are not lost together with it."""
    ring = sorted(agents, key=lambda agent: (zlib.crc32(agent.node.encode()), agent.node))
    places = {agent.node: place for place, agent in enumerate(ring)}
    found = []
    for agent in agents:
        place = places[agent.node]
        beside = (ring[(place + offset) % len(ring)] for offset in range(-_NEIGHBOURS, _NEIGHBOURS + 1))
        peers = {peer.node: [peer.node, *peer.address] for peer in beside if peer is not agent}
        found.append(tuple(peers[node] for node in sorted(peers)))
    return found


def ask(address: tuple[str, int], request: Any, timeout_s: float, gone: Callable[[], bool] = lambda: False) -> Any:
    """One question to an agent on a connection of its own. Raises ConnectionClosed, also as soon as it is `gone`."""
    connection = connect(address, min(timeout_s, _FIRST_WORD_S))
    try:
        connection.set_timeout(timeout_s)
        connection.send(m.encode(request))
        deadline_s = time.monotonic() + timeout_s
        while not connection.poll(_LOOK_S):
            if gone() or time.monotonic() > deadline_s:
                raise ConnectionClosed(f"{address[0]}:{address[1]} did not answer")
        return m.decode(connection.receive()[0])
    finally:
        connection.close()
