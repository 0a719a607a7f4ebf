"""The weights that a training begins with, where a job says that these are elsewhere (`train.init_from`).

A Hugging Face folder has a config.json; anything else is STORE/JOB, a job's checkpoints, of which `train.init_step`
names one. Owns telling them apart. Does not own the formats (`hf_folder`, `checkpoints`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from shoal_planner.architecture import ModelSpec
from shoal_planner.errors import InvalidField
from shoal_planner.parameters import Parameter
from shoal_recovery.checkpoints import list_manifests, load_manifest, load_model
from shoal_recovery.errors import StoreError, StoreUnreachable
from shoal_recovery.hf_folder import CONFIG, Array, HfFolder
from shoal_recovery.manifest import check_whole
from shoal_recovery.reading import MasterIntervals
from shoal_recovery.store import Store, open_store

_STEP = "train.init_step"
# Contexts are made longer by changing these; the family says no more than how files are laid out.
_FREE = ("family", "rope_theta", "rope_scaling", "window")
T = TypeVar("T")
ReadWeights = Callable[[Parameter, int, int], Array]
"""Elements [first, last) of a flattened parameter."""


def open_weights(uri: str, step: int | None, model: ModelSpec) -> ReadWeights:
    """Looks what is there. Raises, and what it answers does, InvalidField where that cannot be this model's weights,
    and StoreUnreachable where it cannot be read at present."""
    read = _explained(uri, lambda: _open(uri, step, model))
    return lambda parameter, first, last: _explained(uri, lambda: read(parameter, first, last))


def open_model(uri: str, step: int | None) -> tuple[ModelSpec, ReadWeights]:
    """What is there, with its own shape; of checkpoints the newest by default. Raises as `open_weights`."""
    return _explained(uri, lambda: _open_any(uri, step))


def _open_any(uri: str, step: int | None) -> tuple[ModelSpec, ReadWeights]:
    store = open_store(uri)
    if HfFolder(store).is_there():
        model = HfFolder(store).model
    else:
        place, job = _job_at(uri)
        there = list_manifests(open_store(place), job)
        step = there[0] if step is None and there else step
        if step not in there:
            raise _not_there(uri, step, there)
        model = load_model(open_store(place), job, step)
    return model, _open(uri, step, model)


def _job_at(uri: str) -> tuple[str, str]:
    """Store and job of STORE/JOB."""
    place, _, job = uri.rstrip("/").rpartition("/")
    return place, job


def _open(uri: str, step: int | None, model: ModelSpec) -> ReadWeights:
    store = open_store(uri)
    if HfFolder(store).is_there():
        if step is not None:
            raise InvalidField(_STEP, step, f"{uri} is a Hugging Face folder, which has no steps")
        folder = HfFolder(store)
        _check_alike(folder.model, model)
        folder.check(model)
        return partial(folder.values, model)
    place, job = _job_at(uri)
    return _stored(open_store(place), job, step, model)


def _stored(store: Store, job: str, step: int | None, model: ModelSpec) -> ReadWeights:
    there = list_manifests(store, job)
    if step not in there:  # nor is the newest one taken, which may be another one when the next rank looks
        raise _not_there(f"{store.uri}/{job}", step, there)
    _check_alike(load_model(store, job, step), model)
    manifest = load_manifest(store, job, step)
    check_whole(manifest, model)
    masters = MasterIntervals(store, manifest)

    def read(parameter: Parameter, first: int, last: int) -> Array:
        return np.frombuffer(masters.read(parameter.fqn, first, last), dtype="<f4")

    return read


def _check_alike(theirs: ModelSpec, model: ModelSpec) -> None:
    """That weights mean the same in both: many differences show in no shape."""
    for field in dataclasses.fields(ModelSpec):
        there, here = getattr(theirs, field.name), getattr(model, field.name)
        if field.name not in _FREE and there != here:
            raise InvalidField(f"model.{field.name}", here, f"is {there!r} where these weights were trained")


def _not_there(uri: str, step: int | None, there: Sequence[int]) -> Exception:
    if not there:
        return StoreError(uri, f"holds neither {CONFIG} nor a checkpoint")
    return InvalidField(_STEP, step, f"must be one of the stored steps: {', '.join(map(str, there))}")


def _explained(uri: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except StoreUnreachable:
        raise
    except (StoreError, InvalidField) as error:
        if isinstance(error, InvalidField) and error.field == _STEP:
            raise
        raise InvalidField("train.init_from", uri, f"cannot be used: {error}") from error
