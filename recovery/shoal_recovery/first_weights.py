"""The weights that a training begins with, where a job says that these are elsewhere (`train.init_from`).

A Hugging Face folder has a config.json; anything else is STORE/JOB, a job's checkpoints, of which `train.init_step`
names one. Owns telling them apart. Does not own the formats (`hf_folder`, `checkpoints`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from shoal_planner.architecture import ModelSpec
from shoal_planner.errors import InvalidField
from shoal_planner.parameters import Parameter
from shoal_recovery.checkpoints import list_manifests, load_manifest
from shoal_recovery.errors import StoreError, StoreUnreachable
from shoal_recovery.hf_folder import CONFIG, Array, HfFolder
from shoal_recovery.manifest import check_whole
from shoal_recovery.reading import read_interval
from shoal_recovery.store import Store, open_store

T = TypeVar("T")
ReadWeights = Callable[[Parameter, int, int], Array]
"""Elements [first, last) of a flattened parameter."""


def open_weights(uri: str, step: int | None, model: ModelSpec) -> ReadWeights:
    """Looks what is there. Raises, and what it answers does, InvalidField where that cannot be this model's weights,
    and StoreUnreachable where it cannot be read at present."""
    read = _explained(uri, lambda: _open(uri, step, model))
    return lambda parameter, first, last: _explained(uri, lambda: read(parameter, first, last))


def _open(uri: str, step: int | None, model: ModelSpec) -> ReadWeights:
    store = open_store(uri)
    if CONFIG in store.list(CONFIG):
        if step is not None:
            raise InvalidField("train.init_step", step, f"{uri} is a Hugging Face folder, which has no steps")
        folder = HfFolder(store)
        folder.check(model)
        return partial(folder.values, model)
    place, _, job = uri.rstrip("/").rpartition("/")
    return _stored(open_store(place), job, step, model)


def _stored(store: Store, job: str, step: int | None, model: ModelSpec) -> ReadWeights:
    there = list_manifests(store, job)
    if not there:
        raise StoreError(store.uri, f"has neither {job}/{CONFIG} nor a checkpoint of {job}")
    if step not in there:
        # The newest may be another one when the next rank looks.
        raise InvalidField("train.init_step", step, f"must be one of the stored steps: {', '.join(map(str, there))}")
    manifest = load_manifest(store, job, step)
    check_whole(manifest, model)

    def read(parameter: Parameter, first: int, last: int) -> Array:
        return np.frombuffer(read_interval(store, manifest, parameter.fqn, first, last), dtype="<f4")

    return read


def _explained(uri: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except StoreUnreachable:
        raise
    except StoreError as error:
        raise InvalidField("train.init_from", uri, str(error)) from error
