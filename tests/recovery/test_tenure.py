"""Who has a job: one life of one cluster at a time, as its object store says, whatever store it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import new_place

from shoal_recovery import claims
from shoal_recovery.claims import MARK, put_claimed
from shoal_recovery.errors import StoreError
from shoal_recovery.store import Data, open_store
from shoal_recovery.store_directory import DirectoryStore
from shoal_recovery.tenure import Life, claim, holder

FIRST = Life(cluster="first", incarnation="0")
OLD, NEW = Life(cluster="a", incarnation="1"), Life(cluster="b", incarnation="2")


def test_who_claims_last_has_the_job(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    assert holder(store, "j") == (0, None)
    for _ in range(2):
        claim(store, "j", OLD)
        assert holder(store, "j") == (1, OLD)
    claim(store, "j", NEW)
    assert holder(store, "j") == (2, NEW)
    assert holder(store, "k") == (0, None)
    claim(store, "j", OLD)
    assert holder(store, "j") == (3, OLD)


def test_of_many_at_once_each_gets_a_number_of_its_own(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    lives = [Life(cluster="c", incarnation=str(number)) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda life: claim(store, "j", life), lives))
    number, last = holder(store, "j")
    assert (number, last in lives) == (6, True)


class Overwriting(DirectoryStore):
    """As servers are that ignore conditions: writers agree by claims. Before the call of this number `meanwhile` takes
    place, in the middle of somebody else's claim."""

    def __init__(self, folder: Path, at: int | None = None, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__(folder)
        self._calls, self._at, self._meanwhile = itertools.count(), at, meanwhile
        self._times = itertools.count()

    def _turn(self) -> None:
        if next(self._calls) == self._at:
            self._meanwhile()

    def put(self, name: str, data: Data) -> None:
        self._turn()
        assert MARK in name or name not in super().list(name), f"{name} is written twice"
        super().put(name, data)

    def put_new(self, name: str, data: Data) -> None:
        put_claimed(self, name, bytes(data), clock=lambda: float(next(self._times)), pause=lambda _: None)

    def list(self, prefix: str) -> tuple[str, ...]:
        self._turn()
        return super().list(prefix)

    def delete(self, name: str) -> None:
        self._turn()
        super().delete(name)


class Dies(Exception):
    pass


def dies() -> None:
    raise Dies


CALLS = range(13)  # of one claim where nobody else is


@pytest.mark.parametrize("call", CALLS)
def test_whoever_dies_while_it_claims_holds_up_nobody(tmp_path: Path, call: int) -> None:
    claim(Overwriting(tmp_path), "j", FIRST)
    with pytest.raises(Dies):
        claim(Overwriting(tmp_path, call, dies), "j", OLD)
    store = Overwriting(tmp_path)
    claim(store, "j", NEW)
    assert holder(store, "j")[1] == NEW
    claim(store, "j", FIRST)
    number, has = holder(store, "j")
    assert has == FIRST
    left = [name for name in store.list("j/tenures/") if MARK in name]
    assert not [name for name in left if name < f"j/tenures/{number:06d}"], "claims that nobody waits for any more"


@pytest.mark.parametrize("call", CALLS)
def test_whoever_only_seemed_dead_has_the_newest_number_or_nothing(tmp_path: Path, call: int) -> None:
    """It stands still at any point, another one claims the job, and it goes on."""
    there = Overwriting(tmp_path)
    between: list[tuple[int, Life | None]] = []

    def takes_over() -> None:
        claim(there, "j", NEW)
        between.append(holder(there, "j"))

    claim(there, "j", FIRST)
    claim(Overwriting(tmp_path, call, takes_over), "j", OLD)
    assert [has for _, has in between] == [NEW]
    after = holder(there, "j")
    assert after == between[0] or (after[1] == OLD and after[0] > between[0][0])


def test_a_real_server_that_ignores_conditions_takes_the_next_number(
    rclone_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_PATIENCE_S", 0.2)
    store = open_store(new_place())
    claim(store, "j", OLD)
    store.put(f"j/tenures/000002.json{MARK}dead-1", b"-")
    store.put(f"j/tenures/000003.json{MARK}dead-2", b"-")
    claim(store, "j", NEW)
    assert holder(store, "j") == (4, NEW)
    assert store.list("j/tenures/") == ("j/tenures/000001.json", "j/tenures/000004.json")


def test_an_object_that_says_nothing_is_no_answer(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    store.put("j/tenures/000001.json", b"{}")
    with pytest.raises(StoreError, match=r"000001\.json does not say who has the job"):
        holder(store, "j")
