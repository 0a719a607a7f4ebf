"""What a supervisor makes of the shares that it is told, entry by entry."""

from __future__ import annotations

from shoal_recovery.journal import Entry, Event
from shoal_recovery.journal_shares import ShareChanged, ShareTaken
from shoal_workers.share import Share, ToldShare

NONE: frozenset[str] = frozenset()


def told(version: int, nodes: str | None, reason: str = "") -> ToldShare:
    return ToldShare(version=version, nodes=None if nodes is None else tuple(nodes), reason=reason)


def test_what_is_told_is_written_once_and_taken_when_the_rest_is_left() -> None:
    said: list[Event] = []
    share = Share(said.append, None)
    share.hear()
    assert share.nodes is None and share.allows("z") and not share.given_up("az")
    assert share.settle(frozenset("abc"), elsewhere=True) is None
    share.tell(told(2, "ab", "c is given to another"))
    share.tell(told(1, None))
    share.hear()
    share.hear()
    assert said == [ShareChanged(version=2, nodes=("a", "b"), reason="c is given to another")]
    assert share.given_up("abc") == (("c", "c is given to another"),)
    assert share.settle(frozenset("abc"), elsewhere=True) is None, "a plan still needs it"
    assert share.settle(frozenset("ab"), elsewhere=False) is None, "the state may still be there alone"
    assert share.settle(frozenset("ab"), elsewhere=True) == frozenset("ab")
    assert share.settle(frozenset("ab"), elsewhere=True) is None
    assert said[1:] == [ShareTaken(version=2, nodes=("a", "b"))]


def test_more_nodes_are_taken_at_once() -> None:
    said: list[Event] = []
    share = Share(said.append, told(1, "a"))
    share.hear()
    assert share.settle(NONE, elsewhere=True) == {"a"}
    share.tell(told(2, "ab"))
    share.hear()
    assert share.settle(frozenset("a"), elsewhere=False) == frozenset("ab")
    share.tell(told(3, None))
    share.hear()
    assert share.nodes is None
    assert share.settle(frozenset("abc"), elsewhere=True) is None, "nobody waits for that"


def test_the_same_nodes_under_another_number_are_confirmed() -> None:
    """A node was taken away and given back before anybody heard of it."""
    said: list[Event] = []
    share = Share(said.append, told(1, "ab"))
    share.hear()
    share.settle(NONE, elsewhere=True)
    share.tell(told(3, "ab"))
    share.hear()
    assert share.settle(frozenset("ab"), elsewhere=False) == frozenset("ab")
    assert said[2:] == [ShareTaken(version=3, nodes=("a", "b"))]


def test_who_comes_next_knows_what_was_told() -> None:
    events: list[Event] = []
    first = Share(events.append, told(1, "ab"))
    first.hear()
    first.settle(NONE, elsewhere=True)
    first.tell(told(2, "a", "b is given to another"))
    first.hear()
    said: list[Event] = []
    second = Share(said.append, told(1, "ab"))  # as its actor was made with
    second.adopt(Entry(seq=seq, at_s=0.0, event=event) for seq, event in enumerate(events, start=1))
    second.hear()
    assert second.given_up("ab") == (("b", "b is given to another"),)
    assert second.settle(frozenset("a"), elsewhere=True) == {"a"}
    assert said == [ShareTaken(version=2, nodes=("a",))]
