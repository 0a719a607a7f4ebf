"""What must hold of the checkpoints that a job leaves in its store: none mixes steps or epochs that exclude each other,
all bytes are what was summed, and the last one is the state of the undisturbed run. Changes nothing in a store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal_recovery.checkpoints import list_manifests, load_manifest
from shoal_recovery.crc import checksum
from shoal_recovery.errors import ManifestUnreadable, StoreError
from shoal_recovery.journal import Entry, PlanAdopted
from shoal_recovery.state import OWNED_KINDS, Kind, Manifest
from shoal_recovery.store import Store

Array = npt.NDArray[np.float32]
State = Mapping[tuple[Kind, str], Array]  # all of a step: of each kind and parameter the values, flat

# Of what a kind of state holds of a parameter, relative to the length of that. Other layouts sum in another order: that
# came to 2e-5. A whole step more or less changes what is kept of gradients by 4e-2 at least.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """`problems` are sentences; `worst` is the largest difference of the last step, as TOLERANCE has it."""

    problems: tuple[str, ...]
    worst: float


def check_stored(
    store: Store, job: str, entries: Sequence[Entry], expected: State, steps: int, spoilt: frozenset[int]
) -> Stored:
    """Of a job that has ended. Nothing is asked of what lies in the `spoilt` steps."""
    manifests, newest_first = [], list_manifests(store, job)
    if newest_first[:1] != (steps,):
        return Stored(problems=(f"the newest checkpoint is not step {steps}",), worst=0.0)
    for step in reversed(newest_first):
        try:
            manifests.append(load_manifest(store, job, step))
        except ManifestUnreadable:
            if step not in spoilt:
                raise
        except StoreError:
            if not _is_retired(store, job, step):
                raise
    adopted = (entry.event for entry in entries)
    starts = {event.epoch: event.step for event in adopted if isinstance(event, PlanAdopted)}
    problems, worst = [*_order(manifests, starts)], 0.0
    for manifest in (one for one in manifests if one.step not in spoilt):
        problems += _of_its_step(manifest, starts)
        try:
            found, spoilt_pieces = _read(store, manifest, expected)
        except StoreError:
            if not _is_retired(store, job, manifest.step):
                raise
            continue
        problems += spoilt_pieces
        if manifest.step == steps:
            differences = {key: _difference(found[key], values) for key, values in expected.items()}
            worst = max(differences.values())
            problems += _far(differences)
    return Stored(problems=tuple(problems), worst=worst)


def _is_retired(store: Store, job: str, step: int) -> bool:
    """By now, as the oldest are after each new one, also after the last: its manifest goes first, then all of it."""
    return step not in list_manifests(store, job)


def _order(manifests: Sequence[Manifest], starts: Mapping[int, int]) -> Iterator[str]:
    """An epoch that began before a step cannot have stored an earlier one while an older epoch stored this one."""
    for earlier, later in itertools.combinations(manifests, 2):
        if later.epoch < earlier.epoch and starts[earlier.epoch] < later.step:
            yield (
                f"step {later.step} was stored by epoch {later.epoch}, step {earlier.step} by epoch {earlier.epoch}, "
                f"which began at step {starts[earlier.epoch]}"
            )


def _of_its_step(manifest: Manifest, starts: Mapping[int, int]) -> Iterator[str]:
    """Shards may be of an older epoch than their manifest, as long as none in between began before the step."""
    for name in sorted({piece.object for piece in manifest.pieces}):
        step, shard = name.split("/")[-2:]
        epoch = int(shard.partition("-")[0])
        if int(step) != manifest.step:
            yield f"the checkpoint of step {manifest.step} has {name}"
        void = [other for other, start in starts.items() if epoch < other <= manifest.epoch and start < manifest.step]
        if epoch > manifest.epoch or void:
            yield f"step {manifest.step} of epoch {manifest.epoch} has {name}, and epochs {void} began before that step"


def _read(store: Store, manifest: Manifest, expected: State) -> tuple[State, list[str]]:
    found = {key: np.full(values.size, np.nan, np.float32) for key, values in expected.items()}
    problems = []
    for name in sorted({piece.object for piece in manifest.pieces}):
        content = store.read(name)
        for piece in (piece for piece in manifest.pieces if piece.object == name):
            values = content[piece.offset : piece.offset + piece.num_bytes]
            if checksum(values) != piece.checksum:
                problems.append(f"{name}: {piece.key} is not what was stored")
            elif piece.key.kind in OWNED_KINDS:
                place = found[piece.key.kind, piece.key.fqn]
                place[piece.key.first : piece.key.last] = np.frombuffer(values, "<f4")
    missing = [f"{fqn}/{kind.value}" for (kind, fqn), values in found.items() if np.isnan(values).any()]
    if missing and not problems:
        problems.append(f"step {manifest.step} is not whole: parts of {missing[:3]} are not there")
    return found, problems


def _difference(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-30))


def _far(differences: Mapping[tuple[Kind, str], float]) -> Iterator[str]:
    far = {key: difference for key, difference in differences.items() if not difference <= TOLERANCE}
    if far:
        (kind, fqn), most = max(far.items(), key=lambda one: one[1])
        others = len(far) - 1
        yield f"the last checkpoint is not the undisturbed run's: {fqn}/{kind.value} and {others} more, {most:.2g} off"
