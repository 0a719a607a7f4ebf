"""What a Hugging Face folder holds beside its weights, kept with the checkpoints of a job for when these are exported.

    JOB/folder/config.json              ids of special tokens, how long contexts may be and dropout, nothing else
    JOB/folder/generation_config.json   and files of the tokenizer, as they came

Owns which files these are, and what stands in that config: what the folder that training began with says, but of ids
what the job's tokenizer does, if it names one. Does not own what the shape of a model is called there (`hf_layout`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal_planner.architecture import Family, ModelSpec
from shoal_planner.data_spec import BYTES
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_recovery.errors import StoreError, StoreRefused, StoreUnreachable
from shoal_recovery.hf_folder import CONFIG
from shoal_recovery.hf_layout import dropouts_of, model_of_config, stretched
from shoal_recovery.store import Store, open_store

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
# Of which a tokenizer can be made that knows no tokenizers file.
SLOW = ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATES = "additional_chat_templates"  # folder of those that are not the usual one, by name
_TEMPLATE = re.compile(rf"{TEMPLATES}/[A-Za-z0-9_-][A-Za-z0-9._=-]*\.jinja")  # which names of objects may be
_TOKENIZER_FILES = (
    TOKENIZER,
    _TOKENIZER_CONFIG,
    _SPECIAL_TOKENS,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_FOLDER = "folder"
_POSITIONS = "max_position_embeddings"
_END = "eos_token_id"
_IDS = ("bos_token_id", _END, "pad_token_id")
# What their classes take where a config does not say: ids in that order, and positions.
_LLAMA: tuple[tuple[int | None, ...], int] = ((1, 2, None), 2048)
_QWEN: tuple[tuple[int | None, ...], int] = ((None, None, None), 32768)
_USUAL: Mapping[Family, tuple[tuple[int | None, ...], int]] = {
    "llama": _LLAMA,
    "mistral": (_LLAMA[0], 131072),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gpt2": ((50256, 50256, None), 1024),
}
Files = Mapping[str, bytes]


def files_beside(job: JobSpec, end: int | None) -> Files:
    """What to keep of a job, whose tokenizer ends documents with `end`. A tokenizer that the job names takes the place
    of the one that came with its first weights, and so do bytes where text is read as these. Raises StoreError,
    InvalidField and OSError where folder or tokenizer cannot be read."""
    came = {} if job.train.init_from is None else beside(job.train.init_from)
    files = {name: data for name, data in came.items() if name != CONFIG}
    own = _tokenizer_files(job, end, came)
    ids: dict[str, int | None] = {}
    if own or (job.data.reads_bytes and any(map(_is_of_tokenizer, files))):
        files = {name: data for name, data in files.items() if not _is_of_tokenizer(name)} | own
        ids = _ids(own, end, came)
    if CONFIG in came:
        theirs = _parsed(CONFIG, came[CONFIG])
        said = {name: theirs[name] for name in _IDS} | ids | dropouts_of(theirs)
        reach = _reach(theirs, job)
        if ids and GENERATION in files:
            files[GENERATION] = _said(generation_said(files), ids)
    else:
        said = dict.fromkeys(_IDS) | ids | {_END: end}
        reach = max(job.train.seq_len, stretched(job.model.rope_scaling))
    if job.model.learned_positions is None and job.model.module is None:
        said[_POSITIONS] = reach
    return files | {CONFIG: _as_json(said)}


def keep_beside(store: Store, job_id: str, files: Files) -> None:
    """The config last: where it is, the others are. Raises StoreError."""
    for name in sorted(files, key=lambda name: (name == CONFIG, name)):
        store.put(f"{job_id}/{_FOLDER}/{name}", files[name])


def is_kept(store: Store, job_id: str) -> bool:
    """Raises StoreError."""
    return f"{job_id}/{_FOLDER}/{CONFIG}" in store.list(f"{job_id}/{_FOLDER}/{CONFIG}")


def kept_beside(store: Store, job_id: str) -> Files:
    """Nothing where an earlier version wrote the checkpoints. Raises StoreError."""
    if not is_kept(store, job_id):
        return {}
    prefix = f"{job_id}/{_FOLDER}/"
    return {name.removeprefix(prefix): store.read(name) for name in store.list(prefix)}


def said_beside(files: Files) -> dict[str, Any]:
    """What the config among them says. Raises InvalidField."""
    return _parsed(CONFIG, files[CONFIG]) if CONFIG in files else {}


def positions_of(model: ModelSpec, files: Files) -> int | None:
    """How long contexts of this model may be; None where nothing says so. Raises InvalidField."""
    if (shape := model.own_shape) is not None:
        return shape.seq_len  # more it was not trained on, and may have no place for
    if model.learned_positions is not None:
        return model.learned_positions
    found = said_beside(files).get(_POSITIONS) or stretched(model.rope_scaling) or None
    return None if found is None else int(found)


def generation_said(files: Files) -> dict[str, Any]:
    """What the config among them says of how a text goes on. Raises InvalidField."""
    return _parsed(GENERATION, files[GENERATION]) if GENERATION in files else {}


def ends_of(files: Files) -> tuple[int, ...] | None:
    """The ids that end a text, as their `generate` sees it; None where nothing is said of them. Raises InvalidField."""
    said = said_beside(files) | generation_said(files)
    if _END not in said:
        return None
    found = said[_END]
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _reach(theirs: Mapping[str, Any], job: JobSpec) -> int:
    """As they say it, unless this job makes contexts longer."""
    said, scaling = int(theirs.get(_POSITIONS) or 0), job.model.rope_scaling
    before = model_of_config(theirs).get("rope_scaling") if "model_type" in theirs else None
    same = before == (None if scaling is None else dataclasses.asdict(scaling))
    return max(said, job.train.seq_len, 0 if same else stretched(scaling))


def beside(uri: str) -> Files:
    """Of a folder of Hugging Face's, with all that its config leaves to their classes, or of a job's checkpoints
    (STORE/JOB). Raises StoreError and InvalidField."""
    store = open_store(uri)
    config = _read(store, CONFIG)
    if config is None:
        place, _, job_id = uri.rstrip("/").rpartition("/")
        return kept_beside(open_store(place), job_id)
    theirs = _parsed(CONFIG, config)
    ids, positions = _USUAL.get(theirs.get("model_type", ""), _LLAMA)
    whole = {**dict(zip(_IDS, ids, strict=True)), _POSITIONS: positions, **theirs}
    templates = [name for name in store.list(f"{TEMPLATES}/") if _TEMPLATE.fullmatch(name)]
    found = {name: _read(store, name) for name in (GENERATION, *_TOKENIZER_FILES, *templates)}
    return {name: data for name, data in found.items() if data is not None} | {CONFIG: json.dumps(whole).encode()}


def _read(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except (StoreUnreachable, StoreRefused):
        raise
    except StoreError:
        return None


def _is_of_tokenizer(name: str) -> bool:
    return name in _TOKENIZER_FILES or _TEMPLATE.fullmatch(name) is not None


def _tokenizer_files(job: JobSpec, end: int | None, came: Files) -> dict[str, bytes]:
    """Of the tokenizer that the job names; one that is a file by itself gets the config that their loaders want, unless
    what came has the same file with one."""
    if job.data.tokenizer == BYTES:
        return {}
    place = Path(job.data.tokenizer)
    if place.is_dir():
        names = [path.relative_to(place).as_posix() for path in (*place.iterdir(), *place.glob(f"{TEMPLATES}/*"))]
        files = {
            name: (place / name).read_bytes()
            for name in sorted(names)
            if _is_of_tokenizer(name) and (place / name).is_file()
        }
    else:
        files = {TOKENIZER: place.read_bytes()}
        if came.get(TOKENIZER) == files[TOKENIZER] and _id_of(came, _END) == end:
            return {}
    if _id_of(files, _END) is None and (token := job.data.end_token or _tokens(files[TOKENIZER]).get(end)) is not None:
        config = _parsed(_TOKENIZER_CONFIG, files.get(_TOKENIZER_CONFIG, b"{}"))
        usual = {"tokenizer_class": "PreTrainedTokenizerFast"}
        files[_TOKENIZER_CONFIG] = _as_json(usual | config | {"eos_token": token})
    return files


def _ids(own: Files, end: int | None, came: Files) -> dict[str, int | None]:
    """What the job's own tokenizer, or bytes where it is none, have configs say. Of the vocabulary that came only what
    it names itself; and there a model may have several ends, which stay where documents end with one of them."""
    found = {name: _id_of(own, name) for name in _IDS} | {_END: end}
    if not own or own.get(TOKENIZER) != came.get(TOKENIZER):
        return found
    is_known = end in (ends_of(came) or ())
    return {name: number for name, number in found.items() if number is not None and not (is_known and name == _END)}


def _id_of(files: Files, name: str) -> int | None:
    """Of the special token that a tokenizer's config names so."""
    if TOKENIZER not in files:
        return None
    config = _parsed(_TOKENIZER_CONFIG, files.get(_TOKENIZER_CONFIG, b"{}"))
    if "added_tokens_decoder" not in config:  # with it, what the other file says is of an older day
        config |= _parsed(_SPECIAL_TOKENS, files.get(_SPECIAL_TOKENS, b"{}"))
    token = config.get(name.removesuffix("_id"))
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        return None
    return next((number for number, one in _tokens(files[TOKENIZER]).items() if one == text), _number(files, text))


def _number(files: Files, token: str) -> int | None:
    """Of one that the vocabulary itself has."""
    known = (_parsed(TOKENIZER, files[TOKENIZER]).get("model") or {}).get("vocab")
    return known.get(token) if isinstance(known, Mapping) else None


def _tokens(tokenizer: bytes) -> dict[int | None, str]:
    """Those of a tokenizers JSON file that are no text, by id."""
    return {one["id"]: one["content"] for one in _parsed(TOKENIZER, tokenizer).get("added_tokens") or ()}


def _said(config: Mapping[str, Any], ids: Mapping[str, int | None]) -> bytes:
    """A config with these ids instead of its own."""
    return _as_json({name: value for name, value in {**config, **ids}.items() if name not in ids or value is not None})


def _as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode("ascii")


def _parsed(name: str, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidField(name, text[:40], f"is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise InvalidField(name, text[:40], "holds no mapping")
    return found
