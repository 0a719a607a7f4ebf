"""Jobs that train on a Hugging Face model: `model: {hf: URI}` becomes the shape that its config says, and its weights
are what training begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shoal_planner.errors import InvalidField
from shoal_recovery.errors import StoreError
from shoal_recovery.hf_folder import HfFolder
from shoal_recovery.store import open_store

_FIELD = "model.hf"


def with_hf_model(value: object) -> object:
    """The document of a job with its model spelled out, if it names one of theirs; reads the folder's config and the
    headers of its files. What the job says beside it counts more, but for the shape. Raises InvalidField."""
    if not (isinstance(value, Mapping) and isinstance(value.get("model"), Mapping) and "hf" in value["model"]):
        return value
    rest: dict[str, Any] = dict(value["model"])
    uri = rest.pop("hf")
    if not isinstance(uri, str) or not uri.startswith(("file://", "s3://")):
        raise InvalidField(_FIELD, uri, "must begin with file:// or s3://")
    try:
        folder = HfFolder(open_store(uri))
        model = dataclasses.asdict(folder.model)
        folder.check(folder.model)
    except StoreError as error:
        raise InvalidField(_FIELD, uri, f"cannot be read: {error.problem}") from error
    except InvalidField as error:
        raise InvalidField(_FIELD, uri, f"cannot be used: {error}") from error
    train = value.get("train")
    if isinstance(train, Mapping):
        train = {"init_from": uri, **train}
    return {**value, "model": {**model, **rest}, "train": train}
