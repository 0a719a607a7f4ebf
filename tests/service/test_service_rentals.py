"""On whose account the machines of a pool are, as they start, join, change over and go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shoal_planner.provisioning import PoolSeen
from shoal_service.rentals import Claims, Rental, turned_over


class Books:
    """Of a pool, written down look by look; `all` also has what is over."""

    def __init__(self, **pool: int) -> None:
        self.pool = PoolSeen(name="spot", least=pool.get("least", 0), most=9, price_per_hour=0.5)
        self.all: dict[int, Rental] = {}
        self.going_on: list[Rental] = []

    def look(
        self, wanted: Mapping[str, int], users: Mapping[str, str | None] | None = None, **pool: object
    ) -> list[tuple[str | None, str | None]]:
        """Nodes and jobs, the longest on the account first."""
        self.pool = replace(self.pool, **pool)  # type: ignore[arg-type]
        claims = Claims(wanted=wanted, users=users or {})
        found = turned_over(self.pool, self.going_on, claims)
        named = {each.id: each for each in found.joined}
        stay = [named.get(each.id, each) for each in self.going_on if each.id not in found.over]
        begun = [replace(each, id=len(self.all) + index) for index, each in enumerate(found.begun)]
        self.going_on = [*stay, *begun]
        self.all |= {each.id: each for each in self.going_on if each.id is not None}
        assert not turned_over(self.pool, self.going_on, claims), "the same look changes nothing more"
        return [(each.node, each.job) for each in self.going_on]


def test_a_machine_is_on_the_account_of_a_job_from_its_start_until_it_goes() -> None:
    books = Books()
    assert books.look({"j": 2}) == []
    assert books.look({"j": 2}, starting=2) == [(None, "j"), (None, "j")]
    assert books.look({"j": 2}, starting=1, nodes=("a",)) == [("a", "j"), (None, "j")]
    assert books.look({"j": 2}, starting=0) == [("a", "j")], "one has failed to start"
    assert books.look({"j": 2}, {"a": "j"}, nodes=("a", "b")) == [("a", "j"), ("b", "j")]
    assert books.look({}, nodes=("a", "b")) == [("a", "j"), ("b", "j")], "idle, and nobody else wants it"
    assert books.look({}, nodes=("b",)) == [("b", "j")]
    assert books.look({}, nodes=()) == [] and len(books.all) == 3


def test_while_a_pool_cannot_be_reached_what_starts_goes_on_to_start() -> None:
    books = Books()
    books.look({"j": 3}, starting=2)
    assert books.look({"j": 3}, starting=0, unreached="timed out") == [(None, "j"), (None, "j")]
    assert books.look({"j": 3}, nodes=("a",)) == [("a", "j"), (None, "j")]
    assert books.look({"j": 3}, starting=1, unreached=None) == [("a", "j"), (None, "j")] and len(books.all) == 2


def test_each_job_pays_for_what_it_lacks_and_for_what_its_plan_stands_on() -> None:
    books = Books()
    wanted = {"first": 1, "second": 2}
    assert books.look(wanted, starting=3) == [(None, "first"), (None, "second"), (None, "second")]
    nodes = ("a", "b", "c")
    assert books.look(wanted, starting=0, nodes=nodes) == [("a", "first"), ("b", "second"), ("c", "second")]
    # The scheduler has dealt otherwise, and one went to a job that may not rent: that pays by its plan alone.
    users = {"a": "second", "b": "first", "c": None}
    assert books.look(wanted, users) == [("a", "second"), ("b", "first"), ("c", None)]
    assert books.look(wanted, {"a": "second", "b": "first"}) == [("a", "second"), ("b", "first"), ("c", "second")]
    # One that has ended, or wants fewer, pays no more for what another one waits with.
    assert set(books.look({"second": 3}, {"a": "second"})) == {("a", "second"), ("b", "second"), ("c", "second")}
    assert set(books.look({"second": 1, "third": 1}, {"a": "second"})) == {
        ("a", "second"),
        ("b", "second"),
        ("c", "third"),
    }


def test_the_least_of_a_pool_are_its_operators() -> None:
    books = Books(least=2)
    assert books.look({}, nodes=("a", "b")) == [("a", None), ("b", None)]
    assert books.look({"j": 3}, starting=1) == [("a", None), ("b", None), (None, "j")]
    users = {"a": "j", "b": "j", "c": "j"}
    assert books.look({"j": 3}, users, starting=0, nodes=("a", "b", "c")) == [("a", None), ("b", None), ("c", "j")]
    assert books.look({"other": 2}) == [("a", None), ("b", None), ("c", "j")], "those of the operator suffice"
    assert len(books.all) == 3


def test_another_price_is_another_rental() -> None:
    books = Books()
    books.look({"j": 1}, nodes=("a",))
    books.look({"j": 1}, price_per_hour=0.7)
    assert [each.price_per_hour for each in books.all.values()] == [0.5, 0.7]
    assert [each.price_per_hour for each in books.going_on] == [0.7]


@pytest.mark.parametrize("twice", [("a", "a"), ("a", None)])
def test_what_was_written_down_twice_is_so_once(twice: tuple[str, str | None]) -> None:
    """By two replicas, one of which was slow."""
    books = Books()
    books.going_on = [
        Rental(id=index, pool="spot", node=node, job="j", price_per_hour=0.5) for index, node in enumerate(twice)
    ]
    assert books.look({"j": 1}, nodes=("a",)) == [("a", "j")]
