"""What jobs come to if nothing happens to them: computed once for each job, and kept in files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from faults.stored import State

from shoal_planner.job import CheckpointSpec, JobSpec, LimitsSpec, job_to_mapping
from shoal_recovery.state import Kind
from shoal_workers.exchange import SoloExchange
from shoal_workers.solo import RunRequest, run_rank, solo_plan, whole_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The loss of each step, and the state after the last one."""

    losses: Sequence[float]
    state: State


def reference(job: JobSpec, folder: Path) -> Reference:
    """Of the undisturbed run, which no name, label, store or limit changes."""
    plain = dataclasses.replace(job, name="reference", labels={}, checkpoint=CheckpointSpec(), limits=LimitsSpec())
    named = {**job_to_mapping(plain), "data": None}
    key = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
    losses, state = folder / f"{key}.json", folder / f"{key}.npz"
    if not losses.exists():
        folder.mkdir(parents=True, exist_ok=True)
        run = run_rank(RunRequest(job=plain, plan=solo_plan(plain), until_step=plain.train.steps), 0, SoloExchange())
        values = whole_state(plain, [run]).values
        arrays = {f"{kind.value}/{fqn}": array for kind, by_name in values.items() for fqn, array in by_name.items()}
        np.savez(state, **arrays)  # type: ignore[arg-type]
        losses.write_text(json.dumps(run.losses), encoding="utf-8")  # last: where it is, all is
    with np.load(state) as found:
        keys = {name: name.split("/", 1) for name in found.files}
        kept = {(Kind(kind), fqn): found[name].reshape(-1) for name, (kind, fqn) in keys.items()}
    return Reference(losses=json.loads(losses.read_text(encoding="utf-8")), state=kept)
