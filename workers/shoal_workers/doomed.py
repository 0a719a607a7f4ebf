"""Which nodes are to go away, as their agents tell a supervisor, and what comes of each notice. Owns its part of the
journal; not what is done about it (`decide`).

When a notice is due is taken by the clock of whoever hears it. A notice is over when the node is gone, when it is
withdrawn, or when the node is still there long after its time. One that stands in the journal alone, while the agent of
the node says nothing of it, was of a machine that went while nobody watched.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal_recovery.journal import NodeNoticed, NoticeEnded
from shoal_workers.messages import Noticed, Withdrawn
from shoal_workers.record import JobRecord

_TOLD_WITHIN_S = 2.0  # an agent begins with what it was told of its node's end


class Doomed:
    """Use from one thread. `overdue_s` is how long after its time a node may still go."""

    def __init__(self, record: JobRecord, clock: Callable[[], float], overdue_s: float) -> None:
        self._record = record
        self._clock = clock
        self._overdue_s = overdue_s
        self._due_s: dict[tuple[str, str], float] = {}
        self._untold_s: dict[tuple[str, str], float] = {}

    def hear(self, node: str, said: Noticed | Withdrawn) -> None:
        key = node, said.source
        match said:
            case Noticed():
                event = NodeNoticed(node=node, source=said.source, why=said.why, lead_s=said.lead_s)
                if key not in self._record.notices and said.left_s < -self._overdue_s:
                    return  # it came to nothing before this supervisor was there
                self._due_s[key] = self._clock() + said.left_s
                if self._record.notices.get(key) != event:  # or an earlier supervisor has heard it already
                    self._record.append(event)
            case Withdrawn() if key in self._record.notices:
                self._end(key, "withdrawn")
            case Withdrawn():
                pass

    def settle(self, living: frozenset[str]) -> None:
        """Ends notices that are over; `living` are the nodes whose agents answer, or may yet on the connection on which
        they have told what they know."""
        now_s = self._clock()
        for key in sorted(self._record.notices):
            if key[0] not in living or self._untold(key, now_s):
                self._end(key, "gone")
            elif now_s > self._due_s.get(key, now_s) + self._overdue_s:
                self._end(key, "overdue")

    def _untold(self, key: tuple[str, str], now_s: float) -> bool:
        return key not in self._due_s and now_s - self._untold_s.setdefault(key, now_s) > _TOLD_WITHIN_S

    def left_s(self) -> dict[str, float]:
        """How long each node that is to go away is still there."""
        now_s = self._clock()
        found: dict[str, float] = {}
        for key in self._record.notices:
            left_s = max(0.0, self._due_s.get(key, now_s) - now_s)
            found[key[0]] = min(left_s, found.get(key[0], left_s))
        return found

    def told(self) -> tuple[tuple[str, str], ...]:
        """Each node that is to go away, and what was told, as one line; the notice that is due first."""
        now_s = self._clock()
        found: dict[str, str] = {}
        for key, event in sorted(self._record.notices.items(), key=lambda item: self._due_s.get(item[0], now_s)):
            left_s = self._due_s.get(key, now_s) - now_s
            when = f"in {left_s:.0f} s" if left_s > 0 else "by now"
            found.setdefault(event.node, f"{event.source}: {event.why}, {when}")
        return tuple(sorted(found.items()))

    def _end(self, key: tuple[str, str], outcome: str) -> None:
        self._due_s.pop(key, None)
        self._untold_s.pop(key, None)
        self._record.append(NoticeEnded(node=key[0], source=key[1], outcome=outcome))
