"""Jobs that train on a Hugging Face model: `model: {hf: URI}` becomes the shape that its config says, its weights are
what training begins with, and its tokenizer is that of the job's text unless the job says another."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal_planner.data_spec import BYTES, OF_IDS
from shoal_planner.errors import InvalidField
from shoal_recovery.errors import StoreError
from shoal_recovery.hf_beside import SLOW, TOKENIZER
from shoal_recovery.hf_folder import HfFolder
from shoal_recovery.store import open_store

_FIELD = "model.hf"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# What may differ from what the weights were trained with: contexts are made longer so.
_FREE = ("rope_theta", "rope_scaling")


def with_hf_model(value: object) -> object:
    """The document of a job with its model spelled out, if it names one of theirs, and whose tokenizer it takes; reads
    the folder's config and the headers of its files. Beside it a job may stretch its positions. Raises
    InvalidField."""
    if not (isinstance(value, Mapping) and isinstance(value.get("model"), Mapping) and "hf" in value["model"]):
        return value
    rest: dict[str, Any] = dict(value["model"])
    uri = rest.pop("hf")
    for name in rest:
        if name not in _FREE:
            raise InvalidField(f"model.{name}", rest[name], f"is what {_FIELD} says: leave it out")
    uri = hf_place(uri)
    try:
        folder = HfFolder(open_store(uri))
        model = dataclasses.asdict(folder.model)
        folder.check(folder.model)
        tokenizers = [name for name in (TOKENIZER, *SLOW) if folder.has(name)]
    except StoreError as error:
        raise InvalidField(_FIELD, uri, f"cannot be read: {error.problem}") from error
    except InvalidField as error:
        raise InvalidField(_FIELD, uri, f"cannot be used: {error}") from error
    found = {**value, "model": {**model, **rest}}
    if isinstance(value.get("data"), Mapping):
        found["data"] = _with_tokenizer(value["data"], tokenizers, uri)
    if isinstance(value.get("train"), Mapping):
        found["train"] = {"init_from": uri, **value["train"]}
    return found


def hf_place(given: object) -> str:
    """What a job names as `model.hf`, as a URI. Raises InvalidField."""
    if isinstance(given, str) and given.startswith("/"):
        return Path(given).as_uri()
    if isinstance(given, str) and given.startswith(("file://", "s3://")):
        return given
    problem = "must be an absolute path, or begin with file:// or s3://"
    if isinstance(given, str) and _HUB_ID.fullmatch(given):
        problem += f"; it looks like the id of a model on the Hub: `hf download {given} --local-dir FOLDER` fetches it"
    raise InvalidField(_FIELD, given, problem)


def _with_tokenizer(data: Mapping[str, Any], there: Sequence[str], uri: str) -> Mapping[str, Any]:
    """What a job says of its data, with the folder as its tokenizer where it says none: bytes of text are no tokens
    that such a model knows. `there` are files of a tokenizer that the folder has. Raises InvalidField."""
    if not there or "tokenizer" in data or not _has_text(data):
        return data
    if TOKENIZER in there and uri.startswith("file://"):
        return {**data, "tokenizer": uri}
    problem = f"is not said, and {uri} has {' and '.join(there)}: say where nodes have a {TOKENIZER} on their disks"
    if TOKENIZER not in there:
        problem += " (transformers writes it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
    raise InvalidField("data.tokenizer", None, f"{problem}, or {BYTES}")


def _has_text(data: Mapping[str, Any]) -> bool:
    """Whether any of it is no ids yet; what is no source, others will say."""
    mix = data.get("mix")
    sources = [*mix] if isinstance(mix, list | tuple) else []
    if not sources or data.get("eval_uri") is not None:
        sources.append(data)
    return any(isinstance(source, Mapping) and source.get("format", "text") not in OF_IDS for source in sources)
