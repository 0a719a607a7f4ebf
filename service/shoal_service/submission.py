"""Whether a job may be created: each check names the field and the value, and nothing is created if one fails.

These look at the world (files, stores, clusters); what a job's fields may be by themselves is shoal_planner.job's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement

from shoal_planner.code_spec import CodeSpec, check_no_secrets
from shoal_planner.data_spec import BYTES, SourceSpec
from shoal_planner.errors import InvalidField
from shoal_planner.job import JobSpec
from shoal_planner.limits import check_to_come
from shoal_planner.own_model import unseen
from shoal_planner.script_spec import AnyJob, ScriptSpec, parse_any_job
from shoal_planner.track_spec import MlflowSpec, TensorBoardSpec
from shoal_recovery.errors import BaseChanged, StoreError
from shoal_recovery.first_weights import fingerprint, open_weights
from shoal_recovery.hf_jobs import hf_place, with_hf_model
from shoal_recovery.storage_access import StoreAccess, located
from shoal_recovery.store import open_store, probe
from shoal_service.errors import BadInput, invalid_field
from shoal_service.places import Places
from shoal_service.settings import Settings
from shoal_service.sinks import MODULES
from shoal_service.storages import Accesses

_TOKEN_BYTES = {"uint16": 2, "uint32": 4}
MOST_JOB_BYTES = 65_536
_PIPS_OWN = re.compile(r"-|(\w+\+)?\w+://")  # options of pip, and addresses of packages: only pip can judge them
_MANY_FILES = 100_000  # of a larger folder, the first ones show whether it holds enough text


async def read_any_job(value: object, store_check_s: float, places: Places) -> AnyJob:
    """As it is submitted or planned for. A model of Hugging Face's is looked up for it. Raises BadInput."""
    check_size(value)
    model = value.get("model") if isinstance(value, Mapping) else None
    theirs = model if isinstance(model, Mapping) and "hf" in model else None
    try:
        if theirs is not None:
            hf_place(theirs["hf"])
        await asyncio.to_thread(places.check, value)
        if theirs is not None:
            async with asyncio.timeout(store_check_s):
                value = await asyncio.to_thread(with_hf_model, value)
        job = parse_any_job(unseen(value) if isinstance(value, Mapping) else value)
        check_code(job)
        return job
    except InvalidField as error:
        raise invalid_field(error) from error
    except TimeoutError as error:
        assert theirs is not None
        slow = InvalidField("model.hf", theirs["hf"], f"did not answer within {store_check_s:g} s")
        raise invalid_field(slow) from error


def check_size(value: object) -> None:
    """Jobs are kept, shown, and sent with every order to a rank: what belongs into files is not in them. Raises
    BadInput."""
    shown = unseen(value) if isinstance(value, Mapping) else value
    try:
        text = json.dumps(shown, ensure_ascii=False, separators=(",", ":"), default=str)
    except TypeError as error:  # YAML knows names that are dates or bytes
        raise BadInput("invalid_field", f"the job has a name that is no text: {error}", "job") from error
    size = len(text.encode(errors="replace"))
    if size > MOST_JOB_BYTES:
        detail = f"the job has {size} bytes as JSON; at most {MOST_JOB_BYTES} are taken: more belongs into files"
        raise BadInput("job_too_large", detail, status=413)


def check_code(job: AnyJob) -> None:
    """Raises InvalidField where a new job holds what looks like a secret, or what pip could not read."""
    section, code = ("script", job.script.code) if isinstance(job, ScriptSpec) else ("code", job.code)
    try:
        check_no_secrets(code)
        _check_requirements(code)
    except InvalidField as error:
        raise type(error)(f"{section}.{error.field}", error.value, error.problem) from error


