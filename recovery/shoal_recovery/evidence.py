"""What counts as the loss of a node: pure, from who was heard, by whom, and for how long not.

A closed connection is evidence by itself. Silence may be the silence of who listens: a second observer confirms it
early, one alone waits longer, and where an epoch may go on out of sight nobody is given up before its ranks have to
have stopped. A done step is a sign of life of all who took part in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An agent or a rank that the supervisor has reached at least once since its node appeared. `ended_by` is the
    signal that native code of a rank died of, where it had the time to say so."""

    node: str
    name: str
    connected: bool
    silent_s: float
    ended_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """What the agent of `node` says of other agents whose heartbeats reached it once: for how long none has."""

    node: str
    silent: tuple[tuple[str, float], ...]

    def hears(self, node: str, within_s: float) -> bool | None:
        """None: it never did."""
        return next((silent_s < within_s for other, silent_s in self.silent if other == node), None)

    def hears_any(self, but: str, within_s: float) -> bool:
        """Anybody else: who hears nobody may have lost its own network."""
        return any(silent_s < within_s for other, silent_s in self.silent if other != but)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """`silence_s` is enough alone, `silence_confirmed_s` when a second observer hears nothing, or sees trouble. A rank
    whose word has not been answered for `cut_off_s` does not vote."""

    silence_s: float = 2.0
    silence_confirmed_s: float = 0.5
    cut_off_s: float = 10.0

    @property
    def out_of_sight_s(self) -> float:
        """After so much silence a rank has stopped voting, whatever it heard: its last word was answered before."""
        return self.cut_off_s + self.silence_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """`vital` are the nodes that the epoch needs, `computing` those of its ranks, `troubled` those of ranks that say
    that a peer of theirs is gone; the epoch's last step was done `since_step_s` ago."""

    members: tuple[Member, ...]
    witnesses: tuple[Witness, ...]
    vital: frozenset[str]
    computing: frozenset[str]
    troubled: frozenset[str]
    since_step_s: float


def losses(sight: Sight, patience: Patience) -> dict[str, str]:
    """Vital nodes that are lost, each with the evidence."""
    dark = _dark(sight, patience)
    unseen = _unseen(sight, dark)
    found: dict[str, str] = {}
    for member in sight.members:
        if member.node in sight.vital and member.node not in found:
            evidence = _evidence(member, sight, patience, dark, unseen)
            if evidence is not None:
                found[member.node] = evidence
    return found


def may_be_cut_off(sight: Sight, patience: Patience) -> bool:
    """Whether what is not heard says more of who listens: no rank of the epoch can be stopped from here, or of three
    nodes or more all but one went dark at once."""
    return _unseen(sight, _dark(sight, patience))


class CutOff:
    """Whether a supervisor may have been cut off until just now, for so long that who is heard a moment later than the
    first would count as lost. `clock` in seconds."""

    def __init__(self, patience: Patience, clock: Callable[[], float]) -> None:
        self._patience = patience
        self._clock = clock
        self._since_s: float | None = None

    def ends(self, may_be: bool) -> bool:
        """Once, as soon as it may be so no more."""
        if may_be:
            self._since_s = self._clock() if self._since_s is None else self._since_s
            return False
        since_s, self._since_s = self._since_s, None
        long_s = self._patience.silence_s - self._patience.silence_confirmed_s
        return since_s is not None and self._clock() - since_s >= long_s


def severed(sight: Sight, patience: Patience, apart: Iterable[frozenset[str]]) -> tuple[str, str] | None:
    """Of vital nodes that are well, and yet do not reach each other (`apart`, in pairs), the one that reaches fewest,
    and the evidence; None where there is nothing of the kind."""
    well = sight.vital - _dark(sight, patience)
    pairs = [pair for pair in apart if pair <= well]
    if not pairs:
        return None
    count = Counter(node for pair in pairs for node in pair)
    node = max(count, key=lambda each: (count[each], each))
    others = frozenset(other for pair in pairs if node in pair for other in pair) - {node}
    return node, f"it and {names(others)} do not reach each other, though all answer"


def _silent_s(member: Member, sight: Sight) -> float:
    """Everybody whom an epoch needs has done its part in every step of it."""
    return min(member.silent_s, sight.since_step_s) if member.node in sight.vital else member.silent_s


def _dark(sight: Sight, patience: Patience) -> frozenset[str]:
    """Nodes that show no sign of life at all, but have not said goodbye either."""
    lit = {
        member.node
        for member in sight.members
        if not member.connected or _silent_s(member, sight) < patience.silence_confirmed_s
    }
    return frozenset(member.node for member in sight.members) - lit


def _unseen(sight: Sight, dark: frozenset[str]) -> bool:
    everyone = {member.node for member in sight.members}
    nobody_computes = bool(sight.computing) and sight.computing <= dark
    return nobody_computes or (len(everyone) >= 3 and len(everyone - dark) <= 1)


def _evidence(member: Member, sight: Sight, patience: Patience, dark: frozenset[str], unseen: bool) -> str | None:
    if not member.connected and member.ended_by is not None:
        return f"the connection to {member.name} closed: {member.ended_by}"
    if not member.connected:
        return f"the connection to {member.name} closed"
    silent_s, limit_s = _silent_s(member, sight), patience.silence_s
    if silent_s < patience.silence_confirmed_s:
        return None
    silence = f"{member.name} has been silent for {silent_s:.1f} s"
    if member.node in dark:
        deaf, hearing = _testimony(member.node, sight, patience.silence_confirmed_s)
        if deaf and not unseen:
            return f"{silence}, and the agent of {names(deaf)} does not hear its node either"
        if hearing:
            limit_s = patience.out_of_sight_s
    if unseen:  # also where one of its processes was just heard again, and the others were not yet
        limit_s = patience.out_of_sight_s
    others = sight.troubled - {member.node}
    if others and not unseen:
        return f"{silence}, and {names(others)} cannot reach a peer"
    return silence if silent_s >= limit_s else None


def _testimony(node: str, sight: Sight, within_s: float) -> tuple[frozenset[str], frozenset[str]]:
    """Whose agents hear nothing of this node, although they hear others; and whose do."""
    said = {
        witness.node: witness.hears(node, within_s)
        for witness in sight.witnesses
        if witness.node != node and (witness.hears(node, within_s) or witness.hears_any(node, within_s))
    }
    return (
        frozenset(other for other, hears in said.items() if hears is False),
        frozenset(other for other, hears in said.items() if hears),
    )


def names(nodes: Iterable[str]) -> str:
    """For sentences."""
    return ", ".join(sorted(nodes)) or "no node"
