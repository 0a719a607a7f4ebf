"""The weights that a training begins with, where a job says that these are elsewhere (`train.init_from`).

A Hugging Face folder has a config.json; anything else is STORE/JOB, a job's checkpoints, of which `train.init_step`
names one. A checkpoint of adapters stands for the model that they make of their base. Owns telling these apart, and
whether the base of adapters is still what it was. Does not own the formats (`hf_folder`, `checkpoints`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from shoal_planner.architecture import ModelSpec
from shoal_planner.errors import InvalidField
from shoal_planner.lora import Adapters, Base
from shoal_planner.parameters import Parameter, without_adapters
from shoal_recovery.checkpoints import list_manifests, load_manifest, load_model, manifest_name
from shoal_recovery.errors import BaseChanged, StoreError, StoreUnreachable
from shoal_recovery.hf_folder import CONFIG, Array, HfFolder
from shoal_recovery.manifest import check_whole
from shoal_recovery.merging import MergedWeights
from shoal_recovery.merging import ReadWeights as ReadWeights
from shoal_recovery.reading import MasterIntervals
from shoal_recovery.state import Manifest
from shoal_recovery.store import Store, open_store

NONE_YET = "of a job that runs 'shoal checkpoint ID' stores one"
_STEP = "train.init_step"
# Contexts are made longer by changing these; the family says no more than how files are laid out.
_FREE = ("family", "rope_theta", "rope_scaling", "window", "window_layers")
T = TypeVar("T")


def open_weights(uri: str, step: int | None, model: ModelSpec) -> ReadWeights:
    """Looks what is there; for a model with adapters, for what these are beside. Raises, and what it answers does,
    InvalidField where that cannot be this model's weights, BaseChanged where other weights have come in their place,
    and StoreUnreachable where it cannot be read at present."""
    read = _explained(uri, lambda: _open(uri, step, model))
    return lambda parameter, first, last: _explained(uri, lambda: read(parameter, first, last))


def open_model(uri: str, step: int | None) -> tuple[ModelSpec, ReadWeights]:
    """What is there, with its own shape; of checkpoints the newest by default. Raises as `open_weights`."""
    return _explained(uri, lambda: _open_any(uri, step))


def fingerprint(uri: str, step: int | None) -> str:
    """The same for the same weights, wherever they are. Of a folder of Hugging Face's it is made of all that its files
    say of their tensors, and of samples of these. Raises as `open_weights`."""
    return _explained(uri, lambda: _fingerprint(uri, step))


def _fingerprint(uri: str, step: int | None) -> str:
    store = open_store(uri)
    if HfFolder(store).is_there():
        return HfFolder(store).fingerprint()
    place, job = _job_at(uri)
    if step is None:
        raise _not_there(uri, step, list_manifests(open_store(place), job))
    # It has the checksums of all pieces.
    return f"sha256:{hashlib.sha256(open_store(place).read(manifest_name(job, step))).hexdigest()}"


def _check_base(uri: str, step: int | None, model: ModelSpec) -> None:
    expected = None if model.lora is None else model.lora.base.fingerprint
    if expected is None:
        return
    found = _fingerprint(uri, step)
    if found != expected:
        raise BaseChanged(uri, expected, found)


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
        model = without_adapters(load_model(open_store(place), job, step))
    return model, _open(uri, step, model)


def _job_at(uri: str) -> tuple[str, str]:
    """Store and job of STORE/JOB."""
    place, _, job = uri.rstrip("/").rpartition("/")
    return place, job


def _open(uri: str, step: int | None, model: ModelSpec) -> ReadWeights:
    _check_base(uri, step, model)
    whole = without_adapters(model)
    store = open_store(uri)
    if HfFolder(store).is_there():
        if step is not None:
            raise InvalidField(_STEP, step, f"{uri} is a Hugging Face folder, which has no steps")
        folder = HfFolder(store)
        _check_alike(folder.model, whole)
        folder.check(whole)
        return partial(folder.values, whole)
    place, job = _job_at(uri)
    return _stored(open_store(place), job, step, model)


def _stored(store: Store, job: str, step: int | None, model: ModelSpec) -> ReadWeights:
    there = list_manifests(store, job)
    if step not in there:  # nor is the newest one taken, which may be another one when the next rank looks
        raise _not_there(f"{store.uri}/{job}", step, there)
    theirs = load_model(store, job, step)
    _check_alike(theirs, model)
    if theirs.lora is not None and model.lora is not None:
        _check_same(theirs.lora, model.lora)
        base = theirs.lora.base
        return open_weights(base.uri, base.step, theirs)
    return stored_weights(store, load_manifest(store, job, step), theirs)


def open_adapters(uri: str, step: int | None, model: ModelSpec) -> ReadWeights | None:
    """The adapters that a job with such goes on with, where it begins with a checkpoint of the same ones. Raises as
    `open_weights`."""
    return _explained(uri, lambda: _open_adapters(uri, step, model))


def _open_adapters(uri: str, step: int | None, model: ModelSpec) -> ReadWeights | None:
    if step is None or model.lora is None or HfFolder(open_store(uri)).is_there():
        return None
    place, job = _job_at(uri)
    store = open_store(place)
    theirs, manifest = load_model(store, job, step), load_manifest(store, job, step)
    if theirs.lora is None:
        return None
    _check_same(theirs.lora, model.lora)
    check_whole(manifest, theirs)
    return _read_of(MasterIntervals(store, manifest))


def base_of(adapters: Adapters) -> Base:
    """What they are beside, also where they go on with those of other checkpoints. Raises as `open_weights`."""
    base = adapters.base
    while not HfFolder(open_store(base.uri)).is_there():
        place, job = _job_at(base.uri)
        before = None if base.step is None else load_model(open_store(place), job, base.step).lora
        if before is None:
            break
        base = before.base
    return base


def _check_same(theirs: Adapters, ours: Adapters) -> None:
    for name, there, here in (
        ("targets", ", ".join(theirs.names), ", ".join(ours.names)),
        ("rank", theirs.rank, ours.rank),
        ("alpha", theirs.alpha, ours.alpha),
    ):
        if there != here:
            problem = f"is {there!r} of the adapters there: go on with the same, or begin with these exported merged"
            raise InvalidField(f"train.lora.{name}", here, problem)


def stored_weights(store: Store, manifest: Manifest, model: ModelSpec) -> ReadWeights:
    """The weights of a stored step of `model`; of one with adapters, those that they make of their base. Raises as
    `open_weights`."""
    check_whole(manifest, model)
    masters = MasterIntervals(store, manifest)
    if model.lora is not None:
        base = model.lora.base
        return MergedWeights(model, open_weights(base.uri, base.step, model), masters).read
    return _read_of(masters)


def _read_of(masters: MasterIntervals) -> ReadWeights:
    def read(parameter: Parameter, first: int, last: int) -> Array:
        return np.frombuffer(masters.read(parameter.fqn, first, last), dtype="<f4")

    return read


def _check_alike(theirs: ModelSpec, model: ModelSpec) -> None:
    """That weights mean the same in both: many differences show in no shape."""
    for field in dataclasses.fields(ModelSpec):
        there, here = getattr(theirs, field.name), getattr(model, field.name)
        if field.name not in (*_FREE, "lora", "module") and there != here:
            raise InvalidField(f"model.{field.name}", here, f"is {there!r} where these weights were trained")
    if _parameters_of(theirs) != _parameters_of(model):
        given = model.family if model.module is None else model.module.entrypoint
        raise InvalidField("model.entrypoint", given, "has other parameters than the model that these weights are of")


def _parameters_of(model: ModelSpec) -> object:
    """Of modules of the user's own, which say nothing else of what they are."""
    if (shape := model.own_shape) is None:
        return None
    return shape.first.parameters, shape.block.parameters, shape.last.parameters, shape.tied


def _not_there(uri: str, step: int | None, there: Sequence[int]) -> Exception:
    if not there:
        return StoreError(uri, f"holds neither {CONFIG} nor a checkpoint; {NONE_YET}")
    return InvalidField(_STEP, step, f"must be one of the stored steps: {', '.join(map(str, there))}")


def _explained(uri: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (StoreUnreachable, BaseChanged):
        raise
    except (StoreError, InvalidField) as error:
        if isinstance(error, InvalidField) and error.field == _STEP:
            raise
        raise InvalidField("train.init_from", uri, f"cannot be used: {error}") from error