def _check_requirements(code: CodeSpec) -> None:
    """Here, where it is said at once, and not by nodes when the job begins."""
    for index, text in enumerate(code.pip):
        if _PIPS_OWN.match(text.strip()):
            continue
        try:
            Requirement(text.strip())
        except InvalidRequirement as error:
            why = str(error).partition("\n")[0]
            problem = f"must be a requirement, as in 'einops==0.8.1': {why[:1].lower()}{why[1:]}"
            raise InvalidField(f"pip[{index}]", text, problem) from error


async def read_job(value: object, store_check_s: float, places: Places) -> JobSpec:
    """One that is planned for. Raises BadInput."""
    job = await read_any_job(value, store_check_s, places)
    if isinstance(job, ScriptSpec):
        problem = "there is no plan of such a job: Ray Train spreads its workers"
        raise invalid_field(InvalidField("kind", "ray_train", problem))
    return job


async def check_surroundings(job: AnyJob, settings: Settings, accesses: Accesses) -> AnyJob:
    """Its deadline still to come, data readable and large enough, weights to begin with those of the model, the script
    there, checkpoint place writable. The job, which knows from then on what its adapters are beside. `accesses` are
    those of the storage profiles that it names. Raises BadInput."""
    store_check_s = settings.store_check_s
    try:
        check_to_come(job.limits.deadline, time.time())
        if isinstance(job, ScriptSpec):
            await asyncio.to_thread(_check_script, job)
            await _check_store(job.checkpoint.uri, store_check_s)
            return job
        await asyncio.to_thread(_check_data, job)
        found = await _with_weights(job, store_check_s)
        await _check_store(job.checkpoint.uri, store_check_s, accesses.get(job.checkpoint.storage or ""))
        await _check_trackers(job, settings)
        return found
    except InvalidField as error:
        raise invalid_field(error) from error


def _check_data(job: JobSpec) -> None:
    for index, source in enumerate(job.data.sources):
        field = f"data.mix[{index}].uri" if job.data.mix else "data.uri"
        _check_source(field, source, job, job.held_out_sequences + 1)
    if job.data.eval_source is not None:
        _check_source("data.eval_uri", job.data.eval_source, job, job.eval_sequences)
    if job.data.tokenizer != BYTES:
        _readable_bytes("data.tokenizer", job.data.tokenizer, Path(job.data.tokenizer))


def _check_source(field: str, source: SourceSpec, job: JobSpec, num_sequences: int) -> None:
    """What is tokenised, and what lies in an object store, only those who read it can judge."""
    parts = urlsplit(source.uri)
    if parts.scheme != "file":
        return
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidField(field, source.uri, "must be file:// and an absolute path, as in file:///data/text")
    path = Path(unquote(parts.path))
    if source.format == "megatron" and not path.is_dir():
        path = path.with_name(path.name.removesuffix(".bin").removesuffix(".idx") + ".bin")
    found = _readable_bytes(field, source.uri, path)
    token_bytes = _TOKEN_BYTES.get(source.token_type, 1) if source.format == "tokens" else 1
    is_counted = source.format == "tokens" or (source.format == "text" and job.data.tokenizer == BYTES)
    needed = (num_sequences * job.train.seq_len + 1) * token_bytes if is_counted else 1
    if found < needed:
        why = f"train.seq_len = {job.train.seq_len}" if is_counted else "training"
        if job.eval_sequences:
            why += f" and evaluations on {job.eval_sequences} sequences"
        raise InvalidField(field, source.uri, f"holds {found} bytes; {why} needs at least {needed}")


def _readable_bytes(field: str, uri: str, path: Path) -> int:
    try:
        if not path.exists():
            raise InvalidField(field, uri, f"cannot be read: {path} does not exist")
        files = [path] if path.is_file() else _first_files(path)
        if files:
            with files[0].open("rb") as file:
                file.read(1)
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise InvalidField(field, uri, f"cannot be read: {error.strerror or error}") from error


def _first_files(folder: Path) -> list[Path]:
    files: list[Path] = []
    for directory, _, names in os.walk(folder, onerror=_raise):
        files.extend(Path(directory, name) for name in sorted(names) if not name.startswith("."))
        if len(files) >= _MANY_FILES:
            break
    return [file for file in files if file.is_file()]


