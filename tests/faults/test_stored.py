"""Whoever looks into the stores of drills sees what must not be there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.stored import State, Stored, check_stored
from stored_steps import store_step
from supervised import tiny_job

from shoal_planner.parameters import parameters
from shoal_recovery.checkpoints import load_manifest, manifest_name, retire
from shoal_recovery.errors import ManifestUnreadable, StoreError
from shoal_recovery.journal import Entry, PlanAdopted
from shoal_recovery.manifest import manifest_to_json
from shoal_recovery.state import OWNED_KINDS, Kind
from shoal_recovery.store import Store, open_store

JOB_ID = "job_1"
LAST = 20
JOB = tiny_job("stdlib:", steps=LAST)
RNG = np.random.default_rng(7)
WEIGHTS: Mapping[str, Any] = {
    one.fqn: RNG.standard_normal(one.shape, dtype=np.float32) for one in parameters(JOB.model)
}
EXPECTED: State = {
    (kind, fqn): array.reshape(-1) if kind is Kind.MASTER else np.zeros(array.size, np.float32)
    for kind in OWNED_KINDS
    for fqn, array in WEIGHTS.items()
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Steps 10 and 20, both of epoch 1."""
    for step in (10, LAST):
        store_step(JOB, dict(WEIGHTS), JOB_ID, step, tmp_path)
    return open_store((tmp_path / "store").as_uri())


def adopted(epoch: int, step: int) -> Entry:
    event = PlanAdopted(epoch=epoch, plan_id="", step=step, reason="", plan={}, snapshot={})
    return Entry(seq=epoch, at_s=float(epoch), event=event)


def check(store: Store, *entries: Entry, expected: State = EXPECTED, spoilt: frozenset[int] = frozenset()) -> Stored:
    return check_stored(store, JOB_ID, entries or (adopted(1, 0),), expected, LAST, spoilt)


def of_epoch(store: Store, step: int, epoch: int) -> None:
    """The manifest of a step as another epoch would have written it, with the shards that are there."""
    manifest = dataclasses.replace(load_manifest(store, JOB_ID, step), epoch=epoch)
    store.put(manifest_name(JOB_ID, step), manifest_to_json(manifest, JOB.model).encode("ascii"))


def test_what_a_job_stored_is_good(store: Store) -> None:
    assert check(store) == Stored(problems=(), worst=0.0)


def test_shards_of_an_epoch_before_are_good_where_its_step_was_kept(store: Store) -> None:
    of_epoch(store, LAST, 2)
    assert check(store, adopted(1, 0), adopted(2, LAST)).problems == ()
    (problem, *_) = check(store, adopted(1, 0), adopted(2, LAST - 1)).problems
    assert "epochs [2] began before that step" in problem


def test_no_epoch_stores_a_step_that_a_later_one_had_left_out(store: Store) -> None:
    of_epoch(store, 10, 2)
    assert check(store, adopted(1, 0), adopted(2, LAST)).problems == (), "it was late, and lost nothing"
    (problem, *_) = check(store, adopted(1, 0), adopted(2, 9)).problems
    assert "step 20 was stored by epoch 1, step 10 by epoch 2, which began at step 9" in problem


def test_a_bit_that_changed_is_seen_unless_the_drill_did_it(store: Store) -> None:
    name = load_manifest(store, JOB_ID, 10).pieces[0].object
    content = bytearray(store.read(name))
    content[-1] ^= 1
    store.put(name, content)
    (problem,) = check(store).problems
    assert name in problem and "is not what was stored" in problem
    assert check(store, spoilt=frozenset({10})).problems == ()


def test_another_state_than_that_of_the_undisturbed_run_is_seen(store: Store) -> None:
    fqn = min(WEIGHTS)
    other = {**EXPECTED, (Kind.MASTER, fqn): EXPECTED[Kind.MASTER, fqn] * np.float32(1.01)}
    found = check(store, expected=other)
    assert found.worst == pytest.approx(0.01, rel=0.02)
    assert f"{fqn}/master and 0 more" in found.problems[0]


def test_the_last_step_must_be_there(store: Store) -> None:
    store.delete(manifest_name(JOB_ID, LAST))
    assert check(store).problems == ("the newest checkpoint is not step 20",)


def test_of_a_last_step_that_the_drill_spoilt_nothing_is_asked(store: Store) -> None:
    name = manifest_name(JOB_ID, LAST)
    store.put(name, store.read(name)[:100])
    assert check(store, spoilt=frozenset({LAST})).problems == ()
    with pytest.raises(ManifestUnreadable):
        check(store)


def test_what_is_retired_while_it_is_read_is_passed_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, read = load_manifest(store, JOB_ID, 10).pieces[0].object, store.read

    def retired(name: str, *place: int) -> bytes:
        if name == first:
            retire(store, JOB_ID, 1)
        return bytes(read(name, *place))

    monkeypatch.setattr(store, "read", retired)
    assert check(store).problems == ()


def test_a_shard_that_is_gone_is_no_retired_step(store: Store) -> None:
    store.delete(load_manifest(store, JOB_ID, 10).pieces[0].object)
    with pytest.raises(StoreError, match="is not there"):
        check(store)
