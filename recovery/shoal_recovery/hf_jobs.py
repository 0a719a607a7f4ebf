"""Jobs that train on a Hugging Face model: `model: {hf: URI}` becomes the shape that its config says, and its weights
are what training begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal_planner.errors import InvalidField
from shoal_recovery.errors import StoreError
from shoal_recovery.hf_folder import HfFolder
from shoal_recovery.store import open_store

_FIELD = "model.hf"
# What may differ from what the weights were trained with: contexts are made longer so.
_FREE = ("rope_theta", "rope_scaling")


def with_hf_model(value: object) -> object:
    """The document of a job with its model spelled out, if it names one of theirs; reads the folder's config and the
    headers of its files. Beside it a job may stretch its positions. Raises InvalidField."""
    if not (isinstance(value, Mapping) and isinstance(value.get("model"), Mapping) and "hf" in value["model"]):
        return value
    rest: dict[str, Any] = dict(value["model"])
    uri = rest.pop("hf")
    for name in rest:
        if name not in _FREE:
            raise InvalidField(f"model.{name}", rest[name], f"is what {_FIELD} says: leave it out")
    if isinstance(uri, str) and uri.startswith("/"):
        uri = Path(uri).as_uri()
    if not isinstance(uri, str) or not uri.startswith(("file://", "s3://")):
        raise InvalidField(_FIELD, uri, "must be an absolute path, or begin with file:// or s3://")
    try:
        folder = HfFolder(open_store(uri))
        model = dataclasses.asdict(folder.model)
        folder.check(folder.model)
    except StoreError as error:
        raise InvalidField(_FIELD, uri, f"cannot be read: {error.problem}") from error
    except InvalidField as error:
        raise InvalidField(_FIELD, uri, f"cannot be used: {error}") from error
    found = {**value, "model": {**model, **rest}}
    if isinstance(value.get("train"), Mapping):
        found["train"] = {"init_from": uri, **value["train"]}
    return found
