"""Who has a job: one life of one cluster at a time, as its object store says, whatever store it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal_recovery.errors import StoreError
from shoal_recovery.store import open_store
from shoal_recovery.tenure import Life, claim, holder

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


def test_an_object_that_says_nothing_is_no_answer(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    store.put("j/tenures/000001.json", b"{}")
    with pytest.raises(StoreError, match=r"000001\.json does not say who has the job"):
        holder(store, "j")
