"""Checkpoints as jobs leave them, for tests that read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import layouts
import numpy as np

from shoal_planner.job import JobSpec
from shoal_planner.plan import Pipeline, Plan, Replica, Stage
from shoal_recovery.checkpoints import commit
from shoal_recovery.hf_beside import files_beside, keep_beside
from shoal_recovery.patient_disk import PatientDisk
from shoal_recovery.shard_map import shard_map
from shoal_recovery.state import OWNED_KINDS, Kind, Manifest, Snapshot
from shoal_recovery.store import open_store
from shoal_workers.rows import stored_from_rows
from shoal_workers.shards import snapshot_name
from shoal_workers.stored_copies import StoredCopies
from shoal_workers.tokenizing import end_token_of
from shoal_workers.uploads import Uploads


def store_step(job: JobSpec, weights: dict[str, Any], job_id: str, step: int, place: Path) -> None:
    """As agents and supervisor do it: two stages, the second in two tensor-parallel parts. `weights` are numpy arrays,
    by name; the store is `place`/store."""
    stages = (
        Stage(layers=((0, 1),), replicas=(Replica(node="a", devices=(0,)),)),
        Stage(layers=((1, job.model.layers),), replicas=(Replica(node="b", devices=(0, 1), tp=2),)),
    )
    plan = Plan(pipelines=(Pipeline(micro_batch=1, micro_batches=4, stages=stages),))
    truth = {(fqn, kind): np.zeros(array.size, "<f4") for fqn, array in weights.items() for kind in OWNED_KINDS}
    truth |= {(fqn, Kind.MASTER): array.reshape(-1) for fqn, array in weights.items()}
    disk = PatientDisk()
    stored, pieces = StoredCopies(place / "stored", lambda: -1, disk), []
    stored.start()
    uploads = Uploads(place / "on-its-way", stored, open_store, disk)
    uploads.start()
    done = uploads.watch(job_id)
    for state in shard_map(plan, job.model).ranks:
        held = layouts.shard(state, truth)
        start = held.pieces[0].offset
        shifted = tuple(replace(piece, offset=piece.offset - start) for piece in held.pieces)
        snapshot = Snapshot(node="a", name=snapshot_name(1, state.rank), step=step, pieces=shifted)
        uploads.add(job_id, snapshot, (place / "store").as_uri(), memoryview(held.content)[start:])
        result = done.get(timeout=10.0)
        assert result.problem is None
        pieces += stored_from_rows(result.rows)
    manifest = Manifest(version=1, job=job_id, step=step, epoch=1, next_sample=4 * step, pieces=tuple(pieces))
    keep_beside(open_store((place / "store").as_uri()), job_id, files_beside(job, end_token_of(job)))
    commit(open_store((place / "store").as_uri()), manifest, job.model)
