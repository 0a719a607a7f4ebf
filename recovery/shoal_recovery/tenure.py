"""Which life of which cluster may write the manifests of a job.

A cluster that nobody hears of may live on and train. Whoever goes on with one of its jobs elsewhere therefore says so
in the job's object store, the one thing that both can reach: it claims the next number, once. Whoever finds that the
newest number is another's has lost the job, and writes no manifest any more.

Where conditions are ignored, who dies while it claims a number holds it up for ever (`claims`). The next one is claimed
then: should that writer live after all, what it writes is not the newest number, and so it has nothing.

    JOB/tenures/NUMBER.json     {"cluster": ..., "incarnation": ...}
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from shoal_recovery.claims import MARK
from shoal_recovery.errors import StoreConflict, StoreError, StoreHeldUp
from shoal_recovery.store import Store

_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of a cluster: its name, and what tells this life from others. One whose head came back without what it
    knew before is in another life."""

    cluster: str
    incarnation: str


def holder(store: Store, job: str) -> tuple[int, Life | None]:
    """The newest number, and whose it is; 0 where nobody has claimed anything. Raises StoreError."""
    prefix = f"{job}/tenures/"
    stems = (name.removeprefix(prefix).removesuffix(".json") for name in store.list(prefix))
    number = max((int(stem) for stem in stems if stem.isdecimal()), default=0)
    if not number:
        return 0, None
    name = _name(job, number)
    try:
        said = json.loads(store.read(name))
        return number, Life(cluster=str(said["cluster"]), incarnation=str(said["incarnation"]))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(store.uri, f"{name} does not say who has the job: {error!r}") from error


def claim(store: Store, job: str, life: Life) -> None:
    """From now on the job is this life's, unless another one claimed a later number meanwhile. Raises StoreError."""
    text = json.dumps({"cluster": life.cluster, "incarnation": life.incarnation}).encode("ascii")
    held_up = 0
    while True:
        number, held_by = holder(store, job)
        if held_by == life:
            return
        number = max(number, held_up) + 1
        try:
            store.put_new(_name(job, number), text)
        except StoreHeldUp:
            held_up = number
        except StoreConflict:  # somebody was quicker, maybe this life itself
            pass
        else:
            _forget_claims(store, job, number)
            return


def _forget_claims(store: Store, job: str, newest: int) -> None:
    """Those of numbers before the newest one: who wins such a number has nothing by it."""
    for name in store.list(f"{job}/tenures/"):
        if MARK in name and name < _name(job, newest):
            store.delete(name)


def _name(job: str, number: int) -> str:
    return f"{job}/tenures/{number:0{_DIGITS}d}.json"