def _raise(error: OSError) -> None:
    raise error


async def _with_weights(job: JobSpec, store_check_s: float) -> JobSpec:
    uri = job.train.init_from
    if uri is None:
        return job
    try:
        async with asyncio.timeout(store_check_s):
            return await asyncio.to_thread(_looked_at, job, uri)
    except BaseChanged as error:
        raise InvalidField("train.lora.base", error.expected, f"is not that of {uri}, {error.found}") from error
    except StoreError as error:
        raise InvalidField("train.init_from", uri, f"cannot be read: {error.problem}") from error
    except TimeoutError as error:
        raise InvalidField("train.init_from", uri, f"did not answer within {store_check_s:g} s") from error


def _looked_at(job: JobSpec, uri: str) -> JobSpec:
    train = job.train
    open_weights(uri, train.init_step, job.model)
    if train.lora is None or train.lora.base is not None:
        return job
    lora = dataclasses.replace(train.lora, base=fingerprint(uri, train.init_step))
    return dataclasses.replace(job, train=dataclasses.replace(train, lora=lora))


def _check_script(job: ScriptSpec) -> None:
    """Folders, which are sent from here; what nodes fetch themselves, and what lies on them, only they can judge."""
    given = [("script.working_dir", job.script.working_dir)]
    given += [(f"script.py_modules[{index}]", uri) for index, uri in enumerate(job.script.py_modules)]
    for field, uri in given:
        if uri is not None and urlsplit(uri).scheme == "file":
            _readable_bytes(field, uri, _local(uri))
    folder, path = job.script.working_dir, job.script.path
    relative = path is not None and not Path(path).is_absolute()
    if relative and folder is not None and urlsplit(folder).scheme == "file" and _local(folder).is_dir():
        assert path is not None
        if not (_local(folder) / path).is_file():
            raise InvalidField("script.path", path, f"there is no such file in {folder}")


def _local(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


async def _check_store(uri: str | None, store_check_s: float, access: StoreAccess | None = None) -> None:
    if uri is None:
        return
    try:
        async with asyncio.timeout(store_check_s):
            await asyncio.to_thread(_try_store, uri if access is None else located(uri, access))
    except InvalidField as error:
        raise InvalidField("checkpoint.uri", uri, error.problem) from error
    except StoreError as error:
        raise InvalidField("checkpoint.uri", uri, f"cannot be written: {error.problem}") from error
    except TimeoutError as error:
        raise InvalidField("checkpoint.uri", uri, f"did not answer within {store_check_s:g} s") from error


def _try_store(uri: str) -> None:
    open_store(uri).check_writable()


async def _check_trackers(job: JobSpec, settings: Settings) -> None:
    """Whether a server of theirs answers is not asked: that may change, and holds no job up."""
    for tool, spec in job.track.chosen():
        if importlib.util.find_spec(MODULES[tool]) is None:
            problem = f"the control plane lacks {MODULES[tool]}: install shoal[{tool}] from its wheel there"
            raise InvalidField(f"track.{tool}", dataclasses.asdict(spec), problem)
        if isinstance(spec, TensorBoardSpec):
            await _check_log_dir(spec.log_dir, settings.store_check_s)
        if isinstance(spec, MlflowSpec):
            try:
                settings.trackers.check(spec.tracking_uri)
            except ValueError as error:
                raise InvalidField("track.mlflow.tracking_uri", spec.tracking_uri, str(error)) from error


async def _check_log_dir(uri: str, store_check_s: float) -> None:
    try:
        async with asyncio.timeout(store_check_s):
            await asyncio.to_thread(lambda: probe(open_store(uri)))
    except StoreError as error:
        raise InvalidField("track.tensorboard.log_dir", uri, f"cannot be written: {error.problem}") from error
    except TimeoutError as error:
        problem = f"did not answer within {store_check_s:g} s"
        raise InvalidField("track.tensorboard.log_dir", uri, problem) from error
